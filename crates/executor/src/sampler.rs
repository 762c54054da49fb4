//! Choosing the next token.

use std::cell::RefCell;
use std::ops::RangeInclusive;

use microserving_protocol::{SamplingParams, TokenId, TokenLogprob};

use crate::numeric::ln_sum_exp;
use crate::penalties::Penalties;
use crate::select::{Cut, MASKED, Scratch, adjust, apply_mask, draw_kept, find_best};
use crate::{ConstraintError, Sampled, TokenConstraint, philox};

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

/// What a sampler must know of a row of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LogitNeed {
    /// The lowest token of those with the largest logit.
    Best,
    /// The tokens that `top_k` and then `top_p` keep at a temperature, with their weights.
    Kept {
        /// Above 0.
        temperature: f32,
        /// 0 for no bound.
        top_k: u32,
        /// 1 for no bound.
        top_p: f32,
    },
    /// All of it.
    All,
}

thread_local! {
    /// One per thread that samples, not one per sequence: it grows to the size of a vocabulary.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The sampling state of one sequence; see [`SamplingParams`] for the order of application.
///
/// The state is what the tokens so far imply and nothing else, so a sequence may be cut anywhere: a new sampler with the
/// same prompt that [replays](Self::replay) the tokens so far continues as the old one would have, on any machine.
#[derive(Debug)]
pub struct Sampler {
    params: SamplingParams,
    /// Found on construction, reported by the first draw: a sequence is not refused twice in two places.
    invalid: Option<SampleError>,
    choice: u32,
    penalties: Penalties,
    min_tokens: u32,
    eos_tokens: Vec<TokenId>,
    constraint: Option<Box<dyn TokenConstraint>>,
    num_outputs: u32,
    /// Set in a stand-in: it draws nothing.
    note: Option<Box<Note>>,
}

impl Sampler {
    /// Begins a sequence. `prompt` counts for the repetition penalty only; `choice` is the index among `n`.
    #[must_use]
    pub fn new(params: SamplingParams, choice: u32, prompt: &[TokenId]) -> Self {
        Self {
            invalid: find_invalid(&params),
            choice,
            penalties: Penalties::new(&params, prompt),
            min_tokens: 0,
            eos_tokens: Vec::new(),
            constraint: None,
            num_outputs: 0,
            params,
            note: None,
        }
    }

    /// Masks `eos_tokens` until `min_tokens` tokens were sampled.
    #[must_use]
    pub fn with_min_tokens(mut self, min_tokens: u32, eos_tokens: &[TokenId]) -> Self {
        self.min_tokens = min_tokens;
        self.eos_tokens = eos_tokens.to_vec();
        self
    }

    /// Constrains the output by a grammar.
    #[must_use]
    pub fn with_constraint(mut self, constraint: Box<dyn TokenConstraint>) -> Self {
        self.constraint = Some(constraint);
        self
    }

    /// Returns how many tokens were sampled or replayed.
    #[must_use]
    pub fn num_outputs(&self) -> u32 {
        self.num_outputs
    }

    /// Replays a token that an earlier attempt sampled: it counts for penalties, seed position and grammar.
    ///
    /// # Errors
    /// If the grammar does not accept it; the sampler is then as before.
    pub fn replay(&mut self, token: TokenId) -> Result<(), SampleError> {
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(token)?;
        }
        self.penalties.record(token);
        self.num_outputs += 1;
        Ok(())
    }

    /// Returns what the sampler must know of logits of `vocab_size` tokens to draw from them, so that a device need not hand
    /// out all of them. What is shaped, masked, told as log-probabilities, or wrong is drawn by [`Self::sample`].
    #[must_use]
    pub fn need(&self, vocab_size: u32) -> LogitNeed {
        if let Some(note) = &self.note {
            return note.need;
        }
        let params = &self.params;
        let is_shaped = !params.logit_bias.is_empty()
            || !self.penalties.is_empty()
            || self.num_outputs < self.min_tokens
            || self.constraint.is_some();
        if is_shaped || params.logprobs.is_some() || self.invalid.is_some() {
            return LogitNeed::All;
        }
        if params.temperature <= 0.0 {
            return LogitNeed::Best;
        }
        let is_cut = params.top_p < 1.0 || (params.top_k > 0 && params.top_k < vocab_size);
        let (temperature, top_k, top_p) = (params.temperature, params.top_k, params.top_p);
        if is_cut { LogitNeed::Kept { temperature, top_k, top_p } } else { LogitNeed::All }
    }

    /// Takes the best token as the next one, as [`Self::sample`] would with logits whose best it is: for
    /// [`LogitNeed::Best`].
    ///
    /// # Errors
    /// As [`Self::replay`].
    pub fn take_best(&mut self, token: TokenId) -> Result<Sampled, SampleError> {
        if let Some(note) = &mut self.note {
            return note.keep(Found::Best(token));
        }
        self.replay(token)?;
        Ok(Sampled { token, logprob: None, grammar_complete: false })
    }

    /// Draws the next token among those that `top_k` and `top_p` keep, as [`Self::sample`] would: for [`LogitNeed::Kept`].
    /// `kept` has tokens with their weights, `round(2^44 * e^((logit - best) / temperature))`, in any order; it is
    /// scratch, left changed.
    ///
    /// # Errors
    /// [`SampleError::NoToken`] if nothing is kept; else as [`Self::replay`].
    pub fn draw_kept(&mut self, kept: &mut Vec<(TokenId, u64)>) -> Result<Sampled, SampleError> {
        if let Some(note) = &mut self.note {
            return note.keep(Found::Kept(std::mem::take(kept)));
        }
        let random = philox::draw(self.params.seed, self.choice, self.num_outputs);
        let token = draw_kept(kept, self.params.min_p, random).ok_or(SampleError::NoToken)?;
        self.replay(token)?;
        Ok(Sampled { token, logprob: None, grammar_complete: false })
    }

    /// Draws the next token from `logits` (length: the vocabulary; scratch, left changed) and records it.
    ///
    /// # Errors
    /// If the grammar fails, masks leave no token, a logit is NaN or infinite, or a parameter is out of bounds. Nothing is
    /// recorded then.
    pub fn sample(&mut self, logits: &mut [f32]) -> Result<Sampled, SampleError> {
        if let Some(note) = &mut self.note {
            return note.look(logits);
        }
        if let Some(invalid) = &self.invalid {
            return Err(invalid.clone());
        }
        self.shape(logits)?;
        let (best, max) = find_best(logits)?;
        let token = if self.params.temperature > 0.0 {
            let cut = Cut {
                temperature: self.params.temperature,
                top_k: self.params.top_k,
                top_p: self.params.top_p,
                min_p: self.params.min_p,
            };
            let random = philox::draw(self.params.seed, self.choice, self.num_outputs);
            SCRATCH.with_borrow_mut(|scratch| scratch.draw(logits, max, cut, random))
        } else {
            best as u32
        };
        let logprob = self.params.logprobs.map(|num_top| logprob(logits, max, token, num_top));
        let token = TokenId(token);
        self.replay(token)?;
        let grammar_complete = self.constraint.as_ref().is_some_and(|constraint| constraint.is_complete());
        Ok(Sampled { token, logprob, grammar_complete })
    }

    /// Applies bias, penalties and masks.
    fn shape(&mut self, logits: &mut [f32]) -> Result<(), SampleError> {
        let vocab_size = logits.len();
        for &(token, bias) in &self.params.logit_bias {
            let logit = logits.get_mut(token.0 as usize).ok_or_else(|| SampleError::InvalidParam {
                field: "logit_bias",
                reason: format!("token {token} is not in the vocabulary of {vocab_size}"),
            })?;
            adjust(logit, |value| value + bias);
        }
        self.penalties.apply(logits);
        if self.num_outputs < self.min_tokens {
            for token in &self.eos_tokens {
                if let Some(logit) = logits.get_mut(token.0 as usize) {
                    adjust(logit, |_| MASKED);
                }
            }
        }
        if let Some(constraint) = &mut self.constraint {
            apply_mask(logits, &constraint.mask()?)?;
        }
        Ok(())
    }
}

fn logprob(logits: &[f32], max: f32, token: u32, num_top: u32) -> TokenLogprob {
    let norm = f64::from(max) + ln_sum_exp(logits, max);
    let of = |logit: f32| (f64::from(logit) - norm) as f32;
    let top = SCRATCH.with_borrow_mut(|scratch| {
        let top = scratch.find_top(logits, num_top as usize);
        top.iter().map(|&(logit, token)| (TokenId(token), of(logit))).collect()
    });
    TokenLogprob { token: TokenId(token), logprob: of(logits[token as usize]), top }
}

fn find_invalid(params: &SamplingParams) -> Option<SampleError> {
    fn within(field: &'static str, value: f32, bounds: RangeInclusive<f32>) -> Option<SampleError> {
        let reason = || format!("{value} is not in [{}, {}]", bounds.start(), bounds.end());
        (!bounds.contains(&value)).then(|| SampleError::InvalidParam { field, reason: reason() })
    }
    within("temperature", params.temperature, 0.0..=100.0)
        .or_else(|| within("top_p", params.top_p, f32::MIN_POSITIVE..=1.0))
        .or_else(|| within("min_p", params.min_p, 0.0..=1.0))
        .or_else(|| within("repetition_penalty", params.repetition_penalty, f32::MIN_POSITIVE..=f32::MAX))
        .or_else(|| within("frequency_penalty", params.frequency_penalty, -2.0..=2.0))
        .or_else(|| within("presence_penalty", params.presence_penalty, -2.0..=2.0))
        .or_else(|| {
            params.logit_bias.iter().find_map(|&(_, bias)| within("logit_bias", bias, -100.0..=100.0))
        })
}

mod note;

use note::Note;
pub use note::{Found, NotedSampler};

#[cfg(test)]
mod tests;
