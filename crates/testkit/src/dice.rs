//! Seeded chance.

use std::time::Duration;

/// A seeded generator (splitmix64): the same seed gives the same throws on every machine.
///
/// ```
/// use microserving_testkit::Dice;
/// let (mut a, mut b) = (Dice::new(3), Dice::new(3));
/// assert_eq!(a.below(100), b.below(100));
/// ```
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Starts at `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Splits off dice of its own for a part of the test, so that more throws in one part do not change another.
    #[must_use]
    pub fn split(&self, part: u64) -> Self {
        let mut dice = Self(self.0 ^ part.wrapping_mul(0xd6e8_feb8_6659_fd93));
        dice.throw();
        dice
    }

    /// Returns 64 bits.
    pub fn throw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `bound`; 0 if the bound is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.throw().checked_rem(bound).unwrap_or(0)
    }

    /// Returns a number in `[low, high]`.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// Returns true with the given probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && ((self.throw() >> 11) as f64) < probability * (1u64 << 53) as f64
    }

    /// Returns one of `all`.
    ///
    /// # Panics
    /// If there is none.
    pub fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }

    /// Returns whole milliseconds in `[low, high]`.
    pub fn millis(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_millis(self.range(low, high))
    }

    /// Returns a time in `[low, high]`, in whole milliseconds.
    pub fn time(&mut self, low: Duration, high: Duration) -> Duration {
        self.millis(low.as_millis() as u64, high.as_millis() as u64)
    }
}
