//! How many attempts may be made again: a tenth of the requests, so that a cluster in trouble is not buried by its own retries.

use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

/// Attempts that each request adds.
const SHARE: f64 = 0.1;
/// Attempts that each second adds, so that a quiet router can make some too.
const PER_SECOND: f64 = 10.0;
/// Attempts that can be saved up: an engine with hundreds of streams may die at once.
const MOST: f64 = 1024.0;

/// How many attempts may be made again.
#[derive(Debug)]
pub struct RetryBudget {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    left: f64,
    at: Instant,
}

impl RetryBudget {
    /// Makes a full one.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { state: Mutex::new(State { left: MOST, at: now }) }
    }

    /// Notes a request.
    pub fn deposit(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.left = (state.left + SHARE).min(MOST);
    }

    /// Takes one attempt; says whether there was one left.
    pub fn try_spend(&self, now: Instant) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = now.saturating_duration_since(state.at).as_secs_f64();
        state.at = now;
        state.left = (state.left + passed * PER_SECOND).min(MOST);
        let is_left = state.left >= 1.0;
        if is_left {
            state.left -= 1.0;
        }
        is_left
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_tenth_of_the_requests_and_some_a_second() {
        let start = Instant::now();
        let budget = RetryBudget::new(start);
        let spend = |now| (0..10_000).take_while(|_| budget.try_spend(now)).count();
        assert_eq!(spend(start), 1024, "what was saved up");
        assert_eq!(spend(start), 0);
        for _ in 0..1001 {
            budget.deposit();
        }
        assert_eq!(spend(start), 100);
        assert_eq!(spend(start + Duration::from_millis(2050)), 20);
        assert_eq!(spend(start + Duration::from_secs(3600)), 1024, "not more than can be saved up");
    }
}
