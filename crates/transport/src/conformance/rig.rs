//! One receiver and some senders under test, with their regions and what they reported.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory, KvRange};

use crate::{
    Admission, ByteRun, ChannelId, Claim, Grant, KvTransport, PutRun, Refusal, TransportError, TransportEvent,
};

/// What a check needs of its transports.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How many senders.
    pub num_senders: usize,
    /// Whether checksums are verified on arrival.
    pub checksum: bool,
}

/// Transports that can reach each other, fresh: no region, no admission.
pub struct Cluster {
    /// The one that grants.
    pub receiver: Box<dyn KvTransport>,
    /// Those that claim.
    pub senders: Vec<Box<dyn KvTransport>>,
    /// Ends the sender of this index as `kill -9` does, if this factory can.
    pub kill_sender: Option<Box<dyn FnMut(usize)>>,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("receiver", &self.receiver)
            .field("senders", &self.senders)
            .finish_non_exhaustive()
    }
}

/// Makes the transports under test.
pub trait Factory {
    /// Makes a receiver and its senders.
    fn cluster(&self, options: Options) -> Cluster;
}

/// Bytes of one token's KV in these checks.
pub(super) const TOKEN_BYTES: usize = 64;
/// Bytes of every region; the last [`BARRIER_BYTES`] are kept for [`Rig::barrier`].
pub(super) const REGION_BYTES: usize = 1 << 20;
const BARRIER_BYTES: usize = 4096;
/// What the receiver's region holds before anybody writes.
pub(super) const UNTOUCHED: u8 = 0xa5;

/// Polls before a check gives up: at least 20 seconds.
const MAX_POLLS: u32 = 100_000;
const PAUSE: Duration = Duration::from_micros(200);

/// Admits `good` followed by the generation; `late` is stale.
#[derive(Debug)]
struct ByName;

impl Admission for ByName {
    fn admit(&self, credential: &[u8]) -> Result<Generation, Refusal> {
        if credential == b"late" {
            return Err(Refusal::Stale);
        }
        let number = credential.strip_prefix(b"good").ok_or(Refusal::BadCredential)?;
        let number = number.try_into().map_err(|_| Refusal::BadCredential)?;
        Ok(Generation(u64::from_le_bytes(number)))
    }
}

pub(super) fn good(generation: Generation) -> Vec<u8> {
    [b"good".as_slice(), &generation.0.to_le_bytes()].concat()
}

pub(super) fn range(begin: u32, end: u32) -> KvRange {
    KvRange::new(begin, end).expect("the checks write ordered ranges")
}

/// The byte that a sender's region holds at an offset: another one in every sender.
pub(super) fn source_byte(sender: usize, offset: usize) -> u8 {
    let mixed =
        (offset as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (sender as u64).wrapping_mul(0x5851_f42d);
    (mixed >> 29) as u8
}

pub(super) struct Node {
    pub(super) transport: Box<dyn KvTransport>,
    pub(super) memory: Arc<dyn KvMemory>,
    pub(super) events: Vec<TransportEvent>,
}

impl Node {
    fn new(mut transport: Box<dyn KvTransport>, num_bytes: usize) -> Self {
        let memory = transport.allocate_region(num_bytes).expect("a small region");
        Self { transport, memory, events: Vec::new() }
    }

    pub(super) fn has(&self, event: &TransportEvent) -> bool {
        self.events.contains(event)
    }

    pub(super) fn bytes(&self, offset: usize, num_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0; num_bytes];
        self.memory.read(offset, &mut bytes);
        bytes
    }
}

pub(super) struct Rig {
    pub(super) receiver: Node,
    pub(super) senders: Vec<Node>,
    pub(super) kill_sender: Option<Box<dyn FnMut(usize)>>,
    now: Duration,
    last_generation: u64,
}

impl Rig {
    pub(super) fn new(factory: &dyn Factory, num_senders: usize) -> Self {
        Self::with(factory, Options { num_senders, checksum: false }, REGION_BYTES)
    }

    pub(super) fn with(factory: &dyn Factory, options: Options, region_bytes: usize) -> Self {
        let cluster = factory.cluster(options);
        let mut receiver = Node::new(cluster.receiver, region_bytes);
        receiver.transport.set_admission(Arc::new(ByName));
        receiver.memory.write(0, &vec![UNTOUCHED; region_bytes]);
        let senders = cluster
            .senders
            .into_iter()
            .enumerate()
            .map(|(index, transport)| {
                let node = Node::new(transport, region_bytes);
                let bytes: Vec<u8> = (0..region_bytes).map(|offset| source_byte(index, offset)).collect();
                node.memory.write(0, &bytes);
                node
            })
            .collect();
        Self { receiver, senders, kill_sender: cluster.kill_sender, now: Duration::ZERO, last_generation: 0 }
    }

    pub(super) fn poll(&mut self) {
        self.now += Duration::from_millis(1);
        let now = self.now;
        for node in self.senders.iter_mut().chain([&mut self.receiver]) {
            node.transport.poll(now, &mut node.events);
        }
    }

    pub(super) fn drive_until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        for _ in 0..MAX_POLLS {
            self.poll();
            if done(self) {
                return;
            }
            std::thread::sleep(PAUSE);
        }
        let sent: Vec<_> = self.senders.iter().map(|node| &node.events).collect();
        panic!("{what}: did not happen; receiver saw {:?}, senders saw {sent:?}", self.receiver.events);
    }

    pub(super) fn until_received(&mut self, event: &TransportEvent) {
        self.drive_until(&format!("the receiver's {event:?}"), |rig| rig.receiver.has(event));
    }

    pub(super) fn until_sent(&mut self, sender: usize, event: &TransportEvent) {
        self.drive_until(&format!("the sender's {event:?}"), |rig| rig.senders[sender].has(event));
    }

    pub(super) fn new_generation(&mut self) -> Generation {
        self.last_generation += 1;
        Generation(self.last_generation)
    }

    /// Grants `[0, num_tokens)`, to lie in one run at `offset`.
    pub(super) fn grant(&mut self, offset: usize, num_tokens: u32) -> Generation {
        let generation = self.new_generation();
        let runs = vec![ByteRun { offset, num_bytes: num_tokens as usize * TOKEN_BYTES }];
        let grant = Grant { generation, range: range(0, num_tokens), token_bytes: TOKEN_BYTES, runs };
        self.receiver.transport.grant(grant).expect("a good grant");
        generation
    }

    pub(super) fn open_with(&mut self, sender: usize, credential: Vec<u8>, range: KvRange) -> ChannelId {
        let peer = self.receiver.transport.peer_address();
        self.senders[sender]
            .transport
            .open(Claim { peer, credential, range })
            .expect("the receiver's own address")
    }

    pub(super) fn open(&mut self, sender: usize, generation: Generation, begin: u32, end: u32) -> ChannelId {
        self.open_with(sender, good(generation), range(begin, end))
    }

    pub(super) fn try_put(
        &mut self,
        sender: usize,
        channel: ChannelId,
        local_offset: usize,
        remote_offset: usize,
        num_bytes: usize,
    ) -> Result<(), TransportError> {
        let run = PutRun { local_offset, remote_offset, num_bytes };
        self.senders[sender].transport.put(channel, &[run])
    }

    pub(super) fn put(
        &mut self,
        sender: usize,
        channel: ChannelId,
        local: usize,
        remote: usize,
        num_bytes: usize,
    ) {
        self.try_put(sender, channel, local, remote, num_bytes).expect("a good run");
    }

    pub(super) fn finish(&mut self, sender: usize, channel: ChannelId) {
        self.senders[sender].transport.finish(channel);
    }

    /// Checks that the receiver holds what the sender had.
    pub(super) fn assert_copied(&self, sender: usize, local: usize, remote: usize, num_bytes: usize) {
        let expected: Vec<u8> =
            (local..local + num_bytes).map(|offset| source_byte(sender, offset)).collect();
        assert!(
            self.receiver.bytes(remote, num_bytes) == expected,
            "{num_bytes} bytes at {remote} differ from the sender's at {local}"
        );
    }

    pub(super) fn assert_untouched(&self, offset: usize, num_bytes: usize) {
        let bytes = self.receiver.bytes(offset, num_bytes);
        let at = bytes.iter().position(|byte| *byte != UNTOUCHED);
        assert_eq!(at, None, "something was written into the {num_bytes} bytes at {offset}");
    }

    /// Runs a whole transfer: what the sender sent before has been dealt with afterwards.
    pub(super) fn barrier(&mut self, sender: usize) {
        let offset = self.receiver.memory.num_bytes() - BARRIER_BYTES;
        let generation = self.grant(offset, 1);
        let channel = self.open(sender, generation, 0, 1);
        self.put(sender, channel, 0, offset, TOKEN_BYTES);
        self.finish(sender, channel);
        self.until_received(&TransportEvent::Complete { generation });
        self.drive_until("the barrier's Finished", |rig| rig.senders[sender].finished(channel).is_some());
    }

    /// Checks that what the receiver reported of a generation is exactly this.
    pub(super) fn assert_received(&self, generation: Generation, expected: &[TransportEvent]) {
        let of_it = |event: &&TransportEvent| match event {
            TransportEvent::Complete { generation: g }
            | TransportEvent::Lost { generation: g, .. }
            | TransportEvent::Released { generation: g, .. } => *g == generation,
            _ => false,
        };
        let seen: Vec<_> = self.receiver.events.iter().filter(of_it).cloned().collect();
        assert_eq!(seen, expected, "what the receiver reported of generation {generation}");
    }
}

impl Node {
    /// Returns the bytes of a channel's `Finished`, if it was reported.
    pub(super) fn finished(&self, channel: ChannelId) -> Option<u64> {
        self.events.iter().find_map(|event| match event {
            TransportEvent::Finished { channel: c, num_bytes, .. } if *c == channel => Some(*num_bytes),
            _ => None,
        })
    }
}
