//! What requests really took, told to the engine's corrections.

use microserving_cost::Phase;
use microserving_protocol::{RelayUsage, RemoteSendResponse, Usage};
use tokio::time::Instant;

use super::Outlook;
use crate::Engine;
use crate::engine::InFlight;

/// Chunks between two looks at a stream's pace.
const CHUNKS_PER_LOOK: u32 = 8;

/// A prefill that is being timed.
#[derive(Debug)]
pub(crate) struct PrefillTimer {
    began: Instant,
    outlook: Outlook,
    /// Prompt tokens that are expected to be computed.
    expected: u64,
    /// Others were queued before it, so that its time is not its own.
    behind_others: bool,
    elapsed: Option<f64>,
}

impl PrefillTimer {
    /// Begins just before the call.
    pub(crate) fn start(in_flight: &InFlight) -> Self {
        let behind_others = in_flight.queued_before() > 0;
        let (outlook, expected) = (in_flight.engine().outlook(), in_flight.tokens());
        Self { began: Instant::now(), outlook, expected, behind_others, elapsed: None }
    }

    /// Ends when the first token is there, or the KV is.
    pub(crate) fn stop(&mut self, engine: &Engine) {
        if self.elapsed.is_none() {
            self.elapsed = Some(self.began.elapsed().as_secs_f64());
            let spent = self.outlook.prefill_seconds(self.expected as f64, 0.0);
            engine.costs.note_prefill(Instant::now(), spent);
        }
    }

    /// Tells what `new` tokens behind `cached` ones took, `other_seconds` of it having been spent on something else.
    pub(crate) fn tell(&self, engine: &Engine, new: u32, cached: u32, other_seconds: f64) {
        let (Some(elapsed), true) = (self.elapsed, new > 0) else { return };
        let outlook = &self.outlook;
        let (new, cached) = (f64::from(new), f64::from(cached));
        if self.behind_others {
            return;
        }
        // The steps that it rode in would have taken that long without it.
        let ridden = outlook.decode_seconds(0.0, 0.0);
        let predicted = outlook.profile.riding_seconds(new, cached, outlook.decoding.into());
        engine.costs.observe(Phase::Prefill, elapsed - ridden - other_seconds, predicted);
    }

    /// As [`Self::tell`], for a prefill whose KV was sent while it was computed.
    pub(crate) fn tell_sent(&mut self, engine: &Engine, answer: &RemoteSendResponse) {
        self.stop(engine);
        self.tell(engine, answer.computed_tokens, answer.cached_tokens, answer.exposed_transfer_seconds);
        let predicted = self.outlook.profile.transfer_seconds(answer.sent_tokens.into(), None);
        if let Some(predicted) = predicted {
            engine.costs.observe(Phase::Transfer, answer.transfer_seconds, predicted);
        }
    }
}

/// The times of one generation.
#[derive(Debug)]
pub(crate) struct StreamTimer {
    prefill: PrefillTimer,
    /// Where the engine began to compute, if that is known before its usage is.
    begin: Option<u32>,
    prompt: u32,
    /// Several choices' chunks come together; their distances say nothing of a step.
    one_choice: bool,
    chunks: u32,
    /// The engine had nothing for us since the last chunk: the next one is new, not late to be fetched.
    waited: bool,
    last: Option<Instant>,
}

impl StreamTimer {
    pub(crate) const fn new(
        prefill: PrefillTimer,
        begin: Option<u32>,
        prompt: u32,
        one_choice: bool,
    ) -> Self {
        Self { prefill, begin, prompt, one_choice, chunks: 0, waited: false, last: None }
    }

    pub(crate) const fn prompt(&self) -> u32 {
        self.prompt
    }

    /// The stream has nothing at the moment.
    pub(crate) const fn waits(&mut self) {
        self.waited = true;
    }

    /// A chunk is there.
    pub(crate) fn chunk(&mut self, engine: &Engine) {
        if self.chunks == 0 {
            self.prefill.stop(engine);
        }
        let waited = std::mem::replace(&mut self.waited, false);
        match self.chunks % CHUNKS_PER_LOOK {
            1 if waited && self.one_choice => self.last = Some(Instant::now()),
            2 if waited => {
                if let Some(last) = self.last.take() {
                    engine.costs.observe_step(last.elapsed().as_secs_f64());
                }
            }
            _ => self.last = None,
        }
        self.chunks = self.chunks.wrapping_add(1);
    }

    /// Events are there whose tokens are so many: only one token's time is that of a step.
    pub(crate) fn tokens(&mut self, engine: &Engine, num_tokens: usize) {
        if num_tokens == 1 || self.chunks == 0 {
            self.chunk(engine);
        } else {
            self.last = None;
            self.waited = false;
            self.chunks = self.chunks.wrapping_add(1);
        }
    }

    /// As [`Self::usage`], for a prompt whose length was a guess until now.
    pub(crate) fn relayed(&self, engine: &Engine, usage: &RelayUsage) {
        let cached = usage.cached_tokens.min(usage.prompt_tokens);
        self.prefill.tell(engine, usage.prompt_tokens - cached, cached, 0.0);
    }

    /// The usage is there: what was computed is known.
    pub(crate) fn usage(&self, engine: &Engine, usage: &Usage) {
        let cached = self.begin.unwrap_or_else(|| usage.cached_tokens()).min(self.prompt);
        self.prefill.tell(engine, self.prompt - cached, cached, 0.0);
    }
}
