//! The headers that we read and write.

use axum::http::{HeaderMap, HeaderName};
use microserving_protocol::ApiError;

use crate::{Pattern, Randomness};

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
pub(crate) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub(crate) const PATTERN: HeaderName = HeaderName::from_static("x-microserving-pattern");
pub(crate) const STATS: HeaderName = HeaderName::from_static("x-microserving-stats");

/// The longest request id that is taken over.
const MAX_ID_BYTES: usize = 128;

/// A request's `x-request-id`.
#[derive(Clone, Debug)]
pub(crate) struct RequestId(pub(crate) String);

/// Returns the client's request id if it can go into logs and headers as it is, else a new one.
pub(crate) fn request_id(headers: &HeaderMap) -> String {
    text(headers, &REQUEST_ID)
        .filter(|id| {
            !id.is_empty() && id.len() <= MAX_ID_BYTES && id.bytes().all(|byte| byte.is_ascii_graphic())
        })
        .map_or_else(|| Randomness::system().name("req-"), str::to_owned)
}

/// Returns the client's trace, if it has the form that W3C gives it.
pub(crate) fn traceparent(headers: &HeaderMap) -> Option<String> {
    let value = text(headers, &TRACEPARENT)?;
    let parts: Vec<&str> = value.split('-').collect();
    let fits = parts.len() >= 4
        && [2, 32, 16, 2].iter().zip(&parts).all(|(len, part)| {
            part.len() == *len && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        });
    fits.then(|| value.to_owned())
}

/// Returns the pattern that the client asks for.
///
/// # Errors
/// 400 if it is not written like one.
pub(crate) fn pattern(headers: &HeaderMap) -> Result<Option<Pattern>, ApiError> {
    let Some(value) = headers.get(&PATTERN) else { return Ok(None) };
    let bad = |reason: String| ApiError::bad_request(PATTERN.as_str(), reason);
    let text = value.to_str().map_err(|_| bad("the pattern is no text".into()))?;
    text.trim().parse().map(Some).map_err(|error: crate::BadPattern| bad(error.to_string()))
}

/// Says whether the client wants to know where tokens were computed.
pub(crate) fn wants_stats(headers: &HeaderMap) -> bool {
    text(headers, &STATS) == Some("1")
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name.clone(), value.parse().expect("a header value"))])
    }

    #[test]
    fn request_ids_are_kept_if_they_are_harmless() {
        assert_eq!(request_id(&with(&REQUEST_ID, "abc-1")), "abc-1");
        for bad in ["", "a b", &"x".repeat(129)] {
            assert!(request_id(&with(&REQUEST_ID, bad)).starts_with("req-"), "{bad}");
        }
        assert_ne!(request_id(&HeaderMap::new()), request_id(&HeaderMap::new()));
    }

    #[test]
    fn traces_are_passed_on_if_they_are_traces() {
        let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert_eq!(traceparent(&with(&TRACEPARENT, trace)).as_deref(), Some(trace));
        for bad in ["x", "00-0af7-b7ad-01", &trace.to_uppercase()] {
            assert_eq!(traceparent(&with(&TRACEPARENT, bad)), None, "{bad}");
        }
    }

    #[test]
    fn patterns() {
        assert_eq!(pattern(&HeaderMap::new()), Ok(None));
        let balanced = Pattern::named("balanced").with("", "0.25");
        assert_eq!(pattern(&with(&PATTERN, " balanced:0.25")), Ok(Some(balanced)));
        let error = pattern(&with(&PATTERN, "balanced:0.1,x")).expect_err("no name");
        assert_eq!((error.status, error.param.as_deref()), (400, Some("x-microserving-pattern")));
    }
}
