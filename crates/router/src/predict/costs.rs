//! What the router knows of one engine's pace.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use microserving_cost::{Correction, Phase, Profile};
use tokio::time::Instant;

use super::{Factors, Outlook};

/// How far what is seen may be from a measured profile: another load, other neighbours on the machine.
const MEASURED_BOUND: f64 = 16.0;
/// How far it may be from a neutral one, which knows nothing.
const NEUTRAL_BOUND: f64 = 10_000.0;
/// What is shorter than this is not told from the network's share of it.
const SHORTEST: f64 = 0.5e-3;
/// How long prefilling is remembered as a share of an engine's time.
const MEMORY: Duration = Duration::from_secs(5);

/// Where an engine's profile came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProfileSource {
    /// The engine itself, which was calibrated.
    Engine,
    /// The router's configuration.
    Router,
    /// Nowhere: corrections alone say how long things take.
    #[default]
    Neutral,
}

impl ProfileSource {
    /// Returns the name that operators see.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Router => "router",
            Self::Neutral => "neutral",
        }
    }
}

/// Profile, corrections and decoding load of one engine.
#[derive(Debug)]
pub(crate) struct Costs {
    learned: Mutex<Learned>,
    decoding: AtomicU32,
    decoding_tokens: AtomicU64,
}

#[derive(Debug)]
struct Learned {
    profile: Arc<Profile>,
    source: ProfileSource,
    prefill: Correction,
    decode: Correction,
    transfer: Correction,
    /// Seconds of prefill a second, decaying since `share_at`.
    share: f64,
    share_at: Option<Instant>,
}

impl Learned {
    fn new(profile: Arc<Profile>, source: ProfileSource) -> Self {
        let bound = if source == ProfileSource::Neutral { NEUTRAL_BOUND } else { MEASURED_BOUND };
        let none = Correction::new(bound);
        Self { profile, source, prefill: none, decode: none, transfer: none, share: 0.0, share_at: None }
    }

    fn share_now(&self, now: Instant) -> f64 {
        let Some(at) = self.share_at else { return 0.0 };
        let age = now.saturating_duration_since(at).as_secs_f64() / MEMORY.as_secs_f64();
        (self.share * (-age).exp()).min(1.0)
    }
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            learned: Mutex::new(Learned::new(neutral(), ProfileSource::Neutral)),
            decoding: AtomicU32::new(0),
            decoding_tokens: AtomicU64::new(0),
        }
    }
}

/// The neutral profile, made once.
fn neutral() -> Arc<Profile> {
    static NEUTRAL: OnceLock<Arc<Profile>> = OnceLock::new();
    NEUTRAL.get_or_init(|| Arc::new(Profile::neutral())).clone()
}

impl Costs {
    /// Takes a profile; none is the neutral one. What was learned stays if the profile is the same.
    pub(crate) fn set_profile(&self, profile: Option<Arc<Profile>>, source: ProfileSource) {
        let (profile, source) = match profile {
            Some(profile) => (profile, source),
            None => (neutral(), ProfileSource::Neutral),
        };
        self.with(|learned| {
            if learned.source != source || *learned.profile != *profile {
                *learned = Learned::new(profile, source);
            }
        });
    }

    pub(crate) fn source(&self) -> ProfileSource {
        self.with(|learned| learned.source)
    }

    /// Returns all that matters now, with so many tokens queued.
    pub(crate) fn outlook(&self, now: Instant, queued_tokens: u64) -> Outlook {
        let decoding = self.decoding.load(Ordering::Relaxed);
        let decoding_tokens = self.decoding_tokens.load(Ordering::Relaxed);
        self.with(|learned| Outlook {
            profile: learned.profile.clone(),
            factors: Factors {
                prefill: learned.prefill.factor(),
                decode: learned.decode.factor(),
                transfer: learned.transfer.factor(),
            },
            queued_tokens,
            decoding,
            decoding_tokens,
            prefill_share: learned.share_now(now),
        })
    }

    /// Takes what a phase took and what the profile alone says that it takes.
    pub(crate) fn observe(&self, phase: Phase, actual_seconds: f64, predicted_seconds: f64) {
        if actual_seconds < SHORTEST {
            return;
        }
        self.with(|learned| {
            let correction = match phase {
                Phase::Prefill => &mut learned.prefill,
                Phase::Decode => &mut learned.decode,
                Phase::Transfer => &mut learned.transfer,
            };
            correction.observe(actual_seconds, predicted_seconds);
        });
    }

    /// Takes what a step took that all who decode here were in.
    pub(crate) fn observe_step(&self, actual_seconds: f64) {
        let decoding = f64::from(self.decoding.load(Ordering::Relaxed));
        let tokens = self.decoding_tokens.load(Ordering::Relaxed) as f64;
        let predicted = self.with(|learned| learned.profile.decode_seconds(decoding, tokens));
        self.observe(Phase::Decode, actual_seconds, predicted);
    }

    /// Notes that the engine has spent so long on a prefill.
    pub(crate) fn note_prefill(&self, now: Instant, seconds: f64) {
        self.with(|learned| {
            learned.share = learned.share_now(now) + seconds.max(0.0) / MEMORY.as_secs_f64();
            learned.share_at = Some(now);
        });
    }

    /// Counts a sequence of so many tokens as decoding.
    pub(crate) fn begin_decoding(&self, tokens: u32) {
        self.decoding.fetch_add(1, Ordering::Relaxed);
        self.decoding_tokens.fetch_add(tokens.into(), Ordering::Relaxed);
    }

    /// Takes one off again.
    pub(crate) fn end_decoding(&self, tokens: u32) {
        self.decoding.fetch_sub(1, Ordering::Relaxed);
        self.decoding_tokens.fetch_sub(tokens.into(), Ordering::Relaxed);
    }

    fn with<T>(&self, f: impl FnOnce(&mut Learned) -> T) -> T {
        f(&mut self.learned.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_is_seen_corrects_what_is_predicted() {
        let costs = Costs::default();
        let now = Instant::now();
        let before = costs.outlook(now, 0);
        assert_eq!((costs.source(), before.prefill_seconds(1000.0, 0.0)), (ProfileSource::Neutral, 0.11));
        for _ in 0..20 {
            costs.observe(Phase::Prefill, 0.22, 0.11);
            costs.observe(Phase::Decode, 0.0001, 0.01);
        }
        let after = costs.outlook(now, 0);
        assert!((after.prefill_seconds(1000.0, 0.0) - 0.22).abs() < 1e-9);
        assert!(
            (after.correction(Phase::Decode) - 1.0).abs() < 1e-9,
            "too short to be told from the network"
        );

        let profile = Arc::new(Profile::neutral());
        costs.set_profile(Some(profile.clone()), ProfileSource::Engine);
        assert!((costs.outlook(now, 0).correction(Phase::Prefill) - 1.0).abs() < 1e-9, "a new profile");
        costs.observe(Phase::Prefill, 0.22, 0.11);
        costs.set_profile(Some(profile), ProfileSource::Engine);
        assert!((costs.outlook(now, 0).correction(Phase::Prefill) - 2.0).abs() < 1e-9, "the same one");
        costs.set_profile(None, ProfileSource::Router);
        assert_eq!(costs.source(), ProfileSource::Neutral);
    }

    #[tokio::test(start_paused = true)]
    async fn prefilling_is_a_share_of_lately() {
        let costs = Costs::default();
        let share = || costs.outlook(Instant::now(), 0).prefill_share;
        assert_eq!(share(), 0.0);
        for _ in 0..100 {
            tokio::time::advance(Duration::from_millis(200)).await;
            costs.note_prefill(Instant::now(), 0.1);
        }
        assert!((share() - 0.5).abs() < 0.05, "{}", share());
        tokio::time::advance(Duration::from_secs(30)).await;
        assert!(share() < 0.01);
        (0..100).for_each(|_| costs.note_prefill(Instant::now(), 1.0));
        assert!(share() <= 1.0);
    }
}
