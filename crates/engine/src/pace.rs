//! How many prompt tokens a step may take, so that it ends in time.
//!
//! A step cannot be interrupted: while it runs no stream yields, and nothing that arrives is answered. A device that takes seconds for a
//! batch of 512 tokens therefore gets smaller ones. How small is learned from what steps took, since nobody else knows.

use std::time::Duration;

/// Fewer prompt tokens say nothing of what a token takes: the fixed part of a step outweighs them.
const TELLING: u32 = 8;
/// What one step counts for in the means.
const WEIGHT: f64 = 0.3;

/// Learns what a token takes, and says how many fit.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    /// How long a step may take; `None` is as long as it likes.
    longest: Option<f64>,
    /// The smallest budget, so that a prefill always advances.
    least: u32,
    /// What was planned for the step that is not yet reported.
    planned: Option<(u32, u32)>,
    /// Seconds of a step that only decodes.
    decode_seconds: Option<f64>,
    /// Seconds of a prompt token.
    token_seconds: Option<f64>,
    /// The most that is tried next: twice what was seen to work, so that the first long prompt is no shock.
    trusted: u32,
}

impl Pace {
    pub(crate) fn new(longest: Option<Duration>, least: u32) -> Self {
        let longest = longest.map(|longest| longest.as_secs_f64());
        Self { longest, least, planned: None, decode_seconds: None, token_seconds: None, trusted: 2 * least }
    }

    /// Returns how many prompt tokens a step may take that could take `most`.
    pub(crate) fn limit(&self, most: u32, decodes: u32) -> u32 {
        let Some(longest) = self.longest else { return most };
        let decode = if decodes > 0 { self.decode_seconds.unwrap_or(0.0) } else { 0.0 };
        let fits = match self.token_seconds {
            // Not a number only if both are 0, and then nothing needs a limit.
            Some(seconds) => ((longest - decode) / seconds).max(0.0),
            None => f64::INFINITY,
        };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and most")]
        let fits = fits.min(f64::from(most)) as u32;
        fits.min(self.trusted).max(self.least).min(most)
    }

    /// Notes what the next step computes.
    pub(crate) fn planned(&mut self, prefill: u32, decodes: u32) {
        self.planned = Some((prefill, decodes));
    }

    /// Takes how long the planned step took.
    pub(crate) fn took(&mut self, time: Duration) {
        let (Some(_), Some((prefill, decodes))) = (self.longest, self.planned.take()) else { return };
        let seconds = time.as_secs_f64();
        if prefill == 0 {
            mix(&mut self.decode_seconds, seconds);
        } else if prefill >= TELLING {
            let decode = if decodes > 0 { self.decode_seconds.unwrap_or(0.0) } else { 0.0 };
            // A step that took less than one without a prefill was a quick one, not a free one.
            let spent = (seconds - decode).max(seconds / 10.0);
            mix(&mut self.token_seconds, spent / f64::from(prefill));
            self.trusted = self.trusted.max(prefill.saturating_mul(2));
        }
    }
}

fn mix(mean: &mut Option<f64>, seconds: f64) {
    *mean = Some(match *mean {
        None => seconds,
        // What is slower than thought is believed at once: a step too long is worse than one too short.
        Some(mean) if seconds > mean => mean + 2.0 * WEIGHT * (seconds - mean),
        Some(mean) => mean + WEIGHT * (seconds - mean),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs prefills on a device of so many microseconds a step and a token; returns budgets and the longest step after the first few.
    fn run(pace: &mut Pace, step: u64, token: u64, decodes: u32) -> (Vec<u32>, Duration) {
        let mut budgets = Vec::new();
        let mut longest = Duration::ZERO;
        for round in 0..40 {
            let budget = pace.limit(512, decodes);
            pace.planned(budget, decodes);
            let time = Duration::from_micros(step + token * u64::from(budget));
            pace.took(time);
            if round > 5 {
                longest = longest.max(time);
            }
            budgets.push(budget);
        }
        (budgets, longest)
    }

    #[test]
    fn steps_end_in_time_on_devices_of_any_speed() {
        for (step, token) in [(500, 10), (5_000, 500), (1_000, 2_000), (20_000, 100)] {
            let mut pace = Pace::new(Some(Duration::from_millis(100)), 16);
            let (budgets, longest) = run(&mut pace, step, token, 0);
            assert!(longest <= Duration::from_millis(105), "{step} {token}: {longest:?}");
            let fits = (100_000 - step) / token;
            let last = u64::from(budgets[39]);
            assert!(
                last <= 512 && (last == 512 || last * 10 >= fits * 7),
                "{step} {token}: {last} of {fits}"
            );
            assert_eq!(budgets[0], 32, "the first prefill is careful");
        }
    }

    #[test]
    fn a_device_that_is_too_slow_still_advances() {
        let mut pace = Pace::new(Some(Duration::from_millis(100)), 16);
        let (budgets, _) = run(&mut pace, 500_000, 50_000, 0);
        assert_eq!(budgets[39], 16);
        assert_eq!(pace.limit(4, 0), 4, "and never takes more than there may be");
    }

    #[test]
    fn decodes_take_their_part() {
        let mut pace = Pace::new(Some(Duration::from_millis(100)), 16);
        run(&mut pace, 1_000, 1_000, 0);
        let alone = pace.limit(512, 0);
        for _ in 0..10 {
            pace.planned(0, 4);
            pace.took(Duration::from_millis(60));
        }
        let beside = pace.limit(512, 4);
        assert!(beside < alone / 2 && beside >= 16, "{beside} of {alone}");
        assert_eq!(pace.limit(512, 0), alone);
    }

    #[test]
    fn without_a_limit_nothing_changes() {
        let mut pace = Pace::new(None, 16);
        let (budgets, _) = run(&mut pace, 500_000, 50_000, 3);
        assert!(budgets.iter().all(|budget| *budget == 512));
        // A few tokens say nothing.
        let mut pace = Pace::new(Some(Duration::from_millis(100)), 16);
        pace.planned(2, 0);
        pace.took(Duration::from_secs(1));
        assert_eq!(pace.limit(512, 0), 32);
    }
}
