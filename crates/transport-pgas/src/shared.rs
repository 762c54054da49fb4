//! What the caller's thread and the progress thread share.
//!
//! Locks are short and taken one at a time; admissions and wakers are called under none.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use microserving_protocol::{KvRange, PeId};
use microserving_transport::one_sided::{Channels, Notice};
use microserving_transport::{Admission, ChannelId, GrantBook};

use crate::PgasConfig;

/// How a claim's writer is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClaimWriter {
    pub(crate) pe: PeId,
    pub(crate) channel: u64,
}

/// What the progress thread is asked to do.
#[derive(Debug)]
pub(crate) enum Command {
    Open { channel: ChannelId, pe: PeId, credential: Vec<u8>, range: KvRange },
    Stop(ClaimWriter),
    Notice(Notice),
}

/// The receiver's half.
#[derive(Debug)]
pub(crate) struct Receiving {
    pub(crate) book: GrantBook<ClaimWriter>,
    pub(crate) admission: Option<Arc<dyn Admission>>,
}

#[derive(Debug, Default)]
struct Door {
    commands: Vec<Command>,
    /// Something happened since the progress thread last looked.
    rung: bool,
}

type Waker = Arc<dyn Fn() + Send + Sync>;

pub(crate) struct Shared {
    pub(crate) config: PgasConfig,
    receiving: Mutex<Receiving>,
    channels: Mutex<Channels<PeId>>,
    door: Mutex<Door>,
    bell: Condvar,
    waker: Mutex<Option<Waker>>,
    lost: Mutex<Option<String>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn new(config: PgasConfig) -> Self {
        Self {
            config,
            receiving: Mutex::new(Receiving { book: GrantBook::new(), admission: None }),
            channels: Mutex::default(),
            door: Mutex::default(),
            bell: Condvar::new(),
            waker: Mutex::new(None),
            lost: Mutex::new(None),
        }
    }

    pub(crate) fn receiving(&self) -> MutexGuard<'_, Receiving> {
        lock(&self.receiving)
    }

    pub(crate) fn channels(&self) -> MutexGuard<'_, Channels<PeId>> {
        lock(&self.channels)
    }

    /// Gives the progress thread something to do.
    pub(crate) fn command(&self, commands: impl IntoIterator<Item = Command>) {
        let mut door = lock(&self.door);
        door.commands.extend(commands);
        door.rung = true;
        drop(door);
        self.bell.notify_one();
    }

    pub(crate) fn take_commands(&self) -> Vec<Command> {
        let mut door = lock(&self.door);
        door.rung = false;
        std::mem::take(&mut door.commands)
    }

    /// Sleeps until there is something to do, or for so long.
    pub(crate) fn sleep(&self, at_most: Duration) {
        let door = lock(&self.door);
        let slept = self.bell.wait_timeout_while(door, at_most, |door| !door.rung);
        drop(slept.unwrap_or_else(PoisonError::into_inner));
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

    /// Notes why the world is no more; the first reason counts. Says whether this was the first.
    pub(crate) fn lose(&self, reason: String) -> bool {
        let mut lost = lock(&self.lost);
        let first = lost.is_none();
        lost.get_or_insert(reason);
        first
    }

    pub(crate) fn lost(&self) -> Option<String> {
        lock(&self.lost).clone()
    }
}

/// A thread that panicked leaves whole entries behind: every change under these locks is complete when it is unlocked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
