//! What may be chosen about a transport of this kind.

use std::time::Duration;

/// Options of a [`PgasTransport`](crate::PgasTransport).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PgasConfig {
    /// Bytes of this element's KV region. Symmetric memory is as large everywhere as the largest that any element needs.
    pub region_bytes: usize,
    /// Compare every run with its checksum on arrival; also asked of the other side of every claim.
    pub checksum: bool,
    /// Copy runs queued on one channel at most; a [`put`](microserving_transport::KvTransport::put) beyond it is an error.
    pub max_queued_runs: usize,
    /// Bytes put for one channel before messages are looked at and the next channel has its turn: the longest that a stop has to wait for.
    pub slice_bytes: usize,
    /// How long an element on another host may give no sign of life before the world counts as lost. Those on this host are watched by
    /// their process instead, however silent.
    pub silence: Duration,
    /// Leave the world when the transport ends, if all others do within this time. A launcher takes a process that ends without leaving for
    /// a failure. `None` is for those who form another transport in the same world.
    pub leave_within: Option<Duration>,
}

impl PgasConfig {
    /// Returns the defaults for a region of some size.
    #[must_use]
    pub fn new(region_bytes: usize) -> Self {
        Self {
            region_bytes,
            checksum: false,
            max_queued_runs: 1 << 20,
            slice_bytes: 1 << 20,
            silence: Duration::from_secs(30),
            leave_within: None,
        }
    }

    /// Leaves the world with the transport.
    #[must_use]
    pub fn leaving_within(mut self, patience: Duration) -> Self {
        self.leave_within = Some(patience);
        self
    }

    /// Turns checksums on or off.
    #[must_use]
    pub fn with_checksum(mut self, checksum: bool) -> Self {
        self.checksum = checksum;
        self
    }
}
