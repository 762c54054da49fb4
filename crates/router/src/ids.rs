//! Where names and seeds come from.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// A source of random numbers: one that the system has keyed, or a counted one that makes tests and simulations repeatable.
#[derive(Debug, Default)]
pub struct Randomness {
    seed: Option<u64>,
    /// The system's keys: who sees some numbers cannot tell the next.
    keys: RandomState,
    drawn: AtomicU64,
}

impl Randomness {
    /// Draws by keys of the operating system, which costs no call to it each time.
    #[must_use]
    pub fn system() -> Self {
        Self::default()
    }

    /// Draws a fixed sequence. Names then repeat from run to run, so it is not for serving.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self { seed: Some(seed), ..Self::default() }
    }

    /// Draws 64 bits.
    pub fn draw(&self) -> u64 {
        let count = self.drawn.fetch_add(1, Ordering::Relaxed);
        match self.seed {
            Some(seed) => mix(seed.wrapping_add(count.wrapping_mul(STEP))),
            None => self.keys.hash_one(count),
        }
    }

    /// Mints a name: `prefix` and 32 hex digits.
    pub fn name(&self, prefix: &str) -> String {
        format!("{prefix}{:016x}{:016x}", self.draw(), self.draw())
    }
}

/// Numbers for choices that need be neither secret nor unique: SplitMix64, shared by all who draw.
#[derive(Debug)]
pub(crate) struct Draws(AtomicU64);

impl Clone for Draws {
    /// Copies what comes next: the copy draws the same numbers, and takes none away.
    fn clone(&self) -> Self {
        Self(AtomicU64::new(self.0.load(Ordering::Relaxed)))
    }
}

impl Draws {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    pub(crate) fn draw(&self) -> u64 {
        mix(self.0.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP))
    }

    /// Draws one of `0..bound`.
    pub(crate) fn below(&self, bound: usize) -> usize {
        ((u128::from(self.draw()) * bound as u128) >> 64) as usize
    }

    /// Draws a number in [0, 1).
    pub(crate) fn fraction(&self) -> f64 {
        (self.draw() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// SplitMix64's step, the golden ratio in 64 bits.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's finaliser (Steele, Lea, Flood 2014).
pub(crate) const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_repeat_and_seeded_ones_do_from_run_to_run() {
        let system = Randomness::system();
        assert_ne!(system.name("cmpl-"), system.name("cmpl-"));
        let (a, b) = (Randomness::seeded(7), Randomness::seeded(7));
        assert_eq!((a.name("x"), a.draw()), (b.name("x"), b.draw()));
        assert_ne!(a.draw(), a.draw());
        assert_eq!(a.name("cmpl-").len(), 37);
    }
}
