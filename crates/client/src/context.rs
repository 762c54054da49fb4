//! What the calls of one request share.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

/// Identity, trace and deadline of a request, handed to each of its calls. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallContext {
    /// Sent as `x-request-id`.
    pub request_id: Option<Arc<str>>,
    /// Sent as W3C `traceparent`.
    pub traceparent: Option<Arc<str>>,
    /// When the caller gives up.
    pub deadline: Option<Instant>,
    /// Asks for the phase statistics of the request (`x-microserving-stats: 1`).
    pub wants_stats: bool,
}

impl CallContext {
    /// Makes a context that has only a deadline, counted from now.
    #[must_use]
    pub fn within(timeout: Duration) -> Self {
        Self { deadline: Some(Instant::now() + timeout), ..Self::default() }
    }

    /// Returns the time left; `None` without a deadline, zero when it has passed.
    #[must_use]
    pub fn remaining(&self) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }
}
