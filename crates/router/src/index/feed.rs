//! Keeping count of one engine's events.

use microserving_protocol::{KvEvent, KvEventKind};

/// What is to be done with an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is the next one: apply it.
    Apply,
    /// It is a snapshot: forget the engine's pages and begin with it.
    Replace,
    /// Something is missing, came twice, or is of another boot: ask for a snapshot.
    Resync,
}

/// Whose events are counted, and which one comes next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    /// Nothing is known until the first snapshot.
    incarnation: Option<String>,
    next: u64,
}

impl Count {
    /// Judges an event, and counts it if it fits.
    pub(super) fn judge(&mut self, event: &KvEvent) -> Verdict {
        let known = self.incarnation.as_deref() == Some(event.incarnation.as_str());
        if matches!(event.kind, KvEventKind::Snapshot { .. }) {
            // One that is older than what we have would take back what came after it.
            if known && event.number.saturating_add(1) < self.next {
                return Verdict::Resync;
            }
            self.incarnation = Some(event.incarnation.clone());
            self.next = event.number.saturating_add(1);
            return Verdict::Replace;
        }
        if !known || event.number != self.next {
            return Verdict::Resync;
        }
        self.next = self.next.saturating_add(1);
        Verdict::Apply
    }

    /// Returns the number to ask for: 0 for a snapshot.
    pub(super) const fn from(&self) -> u64 {
        if self.incarnation.is_some() { self.next } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(incarnation: &str, number: u64, snapshot: bool) -> KvEvent {
        let kind = if snapshot { KvEventKind::Snapshot { pages: Vec::new() } } else { KvEventKind::Cleared };
        KvEvent { incarnation: incarnation.into(), number, kind }
    }

    #[test]
    fn only_the_next_event_of_the_same_boot_is_applied() {
        let mut count = Count::default();
        assert_eq!((count.from(), count.judge(&event("a", 1, false))), (0, Verdict::Resync));
        assert_eq!((count.judge(&event("a", 7, true)), count.from()), (Verdict::Replace, 8));
        assert_eq!((count.judge(&event("a", 8, false)), count.from()), (Verdict::Apply, 9));
        for (other, number) in [("a", 8), ("a", 7), ("a", 10), ("b", 9), ("a", 0), ("a", u64::MAX)] {
            let before = count.clone();
            assert_eq!(count.judge(&event(other, number, false)), Verdict::Resync, "{other} {number}");
            assert_eq!(count, before, "what does not fit changes nothing");
        }
        assert_eq!(count.judge(&event("a", 7, true)), Verdict::Resync, "a snapshot of before");
        assert_eq!(count.judge(&event("a", 8, true)), Verdict::Replace, "one of now");
        assert_eq!((count.judge(&event("b", 0, true)), count.from()), (Verdict::Replace, 1));
        assert_eq!(count.judge(&event("b", u64::MAX, true)), Verdict::Replace);
        assert_eq!(count.judge(&event("b", u64::MAX, false)), Verdict::Apply, "and nothing overflows");
    }
}
