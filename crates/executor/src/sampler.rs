//! Choosing the next token.

use microserving_protocol::{SamplingParams, TokenId};

use crate::{ExecutorError, Sampled, TokenConstraint};

/// The sampling state of one sequence; see [`SamplingParams`] for the order of application.
#[derive(Debug)]
pub struct Sampler {
    params: SamplingParams,
    choice: u32,
    constraint: Option<Box<dyn TokenConstraint>>,
}

impl Sampler {
    /// Begins a sequence. `prompt` counts for the repetition penalty only; `choice` is the index among `n`.
    #[must_use]
    pub fn new(params: SamplingParams, choice: u32, prompt: &[TokenId]) -> Self {
        let _ = prompt;
        Self { params, choice, constraint: None }
    }

    /// Masks `eos_tokens` until `min_tokens` tokens were sampled.
    #[must_use]
    pub fn with_min_tokens(self, min_tokens: u32, eos_tokens: &[TokenId]) -> Self {
        let _ = (min_tokens, eos_tokens);
        self
    }

    /// Constrains the output by a grammar.
    #[must_use]
    pub fn with_constraint(mut self, constraint: Box<dyn TokenConstraint>) -> Self {
        self.constraint = Some(constraint);
        self
    }

    /// Replays a token that an earlier attempt sampled: it counts for penalties, seed position and grammar.
    ///
    /// # Errors
    /// If the grammar does not accept it.
    pub fn replay(&mut self, token: TokenId) -> Result<(), ExecutorError> {
        let _ = token;
        Ok(())
    }

    /// Draws the next token from `logits` (length: the vocabulary; scratch, left changed) and records it.
    ///
    /// # Errors
    /// If the grammar fails or leaves no token.
    pub fn sample(&mut self, logits: &mut [f32]) -> Result<Sampled, ExecutorError> {
        let _ = (logits, &self.params, self.choice);
        Err(ExecutorError::Compute { reason: "not written yet".into() })
    }
}
