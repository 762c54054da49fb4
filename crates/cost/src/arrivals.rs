//! How often requests come.

use std::time::Duration;

/// Arrivals that the prior counts for.
const PRIOR: f64 = 10.0;
/// What each arrival's weight is multiplied by at the next one.
const DECAY: f64 = 0.98;

/// An estimate of the arrival rate: weighted arrivals over weighted gaps, with a prior.
///
/// ```text
/// rate = (10 + sum w) / (10 * 2 S + sum w * gap)         S: seconds of service; w: 0.98 to the power of the arrivals since
/// ```
///
/// The prior is ten arrivals, each at half of what one server can take. Without it a mean of gaps follows the first few of them, and three
/// requests that happen to come together look like overload.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ArrivalRate {
    weights: f64,
    weighted_gaps: f64,
    last: Option<Duration>,
}

impl ArrivalRate {
    /// Takes an arrival; `now` counts from an origin of the caller's choice and is never taken to go back.
    pub fn arrive(&mut self, now: Duration) {
        if let Some(last) = self.last {
            self.weights = self.weights * DECAY + 1.0;
            self.weighted_gaps = self.weighted_gaps * DECAY + now.saturating_sub(last).as_secs_f64();
        }
        self.last = Some(self.last.map_or(now, |last| last.max(now)));
    }

    /// Returns arrivals a second, where serving one takes `service_seconds`.
    #[must_use]
    pub fn per_second(&self, service_seconds: f64) -> f64 {
        let prior = PRIOR * 2.0 * service_seconds.max(1e-6);
        (PRIOR + self.weights) / (prior + self.weighted_gaps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVICE: f64 = 0.171;

    #[test]
    fn the_prior_is_half_of_what_one_server_can_take() {
        assert!((ArrivalRate::default().per_second(SERVICE) * SERVICE - 0.5).abs() < 1e-12);
    }

    #[test]
    fn a_few_early_arrivals_do_not_overturn_it() {
        let mut rate = ArrivalRate::default();
        (0..4).for_each(|n| rate.arrive(Duration::from_millis(n)));
        assert!(rate.per_second(SERVICE) * SERVICE < 0.7);
    }

    #[test]
    fn it_finds_the_rate_and_follows_its_change() {
        let mut rate = ArrivalRate::default();
        let mut now = Duration::ZERO;
        for per_second in [4.0, 1.0, 6.4] {
            for _ in 0..300 {
                now += Duration::from_secs_f64(1.0 / per_second);
                rate.arrive(now);
            }
            let found = rate.per_second(SERVICE);
            assert!((found / per_second - 1.0).abs() < 0.2, "{found}, not {per_second}");
        }
        rate.arrive(Duration::ZERO);
        assert!(rate.per_second(SERVICE).is_finite(), "time that goes back is no gap");
    }
}
