//! What the caller's thread, the IO thread and the writer thread share.
//!
//! Locks are short and taken one at a time; admissions and wakers are called under none.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use microserving_protocol::{Generation, KvRange};
use microserving_transport::one_sided::{Channels, Notice};
use microserving_transport::{Admission, ChannelId, GrantBook};
use rustix::event::{EventfdFlags, eventfd};

use crate::ShmConfig;
use crate::address::Address;
use crate::memory::{Counters, PeerMemory, Region};

/// Channels into the mapped regions of peers.
pub(crate) type SentTo = Channels<Arc<PeerMemory>>;

/// A connection of the IO thread; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ConnId(pub(crate) u64);

/// How a claim's writer is found, and how far it has come.
#[derive(Clone, Debug)]
pub(crate) struct ClaimWriter {
    pub(crate) conn: ConnId,
    pub(crate) channel: u64,
    pub(crate) counters: Arc<Counters>,
    pub(crate) slot: u32,
}

/// What the IO thread is asked to do.
#[derive(Debug)]
pub(crate) enum Command {
    Open { channel: ChannelId, address: Address, credential: Vec<u8>, range: KvRange },
    Stop { conn: ConnId, channel: u64 },
    Notice(Notice),
    ShutDown,
}

/// The receiver's half.
#[derive(Debug)]
pub(crate) struct Receiving {
    pub(crate) book: GrantBook<ClaimWriter>,
    pub(crate) admission: Option<Arc<dyn Admission>>,
}

impl Receiving {
    /// Looks up how far the writers of a grant have come.
    pub(crate) fn arrived_bytes(&mut self, generation: Generation) -> u64 {
        let counts: Vec<_> = self
            .book
            .writers(generation)
            .map(|(claim, writer)| (claim, writer.counters.load(writer.slot)))
            .collect();
        for (claim, arrived) in counts {
            self.book.progress(claim, arrived);
        }
        self.book.arrived_bytes(generation)
    }
}

type Waker = Arc<dyn Fn() + Send + Sync>;

pub(crate) struct Shared {
    pub(crate) config: ShmConfig,
    pub(crate) region: OnceLock<Arc<Region>>,
    receiving: Mutex<Receiving>,
    channels: Mutex<SentTo>,
    /// There may be something for the writer thread.
    pub(crate) work: Condvar,
    commands: Mutex<Vec<Command>>,
    /// Readable when there are commands.
    wake_io: OwnedFd,
    waker: Mutex<Option<Waker>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("config", &self.config)
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn new(config: ShmConfig) -> std::io::Result<Self> {
        Ok(Self {
            config,
            region: OnceLock::new(),
            receiving: Mutex::new(Receiving { book: GrantBook::new(), admission: None }),
            channels: Mutex::new(Channels::default()),
            work: Condvar::new(),
            commands: Mutex::new(Vec::new()),
            wake_io: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            waker: Mutex::new(None),
        })
    }

    pub(crate) fn receiving(&self) -> MutexGuard<'_, Receiving> {
        lock(&self.receiving)
    }

    pub(crate) fn channels(&self) -> MutexGuard<'_, SentTo> {
        lock(&self.channels)
    }

    /// Waits until there may be something to write.
    pub(crate) fn wait_for_work<'a>(&self, channels: MutexGuard<'a, SentTo>) -> MutexGuard<'a, SentTo> {
        self.work.wait(channels).unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn command(&self, commands: impl IntoIterator<Item = Command>) {
        let added = {
            let mut queue = lock(&self.commands);
            let before = queue.len();
            queue.extend(commands);
            queue.len() > before
        };
        // The counter can only be full after 2^64 - 1 unread wakes, and then the IO thread is awake anyway.
        if added && let Err(error) = rustix::io::write(&self.wake_io, &1u64.to_ne_bytes()) {
            tracing::debug!(%error, "the wake of the IO thread is full");
        }
    }

    pub(crate) fn take_commands(&self) -> Vec<Command> {
        let mut count = [0; 8];
        // Nothing to read is fine: the commands may have been taken by the round before.
        let _ = rustix::io::read(&self.wake_io, &mut count);
        std::mem::take(&mut lock(&self.commands))
    }

    pub(crate) fn wake_fd(&self) -> &OwnedFd {
        &self.wake_io
    }

    pub(crate) fn set_waker(&self, waker: Waker) {
        *lock(&self.waker) = Some(waker);
    }

    /// Calls the waker if there is something to poll.
    pub(crate) fn wake_caller(&self) {
        if self.channels().has_events() || self.receiving().book.has_events() {
            let waker = lock(&self.waker).clone();
            if let Some(wake) = waker {
                wake();
            }
        }
    }
}

/// A thread that panicked leaves whole entries behind: every change under these locks is complete when it is unlocked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
