//! The thread that transfers, and the one that hears what is to be transferred.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory};
use microserving_transport::{Admission, ChannelId, KvTransport, Refusal, TransportError, TransportEvent};
use tokio::time::Instant;

use super::computing::left;
use super::{Ended, Region, WorldEnd};
use crate::WorkerError;
use crate::transfers::{ADMIT, ADMITTED, Answer, ENDS, News, Request, take_admitted};
use crate::wire::{Frames, Out};

/// How often a transport is looked at that has something under way: arrived bytes wake nobody.
const BUSY_LOOK: Duration = Duration::from_millis(5);
/// And one that has nothing, so that a missed wake-up costs time and not a hang.
const IDLE_LOOK: Duration = Duration::from_millis(250);

/// What the transferring thread is told.
#[derive(Debug)]
pub(super) enum Note {
    Asked(Request),
    /// The transport has news.
    Woken,
    /// The front has left.
    Over,
}

/// Who waits to hear whether a credential lets its bearer in.
pub(super) type Waiting = Mutex<BTreeMap<u64, SyncSender<Result<Generation, Refusal>>>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hears the front until it leaves.
pub(super) fn hear(
    mut frames: Frames,
    requests: &Sender<Note>,
    waiting: &Waiting,
) -> Result<Ended, WorkerError> {
    let mut hear_one = || -> io::Result<()> {
        let (kind, mut body) = frames.next()?;
        if kind == ADMITTED {
            let (number, verdict) = take_admitted(&mut body)?;
            if let Some(waiter) = lock(waiting).remove(&number) {
                let _ = waiter.send(verdict);
            }
            return Ok(());
        }
        let request = Request::read(kind, &mut body)?;
        let _ = requests.send(Note::Asked(request));
        Ok(())
    };
    let error = loop {
        if let Err(error) = hear_one() {
            break error;
        }
    };
    // Nobody answers any more: whoever waits is told no by the end of its channel.
    lock(waiting).clear();
    let _ = requests.send(Note::Over);
    left(error)
}

/// Has the front judge credentials.
#[derive(Debug)]
struct AskFront {
    writer: Arc<Mutex<UnixStream>>,
    waiting: Arc<Waiting>,
    next: AtomicU64,
}

impl Admission for AskFront {
    fn admit(&self, credential: &[u8]) -> Result<Generation, Refusal> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (verdict, heard) = sync_channel(1);
        lock(&self.waiting).insert(number, verdict);
        let mut out = Out::new(ADMIT);
        out.u64(number).bytes(credential);
        if out.send(&mut *lock(&self.writer)).is_err() {
            lock(&self.waiting).remove(&number);
        }
        // Without a front there is nothing that could be admitted to.
        heard.recv().unwrap_or(Err(Refusal::Stale))
    }
}

/// The transport, and what is to be told of it.
pub(super) struct Desk {
    transport: Box<dyn KvTransport>,
    writer: Arc<Mutex<UnixStream>>,
    region: Region,
    world_end: Option<WorldEnd>,
    woken: Arc<AtomicBool>,
    origin: Instant,
    /// How much had arrived under each open grant when it was told last.
    grants: BTreeMap<Generation, u64>,
    /// Channels whose end was not told yet.
    num_channels: usize,
    events: Vec<TransportEvent>,
}

impl Desk {
    pub(super) fn new(
        mut transport: Box<dyn KvTransport>,
        writer: UnixStream,
        notes: Sender<Note>,
        waiting: Arc<Waiting>,
        region: Region,
        world_end: Option<WorldEnd>,
    ) -> Self {
        let writer = Arc::new(Mutex::new(writer));
        let admission = AskFront { writer: Arc::clone(&writer), waiting, next: AtomicU64::new(0) };
        transport.set_admission(Arc::new(admission));
        let woken = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&woken);
        transport.set_waker(Arc::new(move || {
            // One note is enough until it is read.
            if !flag.swap(true, Ordering::AcqRel) {
                let _ = notes.send(Note::Woken);
            }
        }));
        Self {
            transport,
            writer,
            region,
            world_end,
            woken,
            origin: Instant::now(),
            grants: BTreeMap::new(),
            num_channels: 0,
            events: Vec::new(),
        }
    }

    /// Transfers until the front leaves or the world ends; hands the transport back, which may be dropped only when nobody computes in
    /// its region any more.
    pub(super) fn run(
        mut self,
        notes: &Receiver<Note>,
    ) -> (Box<dyn KvTransport>, Result<Ended, WorkerError>) {
        let why = self.work(notes).unwrap_or_else(left);
        (self.transport, why)
    }

    fn work(&mut self, notes: &Receiver<Note>) -> io::Result<Result<Ended, WorkerError>> {
        loop {
            let is_busy = self.num_channels > 0 || !self.grants.is_empty();
            let mut next = notes.recv_timeout(if is_busy { BUSY_LOOK } else { IDLE_LOOK });
            loop {
                match next {
                    Ok(Note::Asked(request)) => self.take(request)?,
                    Ok(Note::Woken) => self.woken.store(false, Ordering::Release),
                    Ok(Note::Over) | Err(RecvTimeoutError::Disconnected) => return Ok(Ok(Ended::FrontLeft)),
                    Err(RecvTimeoutError::Timeout) => break,
                }
                next = notes.try_recv().map_err(|_| RecvTimeoutError::Timeout);
            }
            self.tell_news()?;
            if let Some(reason) = self.world_end.as_ref().and_then(|ended| ended()) {
                let mut out = Out::new(ENDS);
                out.text(&format!("the world is lost: {reason}"));
                self.send(out)?;
                return Ok(Ok(Ended::WorldLost(reason)));
            }
        }
    }

    fn send(&self, out: Out) -> io::Result<()> {
        out.send(&mut *lock(&self.writer)).map(drop)
    }

    fn take(&mut self, request: Request) -> io::Result<()> {
        let answer = match request {
            Request::Put { channel, runs } => {
                self.put(channel, &runs);
                return Ok(());
            }
            Request::Finish(channel) => {
                self.transport.finish(channel);
                return Ok(());
            }
            Request::Cancel(channel) => {
                self.transport.cancel(channel);
                return Ok(());
            }
            Request::Revoke(generation) => {
                self.transport.revoke(generation);
                return Ok(());
            }
            Request::Allocate { num_bytes } => match self.transport.allocate_region(num_bytes) {
                Ok(memory) => {
                    // A second region was refused.
                    let _ = self.region.set(memory);
                    Answer::Allocated { address: self.transport.peer_address() }
                }
                Err(error) => Answer::Error(error),
            },
            Request::Grant(grant) => {
                let generation = grant.generation;
                match self.transport.grant(grant) {
                    Ok(()) => {
                        self.grants.insert(generation, 0);
                        Answer::Granted
                    }
                    Err(error) => Answer::Error(error),
                }
            }
            Request::Open(claim) => match self.transport.open(claim) {
                Ok(channel) => {
                    self.num_channels += 1;
                    Answer::Opened(channel)
                }
                Err(error) => Answer::Error(error),
            },
            Request::Telemetry => Answer::Telemetry(self.transport.telemetry()),
            Request::RankOf(peer) => Answer::Rank(self.transport.rank_of(&peer)),
            Request::Read { offset, num_bytes } => match self.part(offset, num_bytes) {
                Ok(memory) => {
                    let mut bytes = vec![0; num_bytes];
                    memory.read(offset, &mut bytes);
                    Answer::Bytes(bytes)
                }
                Err(error) => Answer::Error(error),
            },
            Request::Write { offset, bytes } => match self.part(offset, bytes.len()) {
                Ok(memory) => {
                    memory.write(offset, &bytes);
                    Answer::Written
                }
                Err(error) => Answer::Error(error),
            },
        };
        self.send(answer.frame())
    }

    /// The front has checked the call, so what fails here is the transport's: the claim is given up.
    fn put(&mut self, channel: ChannelId, runs: &[microserving_transport::PutRun]) {
        if let Err(error) = self.transport.put(channel, runs) {
            tracing::error!(%error, channel = channel.0, "a put failed; its claim is given up");
            self.transport.cancel(channel);
        }
    }

    /// Returns the region, if it has such a part.
    fn part(&self, offset: usize, num_bytes: usize) -> Result<Arc<dyn KvMemory>, TransportError> {
        let region = self
            .region
            .get()
            .filter(|memory| offset.checked_add(num_bytes).is_some_and(|end| end <= memory.num_bytes()));
        region.cloned().ok_or_else(|| TransportError::Misuse {
            transport: self.transport.name(),
            reason: "the region has no such part".into(),
        })
    }

    fn tell_news(&mut self) -> io::Result<()> {
        self.transport.poll(self.origin.elapsed(), &mut self.events);
        let events = std::mem::take(&mut self.events);
        let mut arrived = Vec::new();
        for event in &events {
            match event {
                TransportEvent::Complete { generation } => {
                    let now = self.transport.arrived_bytes(*generation);
                    if self.grants.remove(generation).is_some_and(|told| told != now) {
                        arrived.push((*generation, now));
                    }
                }
                TransportEvent::Released { generation, .. } => drop(self.grants.remove(generation)),
                TransportEvent::Finished { .. } | TransportEvent::Closed { .. } => {
                    self.num_channels = self.num_channels.saturating_sub(1);
                }
                TransportEvent::Opened { .. } | TransportEvent::Lost { .. } => {}
            }
        }
        for (generation, told) in &mut self.grants {
            let now = self.transport.arrived_bytes(*generation);
            if now != *told {
                *told = now;
                arrived.push((*generation, now));
            }
        }
        if events.is_empty() && arrived.is_empty() {
            return Ok(());
        }
        self.send(News { events, arrived }.frame())
    }
}
