//! A sender's connection, at its receiver.

use std::collections::BTreeMap;
use std::sync::Arc;

use microserving_protocol::KvRange;
use microserving_transport::one_sided::{Frame, MAX_MESSAGE, Record, Records};
use microserving_transport::{ByteRun, ClaimId, Delivery, Ending, PutRun, Refusal, run_is_allowed};

use crate::agent::ReadRun;
use crate::link::{Link, LinkError};
use crate::memory::Region;
use crate::message::{Introduction, MAX_FIRST_MESSAGE, Message, VERSION};
use crate::reading::{Read, Reading};
use crate::shared::{ClaimWriter, ConnId, Shared};

/// Claims that one connection may hold at a time.
const MAX_CLAIMS: usize = 1024;

#[derive(Debug)]
struct Claim {
    id: ClaimId,
    num_bytes: u64,
    runs: Arc<[ByteRun]>,
    records: Records,
    /// Bytes whose reading was begun, and those that are there.
    begun: u64,
    arrived: u64,
    num_reads: usize,
    /// The grant was revoked: nothing more is read.
    stopped: bool,
}

/// What reading takes, for the moment of a call.
pub(crate) struct Tools<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) reading: &'a mut Reading,
    pub(crate) region: Option<&'a Region>,
    /// Our own id, by which senders must mean us.
    pub(crate) me: [u8; 16],
}

/// What a receiver keeps of a sender. It outlives the connection while reads of its claims may be under way.
pub(crate) struct Inbound {
    id: ConnId,
    link: Option<Link>,
    introduction: Option<Introduction>,
    checksum: bool,
    /// A claim was let in: from now on the sender is trusted with what it costs.
    admitted: bool,
    claims: BTreeMap<u64, Claim>,
}

impl Inbound {
    pub(crate) fn new(id: ConnId, link: Link) -> Self {
        let claims = BTreeMap::new();
        Self { id, link: Some(link), introduction: None, checksum: false, admitted: false, claims }
    }

    pub(crate) fn link(&self) -> Option<&Link> {
        self.link.as_ref()
    }

    pub(crate) fn link_mut(&mut self) -> Option<&mut Link> {
        self.link.as_mut()
    }

    pub(crate) fn is_admitted(&self) -> bool {
        self.admitted
    }

    /// Says whether nothing is to be awaited from this sender any more.
    pub(crate) fn is_over(&self) -> bool {
        self.link.is_none() && self.claims.is_empty()
    }

    fn send(&mut self, message: &Message) -> Result<(), LinkError> {
        self.link.as_mut().map_or(Ok(()), |link| link.send(message))
    }

    fn say(&mut self, frame: Frame) -> Result<(), LinkError> {
        self.send(&Message::Frame(frame))
    }

    /// Handles what was read.
    pub(crate) fn handle_all(&mut self, tools: &mut Tools<'_>) -> Result<(), LinkError> {
        loop {
            let max_message = if self.admitted { MAX_MESSAGE } else { MAX_FIRST_MESSAGE };
            let Some(link) = self.link.as_mut() else { return Ok(()) };
            let Some(message) = link.next(max_message)? else { return Ok(()) };
            self.handle(tools, message)?;
        }
    }

    /// Ends a claim whose grant was revoked: as soon as no read of it is under way, whatever the sender does.
    pub(crate) fn stop(&mut self, shared: &Shared, channel: u64) -> Result<(), LinkError> {
        let Some(claim) = self.claims.get_mut(&channel) else { return Ok(()) };
        claim.stopped = true;
        self.settle(shared, channel);
        self.say(Frame::Stop { channel })
    }

    /// The connection is gone: nothing more will be read.
    pub(crate) fn hang_up(&mut self, shared: &Shared) {
        self.link = None;
        for claim in self.claims.values() {
            shared.state().book.end(claim.id, Ending::Vanished);
        }
        for channel in self.claims.keys().copied().collect::<Vec<_>>() {
            self.settle(shared, channel);
        }
    }

    /// A read has ended. It brought its bytes, or it is not known what it brought.
    pub(crate) fn ended(&mut self, shared: &Shared, read: Read, whole: bool) -> Result<(), LinkError> {
        let Some(claim) = self.claims.get_mut(&read.channel) else { return Ok(()) };
        claim.num_reads -= 1;
        if whole {
            claim.arrived += read.num_bytes;
            shared.state().book.progress(claim.id, claim.arrived);
        }
        self.settle(shared, read.channel);
        self.send(&Message::Taken { channel: read.channel, num_bytes: read.num_bytes })
    }

    /// Gives up a claim that has an end coming and no read under way.
    fn settle(&mut self, shared: &Shared, channel: u64) {
        let Some(claim) = self.claims.get(&channel).filter(|claim| claim.num_reads == 0) else { return };
        let ending = match (&self.link, claim.stopped) {
            (None, _) => Ending::Fenced,
            (Some(_), true) => Ending::Drained,
            (Some(_), false) => return,
        };
        shared.state().book.end(claim.id, ending);
        self.claims.remove(&channel);
    }

    fn handle(&mut self, tools: &mut Tools<'_>, message: Message) -> Result<(), LinkError> {
        let frame = match message {
            Message::Introduce(introduction) => return self.on_introduce(tools, introduction),
            _ if self.introduction.is_none() => {
                return Err(LinkError::Protocol("the first message is not `Introduce`"));
            }
            Message::Beat => return Ok(()),
            Message::Put { channel, runs } => return self.on_put(tools, channel, &runs),
            Message::Taken { .. } => return Err(LinkError::Protocol("a sender sent a receiver's message")),
            Message::Frame(frame) => frame,
        };
        match frame {
            Frame::Open { channel, range, credential } => {
                self.on_open(tools.shared, channel, range, &credential)
            }
            Frame::Records { channel, records } => self.on_records(channel, records),
            Frame::Finish { channel, num_bytes } => self.on_finish(tools, channel, num_bytes),
            Frame::Drained { channel } => self.on_drained(tools.shared, channel),
            Frame::Hello { .. }
            | Frame::Accept { .. }
            | Frame::Refuse { .. }
            | Frame::Stop { .. }
            | Frame::Finished { .. }
            | Frame::Reject { .. } => Err(LinkError::Protocol("a sender sent a receiver's frame")),
        }
    }

    fn on_introduce(&mut self, tools: &Tools<'_>, introduction: Introduction) -> Result<(), LinkError> {
        if self.introduction.is_some() {
            return Err(LinkError::Protocol("a second `Introduce`"));
        }
        if introduction.version != VERSION {
            let reason =
                format!("the receiver speaks version {VERSION}, the sender {}", introduction.version);
            tracing::warn!(reason, "turned a sender away");
            self.say(Frame::Reject { reason })?;
            return Err(LinkError::Protocol("it was turned away"));
        }
        if introduction.whom != tools.me {
            return Err(LinkError::Stranger);
        }
        self.checksum = introduction.checksum || tools.shared.config.checksum;
        self.introduction = Some(introduction);
        Ok(())
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
            Ok(accept) => self.say(accept),
            Err(refusal) => self.say(Frame::Refuse { channel, refusal }),
        }
    }

    fn claim(
        &mut self,
        shared: &Shared,
        channel: u64,
        range: KvRange,
        credential: &[u8],
    ) -> Result<Frame, Refusal> {
        let admission = shared.state().admission.clone();
        let generation =
            admission.map_or(Err(Refusal::BadCredential), |admission| admission.admit(credential));
        let book = &mut shared.state().book;
        let generation = generation.inspect_err(|_| book.count_refused())?;
        if self.claims.len() >= MAX_CLAIMS {
            tracing::warn!(conn = self.id.0, "a sender holds as many claims as a connection may");
            book.count_refused();
            return Err(Refusal::Unreachable);
        }
        let accepted = book.claim(generation, range, ClaimWriter { conn: self.id, channel })?;
        self.admitted = true;
        let claim = Claim {
            id: accepted.claim,
            num_bytes: accepted.num_bytes,
            runs: accepted.runs.clone(),
            records: Records::default(),
            begun: 0,
            arrived: 0,
            num_reads: 0,
            stopped: false,
        };
        self.claims.insert(channel, claim);
        Ok(Frame::Accept {
            channel,
            slot: 0,
            num_bytes: accepted.num_bytes,
            checksum: self.checksum,
            runs: accepted.runs.to_vec(),
        })
    }

    fn on_put(&mut self, tools: &mut Tools<'_>, channel: u64, runs: &[PutRun]) -> Result<(), LinkError> {
        let Some(introduction) = &self.introduction else { return Ok(()) };
        // A claim that has ended here may have runs on the way: nothing of them is read.
        let Some(claim) = self.claims.get_mut(&channel).filter(|claim| !claim.stopped) else {
            return self.send(&Message::Taken { channel, num_bytes: 0 });
        };
        let mut reads = Vec::with_capacity(runs.len());
        let mut num_bytes = 0;
        for run in runs {
            let theirs = run.local_offset.checked_add(run.num_bytes);
            let readable = theirs.is_some_and(|end| end <= introduction.num_bytes);
            let from = introduction.base.checked_add(run.local_offset).filter(|_| readable);
            let allowed = run_is_allowed(&claim.runs, run.remote_offset, run.num_bytes);
            let Some(from) = from.filter(|_| allowed && run.num_bytes > 0) else {
                return Err(LinkError::Protocol("a run outside the grant, or outside the sender's region"));
            };
            reads.push(ReadRun { offset: run.remote_offset, from, num_bytes: run.num_bytes });
            num_bytes += run.num_bytes as u64;
        }
        claim.begun += num_bytes;
        if reads.is_empty() || claim.begun > claim.num_bytes {
            return Err(LinkError::Protocol("no runs, or more bytes than were claimed"));
        }
        let read = Read { conn: self.id, channel, num_bytes };
        let (begun, result) = tools.reading.begin(read, &introduction.metadata, &reads);
        claim.num_reads += usize::from(begun);
        result.map_err(|error| LinkError::Unreadable(Some(error)))
    }

    fn on_records(&mut self, channel: u64, records: Vec<Record>) -> Result<(), LinkError> {
        // A claim that has ended here may have records on the way.
        let Some(claim) = self.claims.get_mut(&channel) else { return Ok(()) };
        claim.records.extend(records, &claim.runs, claim.num_bytes).map_err(LinkError::Protocol)
    }

    fn on_finish(&mut self, tools: &Tools<'_>, channel: u64, said_bytes: u64) -> Result<(), LinkError> {
        let Some(claim) = self.claims.get(&channel) else {
            return self.say(Frame::Finished { channel, refusal: Some(Refusal::Stale) });
        };
        if claim.num_reads > 0 {
            return Err(LinkError::Protocol("a claim is finished before its runs were taken"));
        }
        // What was read and the word must agree with the claim; the one that does not decides.
        let num_bytes = if said_bytes == claim.num_bytes { claim.arrived } else { said_bytes };
        let Some(claim) = self.claims.remove(&channel) else { return Ok(()) };
        let intact = !self.checksum
            || num_bytes != claim.num_bytes
            || tools.region.is_some_and(|region| {
                let hash = |run: ByteRun| region.hash(run.offset, run.num_bytes);
                claim.records.are_intact(claim.num_bytes, hash)
            });
        let result = tools.shared.state().book.finish(claim.id, Delivery { num_bytes, intact });
        self.say(Frame::Finished { channel, refusal: result.err() })
    }

    fn on_drained(&mut self, shared: &Shared, channel: u64) -> Result<(), LinkError> {
        // A claim that was refused, or has ended already, is drained for nobody.
        let Some(claim) = self.claims.get(&channel) else { return Ok(()) };
        if claim.num_reads > 0 {
            return Err(LinkError::Protocol("a claim is given up before its runs were taken"));
        }
        shared.state().book.end(claim.id, Ending::Drained);
        self.claims.remove(&channel);
        Ok(())
    }
}
