//! What the caller's thread and the IO thread share.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use microserving_protocol::KvRange;
use microserving_transport::one_sided::{Channels, Notice};
use microserving_transport::{Admission, ChannelId, GrantBook};
use rustix::event::{EventfdFlags, eventfd};

use crate::NixlConfig;
use crate::address::Address;
use crate::agent::Agent;

/// A connection of the IO thread; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ConnId(pub(crate) u64);

/// How a claim's writer is found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClaimWriter {
    pub(crate) conn: ConnId,
    pub(crate) channel: u64,
}

/// What the IO thread is asked to do.
#[derive(Debug)]
pub(crate) enum Command {
    /// Peers may read from this agent, and what it serves is ours to read into.
    Serve(Box<Agent>),
    Open {
        channel: ChannelId,
        address: Address,
        credential: Vec<u8>,
        range: KvRange,
    },
    Stop(ClaimWriter),
    Notice(Notice),
    /// There may be something to announce.
    Work,
    ShutDown,
}

type Waker = Arc<dyn Fn() + Send + Sync>;

/// Everything behind the one lock, which is held for moments only.
pub(crate) struct State {
    pub(crate) book: GrantBook<ClaimWriter>,
    pub(crate) channels: Channels<ConnId>,
    pub(crate) admission: Option<Arc<dyn Admission>>,
    pub(crate) waker: Option<Waker>,
    commands: VecDeque<Command>,
}

pub(crate) struct Shared {
    pub(crate) config: NixlConfig,
    state: Mutex<State>,
    /// Readable when there are commands.
    wake_io: OwnedFd,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn new(config: NixlConfig) -> std::io::Result<Self> {
        let state = State {
            book: GrantBook::new(),
            channels: Channels::default(),
            admission: None,
            waker: None,
            commands: VecDeque::new(),
        };
        let wake_io = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { config, state: Mutex::new(state), wake_io })
    }

    /// A thread that panicked leaves whole entries behind: every change under the lock is complete when it is unlocked.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn command(&self, commands: impl IntoIterator<Item = Command>) {
        let added = {
            let queue = &mut self.state().commands;
            let before = queue.len();
            queue.extend(commands);
            queue.len() > before
        };
        // The counter can only be full after 2^64 - 1 unread wakes, and then the IO thread is awake anyway.
        if added && let Err(error) = rustix::io::write(&self.wake_io, &1u64.to_ne_bytes()) {
            tracing::debug!(%error, "the wake of the IO thread is full");
        }
    }

    pub(crate) fn take_commands(&self) -> VecDeque<Command> {
        let mut count = [0; 8];
        // Nothing to read is fine: the commands may have been taken by the round before.
        let _ = rustix::io::read(&self.wake_io, &mut count);
        std::mem::take(&mut self.state().commands)
    }

    pub(crate) fn wake_fd(&self) -> &OwnedFd {
        &self.wake_io
    }

    /// Calls the waker if there is something to poll.
    pub(crate) fn wake_caller(&self) {
        let waker = {
            let state = self.state();
            let has_events = state.channels.has_events() || state.book.has_events();
            if has_events { state.waker.clone() } else { None }
        };
        if let Some(wake) = waker {
            wake();
        }
    }
}
