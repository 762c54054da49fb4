//! An answer as one client sees it: made of an engine's chunks, the same whatever the pattern.

use std::collections::HashSet;

use microserving_client::CallContext;
use microserving_protocol::{CompletionRequest, CompletionResponse, SeqId, ServingStats, Usage};
use tokio::time::Instant;

use crate::Metrics;
use crate::relay::Names;
use crate::service::now_unix_seconds;
use crate::stats::StatsCell;

/// What of an answer depends on the request and not on the engine.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) arrival: Instant,
    pub(crate) call: CallContext,
    pub(crate) program: String,
    pub(crate) pattern: String,
    pub(crate) model: String,
    created: u64,
    /// The prompt's own text, to go before each choice that has not begun.
    echo: Option<String>,
    begun: HashSet<u32>,
    include_usage: bool,
    continuous_usage: bool,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Answer {
    pub(crate) fn new(
        arrival: Instant,
        call: CallContext,
        program: &str,
        pattern: String,
        model: String,
        completion: &CompletionRequest,
        text: Option<String>,
    ) -> Self {
        let options = completion.stream_options.unwrap_or_default();
        Self {
            arrival,
            call,
            program: program.to_owned(),
            pattern,
            model,
            created: now_unix_seconds(),
            echo: text.filter(|_| completion.echo),
            begun: HashSet::new(),
            include_usage: options.include_usage,
            continuous_usage: options.include_usage && options.continuous_usage_stats,
            first: None,
            last: None,
        }
    }

    /// Goes on with an answer of which the client has had the beginning, and its usage or not.
    pub(crate) fn begun(self, created: u64, first: Option<Instant>, usage_shown: bool) -> Self {
        let include_usage = self.include_usage && !usage_shown;
        let last = first.map(|_| Instant::now());
        Self { created, first, last, include_usage, ..self }
    }

    /// Notes that something has come from the engine.
    pub(crate) fn note_chunk(&mut self, metrics: &Metrics) {
        let now = Instant::now();
        if self.first.is_none() {
            self.first = Some(now);
            metrics.first_token(&self.program, now - self.arrival);
        }
        self.last = Some(now);
    }

    /// Notes that events are passed on; the first ones say when the answer was made.
    pub(crate) fn note_passed_on(&mut self, events: &[u8]) {
        if self.begun.insert(0)
            && let Some(names) = Names::read(events)
        {
            self.created = names.created;
        }
    }

    /// Returns what the client gets for a chunk; nothing if it did not ask for what is in it.
    pub(crate) fn chunk(
        &mut self,
        seq_id: &SeqId,
        mut chunk: CompletionResponse,
        stats: &StatsCell,
        metrics: &Metrics,
    ) -> Option<CompletionResponse> {
        self.put_names(seq_id, &mut chunk);
        if chunk.choices.is_empty() {
            let usage = chunk.usage.take()?;
            let (usage, stats) = self.finish(usage, chunk.microserving.take(), stats, metrics);
            chunk.usage = self.include_usage.then_some(usage);
            chunk.microserving = self.call.wants_stats.then_some(stats);
            return (chunk.usage.is_some() || chunk.microserving.is_some()).then_some(chunk);
        }
        if !self.continuous_usage {
            chunk.usage = None;
        }
        chunk.microserving = None;
        for choice in &mut chunk.choices {
            if self.begun.insert(choice.index)
                && let Some(prompt) = &self.echo
            {
                choice.text.insert_str(0, prompt);
            }
        }
        Some(chunk)
    }

    /// Returns what the client gets for a whole answer.
    pub(crate) fn whole(
        &mut self,
        seq_id: &SeqId,
        mut whole: CompletionResponse,
        stats: &StatsCell,
        metrics: &Metrics,
    ) -> CompletionResponse {
        self.put_names(seq_id, &mut whole);
        if let Some(prompt) = &self.echo {
            for choice in &mut whole.choices {
                choice.text.insert_str(0, prompt);
            }
        }
        let own = whole.microserving.take();
        if let Some(usage) = whole.usage.take() {
            let (usage, stats) = self.finish(usage, own, stats, metrics);
            whole.usage = Some(usage);
            whole.microserving = self.call.wants_stats.then_some(stats);
        }
        whole
    }

    /// An engine's answer says the engine's names; ours says what the client asked this router for.
    fn put_names(&self, seq_id: &SeqId, answer: &mut CompletionResponse) {
        seq_id.as_str().clone_into(&mut answer.id);
        answer.model = Some(self.model.clone());
        answer.created = self.created;
    }

    fn finish(
        &self,
        usage: Usage,
        own: Option<ServingStats>,
        stats: &StatsCell,
        metrics: &Metrics,
    ) -> (Usage, ServingStats) {
        let usage = stats.finish(usage, own.as_ref());
        let pattern = stats.pattern().unwrap_or_else(|| self.pattern.clone());
        let stats = ServingStats { pattern, ..stats.get() };
        let (first, last) = (self.first.unwrap_or(self.arrival), self.last.unwrap_or(self.arrival));
        metrics.answer(&self.program, last - self.arrival, last - first, &usage, &stats);
        (usage, stats)
    }
}
