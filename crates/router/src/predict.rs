//! What an engine will probably take: its profile, corrected by what it took lately, and what is queued there.
//!
//! ```text
//!  profile (the engine's own, or the router's, or neutral) ─┐
//!  corrections (actual / predicted, by phase) ──────────────┼─▶ Outlook ─▶ seconds ─▶ adaptive, explain, shedding, deadlines
//!  queue (tokens to prefill, sequences that decode) ────────┘
//! ```
//!
//! Each engine keeps its own [`Costs`]. An [`Outlook`] is a copy of all that matters at one moment, cheap to take and free of locks: a program
//! that weighs a hundred ways of serving a request takes one of each engine and computes.

mod costs;
mod feedback;
mod traffic;

use std::sync::Arc;
use std::time::Duration;

use microserving_cost::{Phase, Profile};

pub(crate) use self::costs::Costs;
pub use self::costs::ProfileSource;
pub(crate) use self::feedback::{PrefillTimer, StreamTimer};
pub(crate) use self::traffic::Traffic;

/// Prefill that may share an engine with decoding before predictions stop trusting the rest to be there.
const MAX_PREFILL_SHARE: f64 = 0.9;

/// What one request would see on one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prediction {
    /// Time to its first token, queued work included.
    pub ttft: Duration,
    /// Time of each token after it.
    pub tpot: Duration,
}

/// What an engine takes, and what it has to do, at one moment.
#[derive(Clone, Debug)]
pub struct Outlook {
    pub(crate) profile: Arc<Profile>,
    pub(crate) factors: Factors,
    /// Prompt tokens that wait there to be computed.
    pub queued_tokens: u64,
    /// Sequences that decode there.
    pub decoding: u32,
    /// Their tokens, over all of them.
    pub decoding_tokens: u64,
    /// The share of its time that went to prefilling lately, in `[0, 1]`.
    pub prefill_share: f64,
}

/// What predictions are multiplied by, one a phase.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Factors {
    pub(crate) prefill: f64,
    pub(crate) decode: f64,
    pub(crate) transfer: f64,
}

impl Factors {
    pub(crate) const NONE: Self = Self { prefill: 1.0, decode: 1.0, transfer: 1.0 };
}

impl Outlook {
    /// Makes the outlook of an idle engine with a profile, as a base for calculations.
    #[must_use]
    pub fn idle(profile: Arc<Profile>) -> Self {
        Self {
            profile,
            factors: Factors::NONE,
            queued_tokens: 0,
            decoding: 0,
            decoding_tokens: 0,
            prefill_share: 0.0,
        }
    }

    /// Predicts for a request of `context` tokens of which `uncached` are to be computed here. Reads nothing but this copy.
    #[must_use]
    pub fn predict(&self, uncached: u32, context: u32) -> Prediction {
        let cached = f64::from(context.saturating_sub(uncached));
        let first = self.backlog_seconds()
            + self.riding_seconds(uncached.into(), cached)
            + self.decode_seconds(0.0, 0.0);
        let step =
            self.decode_seconds(1.0, context.into()) / (1.0 - self.prefill_share.min(MAX_PREFILL_SHARE));
        Prediction { ttft: duration(first), tpot: duration(step) }
    }

    /// Returns the seconds that the queued prompt tokens will take.
    #[must_use]
    pub fn backlog_seconds(&self) -> f64 {
        /// Long enough that the fixed part of a step does not count for each prompt's every token.
        const PROMPT: f64 = 1024.0;
        let queued = self.queued_tokens as f64;
        // As prompts of a usual length, one after the other: a thousand short ones are not one long one.
        let whole = (queued / PROMPT).floor();
        whole * self.prefill_seconds(PROMPT, 0.0) + self.prefill_seconds(queued - whole * PROMPT, 0.0)
    }

    /// Returns what prefilling `new` tokens behind `cached` ones takes with nothing else in the step: *a_P*.
    #[must_use]
    pub fn prefill_seconds(&self, new: f64, cached: f64) -> f64 {
        self.factors.prefill * self.profile.prefill_seconds(new, cached)
    }

    /// Returns what prefilling `new` tokens adds to the steps of those that decode here: *σ*.
    #[must_use]
    pub fn riding_seconds(&self, new: f64, cached: f64) -> f64 {
        self.factors.prefill * self.profile.riding_seconds(new, cached, self.decoding.into())
    }

    /// Returns what a step takes with `more` sequences of `more_tokens` beside those that decode here: *τ*.
    #[must_use]
    pub fn decode_seconds(&self, more: f64, more_tokens: f64) -> f64 {
        let (sequences, tokens) =
            (f64::from(self.decoding) + more, self.decoding_tokens as f64 + more_tokens);
        self.factors.decode * self.profile.decode_seconds(sequences, tokens)
    }

    /// Returns what moving the KV of `tokens` from here takes: *t_kv*. Without any measured link, nothing.
    #[must_use]
    pub fn transfer_seconds(&self, tokens: f64) -> f64 {
        self.factors.transfer * self.profile.transfer_seconds(tokens, None).unwrap_or(0.0)
    }

    /// Returns what a prediction of a phase is multiplied by: what that phase took lately over what the profile says.
    #[must_use]
    pub const fn correction(&self, phase: Phase) -> f64 {
        match phase {
            Phase::Prefill => self.factors.prefill,
            Phase::Decode => self.factors.decode,
            Phase::Transfer => self.factors.transfer,
        }
    }
}

/// Makes a duration of predicted seconds, at most a day.
fn duration(seconds: f64) -> Duration {
    const DAY: f64 = 86_400.0;
    Duration::from_secs_f64(if seconds.is_finite() { seconds.clamp(0.0, DAY) } else { DAY })
}

#[cfg(test)]
mod tests {
    use microserving_cost::HardwareProfile;

    use super::*;

    fn h100() -> Outlook {
        let hardware = HardwareProfile::llama3_70b_fp8_h100_tp4();
        Outlook::idle(Arc::new(Profile::roofline(&hardware, &[])))
    }

    fn assert_near(value: Duration, milliseconds: f64) {
        let found = value.as_secs_f64() * 1e3;
        assert!((found / milliseconds - 1.0).abs() < 0.04, "{found} ms, not {milliseconds}");
    }

    #[test]
    fn an_idle_engine_takes_what_its_profile_says() {
        let prediction = h100().predict(3000, 3000);
        assert_near(prediction.ttft, 171.0);
        assert_near(prediction.tpot, 11.1);
    }

    #[test]
    fn queues_caches_and_corrections_count() {
        let mut outlook = h100();
        let idle = outlook.predict(3000, 3000);
        assert!(outlook.predict(100, 3000).ttft < idle.ttft / 4, "a cached prefix");
        outlook.queued_tokens = 6000;
        let queued = outlook.predict(3000, 3000);
        assert!(queued.ttft > idle.ttft + Duration::from_millis(320), "{queued:?}");
        assert_eq!(queued.tpot, idle.tpot);
        (outlook.decoding, outlook.decoding_tokens) = (64, 64 * 3000);
        assert!(outlook.predict(3000, 3000).tpot > idle.tpot);
        outlook.prefill_share = 0.5;
        let crowded = outlook.predict(3000, 3000);
        outlook.factors.prefill = 3.0;
        assert!(outlook.predict(3000, 3000).ttft > crowded.ttft * 5 / 2);
        outlook.factors.decode = f64::INFINITY;
        assert_eq!(outlook.predict(1, 1).tpot, Duration::from_secs(86_400), "never out of range");
    }
}
