//! From what the device found of logits to tokens.

use microserving_executor::{BatchItem, ExecutorError, LogitNeed, SampleError, Sampled};
use microserving_kernels::{KernelError, NO_TOKEN};
use microserving_protocol::TokenId;

use crate::accelerator::Stream;
use crate::inputs::Inputs;
use crate::model::{Model, failed};
use crate::workspace::{Found, MAX_CANDIDATES};

/// What one sampler made of its logits.
type Drawn = Result<Sampled, SampleError>;

/// The words that the device has found.
struct Words<'a> {
    bytes: &'a [u8],
    places: Found,
}

impl Words<'_> {
    fn word(&self, place: usize, at: usize) -> u32 {
        let bytes = &self.bytes[place + 4 * at..][..4];
        u32::from_ne_bytes(bytes.try_into().expect("four bytes"))
    }

    fn long(&self, place: usize, at: usize) -> u64 {
        let bytes = &self.bytes[place + 8 * at..][..8];
        u64::from_ne_bytes(bytes.try_into().expect("eight bytes"))
    }

    /// Returns the best token of a row, unless the row must be looked at: no logit is finite, or one is not.
    fn best(&self, row: usize) -> Option<TokenId> {
        let token = self.word(self.places.best, row);
        let is_sound = token != NO_TOKEN && self.word(self.places.not_finite, row) == NO_TOKEN;
        is_sound.then_some(TokenId(token))
    }

    /// Returns what `top_k` and `top_p` keep of a row, unless that may be more than was handed out.
    fn kept(&self, row: usize, into: &mut Vec<(TokenId, u64)>) -> Option<()> {
        self.best(row)?;
        let kept = self.word(self.places.kept, row);
        if kept == NO_TOKEN || kept > self.word(self.places.counts, row) {
            return None;
        }
        into.clear();
        into.extend((0..kept as usize).map(|at| {
            let at = row * MAX_CANDIDATES + at;
            (TokenId(self.word(self.places.tokens, at)), self.long(self.places.weights, at))
        }));
        Some(())
    }
}

impl Model {
    /// Waits for the step and lets each item's sampler draw. `sampled` has an entry an item.
    pub(crate) fn sample(
        &mut self,
        inputs: &Inputs,
        items: &mut [BatchItem<'_>],
        sampled: &mut [Option<Drawn>],
    ) -> Result<(), ExecutorError> {
        self.accelerator.wait_on_host(self.done).map_err(failed)?;
        let vocab_size = self.config.vocab_size;
        let num_words = inputs.num_all * self.weights.vocab_rows;
        let first_all = inputs.wanted.len() - inputs.num_all;
        let mut kept = Vec::new();
        // Rows of which the device did not find enough.
        let mut left = Vec::new();
        let places = Found::of(inputs.wanted.len(), inputs.num_kept);
        // SAFETY: the step is over; no copy is queued.
        let (found, logits) =
            unsafe { (self.workspace.host_found.bytes(), self.workspace.host_logits.words(num_words)) };
        let words = Words { bytes: found, places };
        for (row, wanted) in inputs.wanted.iter().enumerate() {
            let Some(sampler) = items[wanted.item].sampler.as_mut() else { continue };
            sampled[wanted.item] = match wanted.need {
                LogitNeed::Best => words.best(row).map(|token| sampler.take_best(token)),
                LogitNeed::Kept { .. } => words.kept(row, &mut kept).map(|()| sampler.draw_kept(&mut kept)),
                LogitNeed::All => {
                    let begin = (row - first_all) * self.weights.vocab_rows;
                    Some(sampler.sample(floats(&mut logits[begin..begin + vocab_size])))
                }
            };
            if sampled[wanted.item].is_none() {
                left.push(row);
            }
        }
        for row in left {
            self.sample_all(row, inputs.wanted[row].item, items, sampled).map_err(failed)?;
        }
        Ok(())
    }

    /// Draws from all logits of a row, after all.
    fn sample_all(
        &mut self,
        row: usize,
        item: usize,
        items: &mut [BatchItem<'_>],
        sampled: &mut [Option<Drawn>],
    ) -> Result<(), KernelError> {
        let row_bytes = self.weights.vocab_rows * 4;
        let (to, from) = (self.workspace.host_logits.ptr(), self.workspace.logits.at(row * row_bytes));
        // SAFETY: the workspace has room for a row at least; the logits are the step's until the next one.
        unsafe { self.accelerator.copy_out(Stream::Compute, to, from, row_bytes)? };
        self.accelerator.synchronize(Stream::Compute)?;
        // SAFETY: the copy was waited for.
        let logits = unsafe { self.workspace.host_logits.words(self.config.vocab_size) };
        sampled[item] = items[item].sampler.as_mut().map(|sampler| sampler.sample(floats(logits)));
        Ok(())
    }
}

/// Takes words for what they are.
fn floats(words: &mut [u32]) -> &mut [f32] {
    // SAFETY: any bits are an f32, of the same size and alignment; the borrow is passed on.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}
