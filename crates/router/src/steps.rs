//! How long one step of a program may take.
//!
//! A request has one deadline for all of its calls. Each step has an earlier one, so that an engine that hangs costs a step and not the
//! whole request: there is time left to try another engine.

use std::time::Duration;

use tokio::time::Instant;

/// Added to every prediction.
const GRACE: Duration = Duration::from_secs(1);
/// How many times longer than predicted a step may take.
const PATIENCE: u32 = 4;

/// The bounds of steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Steps {
    /// What a step may take where nothing is predicted.
    pub(crate) unpredicted: Duration,
}

impl Steps {
    /// Returns when a step that begins now must be over: four times what is predicted and a second, but not after the request's deadline.
    pub(crate) fn until(
        self,
        now: Instant,
        predicted: Option<Duration>,
        deadline: Option<Instant>,
    ) -> Option<Instant> {
        let allowance =
            predicted.map_or(self.unpredicted, |time| time.saturating_mul(PATIENCE).saturating_add(GRACE));
        match (now.checked_add(allowance), deadline) {
            (Some(step), Some(deadline)) => Some(step.min(deadline)),
            (step, deadline) => step.or(deadline),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_ends_before_the_request_does() {
        let now = Instant::now();
        let s = Duration::from_secs;
        let steps = Steps { unpredicted: s(60) };
        for (predicted, deadline, until) in [
            (None, None, Some(60)),
            (None, Some(600), Some(60)),
            (None, Some(6), Some(6)),
            (Some(2), Some(600), Some(9)),
            (Some(0), None, Some(1)),
            (Some(300), Some(600), Some(600)),
        ] {
            let deadline = deadline.map(|deadline| now + s(deadline));
            assert_eq!(steps.until(now, predicted.map(s), deadline), until.map(|until| now + s(until)));
        }
        let never = Steps { unpredicted: Duration::MAX };
        assert_eq!(never.until(now, None, Some(now + s(1))), Some(now + s(1)));
    }
}
