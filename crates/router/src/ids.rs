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
            Some(seed) => mix(seed.wrapping_add(count.wrapping_mul(0x9e37_79b9_7f4a_7c15))),
            None => self.keys.hash_one(count),
        }
    }

    /// Mints a name: `prefix` and 32 hex digits.
    pub fn name(&self, prefix: &str) -> String {
        format!("{prefix}{:016x}{:016x}", self.draw(), self.draw())
    }
}

/// SplitMix64's finaliser (Steele, Lea, Flood 2014).
const fn mix(mut z: u64) -> u64 {
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
