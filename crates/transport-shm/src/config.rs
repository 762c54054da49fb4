//! What may be chosen about a transport of this kind.

/// Options of a [`ShmTransport`](crate::ShmTransport).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShmConfig {
    /// Compare every run with its checksum on arrival; also asked of the other side of every claim. Costs one more pass over
    /// the bytes on both sides.
    pub checksum: bool,
    /// Copy runs queued on one channel at most; a [`put`](microserving_transport::KvTransport::put) beyond it is an error.
    /// The queue holds descriptions of 24 bytes, never bytes to be copied, which stay in the sender's region; beyond this
    /// number, a claim can never queue more bytes than its range has.
    pub max_queued_runs: usize,
    /// Bytes that the writer thread copies for one channel before it turns to the next, and the longest time that a stop
    /// has to wait for.
    pub slice_bytes: usize,
    /// Connections of senders at a time. One more takes the place of one that has not said who it is, or is turned away.
    pub max_senders: usize,
}

impl Default for ShmConfig {
    fn default() -> Self {
        Self { checksum: false, max_queued_runs: 1 << 20, slice_bytes: 1 << 20, max_senders: 256 }
    }
}

impl ShmConfig {
    /// Turns checksums on or off.
    #[must_use]
    pub fn with_checksum(mut self, checksum: bool) -> Self {
        self.checksum = checksum;
        self
    }
}
