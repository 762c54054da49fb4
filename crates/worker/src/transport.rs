//! The worker's transport and its region, as its front sees them.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory, MemoryKind, PeId};
use microserving_transport::{
    Admission, ChannelId, Claim, Grant, KvTransport, PeerAddress, PutRun, Telemetry, TransportError,
    TransportEvent, check_source_runs,
};

use crate::link::Link;
use crate::transfers::{
    ALLOCATE, Answer, CANCEL, FINISH, GRANT, OPEN, PUT, RANK_OF, READ, REVOKE, TELEMETRY, WRITE, put_grant,
    put_peer, put_range,
};
use crate::wire::Out;

/// Complete grants whose arrived bytes are still known.
const REMEMBERED: usize = 1024;

/// Moves KV from and to a worker's pages. Dropping it ends the worker.
#[derive(Debug)]
pub struct RemoteTransport {
    link: Arc<Link>,
    address: PeerAddress,
    region_bytes: usize,
    /// Channels that may be put to.
    open: BTreeSet<ChannelId>,
    /// Grants that are complete, oldest first: their count stays for a while.
    complete: VecDeque<Generation>,
}

impl RemoteTransport {
    pub(crate) fn new(link: Arc<Link>, address: PeerAddress) -> Self {
        Self { link, address, region_bytes: 0, open: BTreeSet::new(), complete: VecDeque::new() }
    }

    fn misuse(&self, reason: &str) -> TransportError {
        TransportError::Misuse { transport: self.link.name, reason: reason.to_owned() }
    }

    /// Says something whose failure is the worker's end, which others hear of.
    fn tell(&self, kind: u8, number: u64) {
        let mut out = Out::new(kind);
        out.u64(number);
        if let Err(error) = self.link.tell(out) {
            tracing::debug!(%error, "the worker is not told");
        }
    }
}

impl Drop for RemoteTransport {
    fn drop(&mut self) {
        self.link.close();
    }
}

impl KvTransport for RemoteTransport {
    fn name(&self) -> &'static str {
        self.link.name
    }

    fn peer_address(&self) -> PeerAddress {
        self.address.clone()
    }

    fn rank_of(&self, peer: &PeerAddress) -> Option<PeId> {
        let mut out = Out::new(RANK_OF);
        put_peer(&mut out, peer);
        match self.link.ask(out) {
            Ok(Answer::Rank(rank)) => rank,
            _ => None,
        }
    }

    fn allocate_region(&mut self, num_bytes: usize) -> Result<Arc<dyn KvMemory>, TransportError> {
        let mut out = Out::new(ALLOCATE);
        out.size(num_bytes);
        match self.link.ask(out)? {
            Answer::Allocated { address } => {
                self.address = address;
                self.region_bytes = num_bytes;
                Ok(Arc::new(RemoteMemory { link: Arc::clone(&self.link), num_bytes }))
            }
            other => Err(self.link.astray(&other)),
        }
    }

    fn set_admission(&mut self, admission: Arc<dyn Admission>) {
        self.link.set_admission(admission);
    }

    fn set_waker(&mut self, waker: Arc<dyn Fn() + Send + Sync>) {
        self.link.set_waker(waker);
    }

    fn grant(&mut self, grant: Grant) -> Result<(), TransportError> {
        let mut out = Out::new(GRANT);
        put_grant(&mut out, &grant);
        // Waited for: the address goes out at once, and a claim must not come before its grant.
        match self.link.ask(out)? {
            Answer::Granted => Ok(()),
            other => Err(self.link.astray(&other)),
        }
    }

    fn arrived_bytes(&self, generation: Generation) -> u64 {
        self.link.arrived(generation)
    }

    fn revoke(&mut self, generation: Generation) {
        self.tell(REVOKE, generation.0);
    }

    fn open(&mut self, claim: Claim) -> Result<ChannelId, TransportError> {
        let mut out = Out::new(OPEN);
        put_peer(&mut out, &claim.peer);
        put_range(out.bytes(&claim.credential), claim.range);
        match self.link.ask(out)? {
            Answer::Opened(channel) => {
                self.open.insert(channel);
                Ok(channel)
            }
            other => Err(self.link.astray(&other)),
        }
    }

    fn put(&mut self, channel: ChannelId, runs: &[PutRun]) -> Result<(), TransportError> {
        // What can be wrong is found here, so that the worker need not answer.
        if !self.open.contains(&channel) {
            return Err(self.misuse("the channel is not open"));
        }
        check_source_runs(self.link.name, runs, self.region_bytes)?;
        let mut out = Out::new(PUT);
        out.u64(channel.0).list(runs, |out, run| {
            out.size(run.local_offset).size(run.remote_offset).size(run.num_bytes);
        });
        self.link.tell(out)
    }

    fn finish(&mut self, channel: ChannelId) {
        if self.open.remove(&channel) {
            self.tell(FINISH, channel.0);
        }
    }

    fn cancel(&mut self, channel: ChannelId) {
        self.open.remove(&channel);
        self.tell(CANCEL, channel.0);
    }

    fn poll(&mut self, _now: Duration, events: &mut Vec<TransportEvent>) {
        let first = events.len();
        self.link.take_events(events);
        for event in &events[first..] {
            match event {
                TransportEvent::Closed { channel, .. } | TransportEvent::Finished { channel, .. } => {
                    self.open.remove(channel);
                }
                TransportEvent::Complete { generation } => self.complete.push_back(*generation),
                TransportEvent::Released { generation, .. } => self.link.forget_arrived(*generation),
                TransportEvent::Opened { .. } | TransportEvent::Lost { .. } => {}
            }
        }
        while self.complete.len() > REMEMBERED {
            self.complete.pop_front().into_iter().for_each(|generation| self.link.forget_arrived(generation));
        }
    }

    fn telemetry(&self) -> Telemetry {
        match self.link.ask(Out::new(TELEMETRY)) {
            Ok(Answer::Telemetry(telemetry)) => telemetry,
            _ => Telemetry::default(),
        }
    }
}

/// The worker's region. Its front looks at it in tests and never while it serves.
#[derive(Debug)]
struct RemoteMemory {
    link: Arc<Link>,
    num_bytes: usize,
}

impl RemoteMemory {
    fn check(&self, offset: usize, num_bytes: usize) {
        let end = offset.checked_add(num_bytes);
        assert!(end.is_some_and(|end| end <= self.num_bytes), "the range lies outside the region");
    }
}

impl KvMemory for RemoteMemory {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Elsewhere
    }

    fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    fn base_address(&self) -> usize {
        0
    }

    /// As the contract says; of a worker that is gone, zeros.
    fn read(&self, offset: usize, into: &mut [u8]) {
        self.check(offset, into.len());
        let mut out = Out::new(READ);
        out.size(offset).size(into.len());
        match self.link.ask(out) {
            Ok(Answer::Bytes(bytes)) if bytes.len() == into.len() => into.copy_from_slice(&bytes),
            other => {
                tracing::warn!(?other, "the worker's region cannot be read");
                into.fill(0);
            }
        }
    }

    /// As the contract says; of a worker that is gone, nothing is written.
    fn write(&self, offset: usize, from: &[u8]) {
        self.check(offset, from.len());
        let mut out = Out::new(WRITE);
        out.size(offset).bytes(from);
        if let Err(error) = self.link.ask(out) {
            tracing::warn!(%error, "the worker's region cannot be written");
        }
    }
}
