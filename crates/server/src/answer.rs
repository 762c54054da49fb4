//! From the engine's token events to chunks of text: the one way in which every answer is made.
//!
//! ```text
//! token ─▶ Detokenizer ─▶ StopStrings ─▶ chunk ─┬─▶ one SSE event                     (stream)
//!                                               └─▶ CompletionAssembler ─▶ one body   (no stream)
//! ```
//!
//! A chunk is made of one token, so what a client gets does not depend on how tokens came from the engine, and an answer
//! that continues an earlier attempt (`generated_from`) gives out exactly what the earlier one had not.

use std::sync::Arc;

use microserving_engine::{EngineError, GenerateEvent, GenerateStream, GenerateUsage};
use microserving_protocol::{
    ApiError, CompletionChoice, CompletionLogprobs, CompletionResponse, FinishReason, ServingStats, TokenId,
    TokenLogprob, TopLogprobs, Usage, wire_logprob,
};
use microserving_text::TextStream;
use tokio::time::Instant;
use tracing::{debug, info};

use crate::app::App;
use crate::deliver::Marks;
use crate::errors::api_error;
use crate::tracking::Arrival;

/// What an answer needs to know beside the engine's stream.
#[derive(Debug)]
pub(crate) struct AnswerPlan {
    /// The id in every chunk.
    pub(crate) id: String,
    /// Choices.
    pub(crate) n: u32,
    /// Tokens of the true prompt.
    pub(crate) prompt_tokens: u32,
    /// One text pipeline, at the start of the output.
    pub(crate) text: TextStream,
    /// What an earlier attempt has given out already; it goes through the pipeline and not to the client.
    pub(crate) replayed: Vec<TokenId>,
    /// Tokens before this one go through the pipeline and not to the client.
    pub(crate) resume_from: u32,
    /// Stop strings do not count in the first tokens.
    pub(crate) min_tokens: u32,
    /// Tokens that end a choice and are no part of its text.
    pub(crate) end_tokens: Vec<TokenId>,
    /// Goes before the output.
    pub(crate) echo: Option<String>,
    /// Log-probabilities were asked for.
    pub(crate) logprobs: bool,
    /// Token ids were asked for.
    pub(crate) token_ids: bool,
    /// Put the usage so far into every chunk.
    pub(crate) continuous_usage: bool,
    /// The caller asked by header for [`ServingStats`].
    pub(crate) stats: bool,
    /// What a router that passes the answer on wants to know beside it.
    pub(crate) marks: Marks,
}

/// What [`Answer::next`] yields.
#[derive(Debug)]
pub(crate) enum Part {
    /// New text of one choice.
    Chunk(CompletionResponse),
    /// A token whose text is held back; only for who wants every token marked.
    HeldBack,
    /// What it took; the answer is complete.
    End { usage: Usage, stats: Option<ServingStats> },
}

/// One answer under way. Dropping it gives the sequence up.
#[derive(Debug)]
pub(crate) struct Answer {
    app: Arc<App>,
    plan: AnswerPlan,
    created: u64,
    stream: GenerateStream,
    /// Taken from the stream before the answer's status was decided.
    first: Option<GenerateEvent>,
    choices: Vec<Choice>,
    /// Choices whose echo is still to be given out.
    to_echo: std::ops::Range<u32>,
    arrival: Arrival,
    first_token_at: Option<Instant>,
    /// For a router: the tokens since the last chunk, of an answer with one choice.
    unmarked: Vec<TokenId>,
}

#[derive(Debug)]
struct Choice {
    text: TextStream,
    num_tokens: u32,
    ended: bool,
}

impl Answer {
    /// Waits for the engine's first event, so that a failure before any output still has its own status.
    ///
    /// # Errors
    /// What the engine failed with.
    pub(crate) async fn begin(
        app: Arc<App>,
        plan: AnswerPlan,
        mut stream: GenerateStream,
        arrival: Arrival,
    ) -> Result<Self, ApiError> {
        let first = match stream.next_event().await {
            Some(GenerateEvent::Failed { error }) => return Err(api_error(&error)),
            None => return Err(api_error(&EngineError::Draining)),
            Some(event) => event,
        };
        let mut text = plan.text.clone();
        for (index, token) in (0..).zip(&plan.replayed) {
            push(&mut text, *token, index < plan.min_tokens);
        }
        let num_tokens = u32::try_from(plan.replayed.len()).unwrap_or(u32::MAX);
        let choice = || Choice { text: text.clone(), num_tokens, ended: false };
        let choices = (0..plan.n).map(|_| choice()).collect();
        let to_echo = if plan.echo.is_some() { 0..plan.n } else { 0..0 };
        let created = crate::app::unix_seconds();
        Ok(Self {
            app,
            plan,
            created,
            stream,
            first: Some(first),
            choices,
            to_echo,
            arrival,
            first_token_at: None,
            unmarked: Vec::new(),
        })
    }

    /// Takes the tokens since the last time, for the mark of a relayed chunk.
    pub(crate) fn take_unmarked(&mut self) -> Vec<TokenId> {
        std::mem::take(&mut self.unmarked)
    }

    /// Returns the time from the request's arrival to its first token.
    pub(crate) fn first_token_after(&self) -> std::time::Duration {
        self.first_token_at.map_or_else(|| self.arrival.at.elapsed(), |at| at - self.arrival.at)
    }

    /// Returns the id that the answer's chunks carry.
    pub(crate) fn id(&self) -> &str {
        &self.plan.id
    }

    /// Makes a chunk without choices, for what comes after the last one.
    pub(crate) fn empty_chunk(&self) -> CompletionResponse {
        let model = &self.app.config.served_model_name;
        CompletionResponse::new(&self.plan.id, self.created, model, Vec::new())
    }

    /// Returns the next part, or `None` after [`Part::End`].
    ///
    /// # Errors
    /// What the engine failed with; the answer is over then.
    pub(crate) async fn next(&mut self) -> Result<Option<Part>, ApiError> {
        if let Some(index) = self.to_echo.next() {
            let text = self.plan.echo.clone().unwrap_or_default();
            return Ok(Some(self.chunk(CompletionChoice { index, text, ..CompletionChoice::default() })));
        }
        loop {
            let event = match self.first.take() {
                Some(event) => Some(event),
                None => self.stream.next_event().await,
            };
            match event {
                Some(GenerateEvent::Token { choice, index, token, logprob, finish }) => {
                    if let Some(new) = self.token(choice, index, token, logprob, finish) {
                        return Ok(Some(self.chunk(new)));
                    }
                    if self.plan.marks == Marks::Tokens && !self.unmarked.is_empty() {
                        return Ok(Some(Part::HeldBack));
                    }
                }
                Some(GenerateEvent::Done { usage }) => return Ok(Some(self.end(usage))),
                Some(GenerateEvent::Failed { error }) => {
                    info!(request_id = %self.arrival.request_id, id = self.plan.id, %error, "generation failed");
                    return Err(api_error(&error));
                }
                None => return Ok(None),
            }
        }
    }

    fn token(
        &mut self,
        index_of_choice: u32,
        index: u32,
        token: TokenId,
        logprob: Option<TokenLogprob>,
        finish: Option<FinishReason>,
    ) -> Option<CompletionChoice> {
        if self.first_token_at.is_none() {
            self.first_token_at = Some(Instant::now());
            self.app.metrics.first_token(self.arrival.at.elapsed());
        }
        let choice = self.choices.get_mut(index_of_choice as usize)?;
        if choice.ended {
            // Tokens that were on their way when a stop string ended the choice.
            return None;
        }
        choice.num_tokens = index.saturating_add(1);
        if self.plan.marks.any() && self.plan.n == 1 && index >= self.plan.resume_from {
            self.unmarked.push(token);
        }
        let ends_silently = finish == Some(FinishReason::Stop) && self.plan.end_tokens.contains(&token);
        let mut new = CompletionChoice { index: index_of_choice, ..CompletionChoice::default() };
        let mut reason = finish;
        let mut offset = 0;
        if !ends_silently {
            let step = push(&mut choice.text, token, index < self.plan.min_tokens);
            offset = step.offset;
            new.text = step.text;
            if step.stopped_by.is_some() {
                reason = Some(FinishReason::Stop);
            }
        }
        let stopped_by_string = reason.is_some() && finish.is_none();
        if finish.is_some() && (ends_silently || reason == finish) {
            let rest = choice.text.finish();
            new.text.push_str(&rest.text);
            if rest.stopped_by.is_some() {
                reason = Some(FinishReason::Stop);
            }
        }
        choice.ended = reason.is_some();
        new.finish_reason = reason;
        if stopped_by_string {
            self.stream.finish_choice(index_of_choice);
        }
        if index < self.plan.resume_from {
            return None;
        }
        if self.plan.token_ids {
            new.token_ids = Some(vec![token]);
        }
        if let Some(logprob) = logprob
            && self.plan.logprobs
            && !ends_silently
        {
            new.logprobs = Some(self.logprobs(&logprob, offset));
        }
        let carries_something = !new.text.is_empty()
            || new.finish_reason.is_some()
            || new.token_ids.is_some()
            || new.logprobs.is_some();
        carries_something.then_some(new)
    }

    fn logprobs(&self, logprob: &TokenLogprob, offset: usize) -> CompletionLogprobs {
        let text = &self.app.text;
        let top =
            logprob.top.iter().map(|&(token, value)| (text.spelling(token), wire_logprob(value))).collect();
        CompletionLogprobs {
            text_offset: vec![u32::try_from(offset).unwrap_or(u32::MAX)],
            token_logprobs: vec![Some(wire_logprob(logprob.logprob))],
            tokens: vec![text.spelling(logprob.token)],
            top_logprobs: vec![TopLogprobs(top)],
        }
    }

    fn chunk(&self, choice: CompletionChoice) -> Part {
        let mut chunk = self.empty_chunk();
        chunk.choices.push(choice);
        if self.plan.continuous_usage {
            chunk.usage = Some(Usage {
                prompt_tokens_details: None,
                ..Usage::new(self.plan.prompt_tokens, self.completion_tokens(), 0)
            });
        }
        Part::Chunk(chunk)
    }

    fn completion_tokens(&self) -> u32 {
        self.choices.iter().fold(0, |sum, choice| sum.saturating_add(choice.num_tokens))
    }

    fn end(&self, usage: GenerateUsage) -> Part {
        let whole = self.arrival.at.elapsed();
        let longest = self.choices.iter().map(|choice| choice.num_tokens).max().unwrap_or(0);
        let decoding = self.first_token_at.map(|at| at.elapsed()).unwrap_or_default();
        self.app.metrics.generation(whole, decoding, longest);
        debug!(
            request_id = %self.arrival.request_id,
            id = self.plan.id,
            prompt_tokens = self.plan.prompt_tokens,
            completion_tokens = self.completion_tokens(),
            cached_tokens = usage.cached_tokens,
            received_tokens = usage.received_tokens,
            computed_tokens = usage.computed_tokens,
            seconds = whole.as_secs_f64(),
            "generation finished"
        );
        let stats = self.plan.stats.then(|| ServingStats {
            matched_tokens: usage.cached_tokens,
            received_tokens: usage.received_tokens,
            computed_tokens: usage.computed_tokens,
            decode_engine: self.app.engine.info().engine_id.to_string(),
            ..ServingStats::default()
        });
        // Our own count, and not the engine's: tokens behind a stop string are no part of the answer.
        let usage = Usage::new(self.plan.prompt_tokens, self.completion_tokens(), usage.cached_tokens);
        Part::End { usage, stats }
    }
}

fn push(text: &mut TextStream, token: TokenId, unstoppable: bool) -> microserving_text::TextStep {
    if unstoppable { text.push_unstoppable(token) } else { text.push(token) }
}
