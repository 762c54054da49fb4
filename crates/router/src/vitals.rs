//! What is believed of an engine's condition: when it last gave a sign of life, whether its failures in a row keep requests away,
//! and how far it is into its slow start.
//!
//! ```text
//!            failures in a row reach the bound                 cooldown over: one request may try
//!   closed ───────────────────────────────────▶ open ────────────────────────────────────────▶ half open
//!     ▲                                            ▲                    it fails                    │
//!     │                                            └────────────────────────────────────────────────┤
//!     └──────────────────────────────────── it succeeds ─────────────────────────────────────────────┘
//! ```
//!
//! Everything is an atomic number: hundreds of engines may be asked for each request. Time is an argument.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::Thresholds;

/// The share that a slow start begins with.
const FIRST_SHARE: f64 = 0.1;

/// Whether failures keep requests away from an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// They do not.
    Closed,
    /// They do.
    Open,
    /// One request may try, or is trying.
    HalfOpen,
}

impl BreakerState {
    /// Returns the name that is shown.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
        }
    }
}

/// What a call says about the engine that it went to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It works.
    Good,
    /// It failed, or is gone.
    Bad,
    /// Nothing: what was refused is the caller's doing, or a matter of room.
    Neutral,
}

/// The condition of one engine.
#[derive(Debug)]
pub(crate) struct Vitals {
    origin: Instant,
    /// Milliseconds since the origin, as are all times here.
    last_sign: AtomicU64,
    failures: AtomicU32,
    /// When a breaker that is open lets one request try; 0 is closed.
    open_until: AtomicU64,
    is_probing: AtomicBool,
    ramp_from: AtomicU64,
    ramp_until: AtomicU64,
}

impl Vitals {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            origin: now,
            last_sign: AtomicU64::new(0),
            failures: AtomicU32::new(0),
            open_until: AtomicU64::new(0),
            is_probing: AtomicBool::new(false),
            ramp_from: AtomicU64::new(0),
            ramp_until: AtomicU64::new(0),
        }
    }

    fn millis(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.origin).as_millis()).unwrap_or(u64::MAX)
    }

    /// Returns how long the engine has been in the cluster.
    pub(crate) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.origin)
    }

    /// Notes a sign of life.
    pub(crate) fn note_sign(&self, now: Instant) {
        self.last_sign.fetch_max(self.millis(now), Ordering::Relaxed);
    }

    /// Returns how long there has been no sign of life.
    pub(crate) fn silence(&self, now: Instant) -> Duration {
        Duration::from_millis(self.millis(now).saturating_sub(self.last_sign.load(Ordering::Relaxed)))
    }

    /// Says whether failures leave it open to a request.
    pub(crate) fn admits(&self, now: impl FnOnce() -> Instant) -> bool {
        match self.open_until.load(Ordering::Relaxed) {
            0 => true,
            until => self.millis(now()) >= until && !self.is_probing.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn breaker(&self, now: Instant) -> BreakerState {
        match self.open_until.load(Ordering::Relaxed) {
            0 => BreakerState::Closed,
            until if self.millis(now) >= until => BreakerState::HalfOpen,
            _ => BreakerState::Open,
        }
    }

    /// Notes that a request goes there; says whether it is the one that tries.
    pub(crate) fn begin(&self) -> bool {
        self.open_until.load(Ordering::Relaxed) != 0 && !self.is_probing.swap(true, Ordering::Relaxed)
    }

    /// Notes that the request that tried is over, whatever it found.
    pub(crate) fn end_probe(&self) {
        self.is_probing.store(false, Ordering::Relaxed);
    }

    /// Takes a call's verdict; returns the state if it changed.
    pub(crate) fn judge(&self, now: Instant, verdict: Verdict, bounds: &Thresholds) -> Option<BreakerState> {
        match verdict {
            Verdict::Neutral => None,
            Verdict::Good => {
                self.failures.store(0, Ordering::Relaxed);
                if self.open_until.swap(0, Ordering::Relaxed) == 0 {
                    return None;
                }
                self.begin_ramp(now, bounds.slow_start);
                Some(BreakerState::Closed)
            }
            Verdict::Bad => {
                let failures = self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
                if bounds.breaker_failures == 0 || failures < bounds.breaker_failures {
                    return None;
                }
                let until = self.millis(now + bounds.breaker_cooldown).max(1);
                let was = self.open_until.swap(until, Ordering::Relaxed);
                (was == 0).then_some(BreakerState::Open)
            }
        }
    }

    /// Begins a slow start.
    pub(crate) fn begin_ramp(&self, now: Instant, slow_start: Duration) {
        self.ramp_from.store(self.millis(now), Ordering::Relaxed);
        self.ramp_until.store(self.millis(now + slow_start), Ordering::Relaxed);
    }

    /// Returns how much of its weight it has, in `(0, 1]`.
    pub(crate) fn share(&self, now: Instant) -> f64 {
        let (from, until) = (self.ramp_from.load(Ordering::Relaxed), self.ramp_until.load(Ordering::Relaxed));
        let now = self.millis(now);
        if now >= until || until <= from {
            return 1.0;
        }
        let done = now.saturating_sub(from) as f64 / (until - from) as f64;
        FIRST_SHARE + (1.0 - FIRST_SHARE) * done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_in_a_row_open_it_and_one_request_may_try_again() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let bounds = Thresholds { breaker_failures: 3, ..Thresholds::default() };
        let vitals = Vitals::new(start);
        for verdict in
            [Verdict::Bad, Verdict::Bad, Verdict::Good, Verdict::Bad, Verdict::Neutral, Verdict::Bad]
        {
            assert_eq!(vitals.judge(at(1), verdict, &bounds), None);
            assert!(vitals.admits(|| at(1)) && !vitals.begin());
        }
        assert_eq!(vitals.judge(at(1), Verdict::Bad, &bounds), Some(BreakerState::Open));
        assert!(!vitals.admits(|| at(5)));
        assert_eq!(vitals.breaker(at(5)), BreakerState::Open);

        assert!(vitals.admits(|| at(6)));
        assert_eq!(vitals.breaker(at(6)), BreakerState::HalfOpen);
        assert!(vitals.begin(), "it is the one that tries");
        assert!(!vitals.admits(|| at(6)) && !vitals.begin(), "only one does");
        assert_eq!(vitals.judge(at(7), Verdict::Bad, &bounds), None);
        vitals.end_probe();
        assert!(!vitals.admits(|| at(11)), "closed to all for another while");

        // One that finds out nothing leaves the place to the next.
        assert!(vitals.admits(|| at(12)) && vitals.begin());
        assert_eq!(vitals.judge(at(12), Verdict::Neutral, &bounds), None);
        vitals.end_probe();
        assert!(vitals.admits(|| at(12)) && vitals.begin());
        assert_eq!(vitals.judge(at(13), Verdict::Good, &bounds), Some(BreakerState::Closed));
        vitals.end_probe();
        assert!(vitals.admits(|| at(13)));
        assert!(vitals.share(at(13)) < 0.2, "and it starts slowly");
        let never = Thresholds { breaker_failures: 0, ..bounds };
        for _ in 0..100 {
            assert_eq!(vitals.judge(at(14), Verdict::Bad, &never), None);
        }
    }

    #[test]
    fn a_share_rises() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let vitals = Vitals::new(start);
        assert!((vitals.share(start) - 1.0).abs() < 1e-9, "nobody began one");
        vitals.begin_ramp(at(1), Duration::from_secs(10));
        for (seconds, share) in [(1, 0.1), (6, 0.55), (11, 1.0), (100, 1.0)] {
            assert!(
                (vitals.share(at(seconds)) - share).abs() < 1e-9,
                "{seconds}: {}",
                vitals.share(at(seconds))
            );
        }
        vitals.begin_ramp(at(20), Duration::ZERO);
        assert!((vitals.share(at(20)) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn signs_of_life_end_silence() {
        let start = Instant::now();
        let at = |millis: u64| start + Duration::from_millis(millis);
        let vitals = Vitals::new(start);
        assert_eq!(vitals.silence(at(300)), Duration::from_millis(300));
        vitals.note_sign(at(400));
        vitals.note_sign(at(350));
        assert_eq!(vitals.silence(at(1000)), Duration::from_millis(600));
    }
}
