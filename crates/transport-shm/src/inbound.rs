//! A sender's connection, at its receiver.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;

use microserving_protocol::KvRange;
use microserving_transport::one_sided::{Frame, Record, Records, VERSION, Writer};
use microserving_transport::{ByteRun, ClaimId, Delivery, Ending, Refusal};
use rustix::net::sockopt::socket_peercred;

use crate::link::{Link, LinkError};
use crate::memory::{Counters, Region};
use crate::shared::{ClaimWriter, ConnId, Shared};

#[derive(Debug)]
struct Claim {
    id: ClaimId,
    slot: u32,
    num_bytes: u64,
    runs: Arc<[ByteRun]>,
    records: Records,
}

/// What a receiver keeps of a sender. It outlives the connection while claims are open: only the writer's exit ends them
/// then.
pub(crate) struct Inbound {
    id: ConnId,
    link: Option<Link>,
    writer: Option<Writer>,
    checksum: bool,
    counters: Option<Arc<Counters>>,
    free_slots: Vec<u32>,
    /// The region was sent: once is enough.
    introduced: bool,
    claims: BTreeMap<u64, Claim>,
}

impl Inbound {
    pub(crate) fn new(id: ConnId, link: Link) -> Self {
        Self {
            id,
            link: Some(link),
            writer: None,
            checksum: false,
            counters: None,
            free_slots: Vec::new(),
            introduced: false,
            claims: BTreeMap::new(),
        }
    }

    pub(crate) fn link(&self) -> Option<&Link> {
        self.link.as_ref()
    }

    pub(crate) fn writer(&self) -> Option<&Writer> {
        self.writer.as_ref()
    }

    /// Says whether nothing is to be awaited from this sender any more.
    pub(crate) fn is_over(&self) -> bool {
        self.link.is_none() && self.claims.is_empty()
    }

    pub(crate) fn flush(&mut self) -> Result<(), LinkError> {
        self.link.as_mut().map_or(Ok(()), Link::flush)
    }

    /// Reads and handles at most `max_packets` packets, and none behind `Hello`: before a claim is let in, its writer's exit
    /// must be watched for. What is left is read in the next round.
    pub(crate) fn read(&mut self, shared: &Shared, max_packets: usize) -> Result<(), LinkError> {
        let was_known = self.writer.is_some();
        for _ in 0..max_packets {
            let Some(link) = self.link.as_mut() else { return Ok(()) };
            match link.receive()? {
                None => return Ok(()),
                Some(None) => {}
                Some(Some(received)) => self.handle(shared, received.frame)?,
            }
            if self.writer.is_some() != was_known {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Tells a writer to stop, if its claim is still open.
    pub(crate) fn stop(&mut self, channel: u64) -> Result<(), LinkError> {
        match self.claims.contains_key(&channel) {
            true => self.send(&Frame::Stop { channel }),
            false => Ok(()),
        }
    }

    /// The connection is gone. That proves nothing about the writer: claims stay unsafe.
    pub(crate) fn hang_up(&mut self, shared: &Shared) {
        self.link = None;
        self.end_all(shared, Ending::Vanished);
    }

    /// The writer's process has exited, and all it had sent has been read.
    pub(crate) fn fence(&mut self, shared: &Shared) {
        self.link = None;
        self.end_all(shared, Ending::Fenced);
        self.claims.clear();
    }

    fn end_all(&self, shared: &Shared, ending: Ending) {
        let mut receiving = shared.receiving();
        for claim in self.claims.values() {
            if let Some(counters) = &self.counters {
                receiving.book.progress(claim.id, counters.load(claim.slot));
            }
            receiving.book.end(claim.id, ending);
        }
    }

    fn send(&mut self, frame: &Frame) -> Result<(), LinkError> {
        self.link.as_mut().map_or(Ok(()), |link| link.send(frame, Vec::new()))
    }

    fn handle(&mut self, shared: &Shared, frame: Frame) -> Result<(), LinkError> {
        match frame {
            Frame::Hello { version, start_time, checksum } => {
                self.on_hello(shared, version, start_time, checksum)
            }
            _ if self.writer.is_none() => Err(LinkError::Protocol("the first frame is not `Hello`")),
            Frame::Open { channel, range, credential } => self.on_open(shared, channel, range, &credential),
            Frame::Records { channel, records } => self.on_records(channel, records),
            Frame::Finish { channel, num_bytes } => self.on_finish(shared, channel, num_bytes),
            Frame::Drained { channel } => {
                self.on_drained(shared, channel);
                Ok(())
            }
            Frame::Accept { .. }
            | Frame::Refuse { .. }
            | Frame::Stop { .. }
            | Frame::Finished { .. }
            | Frame::Reject { .. } => Err(LinkError::Protocol("a sender sent a receiver's frame")),
        }
    }

    fn on_hello(
        &mut self,
        shared: &Shared,
        version: u16,
        start_time: u64,
        checksum: bool,
    ) -> Result<(), LinkError> {
        if self.writer.is_some() {
            return Err(LinkError::Protocol("a second `Hello`"));
        }
        let reason = if version == VERSION {
            match self.identify(start_time) {
                Ok(writer) => {
                    tracing::debug!(pid = writer.pid(), "a sender connected");
                    self.writer = Some(writer);
                    self.checksum = checksum || shared.config.checksum;
                    return Ok(());
                }
                Err(reason) => reason,
            }
        } else {
            format!("the receiver speaks version {VERSION}, the sender {version}")
        };
        tracing::warn!(reason, "turned a sender away");
        self.send(&Frame::Reject { reason })?;
        Err(LinkError::Protocol("it was turned away"))
    }

    /// Takes hold of the process at the other end, or says why it cannot be let in.
    fn identify(&self, start_time: u64) -> Result<Writer, String> {
        let link = self.link.as_ref().ok_or_else(|| "the connection is gone".to_owned())?;
        let peer =
            socket_peercred(link.as_fd()).map_err(|error| format!("the sender is unknown: {error}"))?;
        if peer.uid != rustix::process::geteuid() {
            return Err("the sender runs as another user".into());
        }
        Writer::identify(peer.pid, start_time).map_err(|error| {
            format!(
                "the sender's process cannot be watched from here ({error}); both engines must see each other's \
                 processes: share the PID namespace, or configure a transport that spans hosts"
            )
        })
    }

    fn on_open(
        &mut self,
        shared: &Shared,
        channel: u64,
        range: KvRange,
        credential: &[u8],
    ) -> Result<(), LinkError> {
        if self.claims.contains_key(&channel) {
            return Err(LinkError::Protocol("a channel is opened twice"));
        }
        match self.claim(shared, channel, range, credential) {
            Err(refusal) => self.send(&Frame::Refuse { channel, refusal }),
            Ok((frame, region, counters)) => {
                let fds = if self.introduced {
                    Vec::new()
                } else {
                    vec![
                        region.memfd().as_fd().try_clone_to_owned()?,
                        counters.memfd().as_fd().try_clone_to_owned()?,
                    ]
                };
                self.introduced = true;
                self.link.as_mut().map_or(Ok(()), |link| link.send(&frame, fds))
            }
        }
    }

    fn claim(
        &mut self,
        shared: &Shared,
        channel: u64,
        range: KvRange,
        credential: &[u8],
    ) -> Result<(Frame, Arc<Region>, Arc<Counters>), Refusal> {
        let admission = shared.receiving().admission.clone();
        let generation =
            admission.map_or(Err(Refusal::BadCredential), |admission| admission.admit(credential));
        let generation = generation.inspect_err(|_| shared.receiving().book.count_refused())?;
        // Without a region there are no grants either, and the claim is refused below.
        let counters = self.counters().inspect_err(|_| shared.receiving().book.count_refused())?;
        let Some(slot) = self.free_slots.pop() else {
            tracing::warn!(conn = self.id.0, "a sender holds as many claims as a connection may");
            shared.receiving().book.count_refused();
            return Err(Refusal::Unreachable);
        };
        counters.reset(slot);
        let writer = ClaimWriter { conn: self.id, channel, counters: counters.clone(), slot };
        let accepted = shared.receiving().book.claim(generation, range, writer);
        let (accepted, region) = match (accepted, shared.region.get()) {
            (Ok(accepted), Some(region)) => (accepted, region.clone()),
            (other, _) => {
                self.free_slots.push(slot);
                return Err(other.err().unwrap_or(Refusal::Stale));
            }
        };
        let frame = Frame::Accept {
            channel,
            slot,
            num_bytes: accepted.num_bytes,
            checksum: self.checksum,
            runs: accepted.runs.to_vec(),
        };
        let claim = Claim {
            id: accepted.claim,
            slot,
            num_bytes: accepted.num_bytes,
            runs: accepted.runs,
            records: Records::default(),
        };
        self.claims.insert(channel, claim);
        Ok((frame, region, counters))
    }

    /// Returns the counters of this connection, made for its first claim.
    fn counters(&mut self) -> Result<Arc<Counters>, Refusal> {
        if let Some(counters) = &self.counters {
            return Ok(counters.clone());
        }
        let counters = Counters::allocate().map_err(|error| {
            tracing::error!(%error, "no memory for arrival counters");
            Refusal::Unreachable
        })?;
        let counters = Arc::new(counters);
        self.free_slots = (0..Counters::NUM_SLOTS).rev().collect();
        self.counters = Some(counters.clone());
        Ok(counters)
    }

    fn on_records(&mut self, channel: u64, records: Vec<Record>) -> Result<(), LinkError> {
        // A claim that has ended here may have records on the way.
        let Some(claim) = self.claims.get_mut(&channel) else { return Ok(()) };
        claim.records.extend(records, &claim.runs, claim.num_bytes).map_err(LinkError::Protocol)
    }

    fn on_finish(&mut self, shared: &Shared, channel: u64, said_bytes: u64) -> Result<(), LinkError> {
        let Some(claim) = self.claims.remove(&channel) else {
            return self.send(&Frame::Finished { channel, refusal: Some(Refusal::Stale) });
        };
        let counted = self.counters.as_ref().map_or(0, |counters| counters.load(claim.slot));
        // The counter and the word must agree with the claim; the one that does not decides.
        let num_bytes = if said_bytes == claim.num_bytes { counted } else { said_bytes };
        let intact = !self.checksum
            || num_bytes != claim.num_bytes
            || shared.region.get().is_some_and(|region| {
                let hash = |run: ByteRun| region.mapping().hash(run.offset, run.num_bytes);
                claim.records.are_intact(claim.num_bytes, hash)
            });
        let result = shared.receiving().book.finish(claim.id, Delivery { num_bytes, intact });
        self.free_slots.push(claim.slot);
        self.send(&Frame::Finished { channel, refusal: result.err() })
    }

    fn on_drained(&mut self, shared: &Shared, channel: u64) {
        // A claim that was refused, or had finished already, is drained for nobody.
        let Some(claim) = self.claims.remove(&channel) else { return };
        let mut receiving = shared.receiving();
        if let Some(counters) = &self.counters {
            receiving.book.progress(claim.id, counters.load(claim.slot));
        }
        receiving.book.end(claim.id, Ending::Drained);
        self.free_slots.push(claim.slot);
    }
}
