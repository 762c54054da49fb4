//! Choosing engines.

use std::cmp::Reverse;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use microserving_protocol::page_hashes;
use tokio::time::Instant;

use crate::relay::TextIndex;
use crate::{Engine, PrefixIndex, Request};

/// What one running sequence costs a new request, in prompt tokens: it takes part in every step that the prompt waits for.
const TOKENS_PER_SEQUENCE: u64 = 32;

/// How engines are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlacementPolicy {
    /// Each in turn.
    RoundRobin,
    /// The one with the fewest requests in flight, in turn among equals.
    LeastLoaded,
    /// The one where this prompt's first token is nearest: fewest tokens to compute, its own uncached ones and those queued there.
    #[default]
    Prefix,
}

impl FromStr for PlacementPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "round-robin" => Ok(Self::RoundRobin),
            "least-loaded" => Ok(Self::LeastLoaded),
            "prefix" => Ok(Self::Prefix),
            _ => Err(format!("{text:?} is no placement, must be round-robin, least-loaded or prefix")),
        }
    }
}

/// Chooses engines by load and by the prefixes they probably hold.
#[derive(Debug, Default)]
pub struct Placement {
    policy: PlacementPolicy,
    /// One counter a job: with a common one, two engines that take turns at both jobs would never change places.
    decode_turn: AtomicUsize,
    prefill_turn: AtomicUsize,
    index: Mutex<PrefixIndex>,
    texts: TextIndex,
}

/// What an engine is chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Job {
    Decode,
    Prefill,
}

/// An engine that was chosen.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    pub(crate) engine: Arc<Engine>,
    /// Tokens of the prompt that it probably holds.
    pub(crate) hinted: u32,
}

impl Placement {
    /// Makes a placement that knows no prefixes yet.
    #[must_use]
    pub fn new(policy: PlacementPolicy) -> Self {
        Self { policy, ..Self::default() }
    }

    /// Chooses one of `candidates` to hold the first `end` tokens of a request; nothing if there is none.
    pub(crate) fn choose(
        &self,
        job: Job,
        candidates: &[Arc<Engine>],
        request: &Request,
        end: u32,
    ) -> Option<Choice> {
        if candidates.is_empty() {
            return None;
        }
        let held = self.held(candidates, request, end);
        self.pick(job, candidates, end, |i| held[i])
    }

    /// As [`Placement::choose`], for a request of about `num_tokens` tokens that is text as yet. `held` tells how many of them the engine
    /// of a number probably holds.
    pub(crate) fn choose_by_text(
        &self,
        candidates: &[Arc<Engine>],
        num_tokens: u32,
        held: impl Fn(u32) -> u32,
    ) -> Option<Choice> {
        self.pick(Job::Decode, candidates, num_tokens, |i| (held(candidates[i].number()), None))
    }

    /// Returns the index by which requests are placed that are text as yet.
    pub(crate) const fn texts(&self) -> &TextIndex {
        &self.texts
    }

    fn pick(
        &self,
        job: Job,
        candidates: &[Arc<Engine>],
        end: u32,
        held: impl Fn(usize) -> (u32, Option<Instant>),
    ) -> Option<Choice> {
        if candidates.is_empty() {
            return None;
        }
        // Starting each search one further makes equals take turns.
        let start = self.turn(job).fetch_add(1, Ordering::Relaxed);
        self.choose_from(start, candidates, end, held)
    }

    /// Returns what [`Placement::choose`] would choose; nobody's turn is over by that.
    pub(crate) fn peek(
        &self,
        job: Job,
        candidates: &[Arc<Engine>],
        request: &Request,
        end: u32,
    ) -> Option<Choice> {
        if candidates.is_empty() {
            return None;
        }
        let held = self.held(candidates, request, end);
        self.choose_from(self.turn(job).load(Ordering::Relaxed), candidates, end, |i| held[i])
    }

    const fn turn(&self, job: Job) -> &AtomicUsize {
        match job {
            Job::Decode => &self.decode_turn,
            Job::Prefill => &self.prefill_turn,
        }
    }

    fn choose_from(
        &self,
        start: usize,
        candidates: &[Arc<Engine>],
        end: u32,
        held: impl Fn(usize) -> (u32, Option<Instant>),
    ) -> Option<Choice> {
        let turns = (0..candidates.len()).map(|i| (start + i) % candidates.len());
        let chosen = match self.policy {
            PlacementPolicy::RoundRobin => start % candidates.len(),
            PlacementPolicy::LeastLoaded => turns.min_by_key(|&i| candidates[i].load().requests)?,
            PlacementPolicy::Prefix => turns.min_by_key(|&i| {
                let load = candidates[i].load();
                let (tokens, since) = held(i);
                let uncached = u64::from(end.saturating_sub(tokens));
                let cost = uncached + load.queued_tokens + TOKENS_PER_SEQUENCE * u64::from(load.requests);
                // After a disaggregated turn both engines hold the prompt; the one that decoded also holds the answer.
                (cost, Reverse(since))
            })?,
        };
        Some(Choice { engine: candidates[chosen].clone(), hinted: held(chosen).0 })
    }

    /// Returns for each candidate how many tokens of a request's prompt it probably holds.
    pub(crate) fn hints(&self, candidates: &[Arc<Engine>], request: &Request) -> Vec<u32> {
        self.held(candidates, request, request.len()).into_iter().map(|(tokens, _)| tokens).collect()
    }

    /// Notes that an engine holds the first `end` tokens of a request now.
    pub(crate) fn note(&self, engine: &Engine, request: &Request, end: u32) {
        let Some(page_size) = engine.page_size() else { return };
        let keys = request.placement_keys();
        let end = (end as usize).min(keys.len());
        let chain = page_hashes(request.cache_salt(), &keys[..end], page_size);
        self.index().insert(Instant::now(), engine.number(), &chain);
    }

    /// Drops what is believed of an engine's cache.
    pub(crate) fn forget(&self, engine: u32) {
        self.index().forget(engine);
        self.texts.forget(engine);
    }

    /// Returns for each candidate how many tokens of the prompt it probably holds, and since when.
    fn held(&self, candidates: &[Arc<Engine>], request: &Request, end: u32) -> Vec<(u32, Option<Instant>)> {
        let Some(page_size) = candidates.iter().find_map(|engine| engine.page_size()) else {
            return vec![(0, None); candidates.len()];
        };
        let keys = request.placement_keys();
        let end = (end as usize).min(keys.len());
        let chain = page_hashes(request.cache_salt(), &keys[..end], page_size);
        let numbers: Vec<u32> = candidates.iter().map(|engine| engine.number()).collect();
        let held = self.index().held(Instant::now(), &numbers, &chain);
        let tokens = |pages: usize| u32::try_from(pages).unwrap_or(u32::MAX).saturating_mul(page_size);
        held.into_iter().map(|held| (tokens(held.num_pages), held.last_seen)).collect()
    }

    fn index(&self) -> std::sync::MutexGuard<'_, PrefixIndex> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
