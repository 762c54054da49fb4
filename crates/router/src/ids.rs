//! Where names and seeds come from.

use std::sync::atomic::{AtomicU64, Ordering};

/// A source of random numbers: the system's, or a counted one that makes tests and simulations repeatable.
#[derive(Debug, Default)]
pub struct Randomness {
    seed: Option<u64>,
    drawn: AtomicU64,
}

impl Randomness {
    /// Draws from the operating system.
    #[must_use]
    pub fn system() -> Self {
        Self::default()
    }

    /// Draws a fixed sequence. Names then repeat from run to run, so it is not for serving.
    #[must_use]
    pub const fn seeded(seed: u64) -> Self {
        Self { seed: Some(seed), drawn: AtomicU64::new(0) }
    }

    /// Draws 64 bits.
    pub fn draw(&self) -> u64 {
        let count = self.drawn.fetch_add(1, Ordering::Relaxed);
        let seed = match self.seed {
            Some(seed) => seed,
            None => match getrandom::u64() {
                Ok(number) => return number,
                // No entropy source: names stay unique within this process, which is all that correctness needs.
                Err(_) => std::ptr::from_ref(self).addr() as u64,
            },
        };
        mix(seed.wrapping_add(count.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
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
