//! Why front and worker do not come together.

use std::io;

/// Why front and worker do not come together, or are apart again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The operating system refused.
    #[error("{operation} failed")]
    System {
        /// What was tried.
        operation: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The socket's path is taken.
    #[error("{path}: {reason}")]
    Taken {
        /// The path.
        path: String,
        /// By what.
        reason: &'static str,
    },
    /// The other end is of another build.
    #[error("front and worker are not of the same build: protocol {ours} here, {theirs} there")]
    Version {
        /// This end's.
        ours: u32,
        /// The other's.
        theirs: u32,
    },
    /// The other end does not keep to the protocol.
    #[error("the other end does not speak as it should: {reason}")]
    Protocol {
        /// What it said.
        reason: String,
    },
    /// The worker cannot be what its front asks for, and never will.
    #[error("{reason}")]
    Refused {
        /// The worker's words.
        reason: String,
    },
    /// The worker did not come up.
    #[error("the worker did not come up: {reason}")]
    Failed {
        /// The worker's words, or how it ended.
        reason: String,
    },
}

impl WorkerError {
    pub(crate) fn system(operation: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { operation, source }
    }

    pub(crate) fn protocol(reason: impl Into<String>) -> Self {
        Self::Protocol { reason: reason.into() }
    }
}
