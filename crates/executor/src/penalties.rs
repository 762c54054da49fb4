//! What earlier tokens do to the logits of the next.

use std::collections::HashMap;

use microserving_protocol::{SamplingParams, TokenId};

use crate::select::adjust;

/// Repetition, frequency and presence penalties of one sequence.
#[derive(Debug)]
pub(crate) struct Penalties {
    repetition: f32,
    frequency: f32,
    presence: f32,
    /// Every distinct token that a penalty in use may touch.
    seen: Vec<Seen>,
    /// Where a token stands in `seen`; only looked up, never walked, so that its order cannot matter.
    places: HashMap<TokenId, usize>,
}

#[derive(Debug)]
struct Seen {
    token: TokenId,
    num_outputs: u32,
}

impl Penalties {
    pub(crate) fn new(params: &SamplingParams, prompt: &[TokenId]) -> Self {
        let mut penalties = Self {
            repetition: params.repetition_penalty,
            frequency: params.frequency_penalty,
            presence: params.presence_penalty,
            seen: Vec::new(),
            places: HashMap::new(),
        };
        if penalties.repetition != 1.0 {
            for &token in prompt {
                penalties.place(token);
            }
        }
        penalties
    }

    /// Counts a token of the output.
    pub(crate) fn record(&mut self, token: TokenId) {
        if !self.is_empty() {
            let place = self.place(token);
            self.seen[place].num_outputs += 1;
        }
    }

    /// Says whether no penalty is in use.
    pub(crate) fn is_empty(&self) -> bool {
        self.repetition == 1.0 && self.frequency == 0.0 && self.presence == 0.0
    }

    /// Applies the three penalties to the logits.
    pub(crate) fn apply(&self, logits: &mut [f32]) {
        for seen in &self.seen {
            // A token past the vocabulary has no logit that could be drawn.
            let Some(logit) = logits.get_mut(seen.token.0 as usize) else { continue };
            adjust(logit, |value| {
                let mut value = if value > 0.0 { value / self.repetition } else { value * self.repetition };
                if seen.num_outputs > 0 {
                    value -= self.frequency * seen.num_outputs as f32;
                    value -= self.presence;
                }
                value
            });
        }
    }

    fn place(&mut self, token: TokenId) -> usize {
        *self.places.entry(token).or_insert_with(|| {
            self.seen.push(Seen { token, num_outputs: 0 });
            self.seen.len() - 1
        })
    }
}
