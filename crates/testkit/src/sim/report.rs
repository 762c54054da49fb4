//! What a run found.

use std::fmt;
use std::time::Duration;

/// The invariants that a run checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Invariant {
    /// I1: pages by state add up; at rest none is reserved, owned or quarantined.
    PagesAddUp,
    /// I2: page states and references are consistent, and cached pages never change.
    PagesImmutable,
    /// I3: a client's tokens are those of a single engine, in order, without gap or repetition.
    TokensExact,
    /// I4: the KV of a matchable page is that of its tokens.
    Uncontaminated,
    /// I5: one attempt of a request runs, the highest accepted; tokens are emitted once an index.
    OneAttempt,
    /// I6: everything accepted ends, and nothing of it is left.
    Ends,
    /// I7: nothing that was given up comes back to life.
    GivenUpStaysSo,
    /// D2: what is forged or out of bounds is refused.
    BadCallsRefused,
    /// I8: at rest the router counts nothing as in flight.
    LoadCounts,
    /// Nothing panicked.
    NoPanic,
}

impl Invariant {
    fn name(self) -> &'static str {
        match self {
            Self::PagesAddUp => "I1",
            Self::PagesImmutable => "I2",
            Self::TokensExact => "I3",
            Self::Uncontaminated => "I4",
            Self::OneAttempt => "I5",
            Self::Ends => "I6",
            Self::GivenUpStaysSo => "I7",
            Self::BadCallsRefused => "D2",
            Self::LoadCounts => "I8",
            Self::NoPanic => "panic",
        }
    }
}

/// Something that must not be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// What does not hold.
    pub invariant: Invariant,
    /// When it was seen, in virtual time.
    pub at: Duration,
    /// What was seen.
    pub detail: String,
}

/// Counts of what happened, to show that a run tested something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Requests answered completely.
    pub done: u32,
    /// Requests that ended with an error.
    pub failed: u32,
    /// Requests whose client went away.
    pub cancelled: u32,
    /// Attempts beyond the first.
    pub retries: u32,
    /// Tokens that clients received.
    pub tokens: u64,
    /// Tokens of the prompts that the router served.
    pub prompt_tokens: u64,
    /// Those of them that were cached.
    pub cached_tokens: u64,
    /// From arrival to the first token, summed over the requests that the router served.
    pub first_token: Duration,
    /// Tokens of KV that engines say they delivered.
    pub sent_tokens: u64,
    /// Prompt tokens found in context caches.
    pub matched_tokens: u64,
    /// Steps of engines.
    pub steps: u64,
    /// Crashes of engines.
    pub crashes: u32,
    /// Pauses of engines.
    pub pauses: u32,
    /// Partitions.
    pub cuts: u32,
    /// Deaths of the router.
    pub router_deaths: u32,
    /// Calls, answers and streams lost.
    pub lost: u32,
    /// Calls delivered twice.
    pub duplicates: u32,
    /// Calls of the stranger that were answered no.
    pub strangers_refused: u32,
}

impl Tally {
    /// Adds another run's counts.
    pub fn add(&mut self, other: &Self) {
        let Self {
            done,
            failed,
            cancelled,
            retries,
            tokens,
            prompt_tokens,
            cached_tokens,
            first_token,
            sent_tokens,
            matched_tokens,
            steps,
            crashes,
            pauses,
            cuts,
            router_deaths,
            lost,
            duplicates,
            strangers_refused,
        } = other;
        self.done += done;
        self.failed += failed;
        self.cancelled += cancelled;
        self.retries += retries;
        self.tokens += tokens;
        self.prompt_tokens += prompt_tokens;
        self.cached_tokens += cached_tokens;
        self.first_token += *first_token;
        self.sent_tokens += sent_tokens;
        self.matched_tokens += matched_tokens;
        self.steps += steps;
        self.crashes += crashes;
        self.pauses += pauses;
        self.cuts += cuts;
        self.router_deaths += router_deaths;
        self.lost += lost;
        self.duplicates += duplicates;
        self.strangers_refused += strangers_refused;
    }
}

/// The outcome of [`super::run`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The seed; run it again to see the same.
    pub seed: u64,
    /// Hash of every event in order: two runs with one seed have one hash.
    pub trace_hash: u64,
    /// What must not have been; at most a few, as the first is what matters.
    pub violations: Vec<Violation>,
    /// What happened.
    pub tally: Tally,
    /// Places where a fault could have been put; see [`super::FaultPoint`].
    pub num_points: u64,
    /// How long the run took in virtual time.
    pub virtual_time: Duration,
}

impl Report {
    /// Says whether every invariant held.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.violations.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { done, failed, cancelled, tokens, .. } = self.tally;
        write!(
            f,
            "seed {}: {done} done, {failed} failed, {cancelled} cancelled, {tokens} tokens",
            self.seed
        )?;
        for violation in &self.violations {
            let Violation { invariant, at, detail } = violation;
            write!(f, "\n  {} violated at {at:?}: {detail}", invariant.name())?;
        }
        Ok(())
    }
}
