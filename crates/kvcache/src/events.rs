//! What entered and left the prefix cache, in order and numbered.

use std::collections::VecDeque;

use crate::PageHash;

/// One change of the prefix cache.
///
/// Numbers grow by one with every change of one cache. Whoever keeps a copy notices a missing number, and so that something
/// was lost; [`crate::KvCache::snapshot`] says where to start again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEvent {
    /// The change's number, from 0.
    pub seq: u64,
    /// What changed.
    pub change: KvChange,
}

/// What changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvChange {
    /// Pages can be matched now: `pages[0]` behind `parent`, each further one behind the one before it.
    Stored {
        /// The page, or the tenant's root ([`PageHash::root`]), behind which the first page stands.
        parent: PageHash,
        /// The pages.
        pages: Vec<PageHash>,
    },
    /// Pages can no longer be matched.
    Removed {
        /// The pages.
        pages: Vec<PageHash>,
    },
    /// Nothing can be matched any more.
    Cleared,
    /// Changes before this one were dropped because nobody took them in time.
    Gap,
}

/// Everything that can be matched, and the number of the next change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSnapshot {
    /// Changes from this number on come after the snapshot.
    pub next_seq: u64,
    /// The pages, in no particular order.
    pub pages: Vec<PageHash>,
}

/// A bounded buffer of changes that forgets everything, and says so, rather than grow.
#[derive(Clone, Debug)]
pub(crate) struct EventLog {
    next_seq: u64,
    buffer: VecDeque<KvEvent>,
    /// The most events kept; 0 records none.
    capacity: usize,
}

impl EventLog {
    pub(crate) const fn new(capacity: usize) -> Self {
        Self { next_seq: 0, buffer: VecDeque::new(), capacity }
    }

    pub(crate) fn push(&mut self, change: KvChange) {
        if self.capacity == 0 {
            return;
        }
        if self.buffer.len() == self.capacity {
            // The gap takes the number of the newest change dropped, and this change is among them if there is no room
            // for two: whoever sees a gap asks for a snapshot anyway.
            self.buffer.clear();
            self.number(KvChange::Gap);
            if self.capacity == 1 {
                return;
            }
        }
        self.number(change);
    }

    pub(crate) fn take(&mut self) -> Vec<KvEvent> {
        self.buffer.drain(..).collect()
    }

    pub(crate) const fn next_seq(&self) -> u64 {
        self.next_seq
    }

    fn number(&mut self, change: KvChange) {
        self.buffer.push_back(KvEvent { seq: self.next_seq, change });
        self.next_seq += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn removed(number: u128) -> KvChange {
        KvChange::Removed { pages: vec![PageHash(number)] }
    }

    #[test]
    fn a_full_log_degrades_to_a_gap() {
        let mut log = EventLog::new(3);
        for number in 0..4 {
            log.push(removed(number));
        }
        let events = log.take();
        assert_eq!(
            events,
            [KvEvent { seq: 3, change: KvChange::Gap }, KvEvent { seq: 4, change: removed(3) }]
        );
        log.push(removed(9));
        assert_eq!(log.take(), [KvEvent { seq: 5, change: removed(9) }]);
        assert!(log.take().is_empty());
    }

    #[test]
    fn the_smallest_log_holds_the_gap_itself() {
        let mut log = EventLog::new(1);
        log.push(removed(0));
        log.push(removed(1));
        assert_eq!(log.take(), [KvEvent { seq: 1, change: KvChange::Gap }]);
    }

    #[test]
    fn no_capacity_is_no_log() {
        let mut log = EventLog::new(0);
        log.push(removed(0));
        assert!(log.take().is_empty());
        assert_eq!(log.next_seq(), 0);
    }
}
