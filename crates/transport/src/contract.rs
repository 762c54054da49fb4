//! The transport contract: who may write which bytes of whose region, and when that is over.
//!
//! ```text
//!  receiver                                    sender
//!  grant(G)  ── address, through the router ──▶ open(G) ── claim [begin, end) ──▶ Opened | Refused
//!                                               put(runs)…  put(runs)…  finish
//!  Complete{G}  ◀──────────── bytes, then the arrival counter ────────────  Finished
//!
//!  revoke(G) ── stop ─▶ sender stops posting, drains, acknowledges (or is seen to have exited)
//!  Released{G}: no write under G can land any more; only now may its pages serve something else
//! ```
//!
//! A claim that breaks its own promise (a run outside the grant, more or fewer bytes than its range takes, bytes that fail
//! their checksum) ends as `Lost` at the receiver and as `Closed` with [`Refusal::Revoked`] at the sender. What a lost claim
//! covered cannot be claimed again.
//!
//! The drawing is of what the two see, not of who moves the bytes: a sender may write, or a receiver may read what the sender says is
//! there. `Released` then waits for the receiver's own reads.
//!
//! A transport knows bytes and ranges, never models. All methods are called from one thread, do not block, and report
//! through [`KvTransport::poll`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory, KvRange, PeId};

/// How a sender reaches a receiver: opaque to all but the transport that made it; travels inside the address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerAddress {
    /// The name of the transport that understands `bytes`.
    pub transport: String,
    /// The transport's own encoding.
    pub bytes: Vec<u8>,
}

/// A sender's side of one claim; chosen by the transport, unique for its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChannelId(pub u64);

/// A run of bytes in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRun {
    /// First byte, from the start of the region.
    pub offset: usize,
    /// Number of bytes.
    pub num_bytes: usize,
}

/// A copy from the sender's region into the receiver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutRun {
    /// First byte in the sender's region.
    pub local_offset: usize,
    /// First byte in the receiver's region.
    pub remote_offset: usize,
    /// Number of bytes.
    pub num_bytes: usize,
}

/// A receiver's promise to let the holder of an address write.
#[derive(Clone, Debug)]
pub struct Grant {
    /// The reservation's generation; never used before in this incarnation.
    pub generation: Generation,
    /// The token positions to be received; claims lie inside and do not overlap.
    pub range: KvRange,
    /// Bytes that one token's KV takes; `range.num_tokens() * token_bytes` must arrive in all.
    pub token_bytes: usize,
    /// Where those bytes may lie in the receiver's region.
    pub runs: Vec<ByteRun>,
}

/// A sender's request to write under a grant.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Where the receiver is.
    pub peer: PeerAddress,
    /// The address as received, verbatim: the receiver's [`Admission`] judges it.
    pub credential: Vec<u8>,
    /// The token positions that this sender will write.
    pub range: KvRange,
}

/// Why a receiver refused a claim, or stopped one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// The address was not issued by this receiver, or was changed.
    #[error("the address does not carry this receiver's signature")]
    BadCredential,
    /// The address belongs to an earlier incarnation, or its grant is over.
    #[error("the address is no longer valid")]
    Stale,
    /// Another sender holds part of the range, or it lies outside the grant.
    #[error("the range is not free to be written")]
    RangeTaken,
    /// The receiver revoked the grant while it was being written.
    #[error("the receiver revoked the grant")]
    Revoked,
    /// Sender and receiver have no common way (different hosts, another transport, turned away before the claim was judged).
    #[error("the receiver cannot be reached by this transport")]
    Unreachable,
    /// The receiver went away, before the claim or during it.
    #[error("the receiver is gone")]
    PeerLost,
}

/// What [`KvTransport::poll`] reports.
#[derive(Clone, Debug, PartialEq)]
pub enum TransportEvent {
    /// Sender: the claim was accepted; puts may follow (puts queued before are now being written).
    Opened {
        /// The channel.
        channel: ChannelId,
    },
    /// Sender: everything put was written, `finish` was called, and the receiver can read all of it. The channel is gone.
    Finished {
        /// The channel.
        channel: ChannelId,
        /// Bytes written.
        num_bytes: u64,
        /// Time spent writing, waits for the sender's own computing left out.
        busy: Duration,
    },
    /// Sender: the claim ended early; nothing more will be written. The channel is gone and its source pages are free to
    /// be reused. Also answers a [`KvTransport::cancel`], with `refusal: None`.
    Closed {
        /// The channel.
        channel: ChannelId,
        /// Why, unless it was our own cancel.
        refusal: Option<Refusal>,
    },
    /// Receiver: every byte of the grant arrived (and was verified, in checksum mode); no write under it can land any more.
    /// The grant is closed.
    Complete {
        /// The grant.
        generation: Generation,
    },
    /// Receiver: a writer ended without finishing, or delivered bytes that fail their checksum. What the claim covered is
    /// undefined. The grant stays open until revoked.
    Lost {
        /// The grant.
        generation: Generation,
        /// The claim.
        range: KvRange,
        /// True if the bytes arrived but do not match their checksum.
        corrupt: bool,
    },
    /// Receiver: answers a revoke: no write under the grant can land any more. The grant is forgotten.
    Released {
        /// The grant.
        generation: Generation,
        /// True if a writer's exit, or the end of what was being read from one that is gone, had to be awaited instead of its
        /// acknowledgement.
        fenced: bool,
    },
}

/// Judges a credential that a sender presents. Called from the transport's own thread.
pub trait Admission: Send + Sync + fmt::Debug {
    /// Returns the generation that the credential is good for.
    ///
    /// # Errors
    /// [`Refusal::BadCredential`] or [`Refusal::Stale`].
    fn admit(&self, credential: &[u8]) -> Result<Generation, Refusal>;
}

/// What a transport failed at, locally and at once.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The operating system or library refused.
    #[error("{transport}: {operation} failed")]
    System {
        /// The transport's name.
        transport: &'static str,
        /// What was tried.
        operation: &'static str,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The call breaks the contract (an unknown channel, a run outside the region, a generation used twice).
    #[error("{transport}: {reason}")]
    Misuse {
        /// The transport's name.
        transport: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The peer cannot be reached by this transport at all.
    #[error("{transport}: {reason}")]
    Unreachable {
        /// The transport's name.
        transport: &'static str,
        /// Why, and what to configure instead.
        reason: String,
    },
}

/// Counters since start, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Telemetry {
    /// Bytes written to peers.
    pub bytes_sent: u64,
    /// Bytes received from peers.
    pub bytes_received: u64,
    /// Time spent writing.
    pub send_busy: Duration,
    /// Claims refused by us, whatever the reason.
    pub claims_refused: u64,
    /// Checksum failures seen on arrival.
    pub checksum_failures: u64,
    /// Releases that had to wait for a writer's exit.
    pub fences: u64,
}

/// Moves KV pages between engines. See the module's drawing.
pub trait KvTransport: Send + fmt::Debug {
    /// Returns the transport's name as it stands in addresses and configuration.
    fn name(&self) -> &'static str;

    /// Returns how peers reach this process.
    fn peer_address(&self) -> PeerAddress;

    /// Returns which processing element an address of this transport names, where peers are numbered: `recv_rank` has to agree with it.
    fn rank_of(&self, _peer: &PeerAddress) -> Option<PeId> {
        None
    }

    /// Allocates the KV region, zeroed; called once. The memory is readable and writable by this process, and by peers
    /// under a grant.
    ///
    /// # Errors
    /// [`TransportError::System`] if there is not enough memory, [`TransportError::Misuse`] on a second call.
    fn allocate_region(&mut self, num_bytes: usize) -> Result<Arc<dyn KvMemory>, TransportError>;

    /// Sets who judges credentials; until then every claim is refused.
    fn set_admission(&mut self, admission: Arc<dyn Admission>);

    /// Sets what to call, from any thread, when `poll` has news for a caller that may be asleep.
    fn set_waker(&mut self, waker: Arc<dyn Fn() + Send + Sync>);

    /// Receiver: lets holders of the credential for `grant.generation` write.
    ///
    /// # Errors
    /// [`TransportError::Misuse`] if the generation was granted before or a run lies outside the region.
    fn grant(&mut self, grant: Grant) -> Result<(), TransportError>;

    /// Receiver: returns how many bytes have arrived under the grant so far (0 if it is not known). Never goes down.
    fn arrived_bytes(&self, generation: Generation) -> u64;

    /// Receiver: ends a grant. New claims are refused from now on, writers are told to stop;
    /// [`TransportEvent::Released`] follows, at once if nobody was writing. Unknown generations are released at once.
    fn revoke(&mut self, generation: Generation);

    /// Sender: asks to write under a grant. [`TransportEvent::Opened`] or `Closed` follows; puts may be queued meanwhile.
    ///
    /// # Errors
    /// [`TransportError::Unreachable`] if the address is of another transport or host.
    fn open(&mut self, claim: Claim) -> Result<ChannelId, TransportError>;

    /// Sender: queues copies; the source bytes must not change until `Finished` or `Closed`.
    ///
    /// # Errors
    /// [`TransportError::Misuse`] if the channel is not open or a source run lies outside the region. A channel that has
    /// meanwhile been closed by the peer is not an error here: its event is on the way and the runs are dropped.
    fn put(&mut self, channel: ChannelId, runs: &[PutRun]) -> Result<(), TransportError>;

    /// Sender: says that no more puts follow; [`TransportEvent::Finished`] answers once the receiver can read everything.
    fn finish(&mut self, channel: ChannelId);

    /// Sender: gives the claim up; `Closed` follows when no write of it can happen any more.
    fn cancel(&mut self, channel: ChannelId);

    /// Appends what happened since the last call. `now` counts from the caller's own origin and only grows.
    fn poll(&mut self, now: Duration, events: &mut Vec<TransportEvent>);

    /// Returns the counters.
    fn telemetry(&self) -> Telemetry;
}
