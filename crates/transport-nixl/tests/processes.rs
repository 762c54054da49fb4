//! Real processes: writers that die, stand still or leave while they are read from, and one that frees its pages too early.
//!
//! The writers are this test binary again, started with the test `writer_process` alone and told what to do by a line on their standard
//! input.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may unwrap as the test itself does")]
#![allow(clippy::print_stdout, reason = "writers say on their output what they saw")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::{config, library, transport};
use microserving_protocol::{Generation, KvMemory, KvRange};
use microserving_transport::{
    Admission, ByteRun, Claim, Grant, KvTransport, PeerAddress, PutRun, Refusal, TransportEvent,
};
use microserving_transport_nixl::NixlTransport;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

const ROLE: &str = "MICROSERVING_NIXL_TEST_WRITER";
const G: Generation = Generation(1);
const TOKEN_BYTES: usize = 4096;
const NUM_TOKENS: u32 = 4 << 10;
const NUM_BYTES: usize = NUM_TOKENS as usize * TOKEN_BYTES;
/// Bytes read at a time: little, so that signals find a transfer under way.
const SLICE: usize = 64 << 10;

/// Polls before a test gives up: 30 seconds at least.
const MAX_POLLS: u32 = 30_000;

fn pause() {
    std::thread::sleep(Duration::from_millis(1));
}

fn whole() -> KvRange {
    KvRange::new(0, NUM_TOKENS).expect("ordered")
}

fn source_byte(offset: usize) -> u8 {
    ((offset as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as u8
}

#[derive(Debug)]
struct Numbered;

impl Admission for Numbered {
    fn admit(&self, credential: &[u8]) -> Result<Generation, Refusal> {
        let number = credential.try_into().map_err(|_| Refusal::BadCredential)?;
        Ok(Generation(u64::from_le_bytes(number)))
    }
}

/// Not a test of its own: what a writer process runs.
///
/// It reads `<address in hex> <bytes to put> <finish|hold|leave>`, puts so many bytes from the start of the range, says `put` when the
/// transport took them, and reports its events, one a line. `leave` drops the transport and ends once the claim was opened.
#[test]
fn writer_process() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let words: Vec<_> = line.split_whitespace().collect();
    let [address, num_bytes, then] = words.as_slice() else { panic!("what is `{line}`?") };
    let num_bytes: usize = num_bytes.parse().unwrap();

    let mut config = config(false).with_silence(SILENCE);
    config.slice_bytes = SLICE;
    let mut transport = NixlTransport::new(config).unwrap();
    let region = transport.allocate_region(NUM_BYTES).unwrap();
    region.write(0, &(0..NUM_BYTES).map(source_byte).collect::<Vec<_>>());
    let bytes = (0..address.len()).step_by(2).map(|at| u8::from_str_radix(&address[at..at + 2], 16).unwrap());
    let peer = PeerAddress { transport: "nixl".into(), bytes: bytes.collect() };
    let claim = Claim { peer, credential: G.0.to_le_bytes().to_vec(), range: whole() };
    let channel = transport.open(claim).unwrap();
    for offset in (0..num_bytes).step_by(64 << 10) {
        transport
            .put(channel, &[PutRun { local_offset: offset, remote_offset: offset, num_bytes: 64 << 10 }])
            .unwrap();
    }
    if *then == "finish" {
        transport.finish(channel);
    }
    println!("put");
    let mut events = Vec::new();
    loop {
        transport.poll(Duration::ZERO, &mut events);
        for event in events.drain(..) {
            println!("{event:?}");
            if *then == "leave" && matches!(event, TransportEvent::Opened { .. }) {
                return;
            }
            // Its pages are free now, and are used.
            if matches!(event, TransportEvent::Closed { .. }) {
                region.write(0, &vec![0xee; NUM_BYTES]);
                println!("freed");
            }
        }
        pause();
    }
}

/// A writer in a process of its own; killed when dropped.
struct Writer {
    child: Child,
    lines: BufReader<ChildStdout>,
    _input: ChildStdin,
}

impl Writer {
    fn start(peer: &PeerAddress, num_bytes: usize, then: &str, tls: Option<&str>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "writer_process", "--nocapture", "--test-threads=1"]).env(ROLE, "1");
        command.envs(tls.map(|tls| ("UCX_TLS", tls)));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut input = child.stdin.take().unwrap();
        let address: String = peer.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(input, "{address} {num_bytes} {then}").unwrap();
        Self { child, lines, _input: input }
    }

    /// Reads on to a line that has `text` in it; fails if the writer ends before.
    fn wait_for(&mut self, text: &str) -> String {
        self.find(text).unwrap_or_else(|| panic!("the writer ended without `{text}`"))
    }

    /// Reads on to a line that has `text` in it, or to the writer's end.
    fn find(&mut self, text: &str) -> Option<String> {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if line.contains(text) {
                return Some(line);
            }
            line.clear();
        }
        None
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id().cast_signed()).unwrap(), signal).unwrap();
    }

    /// Stops the process and waits until every thread of it stands still.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let pid = Pid::from_raw(self.child.id().cast_signed());
        let (_, status) = waitpid(pid, WaitOptions::UNTRACED).unwrap().expect("waiting blocks");
        assert!(status.stopped(), "{status:?}");
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Shorter than a test's patience, longer than any pause of a machine that is busy.
const SILENCE: Duration = Duration::from_secs(3);

struct Receiver {
    transport: NixlTransport,
    memory: Arc<dyn KvMemory>,
    events: Vec<TransportEvent>,
}

impl Receiver {
    fn new() -> Self {
        let mut transport = NixlTransport::new(config(false).with_silence(SILENCE)).unwrap();
        // A page more than is granted, on either side.
        let memory = transport.allocate_region(NUM_BYTES + 4096).unwrap();
        memory.write(0, &vec![0xa5; NUM_BYTES + 4096]);
        transport.set_admission(Arc::new(Numbered));
        let mut receiver = Self { transport, memory, events: Vec::new() };
        receiver.grant(G);
        receiver
    }

    fn grant(&mut self, generation: Generation) {
        let runs = vec![ByteRun { offset: 0, num_bytes: NUM_BYTES }];
        let grant = Grant { generation, range: whole(), token_bytes: TOKEN_BYTES, runs };
        self.transport.grant(grant).unwrap();
    }

    fn start_writer(&self, num_bytes: usize, then: &str) -> Writer {
        Writer::start(&self.transport.peer_address(), num_bytes, then, None)
    }

    fn poll_until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        for _ in 0..MAX_POLLS {
            self.transport.poll(Duration::ZERO, &mut self.events);
            if done(self) {
                return;
            }
            pause();
        }
        panic!("{what}: did not happen, but {:?}", self.events);
    }

    fn wait_for(&mut self, event: &TransportEvent) {
        self.poll_until(&format!("{event:?}"), |receiver| receiver.events.contains(event));
    }

    fn wait_for_bytes(&mut self, num_bytes: usize) {
        self.poll_until("bytes arrive", |receiver| receiver.transport.arrived_bytes(G) >= num_bytes as u64);
    }

    fn content(&self, num_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0; num_bytes];
        self.memory.read(0, &mut bytes);
        bytes
    }

    /// The pages serve something else now: nobody else writes to them.
    fn reuse_and_check(&self) {
        self.memory.write(0, &vec![0x5a; NUM_BYTES]);
        for _ in 0..50 {
            pause();
        }
        assert!(self.content(NUM_BYTES) == vec![0x5a; NUM_BYTES], "something landed after the release");
    }

    /// After whatever happened, another writer is served.
    fn serves_another(&mut self) {
        self.events.clear();
        let mut sender = transport(false);
        let region = sender.allocate_region(NUM_BYTES).unwrap();
        region.write(0, &vec![0x77; NUM_BYTES]);
        let generation = Generation(2);
        self.grant(generation);
        let peer = self.transport.peer_address();
        let claim = Claim { peer, credential: generation.0.to_le_bytes().to_vec(), range: whole() };
        let channel = sender.open(claim).unwrap();
        sender.put(channel, &[PutRun { local_offset: 0, remote_offset: 0, num_bytes: NUM_BYTES }]).unwrap();
        sender.finish(channel);
        self.wait_for(&TransportEvent::Complete { generation });
        assert!(self.content(NUM_BYTES) == vec![0x77; NUM_BYTES]);
    }
}

fn released(fenced: bool) -> TransportEvent {
    TransportEvent::Released { generation: G, fenced }
}

fn lost() -> TransportEvent {
    TransportEvent::Lost { generation: G, range: whole(), corrupt: false }
}

#[test]
fn a_whole_transfer_crosses_the_process_border() {
    if library().is_none() {
        return;
    }
    let mut receiver = Receiver::new();
    let mut writer = receiver.start_writer(NUM_BYTES, "finish");
    receiver.wait_for(&TransportEvent::Complete { generation: G });
    assert_eq!(receiver.transport.arrived_bytes(G), NUM_BYTES as u64);
    let content = receiver.content(NUM_BYTES + 4096);
    let expected: Vec<u8> = (0..NUM_BYTES).map(source_byte).collect();
    assert!(content[..NUM_BYTES] == expected, "the bytes are not the sender's");
    assert!(content[NUM_BYTES..].iter().all(|byte| *byte == 0xa5), "written beside the grant");
    let finished = writer.wait_for("Finished");
    assert!(finished.contains(&format!("num_bytes: {NUM_BYTES}")), "{finished}");
}

/// Killed in the midst of being read, or with half of it read and the rest never coming.
#[test]
fn a_killed_writer_is_lost_and_fenced() {
    if library().is_none() {
        return;
    }
    for num_bytes in [NUM_BYTES / 2, NUM_BYTES] {
        let mut receiver = Receiver::new();
        let writer = receiver.start_writer(num_bytes, "hold");
        receiver.wait_for_bytes(if num_bytes == NUM_BYTES { 1 } else { num_bytes });
        writer.signal(Signal::KILL);
        receiver.wait_for(&lost());
        receiver.transport.revoke(G);
        receiver.wait_for(&released(true));
        assert_eq!(receiver.events, [lost(), released(true)]);
        assert_eq!(receiver.transport.telemetry().fences, 1);
        receiver.reuse_and_check();
        receiver.serves_another();
    }
}

/// What a stopped writer does is of no consequence: its grant is released without it.
#[test]
fn a_stopped_writer_holds_nothing() {
    if library().is_none() {
        return;
    }
    let mut receiver = Receiver::new();
    let mut writer = receiver.start_writer(NUM_BYTES, "hold");
    receiver.wait_for_bytes(1);
    writer.stop();
    let arrived = receiver.transport.arrived_bytes(G);
    assert!(arrived < NUM_BYTES as u64, "it was stopped too late to show anything");
    receiver.transport.revoke(G);
    receiver.poll_until("the release", |receiver| !receiver.events.is_empty());
    assert!(matches!(receiver.events[..], [TransportEvent::Released { generation: G, .. }]));
    receiver.reuse_and_check();
    writer.signal(Signal::CONT);
    assert!(writer.wait_for("Closed").contains("refusal: Some("));
    writer.wait_for("freed");
    receiver.reuse_and_check();
    receiver.serves_another();
}

/// Where bytes move only by the writer's doing, reads from one that stands still do not end. When it has been silent for long enough, the
/// agent that reads is destroyed under them.
#[test]
fn reads_that_do_not_end_are_fenced() {
    if library().is_none() {
        return;
    }
    let mut receiver = Receiver::new();
    let mut writer = Writer::start(&receiver.transport.peer_address(), NUM_BYTES, "finish", Some("tcp"));
    receiver.wait_for_bytes(1);
    writer.stop();
    assert!(receiver.transport.arrived_bytes(G) < NUM_BYTES as u64, "it was stopped too late");
    receiver.transport.revoke(G);
    receiver.poll_until("the release", |receiver| !receiver.events.is_empty());
    assert!(matches!(receiver.events[..], [TransportEvent::Released { generation: G, .. }]));
    receiver.reuse_and_check();
    // It wakes up, finds itself given up, and uses its pages otherwise; or UCX, which has to answer reads over tcp itself, ends it.
    writer.signal(Signal::CONT);
    if writer.find("freed").is_none() {
        assert!(!writer.child.wait().unwrap().success(), "it left without a word");
    }
    receiver.reuse_and_check();
    receiver.serves_another();
}

#[test]
fn a_silent_writer_is_given_up() {
    if library().is_none() {
        return;
    }
    let mut receiver = Receiver::new();
    let mut writer = receiver.start_writer(NUM_BYTES / 2, "hold");
    receiver.wait_for_bytes(NUM_BYTES / 2);
    writer.stop();
    receiver.wait_for(&lost());
    receiver.transport.revoke(G);
    receiver.wait_for(&released(true));
    writer.signal(Signal::CONT);
    assert!(writer.wait_for("Closed").contains("PeerLost"));
}

#[test]
fn a_writer_that_leaves_in_order_is_not_fenced() {
    if library().is_none() {
        return;
    }
    let mut receiver = Receiver::new();
    let mut writer = receiver.start_writer(NUM_BYTES / 2, "leave");
    receiver.wait_for(&lost());
    receiver.transport.revoke(G);
    receiver.wait_for(&released(false));
    writer.child.wait().unwrap();
}

#[test]
fn a_receiver_that_is_gone_is_noticed() {
    if library().is_none() {
        return;
    }
    let receiver = Receiver::new();
    let mut writer = receiver.start_writer(NUM_BYTES / 2, "hold");
    writer.wait_for("Opened");
    drop(receiver);
    assert!(writer.wait_for("Closed").contains("PeerLost"));
}
