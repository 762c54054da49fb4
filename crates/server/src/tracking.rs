//! Request ids, spans, and the count of answers.

use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::HeaderName;
use http::header::HeaderValue;
use tokio::time::Instant;
use tracing::{Instrument, debug, field, info_span};

use crate::app::App;

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Longer ids are replaced: they go into every log line.
const MAX_ID_BYTES: usize = 128;

/// A request's id, as its caller gave it or as we drew it, and when it came; among the extensions of every request.
#[derive(Clone, Debug)]
pub struct Arrival {
    pub(crate) request_id: Arc<str>,
    pub(crate) at: Instant,
}

/// The status to count, among the extensions of an answer whose own status says nothing: a gRPC error is a 200.
#[derive(Clone, Copy, Debug)]
pub struct CountedStatus(pub u16);

fn status_of(response: &Response) -> u16 {
    response.extensions().get().map_or(response.status().as_u16(), |CountedStatus(status)| *status)
}

/// Wraps every route.
pub(crate) async fn track(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let request_id: Arc<str> = match header(&request, &X_REQUEST_ID) {
        Some(id) if !id.is_empty() && id.len() <= MAX_ID_BYTES => id.into(),
        _ => format!("req-{:016x}", crate::random::number()).into(),
    };
    let traceparent = header(&request, &TRACEPARENT);
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or_else(|| "unmatched".to_owned(), |path| path.as_str().to_owned());
    let span = info_span!("request", %request_id, route, traceparent = field::Empty);
    if let Some(traceparent) = traceparent {
        span.record("traceparent", traceparent);
    }
    let arrival = Arrival { request_id: Arc::clone(&request_id), at: Instant::now() };
    request.extensions_mut().insert(arrival.clone());

    let mut response = async {
        let response = next.run(request).await;
        let status = status_of(&response);
        debug!(status, seconds = arrival.at.elapsed().as_secs_f64(), "answered");
        response
    }
    .instrument(span)
    .await;

    app.metrics.request(&route, status_of(&response));
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        response.headers_mut().insert(X_REQUEST_ID, value);
    }
    response
}

fn header(request: &Request, name: &HeaderName) -> Option<String> {
    request.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}
