//! What an engine is told when it is made.

use std::time::Duration;

use microserving_protocol::{ClusterKey, EngineId, Incarnation};

use crate::EngineError;

/// How an engine serves: budgets, bounds and times.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// The engine's name, unique in the cluster.
    pub engine_id: EngineId,
    /// Pages of the KV region.
    pub num_pages: u32,
    /// Tokens computed in a step at most; each decode is one, the rest goes to prefill chunks.
    pub max_batch_tokens: u32,
    /// How long a step should take at most: prefill chunks are cut to fit, by what steps before took ([`crate::Engine::note_step`]).
    /// `None` is as long as it likes.
    pub max_step: Option<Duration>,
    /// Sequences prefilled or decoded at a time.
    pub max_running: u32,
    /// Sequences that may wait for their first step; more are refused. As many may be received, and as many be sent.
    pub max_waiting: u32,
    /// How long a sequence may wait for its first step before it is refused after all.
    pub max_wait: Duration,
    /// Choices that one `start_generate` may ask for.
    pub max_choices: u32,
    /// How long a reservation stands without a sign of life, and a finished transfer is waited for.
    pub lease: Duration,
    /// What is told to callers that are refused for want of room.
    pub retry_after: Duration,
    /// A waiting sequence gains one level of priority in this time, so that none waits for ever.
    pub aging: Duration,
    /// The share of all pages that may be quarantined before `prep_recv` is refused.
    pub quarantine_cap: f32,
    /// How long the answers and the token log of an ended request are kept for repeated calls.
    pub tombstone_ttl: Duration,
    /// Ended requests kept at most.
    pub max_tombstones: usize,
    /// Tokens in the logs of ended requests kept at most, over all of them.
    pub max_logged_tokens: usize,
    /// Context-cache events kept for followers; those who fall behind get a snapshot.
    pub kv_event_log: usize,
    /// Calls that may be queued at the thread's door.
    pub command_queue: usize,
    /// Preemptions after which a sequence is the last to be preempted again.
    pub max_preemptions: u32,
    /// Check every page invariant after each step. Slow; on in tests.
    pub check_invariants: bool,
}

impl EngineConfig {
    /// Returns the defaults for an engine of `num_pages` pages.
    #[must_use]
    pub fn new(engine_id: impl Into<EngineId>, num_pages: u32) -> Self {
        Self {
            engine_id: engine_id.into(),
            num_pages,
            max_batch_tokens: 512,
            max_step: None,
            max_running: 64,
            max_waiting: 1024,
            max_wait: Duration::from_secs(120),
            max_choices: 16,
            lease: Duration::from_secs(30),
            retry_after: Duration::from_secs(1),
            aging: Duration::from_secs(5),
            quarantine_cap: 0.05,
            tombstone_ttl: Duration::from_secs(60),
            max_tombstones: 4096,
            max_logged_tokens: 1 << 20,
            kv_event_log: 65_536,
            command_queue: 1024,
            max_preemptions: 2,
            check_invariants: cfg!(debug_assertions),
        }
    }

    /// Checks the bounds.
    ///
    /// # Errors
    /// [`EngineError::InvalidField`] naming the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), EngineError> {
        let bound = |field: &'static str, holds: bool, reason: &str| {
            if holds { Ok(()) } else { Err(EngineError::InvalidField { field, reason: reason.to_owned() }) }
        };
        bound("engine_id", !self.engine_id.as_str().is_empty(), "must not be empty")?;
        bound("num_pages", self.num_pages > 0, "must be at least 1")?;
        bound("max_batch_tokens", self.max_batch_tokens > 0, "must be at least 1")?;
        bound("max_step", self.max_step != Some(Duration::ZERO), "must be longer than 0")?;
        bound("max_running", self.max_running > 0, "must be at least 1")?;
        bound("max_waiting", self.max_waiting > 0, "must be at least 1")?;
        bound("max_choices", (1..=1024).contains(&self.max_choices), "must be in [1, 1024]")?;
        bound("lease", !self.lease.is_zero(), "must be longer than 0")?;
        bound("max_wait", !self.max_wait.is_zero(), "must be longer than 0")?;
        bound("aging", !self.aging.is_zero(), "must be longer than 0")?;
        bound("quarantine_cap", (0.0..=1.0).contains(&self.quarantine_cap), "must be in [0, 1]")?;
        bound("max_tombstones", self.max_tombstones > 0, "must be at least 1")?;
        bound("kv_event_log", self.kv_event_log > 0, "must be at least 1")?;
        bound("command_queue", self.command_queue > 0, "must be at least 1")
    }
}

/// What an engine cannot make up itself: it has no random numbers and no clock.
#[derive(Clone, Debug)]
pub struct Entropy {
    /// Drawn at boot; tells this run of the engine from every other.
    pub incarnation: Incarnation,
    /// Signs and verifies addresses.
    pub cluster_key: ClusterKey,
    /// Whether peers have the same key, so that their addresses can be verified before anything is computed for them.
    pub key_is_shared: bool,
    /// What minted sequence ids are derived from.
    pub mint_seed: u64,
}
