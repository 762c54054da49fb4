//! The caller's deadline on the OpenAI routes: our own field `timeout_seconds`.

use std::time::Duration;

use microserving_protocol::{ApiError, Fields};

/// The longest deadline, in seconds: a day, as on the MicroServing calls.
const MAX_SECONDS: f64 = 86_400.0;

/// Reads `timeout_seconds` off a body whose other fields somebody else reads.
///
/// # Errors
/// 422 if it is no number, 400 if it is out of bounds.
pub(crate) fn timeout_of(body: &[u8]) -> Result<Option<Duration>, ApiError> {
    let Some(seconds) = Fields::parse(body)?.opt_f32("timeout_seconds")?.map(f64::from) else {
        return Ok(None);
    };
    if seconds > 0.0 && seconds <= MAX_SECONDS {
        return Ok(Some(Duration::from_secs_f64(seconds)));
    }
    let message = format!("timeout_seconds is {seconds}, must be in (0, {MAX_SECONDS}]");
    Err(ApiError::bad_request("timeout_seconds", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_bounded() {
        assert_eq!(timeout_of(b"{}"), Ok(None));
        assert_eq!(timeout_of(br#"{"timeout_seconds": 1.5}"#), Ok(Some(Duration::from_millis(1500))));
        for (body, status) in [
            (&br#"{"timeout_seconds": 0}"#[..], 400),
            (br#"{"timeout_seconds": -1}"#, 400),
            (br#"{"timeout_seconds": 1e30}"#, 400),
            (br#"{"timeout_seconds": "soon"}"#, 422),
        ] {
            let error = timeout_of(body).unwrap_err();
            assert_eq!((error.status, error.param.as_deref()), (status, Some("timeout_seconds")));
        }
    }
}
