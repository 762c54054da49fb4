//! Measures how fast KV goes from one process into another's pages, beside `memcpy` in the same run.
//!
//! ```text
//! cargo run --release -p microserving-transport-shm --example bandwidth
//! ```
//!
//! Two processes: this one receives, and starts itself again as the sender. The sender moves the same region again and
//! again, one claim a round, in puts of one size; the time of a round is that from its first put to `Finished`, when the
//! receiver can read all of it; `busy` is the writer thread's own time of it. Before each round, `memcpy` copies as many
//! bytes in pieces of the same size within the sender, between memory of the same kind. Prints a table, then a line of
//! JSON, with checksums off and on.

#![allow(clippy::print_stdout, reason = "this is a program, and what it prints is its result")]

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory, KvRange};
use microserving_transport::{
    Admission, ByteRun, Claim, Grant, KvTransport, PeerAddress, PutRun, Refusal, TransportEvent,
};
use microserving_transport_shm::{ShmConfig, ShmTransport};
use rustix::time::{ClockId, clock_gettime};

const SENDER: &str = "MICROSERVING_BANDWIDTH_SENDER";
const REGION_BYTES: usize = 64 << 20;
const PUT_BYTES: [usize; 2] = [64 << 10, 4 << 20];
const ROUNDS: usize = 30;
/// Rounds that are not counted: the first touches of a mapping cost page faults.
const WARM_UP: usize = 3;
const TOKEN_BYTES: usize = 4096;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    if std::env::var_os(SENDER).is_some() { send() } else { receive() }
}

fn now() -> f64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// The credential is the generation itself: both processes are ours.
#[derive(Debug)]
struct Named;

impl Admission for Named {
    fn admit(&self, credential: &[u8]) -> std::result::Result<Generation, Refusal> {
        let number = credential.try_into().map_err(|_| Refusal::BadCredential)?;
        Ok(Generation(u64::from_le_bytes(number)))
    }
}

fn whole() -> KvRange {
    KvRange::new(0, (REGION_BYTES / TOKEN_BYTES) as u32).expect("a range from 0")
}

fn receive() -> Result<()> {
    for (label, config) in
        [("plain", ShmConfig::default()), ("checksum", ShmConfig::default().with_checksum(true))]
    {
        let mut transport = ShmTransport::new(config)?;
        let region = transport.allocate_region(REGION_BYTES)?;
        transport.set_admission(Arc::new(Named));
        let mut child = Command::new(std::env::current_exe()?)
            .env(SENDER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut input = child.stdin.take().ok_or("the sender has no input")?;
        let mut output = BufReader::new(child.stdout.take().ok_or("the sender has no output")?).lines();
        let address: Vec<String> = transport.peer_address().bytes.iter().map(u8::to_string).collect();
        writeln!(input, "{} {label}", address.join(","))?;

        let mut events = Vec::new();
        for generation in (1..=(PUT_BYTES.len() * (ROUNDS + WARM_UP)) as u64).map(Generation) {
            let runs = vec![ByteRun { offset: 0, num_bytes: REGION_BYTES }];
            transport.grant(Grant { generation, range: whole(), token_bytes: TOKEN_BYTES, runs })?;
            writeln!(input, "{generation}")?;
            while !events.contains(&TransportEvent::Complete { generation }) {
                if let Some(status) = child.try_wait()? {
                    return Err(format!("the sender ended early: {status}").into());
                }
                std::thread::sleep(Duration::from_micros(200));
                transport.poll(Duration::ZERO, &mut events);
            }
            let mut bytes = [0; 8];
            region.read(REGION_BYTES / 2, &mut bytes);
            if u64::from_le_bytes(bytes) != generation.0 {
                return Err("the bytes are not those of this round".into());
            }
        }
        for line in output.by_ref() {
            println!("{}", line?);
        }
        let status = child.wait()?;
        if !status.success() {
            return Err(format!("the sender failed: {status}").into());
        }
    }
    Ok(())
}

fn send() -> Result<()> {
    let mut lines = std::io::stdin().lines();
    let first = lines.next().ok_or("no address")??;
    let (address, label) = first.split_once(' ').ok_or("no label")?;
    let bytes = address.split(',').map(str::parse).collect::<std::result::Result<Vec<u8>, _>>()?;
    let peer = PeerAddress { transport: "shm".into(), bytes };

    let mut transport = ShmTransport::new(ShmConfig::default())?;
    let region = transport.allocate_region(REGION_BYTES)?;
    // What `memcpy` copies between; another transport only lends its kind of memory.
    let mut lender = ShmTransport::new(ShmConfig::default())?;
    let scratch = lender.allocate_region(REGION_BYTES)?;
    let mut json = Vec::new();
    for put_bytes in PUT_BYTES {
        let (mut puts, mut busy, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..ROUNDS + WARM_UP {
            let generation: u64 = lines.next().ok_or("no generation")??.parse()?;
            region.write(REGION_BYTES / 2, &generation.to_le_bytes());
            let copy = memcpy(&*region, &*scratch, put_bytes);
            let (put, writing) = send_once(&mut transport, &peer, generation, put_bytes)?;
            if round >= WARM_UP {
                puts.push(put);
                busy.push(writing);
                copies.push(copy);
            }
        }
        let (put, busy, copy) = (Speeds::of(puts), Speeds::of(busy), Speeds::of(copies));
        println!(
            "{label:>8}  puts of {:>4} KiB: {put}   busy: {busy}   memcpy: {copy}   ratio {:.2}",
            put_bytes >> 10,
            put.median / copy.median
        );
        json.push(serde_json::json!({
            "mode": label,
            "put_bytes": put_bytes,
            "round_bytes": REGION_BYTES,
            "rounds": ROUNDS,
            "put_gb_per_second": put.median,
            "put_gb_per_second_best": put.best,
            "busy_gb_per_second": busy.median,
            "busy_gb_per_second_best": busy.best,
            "memcpy_gb_per_second": copy.median,
            "memcpy_gb_per_second_best": copy.best,
        }));
    }
    println!("{}", serde_json::Value::from(json));
    Ok(())
}

/// Sends the whole region under one claim; returns the seconds from the first put to `Finished`, and those of them that
/// the writer thread was copying.
fn send_once(
    transport: &mut ShmTransport,
    peer: &PeerAddress,
    generation: u64,
    put_bytes: usize,
) -> Result<(f64, f64)> {
    let claim = Claim { peer: peer.clone(), credential: generation.to_le_bytes().to_vec(), range: whole() };
    let channel = transport.open(claim)?;
    wait_for(transport, |event| matches!(event, TransportEvent::Opened { channel: c } if *c == channel))?;
    let begin = now();
    for offset in (0..REGION_BYTES).step_by(put_bytes) {
        transport
            .put(channel, &[PutRun { local_offset: offset, remote_offset: offset, num_bytes: put_bytes }])?;
    }
    transport.finish(channel);
    let is_end = |event: &TransportEvent| matches!(event, TransportEvent::Finished { channel: c, .. } if *c == channel);
    let finished = wait_for(transport, is_end)?;
    let seconds = now() - begin;
    match finished {
        TransportEvent::Finished { busy, .. } => Ok((seconds, busy.as_secs_f64())),
        other => Err(format!("not the end of a claim: {other:?}").into()),
    }
}

fn wait_for(
    transport: &mut ShmTransport,
    wanted: impl Fn(&TransportEvent) -> bool,
) -> Result<TransportEvent> {
    let mut events = Vec::new();
    loop {
        transport.poll(Duration::ZERO, &mut events);
        for event in events.drain(..) {
            if wanted(&event) {
                return Ok(event);
            }
            if let TransportEvent::Closed { refusal, .. } = event {
                return Err(format!("the claim ended: {refusal:?}").into());
            }
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Copies as many bytes as a round between two regions of this process, and returns the seconds.
fn memcpy(source: &dyn KvMemory, target: &dyn KvMemory, piece: usize) -> f64 {
    assert!(
        source.num_bytes() >= REGION_BYTES && target.num_bytes() >= REGION_BYTES,
        "the regions of this program"
    );
    let begin = now();
    for offset in (0..REGION_BYTES).step_by(piece) {
        let from = std::ptr::with_exposed_provenance::<u8>(source.base_address() + offset);
        let to = std::ptr::with_exposed_provenance_mut::<u8>(target.base_address() + offset);
        // SAFETY: both regions are host memory of at least `REGION_BYTES`, which `piece` divides; they are distinct, live
        // through the call, and nobody writes to either meanwhile: no claim is open, and no grant was ever made on them.
        unsafe { std::ptr::copy_nonoverlapping(from, to, piece) };
    }
    now() - begin
}

/// Gigabytes (10^9 bytes) a second over the rounds.
struct Speeds {
    median: f64,
    best: f64,
}

impl Speeds {
    fn of(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        let speed = |seconds: f64| REGION_BYTES as f64 / seconds / 1e9;
        Self { median: speed(seconds[seconds.len() / 2]), best: speed(seconds[0]) }
    }
}

impl std::fmt::Display for Speeds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:5.1} GB/s (best {:5.1})", self.median, self.best)
    }
}
