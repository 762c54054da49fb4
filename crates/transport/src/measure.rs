//! How fast a transport is, beside `memcpy` in the same run: the two ends of a measurement, for programs that bring the processes.
//!
//! The sender moves one region again and again, one claim a round, in puts of one size; the time of a round is that from its first put to
//! [`TransportEvent::Finished`], when the receiver can read all of it. Before each round, as many bytes are copied in pieces of the same
//! size from the same memory to a place in the sender's own, by the processor alone.

#![allow(clippy::disallowed_types, reason = "real time is measured; there is no clock to pause")]

use std::sync::Arc;
use std::thread::Thread;
use std::time::{Duration, Instant};

use microserving_protocol::{Generation, KvMemory, KvRange};

use crate::{Admission, ByteRun, Claim, Grant, KvTransport, PeerAddress, PutRun, Refusal, TransportEvent};

/// Bytes of one round.
pub const ROUND_BYTES: usize = 64 << 20;
/// Bytes of the region that either side needs: what is sent, and for `memcpy` a place of the same kind.
pub const REGION_BYTES: usize = 2 * ROUND_BYTES;
/// Bytes of a put.
const PUT_BYTES: [usize; 2] = [64 << 10, 4 << 20];
const ROUNDS: usize = 30;
/// Rounds that are not counted: the first touches of a mapping cost page faults.
const WARM_UP: usize = 3;
const TOKEN_BYTES: usize = 4096;

/// Why there are no figures.
pub type Failure = Box<dyn std::error::Error>;

/// What rounds with puts of one size took, in gigabytes (10^9 bytes) a second.
#[derive(Clone, Debug)]
pub struct Figures {
    /// Bytes of a put.
    pub put_bytes: usize,
    /// From the first put to the end of the claim.
    pub put: Speeds,
    /// While the transport was writing; nothing if it does not say how long that was.
    pub busy: Option<Speeds>,
    /// The processor's own copy.
    pub memcpy: Speeds,
}

impl Figures {
    /// Returns the figures as an object of JSON, under a name for how the transport was set up.
    #[must_use]
    pub fn to_json(&self, transport: &str, mode: &str) -> String {
        let busy =
            |of: fn(Speeds) -> f64| self.busy.map_or_else(|| "null".to_owned(), |busy| of(busy).to_string());
        format!(
            "{{\"transport\":\"{transport}\",\"mode\":\"{mode}\",\"put_bytes\":{},\"round_bytes\":{ROUND_BYTES},\"rounds\":{ROUNDS},\
             \"put_gb_per_second\":{},\"put_gb_per_second_best\":{},\"busy_gb_per_second\":{},\"busy_gb_per_second_best\":{},\
             \"memcpy_gb_per_second\":{},\"memcpy_gb_per_second_best\":{},\"ratio\":{}}}",
            self.put_bytes,
            self.put.median,
            self.put.best,
            busy(|busy| busy.median),
            busy(|busy| busy.best),
            self.memcpy.median,
            self.memcpy.best,
            self.put.median / self.memcpy.median
        )
    }
}

/// Speeds over the rounds.
#[derive(Clone, Copy, Debug)]
pub struct Speeds {
    /// The one in the middle.
    pub median: f64,
    /// The highest.
    pub best: f64,
}

impl Speeds {
    fn of(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        let speed = |seconds: f64| ROUND_BYTES as f64 / seconds / 1e9;
        Self { median: speed(seconds[seconds.len() / 2]), best: speed(seconds[0]) }
    }
}

/// The credential is the generation itself: both processes are ours.
#[derive(Debug)]
struct Named;

impl Admission for Named {
    fn admit(&self, credential: &[u8]) -> Result<Generation, Refusal> {
        let number = credential.try_into().map_err(|_| Refusal::BadCredential)?;
        Ok(Generation(u64::from_le_bytes(number)))
    }
}

fn whole() -> KvRange {
    KvRange::new(0, (ROUND_BYTES / TOKEN_BYTES) as u32).unwrap_or_default()
}

fn generations() -> impl Iterator<Item = Generation> {
    (1..=(PUT_BYTES.len() * (ROUNDS + WARM_UP)) as u64).map(Generation)
}

/// Sleeps until a transport has news.
struct Ear(Thread);

impl Ear {
    fn of(transport: &mut dyn KvTransport) -> Self {
        let thread = std::thread::current();
        let waker = thread.clone();
        transport.set_waker(Arc::new(move || waker.unpark()));
        Self(thread)
    }

    fn listen(&self) {
        debug_assert_eq!(self.0.id(), std::thread::current().id(), "news wake the thread that listens");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// The receiver's end: grants round after round, and looks whether the bytes are those of the round.
///
/// # Errors
/// If a round does not come, `sender_lives` says so, or its bytes are another round's.
pub fn receive(
    transport: &mut dyn KvTransport,
    mut sender_lives: impl FnMut() -> Result<(), Failure>,
) -> Result<(), Failure> {
    let region = transport.allocate_region(REGION_BYTES)?;
    transport.set_admission(Arc::new(Named));
    let ear = Ear::of(transport);
    for generation in generations() {
        let runs = vec![ByteRun { offset: 0, num_bytes: ROUND_BYTES }];
        transport.grant(Grant { generation, range: whole(), token_bytes: TOKEN_BYTES, runs })?;
        let mut events = Vec::new();
        while !events.contains(&TransportEvent::Complete { generation }) {
            sender_lives()?;
            ear.listen();
            transport.poll(Duration::ZERO, &mut events);
        }
        let mut bytes = [0; 8];
        region.read(ROUND_BYTES / 2, &mut bytes);
        if u64::from_le_bytes(bytes) != generation.0 {
            return Err("the bytes are not those of this round".into());
        }
    }
    Ok(())
}

/// The sender's end. `memcpy` copies so many bytes in pieces of the given size, from the first half of a region to the second.
///
/// # Errors
/// If a claim is not served.
pub fn send(
    transport: &mut dyn KvTransport,
    peer: &PeerAddress,
    mut memcpy: impl FnMut(&dyn KvMemory, usize),
) -> Result<Vec<Figures>, Failure> {
    let region = transport.allocate_region(REGION_BYTES)?;
    let ear = Ear::of(transport);
    let mut generations = generations();
    let mut figures = Vec::new();
    for put_bytes in PUT_BYTES {
        let (mut puts, mut busy, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..ROUNDS + WARM_UP {
            let generation = generations.next().ok_or("as many generations as rounds")?;
            region.write(ROUND_BYTES / 2, &generation.0.to_le_bytes());
            let begin = Instant::now();
            memcpy(&*region, put_bytes);
            let copy = begin.elapsed().as_secs_f64();
            let (put, writing) = send_once(transport, &ear, peer, generation, put_bytes)?;
            if round >= WARM_UP {
                puts.push(put);
                busy.push(writing);
                copies.push(copy);
            }
        }
        let is_told = busy.iter().all(|seconds| *seconds > 0.0);
        let (put, busy, memcpy) = (Speeds::of(puts), is_told.then(|| Speeds::of(busy)), Speeds::of(copies));
        figures.push(Figures { put_bytes, put, busy, memcpy });
    }
    Ok(figures)
}

/// Sends a round under one claim; returns the seconds from the first put to `Finished`, and those of them that the transport was writing.
fn send_once(
    transport: &mut dyn KvTransport,
    ear: &Ear,
    peer: &PeerAddress,
    generation: Generation,
    put_bytes: usize,
) -> Result<(f64, f64), Failure> {
    let mut events = Vec::new();
    let channel = loop {
        let claim =
            Claim { peer: peer.clone(), credential: generation.0.to_le_bytes().to_vec(), range: whole() };
        let channel = transport.open(claim)?;
        let answer = loop {
            transport.poll(Duration::ZERO, &mut events);
            if let Some(answer) = events.pop() {
                break answer;
            }
            ear.listen();
        };
        match answer {
            TransportEvent::Opened { .. } => break channel,
            // The receiver has not granted this round yet.
            TransportEvent::Closed { refusal: Some(Refusal::Stale | Refusal::BadCredential), .. } => {}
            other => return Err(format!("the claim was not opened: {other:?}").into()),
        }
    };
    let begin = Instant::now();
    for offset in (0..ROUND_BYTES).step_by(put_bytes) {
        transport
            .put(channel, &[PutRun { local_offset: offset, remote_offset: offset, num_bytes: put_bytes }])?;
    }
    transport.finish(channel);
    loop {
        transport.poll(Duration::ZERO, &mut events);
        match events.pop() {
            Some(TransportEvent::Finished { busy, .. }) => {
                return Ok((begin.elapsed().as_secs_f64(), busy.as_secs_f64()));
            }
            Some(other) => return Err(format!("the claim was not finished: {other:?}").into()),
            None => ear.listen(),
        }
    }
}
