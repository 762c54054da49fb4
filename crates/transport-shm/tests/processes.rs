//! Real processes: what only the exit of a writer can prove, and bytes that cross a process border.
//!
//! The writers are this test binary again, started with the test `writer_process` alone and told what to do by a line on
//! their standard input.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may unwrap as the test itself does")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory, KvRange};
use microserving_transport::{
    Admission, ByteRun, Claim, Grant, KvTransport, PeerAddress, PutRun, Refusal, TransportEvent,
};
use microserving_transport_shm::{ShmConfig, ShmTransport};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

const ROLE: &str = "MICROSERVING_SHM_TEST_WRITER";
const G: Generation = Generation(1);
const TOKEN_BYTES: usize = 1024;
const NUM_TOKENS: u32 = 16 << 10;
const NUM_BYTES: usize = NUM_TOKENS as usize * TOKEN_BYTES;
const SECRET: &[u8] = b"signed by the receiver";

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
struct Signed;

impl Admission for Signed {
    fn admit(&self, credential: &[u8]) -> Result<Generation, Refusal> {
        if credential == SECRET { Ok(G) } else { Err(Refusal::BadCredential) }
    }
}

/// Not a test of its own: what a writer process runs.
///
/// It reads `<address in hex> <credential in hex> <bytes to put> <finish|hold|leave>`, puts so many bytes from the
/// start of the range, says `put` when the transport took them, and reports its events, one a line. `leave` drops the
/// transport and ends once the claim was opened; a killed writer may not even have come so far.
#[test]
fn writer_process() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let words: Vec<_> = line.split_whitespace().collect();
    let [address, credential, num_bytes, then] = words.as_slice() else { panic!("what is `{line}`?") };
    let num_bytes: usize = num_bytes.parse().unwrap();

    let mut transport = ShmTransport::new(ShmConfig::default()).unwrap();
    let region = transport.allocate_region(NUM_BYTES).unwrap();
    region.write(0, &(0..NUM_BYTES).map(source_byte).collect::<Vec<_>>());
    let peer = PeerAddress { transport: "shm".into(), bytes: from_hex(address) };
    let claim = Claim { peer, credential: from_hex(credential), range: whole() };
    let channel = transport.open(claim).unwrap();
    for offset in (0..num_bytes).step_by(64 << 10) {
        let num_bytes = (64 << 10).min(num_bytes - offset);
        transport.put(channel, &[PutRun { local_offset: offset, remote_offset: offset, num_bytes }]).unwrap();
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
        }
        pause();
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// A writer in a process of its own; killed when dropped.
struct Writer {
    child: Child,
    lines: BufReader<ChildStdout>,
    _input: ChildStdin,
}

impl Writer {
    fn start(peer: &PeerAddress, credential: &[u8], num_bytes: usize, then: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "writer_process", "--nocapture", "--test-threads=1"])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut input = child.stdin.take().unwrap();
        writeln!(input, "{} {} {num_bytes} {then}", to_hex(&peer.bytes), to_hex(credential)).unwrap();
        Self { child, lines, _input: input }
    }

    /// Reads on to a line that has `text` in it; fails if the writer ends before.
    fn wait_for(&mut self, text: &str) -> String {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if line.contains(text) {
                return line;
            }
            line.clear();
        }
        panic!("the writer ended without `{text}`");
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Stops the process and waits until every thread of it stands still.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let pid = Pid::from_raw(self.child.id().cast_signed());
        let (_, status) = waitpid(pid, WaitOptions::UNTRACED).unwrap().expect("waiting blocks");
        assert!(status.stopped(), "{status:?}");
    }

    /// Says whether the process is a corpse or gone: it can execute nothing any more.
    fn has_exited(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Receiver {
    transport: ShmTransport,
    memory: Arc<dyn KvMemory>,
    events: Vec<TransportEvent>,
}

impl Receiver {
    fn new(config: ShmConfig) -> Self {
        let mut transport = ShmTransport::new(config).unwrap();
        // A page more than is granted, on either side.
        let memory = transport.allocate_region(NUM_BYTES + 4096).unwrap();
        memory.write(0, &vec![0xa5; NUM_BYTES + 4096]);
        transport.set_admission(Arc::new(Signed));
        let runs = vec![ByteRun { offset: 0, num_bytes: NUM_BYTES }];
        transport.grant(Grant { generation: G, range: whole(), token_bytes: TOKEN_BYTES, runs }).unwrap();
        Self { transport, memory, events: Vec::new() }
    }

    fn start_writer(&self, num_bytes: usize, then: &str) -> Writer {
        Writer::start(&self.transport.peer_address(), SECRET, num_bytes, then)
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

    /// Polls for a good while and checks that nothing is released. (Half a second is no proof, but the release would come
    /// within a millisecond if the rule were broken.)
    fn stays_unreleased(&mut self) {
        for _ in 0..500 {
            self.transport.poll(Duration::ZERO, &mut self.events);
            assert!(!self.events.iter().any(|event| matches!(event, TransportEvent::Released { .. })));
            pause();
        }
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
        assert!(self.content(NUM_BYTES) == vec![0x5a; NUM_BYTES], "a write landed after the release");
    }
}

const RELEASED: TransportEvent = TransportEvent::Released { generation: G, fenced: true };

fn lost() -> TransportEvent {
    TransportEvent::Lost { generation: G, range: whole(), corrupt: false }
}

/// All that a writer had sent may wait in the socket when its exit is seen: it counts before the fence falls, and it is
/// fenced although nothing of it was read while it lived.
#[test]
fn the_last_words_of_a_dead_writer_count() {
    for _ in 0..20 {
        let mut receiver = Receiver::new(ShmConfig::default());
        let mut writer = receiver.start_writer(64 << 10, "hold");
        writer.wait_for("put");
        writer.signal(Signal::KILL);
        writer.child.wait().unwrap();
        for _ in 0..10 {
            pause();
        }
        receiver.transport.revoke(G);
        receiver.poll_until("the release", |receiver| {
            receiver.events.iter().any(|event| matches!(event, TransportEvent::Released { .. }))
        });
        receiver.reuse_and_check();
    }
}

#[test]
fn a_whole_transfer_crosses_the_process_border() {
    for checksum in [false, true] {
        let mut receiver = Receiver::new(ShmConfig::default().with_checksum(checksum));
        let mut writer = receiver.start_writer(NUM_BYTES, "finish");
        receiver.wait_for(&TransportEvent::Complete { generation: G });
        assert_eq!(receiver.transport.arrived_bytes(G), NUM_BYTES as u64);
        let expected: Vec<u8> = (0..NUM_BYTES).map(source_byte).collect();
        let content = receiver.content(NUM_BYTES + 4096);
        assert!(content[..NUM_BYTES] == expected, "the bytes are not the sender's (checksum: {checksum})");
        assert!(content[NUM_BYTES..].iter().all(|byte| *byte == 0xa5), "written beside the grant");
        let finished = writer.wait_for("Finished");
        assert!(finished.contains(&format!("num_bytes: {NUM_BYTES}")), "{finished}");
    }
}

#[test]
fn a_killed_writer_is_released_only_after_its_exit() {
    for num_bytes in [NUM_BYTES / 2, NUM_BYTES] {
        let mut receiver = Receiver::new(ShmConfig::default());
        let mut writer = receiver.start_writer(num_bytes, "hold");
        // In the midst of writing, or with half of it written and the rest never coming.
        receiver.wait_for_bytes(if num_bytes == NUM_BYTES { 1 } else { num_bytes });
        writer.signal(Signal::KILL);
        receiver.wait_for(&lost());
        receiver.transport.revoke(G);
        receiver.poll_until("the release", |receiver| {
            let released = receiver.events.contains(&RELEASED);
            assert!(!released || writer.has_exited(), "released under a living writer");
            released
        });
        assert_eq!(receiver.events, [lost(), RELEASED]);
        assert_eq!(receiver.transport.telemetry().fences, 1);
        receiver.reuse_and_check();
    }
}

#[test]
fn a_stopped_writer_holds_its_pages_until_it_is_killed() {
    let mut receiver = Receiver::new(ShmConfig::default());
    let mut writer = receiver.start_writer(NUM_BYTES, "hold");
    receiver.wait_for_bytes(1);
    writer.stop();
    receiver.transport.revoke(G);
    receiver.stays_unreleased();
    assert!(!writer.has_exited());
    writer.signal(Signal::KILL);
    receiver.poll_until("the release", |receiver| {
        let released = receiver.events.contains(&RELEASED);
        assert!(!released || writer.has_exited(), "released under a living writer");
        released
    });
    receiver.reuse_and_check();
}

#[test]
fn a_writer_that_goes_on_drains_and_needs_no_fence() {
    let mut receiver = Receiver::new(ShmConfig::default());
    let mut writer = receiver.start_writer(NUM_BYTES / 2, "hold");
    receiver.wait_for_bytes(1);
    writer.stop();
    receiver.transport.revoke(G);
    receiver.stays_unreleased();
    writer.signal(Signal::CONT);
    let drained = TransportEvent::Released { generation: G, fenced: false };
    receiver.wait_for(&drained);
    assert_eq!(receiver.events, [drained], "no loss is reported of what was given up on purpose");
    receiver.reuse_and_check();
    assert!(writer.wait_for("Closed").contains("Revoked"));
    assert_eq!(receiver.transport.telemetry().fences, 0);
}

#[test]
fn a_forged_credential_writes_nothing() {
    let mut receiver = Receiver::new(ShmConfig::default());
    let peer = receiver.transport.peer_address();
    let mut forger = Writer::start(&peer, b"signed by somebody else", NUM_BYTES, "finish");
    assert!(forger.wait_for("Closed").contains("BadCredential"));
    receiver.transport.poll(Duration::ZERO, &mut receiver.events);
    assert!(receiver.events.is_empty(), "{:?}", receiver.events);
    assert!(receiver.content(NUM_BYTES) == vec![0xa5; NUM_BYTES], "the forger wrote");
    assert_eq!(receiver.transport.telemetry().claims_refused, 1);
    // The grant still serves the one it was made for.
    let _writer = receiver.start_writer(NUM_BYTES, "finish");
    receiver.wait_for(&TransportEvent::Complete { generation: G });
}

#[test]
fn a_writer_that_leaves_in_order_is_not_fenced() {
    let mut receiver = Receiver::new(ShmConfig::default());
    let mut writer = receiver.start_writer(NUM_BYTES / 2, "leave");
    receiver.wait_for(&lost());
    receiver.transport.revoke(G);
    receiver.wait_for(&TransportEvent::Released { generation: G, fenced: false });
    writer.child.wait().unwrap();
}

#[test]
fn a_receiver_that_is_gone_is_noticed() {
    let receiver = Receiver::new(ShmConfig::default());
    let mut writer = receiver.start_writer(NUM_BYTES / 2, "hold");
    writer.wait_for("Opened");
    drop(receiver);
    assert!(writer.wait_for("Closed").contains("PeerLost"));
}
