//! What may go wrong on a simulated link, and the seeded numbers that decide it.

use std::time::Duration;

/// The faults of a [`LoopbackHub`](crate::LoopbackHub). The default has none.
///
/// All times are of the clock given to `poll`, which every peer of a hub with faults must share. The same seed and the same
/// calls give the same run.
#[derive(Clone, Debug, PartialEq)]
pub struct LoopbackFaults {
    /// Where the numbers start.
    pub seed: u64,
    /// The shortest time that a message or a written run is under way.
    pub min_delay: Duration,
    /// The longest. Control messages between two peers keep their order; the runs of a channel do not.
    pub max_delay: Duration,
    /// The longest time from a peer's crash to its exit being certain. Until then what it wrote still lands.
    pub max_fence_delay: Duration,
    /// How likely a run is lost and its writer with it: the claim ends, the writer says so.
    pub lose_writer: f64,
    /// How likely a run lands with one bit turned.
    pub corrupt: f64,
}

impl Default for LoopbackFaults {
    fn default() -> Self {
        Self {
            seed: 0,
            min_delay: Duration::ZERO,
            max_delay: Duration::ZERO,
            max_fence_delay: Duration::ZERO,
            lose_writer: 0.0,
            corrupt: 0.0,
        }
    }
}

/// A small generator (splitmix64): good enough to choose faults, the same everywhere.
#[derive(Clone, Debug)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn chance(&mut self, probability: f64) -> bool {
        // 53 bits: as many as an f64 holds exactly.
        probability > 0.0 && ((self.next() >> 11) as f64) < probability * (1u64 << 53) as f64
    }

    pub(super) fn between(&mut self, low: Duration, high: Duration) -> Duration {
        let Some(span) = high.checked_sub(low).filter(|span| !span.is_zero()) else { return low };
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        low + Duration::from_nanos(self.next() % nanos.saturating_add(1).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dice_are_fair_enough_and_repeatable() {
        let roll = |seed| {
            let mut dice = Dice::new(seed);
            (0..10_000).filter(|_| dice.chance(0.25)).count()
        };
        assert_eq!(roll(1), roll(1));
        assert!((2_300..2_700).contains(&roll(1)), "{}", roll(1));
        assert!(!Dice::new(3).chance(0.0) && Dice::new(3).chance(1.0));
        let mut dice = Dice::new(5);
        let (low, high) = (Duration::from_millis(2), Duration::from_millis(5));
        assert!((0..1000).all(|_| (low..=high).contains(&dice.between(low, high))));
        assert_eq!(dice.between(high, low), high, "an upside-down span is its first end");
    }
}
