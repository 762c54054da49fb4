//! An executor without a model: every KV slot is a hash of all that came before, and every token a hash of all KV slots.
//!
//! It has a transformer's data flow, in integers. A hidden word stands for the activations of a position:
//!
//! ```text
//! h[0][p]   = mix(seed, token[p], p)
//! kv[l][p]  = words of mix(h[l][p], D[l][p-1], head, k|v, dim)     written to the pages
//! D[l][p]   = fold(D[l][p-1], kv[l][p])                            read back from the pages: "attention"
//! h[l+1][p] = mix(h[l][p], D[l][p])
//! logits    = voice(h[L][last], token[last])
//! ```
//!
//! `fold` and `mix` are bijections of each argument, so one lost, stale, swapped or foreign page changes `D`, the logits
//! and with them the text. The executor compares nothing and reports nothing: it only reads, and the text tells.

mod state;
mod voice;

use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{KvDtype, KvGeometry, KvLayout, KvMemory, LayerId, TokenId};

use self::state::{LayerState, mix};
use crate::{Batch, BatchItem, Executor, ExecutorError, ExecutorInfo, StepOutput};

/// What a toy model is made of. Engines with equal configurations (times aside) return equal tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct ToyConfig {
    /// The name served under `/v1/models`.
    pub model: String,
    /// Stands for the weights: another seed is another model.
    pub model_seed: u64,
    /// Tokens in a page; at least 1.
    pub page_size: u32,
    /// Layers; at least 2, so that a layer may be sent while another is computed.
    pub num_layers: u32,
    /// KV heads; at least 1.
    pub num_kv_heads: u32,
    /// 8-byte words of one head's key or value; at least 1.
    pub head_dim: u32,
    /// The longest sequence in tokens; at least 1.
    pub max_context: u32,
    /// One token in so many ends the text; 0 is never.
    pub eos_one_in: u64,
    /// What each step takes, reported as [`StepOutput::modelled`].
    pub step_time: Duration,
    /// What each new token of a step adds to it.
    pub token_time: Duration,
}

impl Default for ToyConfig {
    fn default() -> Self {
        Self {
            model: "toy".into(),
            model_seed: 0,
            page_size: 16,
            num_layers: 4,
            num_kv_heads: 2,
            head_dim: 4,
            max_context: 8192,
            eos_one_in: 256,
            step_time: Duration::ZERO,
            token_time: Duration::ZERO,
        }
    }
}

impl ToyConfig {
    fn check(&self) -> Result<(), ExecutorError> {
        let bounds = [
            ("page_size", self.page_size, 1),
            ("num_layers", self.num_layers, 2),
            ("num_kv_heads", self.num_kv_heads, 1),
            ("head_dim", self.head_dim, 1),
            ("max_context", self.max_context, 1),
        ];
        for (field, value, least) in bounds {
            if value < least {
                return Err(ExecutorError::Load { reason: format!("{field} is {value}, less than {least}") });
            }
        }
        Ok(())
    }

    fn info(&self) -> ExecutorInfo {
        ExecutorInfo {
            model: self.model.clone(),
            layout: KvLayout {
                page_size: self.page_size,
                num_layers: self.num_layers,
                num_kv_heads: self.num_kv_heads,
                head_dim: self.head_dim,
                dtype: KvDtype::U64,
                model_hash: mix(mix(0x74_6f79, self.model_seed), self.eos_one_in),
                numeric_mode: "toy/1".into(),
                tp_rank: 0,
                tp_size: 1,
            },
            vocab_size: ToyExecutor::VOCAB_SIZE,
            max_context: self.max_context,
            eos_tokens: vec![ToyExecutor::EOS],
        }
    }
}

/// The toy executor; see [`ToyConfig`].
///
/// Its vocabulary is the 256 bytes and three specials; what it says under greedy sampling is lower-case words.
#[derive(Debug)]
pub struct ToyExecutor {
    config: ToyConfig,
    info: ExecutorInfo,
    attached: Option<Attached>,
    /// Reused from step to step.
    layer_state: LayerState,
    hidden: Vec<Vec<u64>>,
    logits: Vec<f32>,
}

#[derive(Debug)]
struct Attached {
    geometry: KvGeometry,
    memory: Arc<dyn KvMemory>,
}

impl ToyExecutor {
    /// Begins a text.
    pub const BOS: TokenId = TokenId(256);
    /// Ends a text.
    pub const EOS: TokenId = TokenId(257);
    /// Fills.
    pub const PAD: TokenId = TokenId(258);
    /// The bytes and the specials.
    pub const VOCAB_SIZE: u32 = 259;

    /// Makes a toy model.
    ///
    /// # Errors
    /// [`ExecutorError::Load`] naming the field that is out of its bounds.
    pub fn new(config: ToyConfig) -> Result<Self, ExecutorError> {
        config.check()?;
        Ok(Self {
            info: config.info(),
            config,
            attached: None,
            layer_state: LayerState::default(),
            hidden: Vec::new(),
            logits: vec![0.0; Self::VOCAB_SIZE as usize],
        })
    }

    fn modelled(&self, num_tokens: usize) -> Option<Duration> {
        let num_tokens = u32::try_from(num_tokens).unwrap_or(u32::MAX);
        let duration = self.config.step_time + self.config.token_time.saturating_mul(num_tokens);
        (!duration.is_zero()).then_some(duration)
    }

    fn begin_hidden(&mut self, items: &[BatchItem<'_>]) {
        self.hidden.resize_with(items.len(), Vec::new);
        for (hidden, item) in self.hidden.iter_mut().zip(items) {
            let words = (u64::from(item.position)..)
                .zip(item.tokens)
                .map(|(position, token)| mix(mix(self.config.model_seed, u64::from(token.0)), position));
            hidden.clear();
            hidden.extend(words);
        }
    }
}

impl Executor for ToyExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn attach(&mut self, geometry: KvGeometry, memory: Arc<dyn KvMemory>) -> Result<(), ExecutorError> {
        if geometry.layout != self.info.layout {
            return Err(ExecutorError::Memory { reason: "the layout is another model's".into() });
        }
        let (needed, there) = (geometry.region_bytes(), memory.num_bytes());
        if there < needed {
            let reason = format!("{} pages take {needed} bytes, {there} are there", geometry.num_pages);
            return Err(ExecutorError::Memory { reason });
        }
        self.attached = Some(Attached { geometry, memory });
        Ok(())
    }

    fn forward(
        &mut self,
        batch: &mut Batch<'_>,
        on_layer: &mut dyn FnMut(LayerId),
    ) -> Result<StepOutput, ExecutorError> {
        let Some(Attached { geometry, memory }) = self.attached.take() else {
            return Err(ExecutorError::Memory { reason: "no memory was attached".into() });
        };
        if let Err(error) = batch.check(&self.info, &geometry) {
            self.attached = Some(Attached { geometry, memory });
            return Err(error);
        }
        self.begin_hidden(&batch.items);
        for layer in (0..geometry.layout.num_layers).map(LayerId) {
            for (item, hidden) in batch.items.iter().zip(&mut self.hidden) {
                self.layer_state.run(&geometry, &*memory, layer, item, hidden);
            }
            on_layer(layer);
        }
        let mut output = StepOutput { modelled: self.modelled(batch.num_tokens()), ..Default::default() };
        for (item, hidden) in batch.items.iter_mut().zip(&self.hidden) {
            let sampled = item.sampler.as_mut().map(|sampler| {
                let (last, state) = (item.tokens.last(), hidden.last());
                let (last, state) = last.zip(state).expect("a checked item has at least one token");
                voice::speak(*state, *last, self.config.eos_one_in, &mut self.logits);
                sampler.sample(&mut self.logits)
            });
            output.sampled.push(sampled);
        }
        self.attached = Some(Attached { geometry, memory });
        Ok(output)
    }
}

#[cfg(test)]
mod tests;
