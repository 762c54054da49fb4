//! How a call fails.

use std::time::Duration;

use microserving_protocol::ApiError;

/// The address of an engine cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{url:?} is no engine address: {reason}")]
pub struct BadUrl {
    /// What was given.
    pub url: String,
    /// What is wrong with it.
    pub reason: String,
}

/// A call that did not succeed, by what the caller can do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No connection, or it broke before the answer began: the engine is down. The call may or may not have had its effect.
    #[error("{engine} cannot be reached: {reason}")]
    Unreachable {
        /// The engine.
        engine: String,
        /// What the system said.
        reason: String,
    },
    /// The connection broke within the answer.
    #[error("{engine} broke off its answer: {reason}")]
    Lost {
        /// The engine.
        engine: String,
        /// What was seen.
        reason: String,
    },
    /// The engine answered no.
    #[error("{engine} answered {error}")]
    Refused {
        /// The engine.
        engine: String,
        /// Its answer.
        error: Box<ApiError>,
    },
    /// The deadline passed.
    #[error("{engine} did not answer in time")]
    Timeout {
        /// The engine.
        engine: String,
    },
    /// It is of a kind that cannot do this; nothing was sent.
    #[error("{engine} cannot do {call}")]
    Unsupported {
        /// The engine.
        engine: String,
        /// What was asked of it.
        call: &'static str,
    },
    /// The answer is not what the protocol says.
    #[error("{engine} gave a malformed answer: {reason}")]
    Malformed {
        /// The engine.
        engine: String,
        /// What is wrong.
        reason: String,
    },
}

impl ClientError {
    /// Says whether the engine itself is gone, so that it should get no more requests until it is seen again.
    #[must_use]
    pub const fn means_down(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Lost { .. })
    }

    /// Says whether the engine is there and takes no requests for now: it starts, or drains.
    #[must_use]
    pub fn means_not_ready(&self) -> bool {
        match self {
            Self::Refused { error, .. } => {
                error.status == 503 && matches!(error.code.as_deref(), Some("not_ready" | "draining"))
            }
            _ => false,
        }
    }

    /// Says whether another engine may well do what this one did not: it is gone, has no room, failed or makes no sense.
    #[must_use]
    pub const fn is_worth_another_engine(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Lost { .. } | Self::Malformed { .. } => true,
            Self::Refused { error, .. } => matches!(error.status, 500 | 502 | 503),
            Self::Timeout { .. } | Self::Unsupported { .. } => false,
        }
    }

    /// Returns what a client of ours is told.
    #[must_use]
    pub fn to_api_error(&self) -> ApiError {
        match self {
            Self::Unreachable { .. } | Self::Lost { .. } => {
                ApiError::unavailable(self.to_string(), Duration::from_secs(1))
                    .with_code("engine_unavailable")
            }
            Self::Refused { error, .. } => (**error).clone(),
            Self::Timeout { .. } => ApiError::timeout(self.to_string()),
            Self::Malformed { .. } => ApiError::new(502, self.to_string()),
            Self::Unsupported { .. } => ApiError::new(501, self.to_string()),
        }
    }
}
