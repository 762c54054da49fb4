//! Streams as MLC's router and OpenAI's clients read them.
//!
//! Exactly `data: <one line of JSON>`, a blank line, and at the end `data: [DONE]`: no comments, no keep-alives, no `event:`
//! or `id:` lines, because MLC's router cuts six bytes off every line that is not empty. A router of ours that asks for marks gets
//! comments, and cuts them off.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use microserving_protocol::{ApiError, SSE_DONE, sse_event};
use serde::Serialize;

/// One event, ready to be written.
pub(crate) type Event = Result<Bytes, std::convert::Infallible>;

pub(crate) fn event<T: Serialize>(value: &T) -> Bytes {
    Bytes::from(sse_event(value))
}

pub(crate) fn done() -> Bytes {
    Bytes::from_static(SSE_DONE.as_bytes())
}

/// Frames an error that comes after the stream has begun: one line, after which the stream ends without `[DONE]`.
///
/// The status that the error would have had goes in as `status`, beside OpenAI's four fields.
pub(crate) fn error(error: &ApiError) -> Bytes {
    event(&error.to_event())
}

/// Makes the response of a stream of framed events.
pub(crate) fn response(events: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let body = Body::from_stream(events.map(|bytes| -> Event { Ok(bytes) }));
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, body).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_one_event() {
        let bytes = error(&ApiError::timeout("the deadline\nhas passed"));
        let text = std::str::from_utf8(&bytes).unwrap();
        assert!(text.starts_with("data: {\"error\":{") && text.ends_with("}}\n\n"), "{text}");
        assert_eq!(text.trim_end().lines().count(), 1);
        assert!(text.contains("\"status\":504"), "{text}");
    }
}
