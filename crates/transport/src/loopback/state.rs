//! What the peers of a hub know, and how messages change it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory, KvRange};
use xxhash_rust::xxh3::xxh3_64;

use super::channel::{Channel, Record, Stopping};
use super::faults::Dice;
use super::memory::LoopbackMemory;
use crate::book::{Accepted, ClaimId, Delivery, Ending, GrantBook};
use crate::{Admission, ByteRun, ChannelId, LoopbackFaults, PutRun, Refusal, Telemetry, TransportEvent};

/// A transport of a hub; a restarted engine is another peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PeerId(pub(super) u64);

pub(super) type Waker = Arc<dyn Fn() + Send + Sync>;

/// A claim as its receiver knows it.
#[derive(Debug)]
struct Incoming {
    claim: ClaimId,
    landed_bytes: u64,
}

pub(super) struct Peer {
    pub(super) name: String,
    pub(super) region: Option<Arc<LoopbackMemory>>,
    pub(super) admission: Option<Arc<dyn Admission>>,
    pub(super) waker: Option<Waker>,
    pub(super) book: GrantBook<(PeerId, ChannelId)>,
    pub(super) channels: BTreeMap<ChannelId, Channel>,
    pub(super) events: Vec<TransportEvent>,
    incoming: BTreeMap<(PeerId, ChannelId), Incoming>,
    bytes_sent: u64,
    send_busy: Duration,
    paused: bool,
    /// The waker was called and `poll` has not answered yet.
    woken: bool,
}

impl Peer {
    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            region: None,
            admission: None,
            waker: None,
            book: GrantBook::new(),
            channels: BTreeMap::new(),
            events: Vec::new(),
            incoming: BTreeMap::new(),
            bytes_sent: 0,
            send_busy: Duration::ZERO,
            paused: false,
            woken: false,
        }
    }

    /// Says whether a channel was closed and the caller has not polled that news yet.
    pub(super) fn closed_unseen(&self, channel: ChannelId) -> bool {
        let names_it = |event: &TransportEvent| matches!(event, TransportEvent::Closed { channel: c, .. } if *c == channel);
        self.events.iter().any(names_it)
    }

    pub(super) fn telemetry(&self) -> Telemetry {
        let mut telemetry =
            Telemetry { bytes_sent: self.bytes_sent, send_busy: self.send_busy, ..Telemetry::default() };
        self.book.count_into(&mut telemetry);
        telemetry
    }

    pub(super) fn take_events(&mut self, into: &mut Vec<TransportEvent>) {
        into.append(&mut self.events);
        self.book.drain_events(into);
        self.woken = false;
    }
}

#[derive(Debug)]
pub(super) enum Kind {
    /// Sender to receiver: a claim.
    Open { channel: ChannelId, credential: Vec<u8>, range: KvRange },
    /// Receiver to sender: the answer.
    Verdict { channel: ChannelId, verdict: Result<Accepted, Refusal> },
    /// A posted run reaches the receiver's memory, whatever the receiver thinks of it by now.
    Land { channel: ChannelId, run: PutRun, source: Arc<LoopbackMemory> },
    /// Sender to receiver: everything is written.
    Finish { channel: ChannelId, num_bytes: u64, records: Vec<Record> },
    /// Receiver to sender: the answer.
    Finished { channel: ChannelId, result: Result<(), Refusal> },
    /// Receiver to sender: stop.
    Stop { channel: ChannelId },
    /// Sender to receiver: stopped, and nothing is under way.
    Drained { channel: ChannelId },
    /// The connection to the sender of this message broke.
    Hangup,
    /// The process of the sender of this message is known to have exited.
    Fence,
}

#[derive(Debug)]
pub(super) struct Message {
    pub(super) from: PeerId,
    pub(super) to: PeerId,
    pub(super) kind: Kind,
}

impl Message {
    fn is_control(&self) -> bool {
        !matches!(self.kind, Kind::Land { .. })
    }
}

pub(super) struct State {
    pub(super) now: Duration,
    pub(super) faults: LoopbackFaults,
    pub(super) delivering: bool,
    checksum: bool,
    dice: Dice,
    peers: BTreeMap<PeerId, Peer>,
    names: BTreeMap<String, PeerId>,
    /// Messages by due time, then in order of sending.
    queue: BTreeMap<(Duration, u64), Message>,
    /// Due, but kept back by a pause or a cut; in order.
    held: Vec<Message>,
    /// When the last control message of a pair is due, so that the next does not overtake it.
    links: BTreeMap<(PeerId, PeerId), Duration>,
    cuts: BTreeSet<(PeerId, PeerId)>,
    /// Counts peers, channels and messages.
    last_id: u64,
}

impl State {
    pub(super) fn new(faults: LoopbackFaults, checksum: bool) -> Self {
        Self {
            now: Duration::ZERO,
            dice: Dice::new(faults.seed),
            faults,
            delivering: false,
            checksum,
            peers: BTreeMap::new(),
            names: BTreeMap::new(),
            queue: BTreeMap::new(),
            held: Vec::new(),
            links: BTreeMap::new(),
            cuts: BTreeSet::new(),
            last_id: 0,
        }
    }

    pub(super) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    pub(super) fn add_peer(&mut self, name: &str) -> PeerId {
        let id = PeerId(self.next_id());
        self.peers.insert(id, Peer::new(name));
        self.names.insert(name.to_owned(), id);
        id
    }

    pub(super) fn peer(&self, id: PeerId) -> Option<&Peer> {
        self.peers.get(&id)
    }

    pub(super) fn peer_mut(&mut self, id: PeerId) -> Option<&mut Peer> {
        self.peers.get_mut(&id)
    }

    pub(super) fn named(&self, name: &str) -> Option<PeerId> {
        self.names.get(name).copied().filter(|id| self.peers.contains_key(id))
    }

    pub(super) fn next_due(&self) -> Option<Duration> {
        self.queue.first_key_value().map(|((due, _), _)| *due)
    }

    /// Sends a control message, behind those sent before between the same two.
    pub(super) fn send(&mut self, from: PeerId, to: PeerId, kind: Kind) {
        self.send_after(Duration::ZERO, from, to, kind);
    }

    fn send_after(&mut self, extra: Duration, from: PeerId, to: PeerId, kind: Kind) {
        let due = self.now + extra + self.delay();
        let last = self.links.entry((from, to)).or_default();
        let due = due.max(*last);
        *last = due;
        self.enqueue(due, Message { from, to, kind });
    }

    fn enqueue(&mut self, due: Duration, message: Message) {
        let id = self.next_id();
        self.queue.insert((due, id), message);
    }

    fn delay(&mut self) -> Duration {
        self.dice.between(self.faults.min_delay, self.faults.max_delay)
    }

    /// Takes the next message that is due and may be delivered.
    pub(super) fn next_message(&mut self) -> Option<Message> {
        loop {
            let first = self.queue.first_entry().filter(|first| first.key().0 <= self.now)?;
            let message = first.remove();
            if self.is_held(&message) {
                self.held.push(message);
            } else {
                return Some(message);
            }
        }
    }

    /// A stopped writer writes nothing and a stopped process hears nothing; what has been posted lands on a stopped receiver.
    fn is_held(&self, message: &Message) -> bool {
        let acting = if message.is_control() { message.to } else { message.from };
        self.peers.get(&acting).is_some_and(|peer| peer.paused)
            || self.cuts.contains(&pair(message.from, message.to))
    }

    pub(super) fn pause(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.paused = true;
        }
    }

    pub(super) fn resume(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.paused = false;
        }
        self.send_held_again();
    }

    pub(super) fn cut(&mut self, a: PeerId, b: PeerId) {
        self.cuts.insert(pair(a, b));
    }

    pub(super) fn heal(&mut self) {
        self.cuts.clear();
        self.peers.values_mut().for_each(|peer| peer.paused = false);
        self.send_held_again();
    }

    /// Sends what was held once more. Control messages that are under way between the same two stay behind it.
    fn send_held_again(&mut self) {
        let held = std::mem::take(&mut self.held);
        let pairs: BTreeSet<_> = held.iter().filter(|m| m.is_control()).map(|m| (m.from, m.to)).collect();
        let behind: Vec<_> = self
            .queue
            .iter()
            .filter(|(_, m)| m.is_control() && pairs.contains(&(m.from, m.to)))
            .map(|(key, _)| *key)
            .collect();
        let behind: Vec<_> = behind.iter().filter_map(|key| self.queue.remove(key)).collect();
        for pair in pairs {
            self.links.remove(&pair);
        }
        for message in held.into_iter().chain(behind) {
            if message.is_control() {
                self.send(message.from, message.to, message.kind);
            } else {
                let due = self.now + self.delay();
                self.enqueue(due, message);
            }
        }
    }

    /// A peer's process dies. Runs that it posted land until the others see its exit.
    pub(super) fn crash(&mut self, dead: PeerId) {
        if self.peers.remove(&dead).is_none() {
            return;
        }
        let others: Vec<_> = self.peers.keys().copied().collect();
        for other in others {
            self.send(dead, other, Kind::Hangup);
            let wait = self.dice.between(Duration::ZERO, self.faults.max_fence_delay);
            self.send_after(wait, dead, other, Kind::Fence);
        }
    }

    /// A peer leaves in order: it stops writing, says so, and is gone.
    pub(super) fn leave(&mut self, id: PeerId) {
        let Some(peer) = self.peers.remove(&id) else { return };
        let posted_by = |m: &Message| !m.is_control() && m.from == id;
        self.queue.retain(|_, message| !posted_by(message));
        self.held.retain(|message| !posted_by(message));
        for (channel, open) in &peer.channels {
            self.send(id, open.remote, Kind::Drained { channel: *channel });
        }
        let others: Vec<_> = self.peers.keys().copied().collect();
        for other in others {
            self.send(id, other, Kind::Hangup);
            self.send(id, other, Kind::Fence);
        }
    }

    /// Returns the peers to wake, each once until it polls.
    pub(super) fn wakers(&mut self) -> Vec<Waker> {
        let has_news = |peer: &&mut Peer| !peer.woken && (!peer.events.is_empty() || peer.book.has_events());
        self.peers
            .values_mut()
            .filter(has_news)
            .filter_map(|peer| {
                peer.woken = true;
                peer.waker.clone()
            })
            .collect()
    }

    /// Delivers a message. `admitted` is the receiver's judgement of an `Open`.
    pub(super) fn handle(&mut self, message: Message, admitted: Option<Result<Generation, Refusal>>) {
        let Message { from, to, kind } = message;
        match kind {
            Kind::Open { channel, range, .. } => self.on_open(from, to, channel, range, admitted),
            Kind::Verdict { channel, verdict } => self.on_verdict(to, channel, verdict),
            Kind::Land { channel, run, source } => self.on_land(from, to, channel, run, &source),
            Kind::Finish { channel, num_bytes, records } => {
                self.on_finish(from, to, channel, num_bytes, &records);
            }
            Kind::Finished { channel, result } => self.on_finished(to, channel, result),
            Kind::Stop { channel } => self.stop(to, channel, Stopping::Because(Refusal::Revoked)),
            Kind::Drained { channel } => {
                if let Some(peer) = self.peers.get_mut(&to)
                    && let Some(incoming) = peer.incoming.remove(&(from, channel))
                {
                    peer.book.end(incoming.claim, Ending::Drained);
                }
            }
            Kind::Hangup => self.on_hangup(from, to),
            Kind::Fence => self.on_fence(from, to),
        }
    }

    fn on_open(
        &mut self,
        from: PeerId,
        to: PeerId,
        channel: ChannelId,
        range: KvRange,
        admitted: Option<Result<Generation, Refusal>>,
    ) {
        let verdict = match self.peers.get_mut(&to) {
            None => Err(Refusal::Unreachable),
            Some(peer) => match admitted.unwrap_or(Err(Refusal::BadCredential)) {
                Ok(generation) => {
                    let accepted = peer.book.claim(generation, range, (from, channel));
                    if let Ok(accepted) = &accepted {
                        let incoming = Incoming { claim: accepted.claim, landed_bytes: 0 };
                        peer.incoming.insert((from, channel), incoming);
                    }
                    accepted
                }
                Err(refusal) => {
                    peer.book.count_refused();
                    Err(refusal)
                }
            },
        };
        self.send(to, from, Kind::Verdict { channel, verdict });
    }

    fn on_verdict(&mut self, to: PeerId, channel: ChannelId, verdict: Result<Accepted, Refusal>) {
        let Some(peer) = self.peers.get_mut(&to) else { return };
        let Some(open) = peer.channels.get_mut(&channel) else { return };
        match verdict {
            Ok(accepted) => {
                open.accepted = Some(accepted);
                peer.events.push(TransportEvent::Opened { channel });
                self.pump(to, channel);
            }
            Err(refusal) => {
                peer.channels.remove(&channel);
                peer.events.push(TransportEvent::Closed { channel, refusal: Some(refusal) });
            }
        }
    }

    fn on_land(
        &mut self,
        from: PeerId,
        to: PeerId,
        channel: ChannelId,
        run: PutRun,
        source: &LoopbackMemory,
    ) {
        let lost = self.dice.chance(self.faults.lose_writer);
        let corrupt = self.dice.chance(self.faults.corrupt);
        let flip = self.dice.next();
        if let Some(peer) = self.peers.get_mut(&to)
            && let Some(target) = peer.region.clone()
            && !lost
        {
            copy(source, &target, run);
            if corrupt && run.num_bytes > 0 {
                let at = run.remote_offset + (flip >> 3) as usize % run.num_bytes;
                let mut byte = [0];
                target.read(at, &mut byte);
                target.write(at, &[byte[0] ^ (1 << (flip & 7))]);
            }
            if let Some(incoming) = peer.incoming.get_mut(&(from, channel)) {
                incoming.landed_bytes += run.num_bytes as u64;
                peer.book.progress(incoming.claim, incoming.landed_bytes);
            }
        }
        let now = self.now;
        let Some(peer) = self.peers.get_mut(&from) else { return };
        let Some(open) = peer.channels.get_mut(&channel) else { return };
        open.landed(now);
        if lost {
            open.stop(Stopping::Because(Refusal::PeerLost));
        } else {
            peer.bytes_sent += run.num_bytes as u64;
        }
        self.pump(from, channel);
    }

    fn on_finish(
        &mut self,
        from: PeerId,
        to: PeerId,
        channel: ChannelId,
        num_bytes: u64,
        records: &[Record],
    ) {
        let result = match self.peers.get_mut(&to) {
            None => Err(Refusal::PeerLost),
            Some(peer) => match peer.incoming.remove(&(from, channel)) {
                None => Err(Refusal::Stale),
                Some(incoming) => {
                    let intact = peer.region.as_ref().is_some_and(|region| all_match(region, records));
                    peer.book.finish(incoming.claim, Delivery { num_bytes, intact })
                }
            },
        };
        self.send(to, from, Kind::Finished { channel, result });
    }

    fn on_finished(&mut self, to: PeerId, channel: ChannelId, result: Result<(), Refusal>) {
        let Some(peer) = self.peers.get_mut(&to) else { return };
        let Some(open) = peer.channels.remove(&channel) else { return };
        peer.send_busy += open.busy();
        peer.events.push(match result {
            Ok(()) => TransportEvent::Finished { channel, num_bytes: open.posted_bytes, busy: open.busy() },
            Err(refusal) => TransportEvent::Closed { channel, refusal: Some(refusal) },
        });
    }

    fn on_hangup(&mut self, dead: PeerId, to: PeerId) {
        let Some(peer) = self.peers.get_mut(&to) else { return };
        for ((writer, _), incoming) in &peer.incoming {
            if *writer == dead {
                peer.book.end(incoming.claim, Ending::Vanished);
            }
        }
        let lost: Vec<_> = peer
            .channels
            .iter()
            .filter(|(_, open)| open.remote == dead)
            .map(|(channel, _)| *channel)
            .collect();
        for channel in lost {
            peer.channels.remove(&channel);
            let refusal = Some(Refusal::PeerLost);
            peer.events.push(TransportEvent::Closed { channel, refusal });
        }
    }

    fn on_fence(&mut self, dead: PeerId, to: PeerId) {
        let posted = |m: &Message| !m.is_control() && m.from == dead && m.to == to;
        self.queue.retain(|_, message| !posted(message));
        self.held.retain(|message| !posted(message));
        let Some(peer) = self.peers.get_mut(&to) else { return };
        let theirs: Vec<_> = peer.incoming.keys().copied().filter(|(writer, _)| *writer == dead).collect();
        for key in theirs {
            if let Some(incoming) = peer.incoming.remove(&key) {
                peer.book.end(incoming.claim, Ending::Fenced);
            }
        }
    }

    pub(super) fn stop(&mut self, sender: PeerId, channel: ChannelId, why: Stopping) {
        if let Some(open) = self.peers.get_mut(&sender).and_then(|peer| peer.channels.get_mut(&channel)) {
            open.stop(why);
            self.pump(sender, channel);
        }
    }

    /// Posts what may be posted, and finishes or closes a channel whose last run has landed.
    pub(super) fn pump(&mut self, sender: PeerId, channel: ChannelId) {
        let now = self.now;
        loop {
            let Some(peer) = self.peers.get_mut(&sender) else { return };
            let Some(source) = peer.region.clone() else { break };
            let Some(open) = peer.channels.get_mut(&channel) else { return };
            let Some(run) = open.next_run(now) else { break };
            if self.checksum {
                let hash = hash_of(&source, run.local_offset, run.num_bytes);
                let run = ByteRun { offset: run.remote_offset, num_bytes: run.num_bytes };
                open.records.push(Record { run, hash });
            }
            let to = open.remote;
            let due = now + self.delay();
            self.enqueue(due, Message { from: sender, to, kind: Kind::Land { channel, run, source } });
        }
        let Some(peer) = self.peers.get_mut(&sender) else { return };
        let Some(open) = peer.channels.get_mut(&channel) else { return };
        let to = open.remote;
        if let Some(why) = open.stopping {
            if open.in_flight == 0 {
                peer.send_busy += open.busy();
                peer.channels.remove(&channel);
                peer.events.push(TransportEvent::Closed { channel, refusal: why.refusal() });
                self.send(sender, to, Kind::Drained { channel });
            }
        } else if open.may_finish() {
            open.finish_sent = true;
            let records = std::mem::take(&mut open.records);
            let num_bytes = open.posted_bytes;
            self.send(sender, to, Kind::Finish { channel, num_bytes, records });
        }
    }
}

fn pair(a: PeerId, b: PeerId) -> (PeerId, PeerId) {
    (a.min(b), a.max(b))
}

/// Copies by way of a buffer on the stack; a run may be large.
fn copy(source: &LoopbackMemory, target: &LoopbackMemory, run: PutRun) {
    each_chunk(run.num_bytes, |at, chunk| {
        source.read(run.local_offset + at, chunk);
        target.write(run.remote_offset + at, chunk);
    });
}

fn hash_of(memory: &LoopbackMemory, offset: usize, num_bytes: usize) -> u64 {
    let mut bytes = vec![0; num_bytes];
    memory.read(offset, &mut bytes);
    xxh3_64(&bytes)
}

fn all_match(memory: &LoopbackMemory, records: &[Record]) -> bool {
    records.iter().all(|record| hash_of(memory, record.run.offset, record.run.num_bytes) == record.hash)
}

fn each_chunk(num_bytes: usize, mut each: impl FnMut(usize, &mut [u8])) {
    let mut buffer = [0; 4096];
    let mut at = 0;
    while at < num_bytes {
        let len = buffer.len().min(num_bytes - at);
        each(at, &mut buffer[..len]);
        at += len;
    }
}
