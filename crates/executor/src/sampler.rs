//! Choosing the next token.

use microserving_protocol::{SamplingParams, TokenId};

use crate::{ConstraintError, Sampled, TokenConstraint};

/// Why no token could be drawn for a sequence. It ends that sequence and no other.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// The grammar engine gave up, or a token does not fit the grammar.
    #[error(transparent)]
    Grammar(#[from] ConstraintError),
    /// Masks leave nothing to choose from.
    #[error("grammar and min_tokens leave no token to choose")]
    NoToken,
    /// The model's logits are not numbers.
    #[error("the logit of token {token} is {value}")]
    NotFinite {
        /// The first such token.
        token: TokenId,
        /// NaN or an infinity.
        value: f32,
    },
    /// A sampling parameter is out of its bounds.
    #[error("{field}: {reason}")]
    InvalidParam {
        /// The field's name on the wire.
        field: &'static str,
        /// The value and the bound.
        reason: String,
    },
}

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
    pub fn replay(&mut self, token: TokenId) -> Result<(), SampleError> {
        let _ = token;
        Ok(())
    }

    /// Draws the next token from `logits` (length: the vocabulary; scratch, left changed) and records it.
    ///
    /// # Errors
    /// If the grammar fails or leaves no token.
    pub fn sample(&mut self, logits: &mut [f32]) -> Result<Sampled, SampleError> {
        let _ = (logits, &self.params, self.choice);
        Err(SampleError::NoToken)
    }
}
