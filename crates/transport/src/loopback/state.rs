//! What the peers of a hub know, the messages under way between them, and what a simulator may do to both.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::KvRange;

use super::channel::{Channel, Record};
use super::faults::Dice;
use super::memory::LoopbackMemory;
use crate::book::{Accepted, ClaimId, GrantBook};
use crate::{Admission, ChannelId, LoopbackFaults, PutRun, Refusal, Telemetry, TransportEvent};

/// A transport of a hub; a restarted engine is another peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PeerId(pub(super) u64);

mod delivery;

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
}

fn pair(a: PeerId, b: PeerId) -> (PeerId, PeerId) {
    (a.min(b), a.max(b))
}
