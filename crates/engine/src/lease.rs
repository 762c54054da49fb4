//! Leases: how long a reservation stands without a sign of life.
//!
//! A lease ends *waiting*, never *safety*: what it frees is decided by the transport (see `quarantine` in `pages`).

use std::time::Duration;

/// The lease of one reservation, counted on this engine's own clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    length: Duration,
    until: Duration,
    /// What was last seen of the transfer: bytes arrived and claims admitted. Either growing is a sign of life.
    seen: (u64, u64),
}

impl Lease {
    /// Begins a lease of `length` at `now`.
    pub(crate) fn begin(now: Duration, length: Duration) -> Self {
        Self { length, until: now + length, seen: (0, 0) }
    }

    /// Begins it anew: the caller was heard from.
    pub(crate) fn renew(&mut self, now: Duration) {
        self.until = now + self.length;
    }

    /// Renews the lease if the transfer has got further since the last look.
    pub(crate) fn observe(&mut self, now: Duration, arrived_bytes: u64, claims: u64) {
        if self.seen != (arrived_bytes, claims) {
            self.seen = (arrived_bytes, claims);
            self.renew(now);
        }
    }

    /// Returns when it runs out.
    pub(crate) fn until(self) -> Duration {
        self.until
    }

    /// Returns what is left of it.
    pub(crate) fn left(self, now: Duration) -> Duration {
        self.until.saturating_sub(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn only_news_renews() {
        let mut lease = Lease::begin(s(10), s(5));
        lease.observe(s(12), 0, 0);
        assert_eq!(lease.until(), s(15), "nothing moved");
        lease.observe(s(12), 0, 1);
        assert_eq!(lease.until(), s(17), "a claim was admitted");
        lease.observe(s(13), 100, 1);
        assert_eq!(lease.until(), s(18), "bytes arrived");
        lease.observe(s(16), 100, 1);
        assert_eq!(lease.left(s(16)), s(2), "and then nothing more");
    }
}
