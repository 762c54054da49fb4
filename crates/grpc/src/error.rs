//! Errors as gRPC carries them: a code for everybody, and the whole of it in a trailer for ours.

use std::time::Duration;

use bytes::Bytes;
use microserving_protocol::ApiError;
use prost::Message as _;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};

use crate::wire;

/// The trailer that holds the whole error.
pub const ERROR_TRAILER: &str = "microserving-error-bin";
/// Trailers have less room than bodies, and an error may quote what the client sent.
const MAX_MESSAGE_BYTES: usize = 2 << 10;

/// Makes a status of an error.
#[must_use]
pub fn to_status(error: &ApiError) -> Status {
    let ApiError { status, message, kind, param, code, retry_after: _ } = error;
    let whole = wire::Error {
        status: u32::from(*status),
        message: cut(message),
        r#type: cut(kind),
        param: param.as_deref().map(cut),
        code: code.as_deref().map(cut),
        retry_after_seconds: error.retry_after_seconds(),
    };
    let mut trailers = MetadataMap::new();
    trailers.insert_bin(ERROR_TRAILER, MetadataValue::from_bytes(&whole.encode_to_vec()));
    Status::with_metadata(code_of(*status), whole.message, trailers)
}

/// Reads the error in a status; `None` if there is none, because the status is not an engine's of this protocol.
#[must_use]
pub fn error_of(status: &Status) -> Option<ApiError> {
    let bytes = status.metadata().get_bin(ERROR_TRAILER)?.to_bytes().ok()?;
    let wire::Error { status, message, r#type, param, code, retry_after_seconds } =
        wire::Error::decode(Bytes::from_owner(bytes)).ok()?;
    let status = u16::try_from(status).ok().filter(|status| (400..600).contains(status))?;
    let mut error = ApiError::new(status, message);
    error.kind = r#type;
    error.param = param;
    error.code = code;
    error.retry_after = retry_after_seconds.map(Duration::from_secs);
    Some(error)
}

/// Returns the error that a status of somebody else stands for.
pub(crate) fn guess(status: &Status) -> ApiError {
    let http = match status.code() {
        Code::InvalidArgument | Code::FailedPrecondition => 400,
        Code::Unauthenticated => 401,
        Code::PermissionDenied => 403,
        Code::NotFound => 404,
        Code::Aborted | Code::AlreadyExists => 409,
        Code::OutOfRange => 413,
        Code::ResourceExhausted => 429,
        Code::Unimplemented => 501,
        Code::Unavailable => 503,
        Code::DeadlineExceeded => 504,
        _ => 500,
    };
    let error = ApiError::new(http, status.message());
    if matches!(http, 429 | 503) { error.with_retry_after(Duration::from_secs(1)) } else { error }
}

/// Returns the code nearest to an HTTP status, for clients that look at nothing else.
const fn code_of(status: u16) -> Code {
    match status {
        400 | 422 => Code::InvalidArgument,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::NotFound,
        409 => Code::Aborted,
        410 => Code::FailedPrecondition,
        413 => Code::OutOfRange,
        429 => Code::ResourceExhausted,
        405 | 501 => Code::Unimplemented,
        502 | 503 => Code::Unavailable,
        408 | 504 => Code::DeadlineExceeded,
        _ => Code::Internal,
    }
}

fn cut(text: &str) -> String {
    let mut end = text.len().min(MAX_MESSAGE_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_survives() {
        for status in 400..600 {
            let error = ApiError::new(status, "top_p is 2\nnot so: ü");
            let there = to_status(&error);
            assert_ne!(there.code(), Code::Ok, "{status}");
            assert_eq!(error_of(&there), Some(error), "{status}");
        }
        let mut error = ApiError::bad_request("top_p", "m").with_code("c");
        error.kind = "of another kind".into();
        error.retry_after = Some(Duration::from_secs(3));
        assert_eq!(error_of(&to_status(&error)), Some(error));
        // As in the header of REST, whole seconds.
        let error = ApiError::unavailable("no room", Duration::from_millis(1200));
        assert_eq!(error_of(&to_status(&error)).unwrap().retry_after, Some(Duration::from_secs(2)));
    }

    #[test]
    fn codes_are_those_that_others_expect() {
        for (status, code) in [
            (400, Code::InvalidArgument),
            (403, Code::PermissionDenied),
            (404, Code::NotFound),
            (409, Code::Aborted),
            (410, Code::FailedPrecondition),
            (413, Code::OutOfRange),
            (422, Code::InvalidArgument),
            (429, Code::ResourceExhausted),
            (500, Code::Internal),
            (503, Code::Unavailable),
            (504, Code::DeadlineExceeded),
        ] {
            assert_eq!(to_status(&ApiError::new(status, "m")).code(), code);
        }
    }

    #[test]
    fn a_status_of_somebody_else_is_a_guess() {
        let status = Status::unavailable("busy");
        assert_eq!(error_of(&status), None);
        assert_eq!(guess(&status), ApiError::unavailable("busy", Duration::from_secs(1)));
        assert_eq!(guess(&Status::unknown("what")).status, 500);
    }

    #[test]
    fn what_a_client_sent_is_quoted_within_bounds() {
        let error = ApiError::model_not_found(&"ü".repeat(100_000));
        let back = error_of(&to_status(&error)).unwrap();
        assert!(back.message.len() <= MAX_MESSAGE_BYTES && back.message.len() > 2000);
        assert_eq!((back.status, back.param), (404, Some("model".into())));
    }
}
