//! Why a program could not serve a request.

use std::time::Duration;

use microserving_client::ClientError;
use microserving_protocol::ApiError;

/// Why a program could not serve a request, or its stream ended early.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call failed.
    #[error("{call} failed")]
    Call {
        /// The call's name.
        call: &'static str,
        /// How.
        source: ClientError,
    },
    /// No engine that may do it is up.
    #[error("no engine is available to {job} for this model")]
    NoEngine {
        /// What it would have done: `decode` or `prefill`.
        job: &'static str,
    },
    /// Fewer engines are ready than were waited for.
    #[error("{ready} of {wanted} engines are ready")]
    NotReady {
        /// Ready engines.
        ready: usize,
        /// Engines waited for.
        wanted: usize,
    },
    /// The engine gave the sequence up and wants it to be run again.
    #[error("{engine} preempted the request")]
    Preempted {
        /// The engine.
        engine: String,
    },
    /// The stream ended without a finish reason.
    #[error("{engine} ended the stream before the answer was complete")]
    Incomplete {
        /// The engine.
        engine: String,
    },
    /// A step took longer than it may, and the request has time left.
    #[error("{engine} took too long over {call}")]
    Slow {
        /// The call's name.
        call: &'static str,
        /// The engine.
        engine: String,
    },
    /// The request cannot be moved to another engine as it stands.
    #[error("the request cannot move: {reason}")]
    CannotMove {
        /// Why.
        reason: String,
    },
    /// The deadline passed before the answer was complete.
    #[error("the request's deadline has passed")]
    Deadline,
    /// The program is at fault, not an engine.
    #[error("{program} failed ({reason}): {message}")]
    Program {
        /// The program.
        program: String,
        /// One word, for metrics and headers.
        reason: &'static str,
        /// What happened.
        message: String,
    },
    /// The request itself cannot be served.
    #[error("{0}")]
    Api(Box<ApiError>),
}

impl From<ApiError> for Error {
    fn from(error: ApiError) -> Self {
        Self::Api(Box::new(error))
    }
}

impl Error {
    /// Says whether a new attempt, on other engines where there are some, may succeed.
    ///
    /// A lease that ran out, a reservation that was lost or two engines that do not reach each other are nothing the client
    /// did, so they are tried again too; what the client did wrong is the same everywhere. An attempt that a later one has replaced is
    /// over: whoever made the later one serves the request, and trying again would take it away from them.
    #[must_use]
    pub fn is_worth_another_attempt(&self) -> bool {
        match self {
            Self::Call { source: ClientError::Refused { error, .. }, .. } => {
                !is_replaced(error) && (matches!(error.status, 500 | 502 | 503) || is_between_engines(error))
            }
            Self::Call { source, .. } => source.is_worth_another_engine(),
            Self::Preempted { .. } | Self::Incomplete { .. } | Self::Slow { .. } => true,
            // Its fallback is another matter than another attempt.
            Self::NoEngine { .. }
            | Self::NotReady { .. }
            | Self::CannotMove { .. }
            | Self::Deadline
            | Self::Program { .. }
            | Self::Api(_) => false,
        }
    }

    /// Returns a word for metrics.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Call { source, .. } => match source {
                ClientError::Unreachable { .. } => "unreachable",
                ClientError::Lost { .. } => "lost",
                ClientError::Refused { .. } => "refused",
                ClientError::Timeout { .. } => "timeout",
                ClientError::Unsupported { .. } => "unsupported",
                _ => "malformed",
            },
            Self::NoEngine { .. } | Self::NotReady { .. } => "no_engine",
            Self::Preempted { .. } => "preempted",
            Self::Incomplete { .. } => "incomplete",
            Self::Slow { .. } => "slow",
            Self::CannotMove { .. } => "cannot_move",
            Self::Deadline => "deadline",
            Self::Program { .. } => "program",
            Self::Api(_) => "request",
        }
    }

    /// Returns what the client is told.
    #[must_use]
    pub fn to_api_error(&self) -> ApiError {
        let soon = Duration::from_secs(1);
        match self {
            Self::Call { source: ClientError::Refused { error, .. }, .. } if is_between_engines(error) => {
                ApiError::unavailable(self.to_string(), soon).with_code("engines_disagree")
            }
            Self::Call { source, .. } => source.to_api_error(),
            Self::NoEngine { .. } | Self::NotReady { .. } => {
                ApiError::unavailable(self.to_string(), soon).with_code("no_engine")
            }
            Self::Preempted { .. } | Self::Incomplete { .. } => ApiError::unavailable(self.to_string(), soon),
            Self::Slow { .. } => ApiError::timeout(self.to_string()),
            Self::CannotMove { .. } => ApiError::conflict(self.to_string()).with_code("cannot_move"),
            Self::Deadline => ApiError::timeout(self.to_string()),
            Self::Program { .. } => ApiError::internal(self.to_string()).with_code("program_failed"),
            Self::Api(error) => (**error).clone(),
        }
    }
}

/// Says whether a refusal is about what engines and router have among themselves: keys, leases, addresses.
fn is_between_engines(error: &ApiError) -> bool {
    (matches!(error.status, 403 | 404 | 409 | 410) && !is_replaced(error))
        || (error.status == 400 && matches!(error.param.as_deref(), Some("kv_addr_info" | "recv_rank")))
}

/// Says whether someone else has begun a later attempt at the same request.
fn is_replaced(error: &ApiError) -> bool {
    error.status == 409 && error.code.as_deref() == Some("stale_attempt")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(error: ApiError) -> Error {
        let source = ClientError::Refused { engine: "e".into(), error: Box::new(error) };
        Error::Call { call: "remote_send", source }
    }

    #[test]
    fn clients_never_hear_of_leases_and_addresses() {
        for (error, again, status) in [
            (ApiError::gone("lease"), true, 503),
            (ApiError::conflict("attempt"), true, 503),
            (ApiError::conflict("attempt").with_code("stale_attempt"), false, 409),
            (ApiError::forbidden("signature"), true, 503),
            (ApiError::bad_request("kv_addr_info", "unreachable"), true, 503),
            (ApiError::bad_request("temperature", "x"), false, 400),
            (ApiError::unprocessable("x"), false, 422),
            (ApiError::unavailable("room", Duration::from_secs(3)), true, 503),
            (ApiError::internal("x"), true, 500),
            (ApiError::timeout("x"), false, 504),
            (ApiError::too_large(3), false, 413),
        ] {
            let error = refused(error);
            assert_eq!(error.is_worth_another_attempt(), again, "{error:?}");
            assert_eq!(error.to_api_error().status, status, "{error:?}");
        }
        assert_eq!(
            refused(ApiError::unavailable("room", Duration::from_secs(3)))
                .to_api_error()
                .retry_after_seconds(),
            Some(3)
        );
    }
}
