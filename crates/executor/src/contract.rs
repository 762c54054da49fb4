//! The executor contract: one logical device that runs one model over paged KV.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{KvGeometry, KvLayout, KvMemory, LayerId, PageId, TokenId, TokenLogprob};

use crate::{SampleError, Sampler};

/// What an executor is, fixed once it is loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct ExecutorInfo {
    /// The name served under `/v1/models`.
    pub model: String,
    /// The KV layout, model hash and numeric mode included.
    pub layout: KvLayout,
    /// Logits per position.
    pub vocab_size: u32,
    /// The longest sequence, prompt and output together, in tokens.
    pub max_context: u32,
    /// Tokens that end a sequence unless `ignore_eos`.
    pub eos_tokens: Vec<TokenId>,
}

/// One sequence's share of a step: a run of new tokens behind the context that its pages already hold.
///
/// ```text
/// positions   0 ........ position ........ position + tokens.len()
///             |  in pages  |   new tokens    |
/// pages       [ p0 ][ p1 ][ p2 ][ p3 ]         pages[i] holds positions i*page_size ..
/// ```
#[derive(Debug)]
pub struct BatchItem<'a> {
    /// The tokens to compute; at least one.
    pub tokens: &'a [TokenId],
    /// The position of `tokens[0]`; KV of `[0, position)` is in `pages` and is only read.
    pub position: u32,
    /// The sequence's pages from position 0; they hold at least `position + tokens.len()` tokens.
    ///
    /// The pages of `[position, position + tokens.len())` are written, and no other item or peer touches them meanwhile
    /// (pages wholly below `position` may be shared by several items).
    pub pages: &'a [PageId],
    /// Draws the next token from the logits of the last position; `None` for a prefill chunk that is not the last, and for
    /// a prefill whose KV is all that is wanted.
    pub sampler: Option<&'a mut Sampler>,
    /// A transfer reads the KV of the new tokens from the region as soon as `on_layer` tells of a layer. Without it, only
    /// [`Executor::export`] makes KV readable there.
    pub is_sent: bool,
}

/// The ragged batch of one step: prefill chunks and decodes mixed.
#[derive(Debug, Default)]
pub struct Batch<'a> {
    /// The items; may be of different lengths and at different positions.
    pub items: Vec<BatchItem<'a>>,
}

/// A token drawn for one item.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: TokenId,
    /// Its log-probability and alternatives, if the sampler was asked for them.
    pub logprob: Option<TokenLogprob>,
    /// The grammar accepts no further token: the sequence ends after this one.
    pub grammar_complete: bool,
}

/// What a step returns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// One entry per item, in order; `None` where the item had no sampler. A sampler that failed (its grammar gave up, its
    /// parameters are out of bounds, its logits are not numbers) ends its own sequence and no other: the KV of the item is
    /// written, the other items' tokens stand.
    pub sampled: Vec<Option<Result<Sampled, SampleError>>>,
    /// How long the step takes on the modelled hardware, from executors that model rather than compute. A driver in virtual
    /// time advances its clock by it; a driver in real time waits for the rest of it.
    pub modelled: Option<Duration>,
}

/// Why an executor could not do what was asked. The engine answers the affected requests and goes on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecutorError {
    /// The model's files are missing, damaged or of a kind not supported.
    #[error("cannot load the model: {reason}")]
    Load {
        /// What is wrong, naming the file, field or tensor.
        reason: String,
    },
    /// The device is not there or refused.
    #[error("device not available: {reason}")]
    Device {
        /// Why.
        reason: String,
    },
    /// The batch breaks the contract (a token out of the vocabulary, too few pages, an empty item).
    #[error("item {item} of the batch is malformed: {reason}")]
    MalformedBatch {
        /// The item's place in the batch.
        item: usize,
        /// What is wrong.
        reason: String,
    },
    /// `attach` was not called, or memory and geometry do not fit the layout.
    #[error("KV memory does not fit: {reason}")]
    Memory {
        /// What does not fit.
        reason: String,
    },
    /// The computation itself failed.
    #[error("forward failed: {reason}")]
    Compute {
        /// The cause.
        reason: String,
    },
}

/// Runs a model over paged KV memory.
///
/// Implementations must be **invariant**: the tokens and the KV of an item depend only on the item's token history and its
/// sampler, never on the other items, on how its prompt was cut into chunks, or on which pages it was given. The equality
/// of tokens between orchestration patterns rests on this, within one [`KvLayout::numeric_mode`].
pub trait Executor: Send + fmt::Debug {
    /// Returns what was loaded; the same for the life of the executor.
    fn info(&self) -> &ExecutorInfo;

    /// Gives the executor the memory to keep KV in; called once, before the first `forward`.
    ///
    /// # Errors
    /// [`ExecutorError::Memory`] if `memory` is smaller than `geometry` says, of a kind that the device cannot address, or
    /// `geometry.layout` is not the executor's own.
    fn attach(&mut self, geometry: KvGeometry, memory: Arc<dyn KvMemory>) -> Result<(), ExecutorError>;

    /// Computes one step: writes the KV of all items' tokens and samples where a sampler is given.
    ///
    /// `on_layer(layer)` is called once per layer, in order, when that layer's KV of **every** item is written, and that of
    /// items that are [sent](BatchItem::is_sent) may be read by a transfer; computing goes on after it returns, so it must not
    /// block.
    ///
    /// # Errors
    /// Errors of the whole step only; a sampler's failure is that item's entry in [`StepOutput::sampled`]. On an error
    /// nothing was sampled; KV of the items' new positions is undefined and everything else is untouched.
    fn forward(
        &mut self,
        batch: &mut Batch<'_>,
        on_layer: &mut dyn FnMut(LayerId),
    ) -> Result<StepOutput, ExecutorError>;

    /// Takes over KV that others have written into these pages of the region: called when all of it is there, before the first
    /// [`Self::forward`] that reads it. An executor that computes in the region itself has nothing to do; one that computes in
    /// memory of its own copies the pages.
    ///
    /// # Errors
    /// [`ExecutorError::Memory`] without a region or for a page outside it, [`ExecutorError::Compute`] if the device fails.
    fn import(&mut self, _pages: &[PageId]) -> Result<(), ExecutorError> {
        Ok(())
    }

    /// Makes what [`Self::forward`] has written into these pages readable in the region: called before a transfer reads KV of
    /// earlier steps. An executor that computes in the region itself has nothing to do.
    ///
    /// # Errors
    /// As of [`Self::import`].
    fn export(&mut self, _pages: &[PageId]) -> Result<(), ExecutorError> {
        Ok(())
    }
    /// Returns why the device is gone for good, once it is: one in another process may end alone. Nothing succeeds any more then, what was
    /// in the region is lost with it, and another executor and transport have to take this one's place.
    fn lost(&self) -> Option<String> {
        None
    }
}
