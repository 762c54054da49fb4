//! A stand-in for a sampler that is elsewhere: it notes what that one needs of the logits instead of drawing.
//!
//! ```text
//!  where the sampler is                      where the logits are
//!  need(vocab_size) ───────────────────────▶ NotedSampler::new(need) ─▶ Executor::forward
//!  draw(found)      ◀─────────────────────── found()
//! ```

use microserving_protocol::TokenId;

use super::{LogitNeed, SCRATCH, Sampler};
use crate::select::{Cut, find_best};
use crate::{SampleError, Sampled};

/// What was found of a row of logits, as much as a [`LogitNeed`] says.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    /// For [`LogitNeed::Best`].
    Best(TokenId),
    /// For [`LogitNeed::Kept`]: tokens and weights as [`Sampler::draw_kept`] takes them.
    Kept(Vec<(TokenId, u64)>),
    /// For [`LogitNeed::All`], or for any: the logits.
    All(Vec<f32>),
}

#[derive(Debug)]
pub(super) struct Note {
    pub(super) need: LogitNeed,
    found: Option<Result<Found, SampleError>>,
}

impl Note {
    /// Notes what a device has found. What is returned is no draw: nobody may take it for one.
    pub(super) fn keep(&mut self, found: Found) -> Result<Sampled, SampleError> {
        self.found = Some(Ok(found));
        Ok(Sampled { token: TokenId(0), logprob: None, grammar_complete: false })
    }

    /// Finds what is needed in logits.
    pub(super) fn look(&mut self, logits: &[f32]) -> Result<Sampled, SampleError> {
        let found = match self.need {
            LogitNeed::All => Ok(Found::All(logits.to_vec())),
            LogitNeed::Best => find_best(logits).map(|(best, _)| Found::Best(TokenId(best as u32))),
            LogitNeed::Kept { temperature, top_k, top_p } => find_best(logits).map(|(_, max)| {
                let cut = Cut { temperature, top_k, top_p, min_p: 0.0 };
                Found::Kept(SCRATCH.with_borrow_mut(|scratch| scratch.keep(logits, max, cut)))
            }),
        };
        match found {
            Ok(found) => self.keep(found),
            Err(error) => {
                self.found = Some(Err(error.clone()));
                Err(error)
            }
        }
    }
}

/// Stands in for a sampler in a [`crate::BatchItem`] where the sampler itself is in another process.
#[derive(Debug)]
pub struct NotedSampler(Sampler);

impl NotedSampler {
    /// Makes one for a sampler whose [`Sampler::need`] says `need`.
    #[must_use]
    pub fn new(need: LogitNeed) -> Self {
        let mut sampler = Sampler::new(microserving_protocol::SamplingParams::greedy(), 0, &[]);
        sampler.note = Some(Box::new(Note { need, found: None }));
        Self(sampler)
    }

    /// Returns what an executor is given.
    pub fn as_sampler(&mut self) -> &mut Sampler {
        &mut self.0
    }

    /// Returns what the executor found, or `None` if it did not look.
    #[must_use]
    pub fn found(self) -> Option<Result<Found, SampleError>> {
        self.0.note.and_then(|note| note.found)
    }
}

impl Sampler {
    /// Draws the next token from what a [`NotedSampler`] found with this sampler's need: the token that [`Sampler::sample`] would have
    /// drawn from the logits.
    ///
    /// # Errors
    /// As [`Sampler::sample`].
    pub fn draw(&mut self, found: Found) -> Result<Sampled, SampleError> {
        match found {
            Found::Best(token) => self.take_best(token),
            Found::Kept(mut kept) => self.draw_kept(&mut kept),
            Found::All(mut logits) => self.sample(&mut logits),
        }
    }
}
