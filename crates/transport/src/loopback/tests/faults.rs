//! The simulated network: hostile enough to show the hazard, and never past the rule that ends it.

use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory, KvRange};

use crate::{
    Admission, ByteRun, ChannelId, Claim, Grant, KvTransport, LoopbackFaults, LoopbackHub, LoopbackTransport,
    PutRun, Refusal, TransportEvent,
};

const G: Generation = Generation(1);
const NUM_BYTES: usize = 64 * 64;

#[derive(Debug)]
struct ForOne;

impl Admission for ForOne {
    fn admit(&self, _: &[u8]) -> Result<Generation, Refusal> {
        Ok(G)
    }
}

fn whole() -> KvRange {
    KvRange::new(0, 64).expect("ordered")
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn slow(seed: u64) -> LoopbackFaults {
    LoopbackFaults {
        seed,
        min_delay: ms(1),
        max_delay: ms(20),
        max_fence_delay: ms(50),
        ..LoopbackFaults::default()
    }
}

/// One sender, one receiver, one claim of 64 runs, and a clock that jumps from message to message.
struct Sim {
    hub: LoopbackHub,
    sender: LoopbackTransport,
    receiver: LoopbackTransport,
    memory: Arc<dyn KvMemory>,
    channel: ChannelId,
    now: Duration,
    sent: Vec<TransportEvent>,
    received: Vec<TransportEvent>,
}

impl Sim {
    fn new(faults: LoopbackFaults, checksums: bool) -> Self {
        let hub = LoopbackHub::with(faults, checksums);
        let (mut sender, mut receiver) = (hub.transport("p"), hub.transport("d"));
        sender.allocate_region(NUM_BYTES).unwrap().write(0, &[1; NUM_BYTES]);
        let memory = receiver.allocate_region(NUM_BYTES).unwrap();
        receiver.set_admission(Arc::new(ForOne));
        let runs = vec![ByteRun { offset: 0, num_bytes: NUM_BYTES }];
        receiver.grant(Grant { generation: G, range: whole(), token_bytes: 64, runs }).unwrap();
        let peer = receiver.peer_address();
        let channel = sender.open(Claim { peer, credential: Vec::new(), range: whole() }).unwrap();
        for at in (0..NUM_BYTES).step_by(64) {
            sender.put(channel, &[PutRun { local_offset: at, remote_offset: at, num_bytes: 64 }]).unwrap();
        }
        let (sent, received) = (Vec::new(), Vec::new());
        Self { hub, sender, receiver, memory, channel, now: Duration::ZERO, sent, received }
    }

    /// Moves the clock to the next message and delivers it; says whether there was one.
    fn step(&mut self) -> bool {
        let Some(due) = self.hub.next_due() else { return false };
        self.now = self.now.max(due);
        self.sender.poll(self.now, &mut self.sent);
        self.receiver.poll(self.now, &mut self.received);
        true
    }

    fn run(&mut self) {
        while self.step() {}
    }

    fn run_until(&mut self, mut done: impl FnMut(&Self) -> bool) {
        while !done(self) {
            assert!(self.step(), "nothing is under way any more: {:?} {:?}", self.sent, self.received);
        }
    }

    fn revoke(&mut self) {
        self.receiver.revoke(G);
        self.receiver.poll(self.now, &mut self.received);
    }

    fn arrived(&self) -> u64 {
        self.receiver.arrived_bytes(G)
    }

    fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0; NUM_BYTES];
        self.memory.read(0, &mut bytes);
        bytes
    }

    fn released(&self) -> bool {
        self.received.iter().any(|event| matches!(event, TransportEvent::Released { .. }))
    }

    /// The receiver uses the pages for something else, time passes, and nobody else has written.
    fn reuse_and_check(&mut self) {
        self.memory.write(0, &[9; NUM_BYTES]);
        self.run();
        assert!(self.content() == [9; NUM_BYTES], "a write landed after the release");
    }
}

#[test]
fn delayed_and_reordered_runs_complete_whole() {
    let mut reordered = false;
    for seed in 0..50 {
        let mut sim = Sim::new(slow(seed), false);
        sim.sender.finish(sim.channel);
        while !sim.received.contains(&TransportEvent::Complete { generation: G }) {
            assert!(sim.step());
            let content = sim.content();
            let landed = content.iter().filter(|byte| **byte == 1).count();
            assert!(sim.arrived() <= landed as u64, "the counter is ahead of the data");
            reordered |= content.windows(2).any(|w| w == [0, 1]);
        }
        assert!(sim.content() == [1; NUM_BYTES]);
        sim.run();
        assert!(matches!(sim.sent.last(), Some(TransportEvent::Finished { num_bytes, busy, .. })
            if *num_bytes == NUM_BYTES as u64 && *busy >= ms(1)));
    }
    assert!(reordered, "no seed reordered anything");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let trace = |seed| {
        let mut sim = Sim::new(LoopbackFaults { lose_writer: 0.01, corrupt: 0.02, ..slow(seed) }, true);
        sim.sender.finish(sim.channel);
        let mut steps = Vec::new();
        while sim.step() {
            steps.push((sim.now, sim.arrived(), sim.content()));
        }
        (steps, sim.received)
    };
    assert_eq!(trace(3), trace(3));
    assert_ne!(trace(3), trace(4));
}

#[test]
fn a_dead_writers_puts_land_until_the_fence_and_not_after() {
    let mut late_writes = 0;
    for seed in 0..100 {
        let mut sim = Sim::new(slow(seed), false);
        sim.run_until(|sim| sim.arrived() >= 64 * (1 + seed % 20));
        sim.hub.crash("p");
        sim.run_until(|sim| !sim.received.is_empty());
        assert_eq!(sim.received, [TransportEvent::Lost { generation: G, range: whole(), corrupt: false }]);
        let at_loss = sim.content();
        sim.revoke();
        sim.run_until(Sim::released);
        assert_eq!(sim.received.last(), Some(&TransportEvent::Released { generation: G, fenced: true }));
        late_writes += usize::from(sim.content() != at_loss);
        sim.reuse_and_check();
    }
    assert!(
        late_writes > 20,
        "the faults are too tame to tell a fence from a broken connection: {late_writes}"
    );
}

#[test]
fn a_paused_writer_holds_its_pages_and_writes_on_when_it_wakes() {
    let mut late_writes = 0;
    for seed in 0..50 {
        let mut sim = Sim::new(slow(seed), false);
        sim.run_until(|sim| sim.arrived() >= 640);
        sim.hub.pause("p");
        sim.revoke();
        sim.run();
        assert!(!sim.released(), "released under a stopped writer");
        let while_stopped = sim.content();
        sim.hub.resume("p");
        sim.run_until(Sim::released);
        late_writes += usize::from(sim.content() != while_stopped);
        assert_eq!(sim.received.last(), Some(&TransportEvent::Released { generation: G, fenced: false }));
        sim.reuse_and_check();
        assert_eq!(
            sim.sent.last(),
            Some(&TransportEvent::Closed { channel: sim.channel, refusal: Some(Refusal::Revoked) })
        );
    }
    assert!(late_writes > 10, "a zombie writer should write: {late_writes}");
}

#[test]
fn a_cut_keeps_everything_waiting() {
    for seed in 0..30 {
        let mut sim = Sim::new(slow(seed), false);
        sim.run_until(|sim| sim.arrived() >= 640);
        sim.hub.cut("p", "d");
        sim.revoke();
        sim.hub.crash("p");
        sim.run();
        assert!(!sim.released(), "nobody on the other side of a cut can be fenced");
        sim.hub.heal();
        sim.run_until(Sim::released);
        sim.reuse_and_check();
    }
}

#[test]
fn lost_writers_and_damaged_bytes_are_reported() {
    let (mut lost, mut corrupt) = (0, 0);
    for seed in 0..60 {
        let faults = LoopbackFaults { lose_writer: 0.005, corrupt: 0.01, ..slow(seed) };
        let mut sim = Sim::new(faults, true);
        sim.sender.finish(sim.channel);
        sim.run();
        assert_eq!((sim.sent.len(), sim.received.len()), (2, 1), "{:?} {:?}", sim.sent, sim.received);
        match (&sim.received[0], &sim.sent[1]) {
            (TransportEvent::Complete { .. }, TransportEvent::Finished { .. }) => {
                assert!(sim.content() == [1; NUM_BYTES]);
            }
            (TransportEvent::Lost { corrupt: true, .. }, TransportEvent::Closed { refusal, .. }) => {
                assert_eq!(*refusal, Some(Refusal::Revoked));
                assert!(sim.content() != [1; NUM_BYTES]);
                corrupt += 1;
            }
            (TransportEvent::Lost { corrupt: false, .. }, TransportEvent::Closed { refusal, .. }) => {
                assert_eq!(*refusal, Some(Refusal::PeerLost));
                lost += 1;
            }
            other => panic!("{other:?}"),
        }
        sim.revoke();
        sim.reuse_and_check();
    }
    assert!(lost > 5 && corrupt > 5, "{lost} {corrupt}");
}

#[test]
fn a_crashed_receiver_ends_the_claim_and_its_name_stands_for_the_next() {
    let mut sim = Sim::new(slow(1), false);
    sim.run_until(|sim| sim.arrived() >= 640);
    sim.hub.crash("d");
    sim.run();
    let closed = TransportEvent::Closed { channel: sim.channel, refusal: Some(Refusal::PeerLost) };
    assert_eq!(sim.sent.last(), Some(&closed));
    assert!(
        sim.receiver
            .grant(Grant { generation: Generation(2), range: whole(), token_bytes: 0, runs: Vec::new() })
            .is_err()
    );
    assert!(sim.receiver.allocate_region(64).is_err());

    let mut reborn = sim.hub.transport("d");
    assert_ne!(reborn.peer_address(), sim.receiver.peer_address());
    let old = Claim { peer: sim.receiver.peer_address(), credential: Vec::new(), range: whole() };
    let channel = sim.sender.open(old).unwrap();
    sim.run();
    let refused = TransportEvent::Closed { channel, refusal: Some(Refusal::PeerLost) };
    assert_eq!(sim.sent.last(), Some(&refused));
    reborn.allocate_region(NUM_BYTES).unwrap();
    let new = Claim { peer: reborn.peer_address(), credential: Vec::new(), range: whole() };
    let channel = sim.sender.open(new).unwrap();
    sim.run();
    let refused = TransportEvent::Closed { channel, refusal: Some(Refusal::BadCredential) };
    assert_eq!(sim.sent.last(), Some(&refused), "reached, but nobody judges yet");
}

#[test]
fn hubs_do_not_reach_each_other() {
    let (a, b) = (LoopbackHub::new(), LoopbackHub::new());
    let (mut sender, receiver) = (a.transport("p"), b.transport("d"));
    let claim = Claim { peer: receiver.peer_address(), credential: Vec::new(), range: whole() };
    let error = sender.open(claim).unwrap_err();
    assert!(error.to_string().contains("another hub"), "{error}");
}
