//! What a client may ask of the choice of each next token.

use serde::{Deserialize, Serialize};

use crate::TokenId;

/// How the next token is chosen from the logits.
///
/// Order of application: `logit_bias`, then the three penalties, then `min_tokens` (end-of-sequence tokens masked), then the
/// grammar's mask; `temperature == 0` takes the largest logit (lowest id on a tie); otherwise temperature, `top_k`, `top_p`,
/// `min_p`, and one draw of a counter-based generator keyed by `(seed, choice index, token index)`, so that the draw does
/// not depend on the engine, the batch or the request's name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 is greedy; finite, in `[0, 100]`.
    pub temperature: f32,
    /// Keeps the smallest set of tokens whose probability reaches this; in `(0, 1]`, 1 keeps all.
    pub top_p: f32,
    /// Keeps the `k` most probable tokens; 0 keeps all.
    pub top_k: u32,
    /// Drops tokens less probable than `min_p` times the most probable; in `[0, 1]`, 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output; `> 0`, 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once per occurrence in the output; in `[-2, 2]`.
    pub frequency_penalty: f32,
    /// Subtracted if the token occurs in the output; in `[-2, 2]`.
    pub presence_penalty: f32,
    /// Added to single logits; each in `[-100, 100]`.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The seed of the draws; whoever accepts the request draws one if the client gave none.
    pub seed: u64,
    /// Return the chosen token's log-probability and that of so many most probable tokens; `None` is off.
    pub logprobs: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Returns greedy sampling: always the most probable token.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }
}

/// A token with its log-probability, and the most probable alternatives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The token.
    pub token: TokenId,
    /// Its natural-log probability under the distribution after bias, penalties and mask, at temperature 1.
    pub logprob: f32,
    /// The most probable tokens, best first; as many as were asked for.
    pub top: Vec<(TokenId, f32)>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end-of-sequence token, a stop token, a stop string, or a complete grammar.
    Stop,
    /// `max_tokens`, or the model's context, was reached.
    Length,
    /// The engine gave the sequence up and asks the router to run it again (`--preempt-mode return` only).
    Preempt,
}
