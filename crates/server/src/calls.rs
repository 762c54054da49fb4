//! The MicroServing calls, one file each.

pub(crate) mod abort;
pub(crate) mod commit;
pub(crate) mod kv_events;
pub(crate) mod pause;
pub(crate) mod prep_recv;
pub(crate) mod profile;
pub(crate) mod remote_send;
pub(crate) mod sequences;
pub(crate) mod start_generate;
pub(crate) mod state;

use microserving_engine::CallKey;
use microserving_protocol::{ApiError, Attempt, CallOptions};

/// Returns the key of a call, if it has one.
fn key_of(call: &CallOptions) -> Result<Option<CallKey>, ApiError> {
    match (&call.seq_id, call.attempt) {
        (Some(seq_id), attempt) => {
            Ok(Some(CallKey { seq_id: seq_id.clone(), attempt: attempt.unwrap_or(Attempt(0)) }))
        }
        (None, Some(attempt)) => Err(ApiError::bad_request(
            "attempt",
            format!("attempt is {attempt}, but there is no seq_id that it could count for"),
        )),
        (None, None) => Ok(None),
    }
}
