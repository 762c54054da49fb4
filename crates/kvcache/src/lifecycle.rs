//! What may happen to a reservation, as one pure function.
//!
//! [`step`] takes a state and an event and says what comes next and what is to be done. It knows no pages, no peers and no
//! time: the engine owns those, feeds it what it sees and does what it says. `tests/model_check` explores the same
//! function, with every order of crashes, late writes and lost messages that a small model has.
//!
//! ```text
//!            Arrived            Complete              Wanted
//!  Reserved ────────▶ Receiving ────────▶ Complete ───────────▶ Accepted{received}
//!     │  ╲ Lost       ╱ │ ╲                  │ Abort, LeaseExpired
//!     │   ╲──────────╱  │  ╲ Lost, Wanted    └────────────────▶ Over
//!     │       │         │   ╲
//!     │       ▼  Wanted │    ▼            Released
//!     │     Broken ─────┼──▶ Reclaiming ──────────────────────▶ Accepted{not received}
//!     │       │         │        │
//!     └───────┴────┬────┴────────┘ Abort, LeaseExpired
//!                  ▼              Released
//!             Quarantined ────────────────────────────────────▶ Over
//! ```
//!
//! Both states that wait for `Released` do so because a write may still be on its way. Nothing else gets a page out of them:
//! no time, no later message, no restart of the requester.
//!
//! ```
//! use microserving_kvcache::lifecycle::{Event, PageAction, State, step};
//!
//! // The request is aborted while a peer may be writing, then the transport says that no write can land any more.
//! let aborted = step(State::Receiving { wanted: false }, Event::Abort);
//! assert_eq!((aborted.revoke, aborted.pages), (true, PageAction::Quarantine));
//! let ended = step(aborted.next, Event::Released);
//! assert_eq!((ended.next, ended.pages), (State::Over, PageAction::Drain));
//! ```

/// Where a reservation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// The address is out; nothing is known to have arrived.
    Reserved {
        /// Its pages are asked for: they are accepted as soon as everything has arrived.
        wanted: bool,
    },
    /// Bytes are arriving.
    Receiving {
        /// As above.
        wanted: bool,
    },
    /// A writer ended without finishing. The grant stands, so that another one may fill it.
    Broken,
    /// Everything has arrived; no write can land any more.
    Complete,
    /// Its pages are asked for and will not be filled; revoked, and waiting until no write can land any more.
    Reclaiming,
    /// Given up and revoked; waiting until no write can land any more.
    Quarantined,
    /// The pages belong to a sequence now.
    Accepted {
        /// The range was received; otherwise it is to be computed here.
        received: bool,
    },
    /// The pages are free again.
    Over,
}

/// What an engine may see happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    /// Some bytes arrived.
    Arrived,
    /// The transport: everything arrived and was verified, the grant is closed.
    Complete,
    /// The transport: a writer ended without finishing, or its bytes were corrupt.
    Lost,
    /// `start_generate` or `commit` asks for the pages.
    Wanted,
    /// The request was aborted, or its deadline has passed.
    Abort,
    /// Nobody has shown a sign of life for the length of the lease.
    LeaseExpired,
    /// The transport: no write under the grant can land any more, because every writer has acknowledged or is fenced.
    Released,
}

impl Event {
    /// All events.
    pub const ALL: [Self; 7] = [
        Self::Arrived,
        Self::Complete,
        Self::Lost,
        Self::Wanted,
        Self::Abort,
        Self::LeaseExpired,
        Self::Released,
    ];
}

/// What is to be done with the reservation's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageAction {
    /// Nothing.
    Keep,
    /// [`crate::KvCache::accept`]; KV is valid up to the end of the range.
    AcceptReceived,
    /// [`crate::KvCache::accept`]; KV is valid only as far as it was matched, the range is to be computed.
    AcceptUnreceived,
    /// [`crate::KvCache::quarantine`].
    Quarantine,
    /// [`crate::KvCache::drained`].
    Drain,
    /// [`crate::KvCache::cancel`].
    Free,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[must_use]
pub struct Step {
    /// The new state.
    pub next: State,
    /// Revoke the transport's grant; `Released` will answer.
    pub revoke: bool,
    /// What is to be done with the pages.
    pub pages: PageAction,
}

impl Step {
    const fn keep(next: State) -> Self {
        Self { next, revoke: false, pages: PageAction::Keep }
    }

    const fn pages(next: State, pages: PageAction) -> Self {
        Self { next, revoke: false, pages }
    }

    const fn revoke(next: State, pages: PageAction) -> Self {
        Self { next, revoke: true, pages }
    }
}

impl State {
    /// Returns the first state of a reservation.
    ///
    /// Without an address there is nothing to receive, and nobody who could write.
    #[must_use]
    pub const fn begin(address_given: bool) -> Self {
        if address_given { Self::Reserved { wanted: false } } else { Self::Complete }
    }

    /// Says whether a peer may still write to the pages.
    #[must_use]
    pub const fn may_be_written(self) -> bool {
        match self {
            Self::Reserved { .. }
            | Self::Receiving { .. }
            | Self::Broken
            | Self::Reclaiming
            | Self::Quarantined => true,
            Self::Complete | Self::Accepted { .. } | Self::Over => false,
        }
    }

    /// Says whether nothing changes this state any more.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Accepted { .. } | Self::Over)
    }

    /// Says whether a lease runs: the reservation ends if nobody shows a sign of life.
    #[must_use]
    pub const fn has_lease(self) -> bool {
        !self.is_final() && !matches!(self, Self::Quarantined)
    }
}

/// Says what comes after `state` when `event` happens, and what is to be done.
///
/// Total: every event may happen in every state, because messages are late, doubled or lost; one that means nothing there
/// changes nothing.
pub const fn step(state: State, event: Event) -> Step {
    match state {
        State::Reserved { wanted } | State::Receiving { wanted } => match event {
            Event::Arrived => Step::keep(State::Receiving { wanted }),
            Event::Wanted => match state {
                State::Reserved { .. } => Step::keep(State::Reserved { wanted: true }),
                _ => Step::keep(State::Receiving { wanted: true }),
            },
            Event::Complete if wanted => received(),
            Event::Complete => Step::keep(State::Complete),
            // What is asked for is computed here rather than waited for; what is not may still be filled by another sender.
            Event::Lost if wanted => Step::revoke(State::Reclaiming, PageAction::Keep),
            Event::Lost => Step::keep(State::Broken),
            Event::Abort | Event::LeaseExpired => Step::revoke(State::Quarantined, PageAction::Quarantine),
            // Unasked: the transport has closed the grant by itself. As safe as an answer to a revoke.
            Event::Released if wanted => unreceived(),
            Event::Released => Step::keep(State::Broken),
        },
        State::Broken => match event {
            Event::Complete => Step::keep(State::Complete),
            Event::Wanted => Step::revoke(State::Reclaiming, PageAction::Keep),
            Event::Abort | Event::LeaseExpired => Step::revoke(State::Quarantined, PageAction::Quarantine),
            // An arrival is some other claim's, and does not mend what was lost.
            Event::Arrived | Event::Lost | Event::Released => Step::keep(state),
        },
        State::Complete => match event {
            Event::Wanted => received(),
            Event::Abort | Event::LeaseExpired => Step::pages(State::Over, PageAction::Free),
            Event::Arrived | Event::Complete | Event::Lost | Event::Released => Step::keep(state),
        },
        State::Reclaiming => match event {
            Event::Released => unreceived(),
            Event::Abort | Event::LeaseExpired => Step::pages(State::Quarantined, PageAction::Quarantine),
            Event::Arrived | Event::Complete | Event::Lost | Event::Wanted => Step::keep(state),
        },
        State::Quarantined => match event {
            Event::Released => Step::pages(State::Over, PageAction::Drain),
            Event::Arrived
            | Event::Complete
            | Event::Lost
            | Event::Wanted
            | Event::Abort
            | Event::LeaseExpired => Step::keep(state),
        },
        State::Accepted { .. } | State::Over => Step::keep(state),
    }
}

const fn received() -> Step {
    Step::pages(State::Accepted { received: true }, PageAction::AcceptReceived)
}

const fn unreceived() -> Step {
    Step::pages(State::Accepted { received: false }, PageAction::AcceptUnreceived)
}

#[cfg(test)]
mod tests;
