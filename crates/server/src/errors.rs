//! The one place where errors become status codes.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use microserving_engine::{EngineError, Refusal};
use microserving_protocol::ApiError;

/// When to come back to an engine that says nothing better.
const RETRY_SOON: Duration = Duration::from_secs(1);

/// An error on its way out of a handler.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) ApiError);

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        Self(api_error(&error))
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let json = HeaderValue::from_static("application/json");
        let mut response = (status, [(CONTENT_TYPE, json)], self.0.to_json()).into_response();
        if let Some(seconds) = self.0.retry_after_seconds() {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// Says what an engine's error is on the wire.
pub(crate) fn api_error(error: &EngineError) -> ApiError {
    let message = error.to_string();
    match error {
        EngineError::InvalidField { field, .. } => ApiError::bad_request(*field, message),
        EngineError::TooLong { field, .. } => {
            ApiError::bad_request(*field, message).with_code("context_length_exceeded")
        }
        EngineError::NoRoom { retry_after, .. } => {
            ApiError::unavailable(message, *retry_after).with_code("no_room")
        }
        EngineError::UnknownSequence { .. } => {
            ApiError::not_found(message).with_param("seq_id").with_code("unknown_sequence")
        }
        EngineError::StaleAttempt { .. } => {
            ApiError::conflict(message).with_param("attempt").with_code("stale_attempt")
        }
        EngineError::Conflict { field, .. } => {
            ApiError::conflict(message).with_param(*field).with_code("key_conflict")
        }
        EngineError::LayoutMismatch { .. } => address(ApiError::conflict(message), "layout_mismatch"),
        EngineError::BadAddress { .. } => {
            address(ApiError::bad_request("kv_addr_info", message), "bad_address")
        }
        EngineError::Unreachable { .. } => {
            address(ApiError::bad_request("kv_addr_info", message), "unreachable_peer")
        }
        EngineError::Refused { refusal } => match refusal {
            Refusal::BadCredential => address(ApiError::forbidden(message), "bad_credential"),
            Refusal::RangeTaken => address(ApiError::conflict(message), "range_taken"),
            Refusal::Unreachable => {
                address(ApiError::bad_request("kv_addr_info", message), "unreachable_peer")
            }
            // The address leads nowhere any more; only a new one helps.
            Refusal::Stale | Refusal::Revoked | Refusal::PeerLost => {
                address(ApiError::gone(message), "address_expired")
            }
        },
        EngineError::AddressExpired { .. } => address(ApiError::gone(message), "address_expired"),
        EngineError::LeaseExpired { .. } => gone(message, "lease_expired"),
        EngineError::Aborted { .. } => gone(message, "aborted"),
        // What was prepared is lost; preparing again helps, asking again does not.
        EngineError::TransferLost { .. } => gone(message, "transfer_lost"),
        EngineError::DeadlineExceeded { .. } => ApiError::timeout(message).with_code("deadline_exceeded"),
        EngineError::Draining => ApiError::unavailable(message, RETRY_SOON).with_code("draining"),
        EngineError::Executor { .. } => ApiError::internal(message).with_code("executor_failed"),
        EngineError::Transport { .. } => ApiError::internal(message).with_code("transport_failed"),
        other => ApiError::internal(other.to_string()),
    }
}

fn address(error: ApiError, code: &str) -> ApiError {
    error.with_param("kv_addr_info").with_code(code)
}

fn gone(message: String, code: &str) -> ApiError {
    ApiError::gone(message).with_param("seq_id").with_code(code)
}

#[cfg(test)]
mod tests {
    use microserving_protocol::{Attempt, Generation, SeqId};

    use super::*;

    fn check(error: EngineError, status: u16, param: Option<&str>, code: &str) {
        let wire = api_error(&error);
        assert_eq!(wire.status, status, "{error}");
        assert_eq!(wire.param.as_deref(), param, "{error}");
        assert_eq!(wire.code.as_deref(), Some(code), "{error}");
        let response = Failure(wire).into_response();
        assert_eq!(response.status().as_u16(), status);
        assert_eq!(response.headers()[CONTENT_TYPE], "application/json");
        assert_eq!(response.headers().contains_key(RETRY_AFTER), status == 503, "{error}");
    }

    #[test]
    fn every_error_has_its_status() {
        let seq_id = || SeqId::new("a");
        let refused = |refusal| EngineError::Refused { refusal };
        let reason = || "why".to_owned();
        let bad = EngineError::InvalidField { field: "end", reason: reason() };
        assert_eq!(api_error(&bad), ApiError::bad_request("end", "end: why"));
        let room = EngineError::NoRoom { reason: reason(), retry_after: Duration::from_millis(1200) };
        assert_eq!(api_error(&room).retry_after_seconds(), Some(2));
        check(room, 503, None, "no_room");
        let long = EngineError::TooLong { field: "prompt", needed: 9, limit: 8 };
        check(long, 400, Some("prompt"), "context_length_exceeded");
        check(EngineError::UnknownSequence { seq_id: seq_id() }, 404, Some("seq_id"), "unknown_sequence");
        let stale = EngineError::StaleAttempt { seq_id: seq_id(), attempt: Attempt(1) };
        check(stale, 409, Some("attempt"), "stale_attempt");
        let conflict = EngineError::Conflict { seq_id: seq_id(), field: "prompt" };
        check(conflict, 409, Some("prompt"), "key_conflict");
        let layout = EngineError::LayoutMismatch { ours: 1, theirs: 2 };
        check(layout, 409, Some("kv_addr_info"), "layout_mismatch");
        check(EngineError::BadAddress { reason: reason() }, 400, Some("kv_addr_info"), "bad_address");
        check(EngineError::Unreachable { reason: reason() }, 400, Some("kv_addr_info"), "unreachable_peer");
        check(refused(Refusal::BadCredential), 403, Some("kv_addr_info"), "bad_credential");
        check(refused(Refusal::Stale), 410, Some("kv_addr_info"), "address_expired");
        check(refused(Refusal::Revoked), 410, Some("kv_addr_info"), "address_expired");
        check(refused(Refusal::PeerLost), 410, Some("kv_addr_info"), "address_expired");
        check(refused(Refusal::RangeTaken), 409, Some("kv_addr_info"), "range_taken");
        check(refused(Refusal::Unreachable), 400, Some("kv_addr_info"), "unreachable_peer");
        let expired = EngineError::AddressExpired { generation: Generation(3) };
        check(expired, 410, Some("kv_addr_info"), "address_expired");
        check(EngineError::LeaseExpired { seq_id: seq_id() }, 410, Some("seq_id"), "lease_expired");
        check(EngineError::Aborted { seq_id: seq_id() }, 410, Some("seq_id"), "aborted");
        check(EngineError::TransferLost { seq_id: seq_id() }, 410, Some("seq_id"), "transfer_lost");
        check(EngineError::DeadlineExceeded { seq_id: seq_id() }, 504, None, "deadline_exceeded");
        check(EngineError::Executor { reason: reason() }, 500, None, "executor_failed");
        check(EngineError::Transport { reason: reason() }, 500, None, "transport_failed");
        check(EngineError::Draining, 503, None, "draining");
    }
}
