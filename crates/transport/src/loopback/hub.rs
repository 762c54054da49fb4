//! The hub that the engines of one process share.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::faults::LoopbackFaults;
use super::state::{Kind, PeerId, State};
use super::transport::LoopbackTransport;

/// Connects the [`LoopbackTransport`]s of one process; cloning it gives another handle to the same hub.
///
/// The hooks (`crash`, `pause`, `cut`, …) name peers by the name they were made under; a name stands for the newest peer
/// of that name.
#[derive(Clone)]
pub struct LoopbackHub {
    inner: Arc<Inner>,
}

struct Inner {
    id: u64,
    state: Mutex<State>,
}

impl fmt::Debug for LoopbackHub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoopbackHub").field("id", &self.inner.id).finish_non_exhaustive()
    }
}

impl Default for LoopbackHub {
    fn default() -> Self {
        Self::new()
    }
}

impl LoopbackHub {
    /// Makes a hub that delivers everything at once, without checksums.
    #[must_use]
    pub fn new() -> Self {
        Self::with(LoopbackFaults::default(), false)
    }

    /// Makes a hub that verifies a checksum of every run on arrival.
    #[must_use]
    pub fn with_checksums() -> Self {
        Self::with(LoopbackFaults::default(), true)
    }

    /// Makes a hub with faults, and with checksums or not.
    #[must_use]
    pub fn with(faults: LoopbackFaults, checksums: bool) -> Self {
        // Told apart within the process only: an address of another hub must not find a peer of this one.
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Self { inner: Arc::new(Inner { id, state: Mutex::new(State::new(faults, checksums)) }) }
    }

    /// Makes a peer. A name used before now stands for the new peer.
    #[must_use]
    pub fn transport(&self, name: &str) -> LoopbackTransport {
        let peer = self.lock().add_peer(name);
        LoopbackTransport::new(self.clone(), peer)
    }

    /// Ends a peer as `kill -9` does: at once for the peer; the others notice, and what it had posted lands until its exit
    /// is certain. Its [`LoopbackTransport`] does nothing any more.
    pub fn crash(&self, name: &str) {
        self.with_named(name, State::crash);
    }

    /// Stops a peer as `SIGSTOP` does: it neither writes nor hears, and nothing says so.
    pub fn pause(&self, name: &str) {
        self.with_named(name, State::pause);
    }

    /// Continues a paused peer: first of all it goes on writing what it was about to write.
    pub fn resume(&self, name: &str) {
        self.with_named(name, State::resume);
    }

    /// Cuts two peers off from each other until [`heal`](Self::heal): nothing is lost, all of it waits.
    pub fn cut(&self, a: &str, b: &str) {
        let mut state = self.lock();
        if let (Some(a), Some(b)) = (state.named(a), state.named(b)) {
            state.cut(a, b);
        }
    }

    /// Ends all cuts and pauses.
    pub fn heal(&self) {
        self.lock().heal();
        self.deliver();
    }

    /// Replaces the faults from now on, the seed apart.
    pub fn set_faults(&self, faults: LoopbackFaults) {
        self.lock().faults = faults;
    }

    /// Returns when the next message is due, for a driver that moves the clock itself.
    #[must_use]
    pub fn next_due(&self) -> Option<Duration> {
        self.lock().next_due()
    }

    pub(super) fn id(&self) -> u64 {
        self.inner.id
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in another peer's thread is that peer's; the state is changed by whole messages only.
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers every message that is due. Admissions and wakers are called without the lock; one thread delivers at a time,
    /// so that messages keep their order, and it goes on until no message is due.
    pub(super) fn deliver(&self) {
        let mut state = self.lock();
        if state.delivering {
            return;
        }
        state.delivering = true;
        while let Some(message) = state.next_message() {
            let mut admitted = None;
            if let Kind::Open { credential, .. } = &message.kind {
                let admission = state.peer(message.to).and_then(|peer| peer.admission.clone());
                drop(state);
                admitted = admission.map(|admission| admission.admit(credential));
                state = self.lock();
            }
            state.handle(message, admitted);
        }
        state.delivering = false;
        let wakers = state.wakers();
        drop(state);
        for wake in wakers {
            wake();
        }
    }

    fn with_named(&self, name: &str, change: impl FnOnce(&mut State, PeerId)) {
        {
            let mut state = self.lock();
            if let Some(peer) = state.named(name) {
                change(&mut state, peer);
            }
        }
        self.deliver();
    }
}
