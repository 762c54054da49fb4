//! How far a prediction is off, followed as it is seen.

/// What a prediction is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Computing a prompt.
    Prefill,
    /// Steps of one token a sequence.
    Decode,
    /// Moving KV.
    Transfer,
}

impl Phase {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Prefill, Self::Decode, Self::Transfer];

    /// Returns the name used in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Transfer => "transfer",
        }
    }
}

/// The share that one observation has of the mean, once there are many.
const WEIGHT: f64 = 0.05;
/// How far one observation may lie from the mean, as a logarithm: one that waited for something else must not count for many.
const REACH: f64 = 1.0;

/// A running mean of actual over predicted, between bounds.
///
/// The mean is one of logarithms, so that twice and half as long cancel out. The first observations count as much as all before them
/// together, which is how a profile that is merely a guess is soon left behind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Correction {
    log_ratio: f64,
    log_bound: f64,
    observations: u32,
}

impl Correction {
    /// Makes a correction by nothing that will stay within `[1 / bound, bound]`; a bound below 1 is taken as 1.
    #[must_use]
    pub fn new(bound: f64) -> Self {
        Self { log_ratio: 0.0, log_bound: bound.max(1.0).ln(), observations: 0 }
    }

    /// Takes what something took and what it was predicted to take before any correction. What is no time changes nothing.
    pub fn observe(&mut self, actual_seconds: f64, predicted_seconds: f64) {
        let log_ratio = (actual_seconds / predicted_seconds).ln();
        if !log_ratio.is_finite() {
            return;
        }
        self.observations = self.observations.saturating_add(1);
        let weight = (1.0 / f64::from(self.observations)).max(WEIGHT);
        let mut away = log_ratio - self.log_ratio;
        if self.observations > 4 {
            away = away.clamp(-REACH, REACH);
        }
        self.log_ratio = (self.log_ratio + weight * away).clamp(-self.log_bound, self.log_bound);
    }

    /// Returns what to multiply a prediction by.
    #[must_use]
    pub fn factor(&self) -> f64 {
        self.log_ratio.exp()
    }

    /// Returns how many observations it rests on.
    #[must_use]
    pub const fn observations(&self) -> u32 {
        self.observations
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_settles_on_the_ratio_from_any_guess() {
        for ratio in [0.02, 0.9, 1.0, 3.0, 70.0] {
            let mut correction = Correction::new(100.0);
            assert!((correction.factor() - 1.0).abs() < 1e-12);
            for round in 0..100 {
                let noise = if round % 2 == 0 { 1.1 } else { 1.0 / 1.1 };
                correction.observe(0.01 * ratio * noise, 0.01);
            }
            assert!((correction.factor() / ratio - 1.0).abs() < 0.05, "{ratio}: {}", correction.factor());
            assert_eq!(correction.observations(), 100);
        }
    }

    #[test]
    fn one_long_wait_counts_little_and_a_lasting_change_counts() {
        let mut correction = Correction::new(1000.0);
        (0..50).for_each(|_| correction.observe(1.0, 1.0));
        correction.observe(500.0, 1.0);
        assert!(correction.factor() < 1.06, "{}", correction.factor());
        (0..100).for_each(|_| correction.observe(2.0, 1.0));
        assert!((correction.factor() - 2.0).abs() < 0.1, "{}", correction.factor());
    }

    #[test]
    fn it_is_bounded_and_deaf_to_nonsense() {
        let mut correction = Correction::new(4.0);
        (0..50).for_each(|_| correction.observe(100.0, 1.0));
        assert!((correction.factor() - 4.0).abs() < 1e-9);
        (0..200).for_each(|_| correction.observe(1.0, 100.0));
        assert!((correction.factor() - 0.25).abs() < 1e-9);
        let before = correction;
        for (actual, predicted) in
            [(0.0, 1.0), (1.0, 0.0), (f64::NAN, 1.0), (-1.0, 1.0), (f64::INFINITY, 1.0)]
        {
            correction.observe(actual, predicted);
        }
        assert_eq!(correction, before);
    }
}
