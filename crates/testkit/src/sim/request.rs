//! One client's request, and the eyes that watch its answer.

use std::sync::Arc;
use std::time::Duration;

use microserving_engine::GenerateEvent;
use microserving_protocol::{FinishReason, SamplingParams, TokenId};
use tokio::time::Instant;

use super::oracle::Reference;
use crate::Dice;

/// How the KV of a prompt comes to where it is decoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pattern {
    /// One engine does everything.
    DataParallel,
    /// One engine prefills all but the last token, another decodes.
    PrefillDecode,
    /// The decoding engine prefills this share of the prompt itself.
    Balanced(f64),
    /// Two engines prefill a part each, a third decodes.
    TwoSenders,
    /// The context is copied and committed first; then the request is plain.
    Migrate,
    /// The running request moves to another engine after some tokens; the router's own pattern.
    Move,
}

/// A request.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) name: String,
    pub(crate) prompt: Arc<[TokenId]>,
    pub(crate) sampling: SamplingParams,
    pub(crate) max_output: u32,
    pub(crate) salt: Arc<str>,
    pub(crate) pattern: Pattern,
    /// Served by the real router, or by a program of the simulation's own.
    pub(crate) by_router: bool,
    pub(crate) arrives: Duration,
    /// When the client goes away, counted from its arrival.
    pub(crate) leaves_after: Option<Duration>,
    pub(crate) reference: Arc<Reference>,
}

/// Draws prompts that share beginnings, as chats and documents do.
pub(crate) fn draw_prompt(dice: &mut Dice, max_prompt: u32) -> Vec<TokenId> {
    let len = dice.range(1, u64::from(max_prompt)) as usize;
    let document = dice.below(4);
    let shared = dice.below(len as u64 + 1) as usize;
    let mut common = Dice::new(document).split(99);
    let mut tokens: Vec<_> = (0..shared).map(|_| TokenId(common.below(256) as u32)).collect();
    tokens.extend((shared..len).map(|_| TokenId(dice.below(256) as u32)));
    tokens
}

/// What a client has received so far, held against what it should receive.
#[derive(Debug)]
pub(crate) struct Received {
    reference: Arc<Reference>,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) finish: Option<FinishReason>,
    /// When the first token came.
    pub(crate) first: Option<Instant>,
}

impl Received {
    pub(crate) fn new(reference: Arc<Reference>) -> Self {
        Self { reference, tokens: Vec::new(), finish: None, first: None }
    }

    /// Takes an event; returns what is wrong with it.
    pub(crate) fn take(&mut self, event: &GenerateEvent) -> Result<(), String> {
        let GenerateEvent::Token { index, token, finish, .. } = event else { return Ok(()) };
        let next = self.tokens.len();
        if *index as usize != next {
            return Err(format!("index {index} came where {next} was due"));
        }
        self.take_token(*token, *finish)
    }

    /// Takes the next token; returns what is wrong with it.
    pub(crate) fn take_token(&mut self, token: TokenId, finish: Option<FinishReason>) -> Result<(), String> {
        let index = self.tokens.len();
        if self.finish.is_some() {
            return Err(format!("token {token} follows the last"));
        }
        let expected = self.reference.tokens.get(index);
        if expected != Some(&token) {
            return Err(format!("token {index} is {token}, a single engine says {expected:?}"));
        }
        self.first.get_or_insert_with(Instant::now);
        self.tokens.push(token);
        let is_last = index + 1 == self.reference.tokens.len();
        let expected = is_last.then_some(self.reference.finish);
        if finish != expected {
            return Err(format!("token {index} ends with {finish:?}, a single engine says {expected:?}"));
        }
        self.finish = finish;
        Ok(())
    }
}
