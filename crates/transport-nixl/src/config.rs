//! What may be chosen about a transport of this kind.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Options of a [`NixlTransport`](crate::NixlTransport).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NixlConfig {
    /// `libnixl_capi.so`; nothing to have the system's loader look for it.
    pub library: Option<PathBuf>,
    /// Where senders reach the control connection: an address of this host that they have a way to, and it is told to them as it stands
    /// here. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// Compare every run with its checksum on arrival; also asked of the other side of every claim. Costs one more pass over the bytes on
    /// both sides.
    pub checksum: bool,
    /// Copy runs queued on one channel at most; a [`put`](microserving_transport::KvTransport::put) beyond it is an error. The queue holds
    /// descriptions of 24 bytes, never bytes to be sent, which stay in the sender's region.
    pub max_queued_runs: usize,
    /// Bytes announced on one channel before the receiver has said that it has them: the longest that a cancel has to wait for.
    pub slice_bytes: usize,
    /// Connections of senders at a time. One more takes the place of one that has no claim admitted yet, or is turned away.
    pub max_senders: usize,
    /// How long a control connection may give no sign of life before it is given up. Both ends give one every quarter of it.
    pub silence: Duration,
}

impl NixlConfig {
    /// Returns the defaults for a place to listen.
    #[must_use]
    pub fn new(listen: SocketAddr) -> Self {
        Self {
            library: None,
            listen,
            checksum: false,
            max_queued_runs: 1 << 20,
            slice_bytes: 8 << 20,
            max_senders: 256,
            silence: Duration::from_secs(30),
        }
    }

    /// Turns checksums on or off.
    #[must_use]
    pub fn with_checksum(mut self, checksum: bool) -> Self {
        self.checksum = checksum;
        self
    }

    /// Names the library's file.
    #[must_use]
    pub fn with_library(mut self, library: Option<PathBuf>) -> Self {
        self.library = library;
        self
    }

    /// Sets after how long a silent peer is given up.
    #[must_use]
    pub fn with_silence(mut self, silence: Duration) -> Self {
        self.silence = silence;
        self
    }
}
