//! Driving an executor as an engine would.

use std::sync::Arc;

use microserving_executor::{Batch, BatchItem, Executor, Sampler};
use microserving_executor_candle::{CandleConfig, CandleExecutor, KernelLevel};
use microserving_protocol::{KvGeometry, KvMemory, LayerId, PageId, SamplingParams, TokenId};

use crate::memory::HeapMemory;

/// An executor with memory attached.
pub(crate) struct Driver {
    pub(crate) executor: CandleExecutor,
    pub(crate) geometry: KvGeometry,
    pub(crate) memory: Arc<HeapMemory>,
}

impl Driver {
    /// Loads a model. Memory begins as ones, which are NaNs in every KV type: what is read before it is written shows.
    pub(crate) fn load(config: &CandleConfig, num_pages: u32) -> Self {
        let mut executor = CandleExecutor::load(config, &mut |_| ()).unwrap();
        let geometry = KvGeometry { layout: executor.info().layout.clone(), num_pages };
        let memory = Arc::new(HeapMemory::new(geometry.region_bytes(), 0xff));
        executor.attach(geometry.clone(), Arc::clone(&memory) as Arc<dyn KvMemory>).unwrap();
        Self { executor, geometry, memory }
    }

    /// Prefills `prompt` in chunks of `chunk` and decodes greedily until `count` tokens or an end-of-sequence token.
    pub(crate) fn greedy(
        &mut self,
        prompt: &[TokenId],
        count: usize,
        chunk: usize,
        pages: &[PageId],
    ) -> Vec<TokenId> {
        let mut sampler = Sampler::new(SamplingParams::greedy(), 0, prompt);
        let mut generated: Vec<TokenId> = Vec::new();
        let mut position = 0;
        while position < prompt.len() {
            let end = (position + chunk).min(prompt.len());
            let sampler = (end == prompt.len()).then_some(&mut sampler);
            generated.extend(self.step(&prompt[position..end], position as u32, pages, sampler));
            position = end;
        }
        while generated.len() < count && !self.executor.info().eos_tokens.contains(generated.last().unwrap())
        {
            let last = *generated.last().unwrap();
            generated.extend(self.step(&[last], position as u32, pages, Some(&mut sampler)));
            position += 1;
        }
        generated
    }

    /// Runs a batch of one item.
    pub(crate) fn step(
        &mut self,
        tokens: &[TokenId],
        position: u32,
        pages: &[PageId],
        sampler: Option<&mut Sampler>,
    ) -> Option<TokenId> {
        let mut batch = Batch { items: vec![BatchItem { tokens, position, pages, sampler, is_sent: false }] };
        let output = self.executor.forward(&mut batch, &mut |_| ()).unwrap();
        output.sampled.into_iter().next().unwrap().map(|sampled| sampled.unwrap().token)
    }

    /// Returns the log-probabilities of the whole vocabulary after the last of `tokens`.
    pub(crate) fn log_probs(&mut self, tokens: &[TokenId], position: u32, pages: &[PageId]) -> Vec<f32> {
        let vocab = self.executor.info().vocab_size;
        let mut sampler = full_sampler(vocab);
        let mut batch = Batch {
            items: vec![BatchItem { tokens, position, pages, sampler: Some(&mut sampler), is_sent: false }],
        };
        let output = self.executor.forward(&mut batch, &mut |_| ()).unwrap();
        log_probs_of(output.sampled.into_iter().next().unwrap().unwrap().unwrap(), vocab)
    }

    /// Returns the bytes of a sequence's KV in order of layer, k and v, head and position: what placement must not change.
    pub(crate) fn kv_bytes(&self, pages: &[PageId], num_tokens: u32) -> Vec<u8> {
        let layout = &self.geometry.layout;
        let mut all = Vec::new();
        let mut slot = vec![0; layout.slot_bytes()];
        for layer in 0..layout.num_layers {
            for kv in 0..2 {
                for head in 0..layout.num_kv_heads {
                    for position in 0..num_tokens {
                        let page = pages[(position / layout.page_size) as usize];
                        let at = self.geometry.slot_offset(
                            LayerId(layer),
                            page,
                            kv,
                            head,
                            position % layout.page_size,
                        );
                        self.memory.read(at, &mut slot);
                        all.extend_from_slice(&slot);
                    }
                }
            }
        }
        all
    }
}

/// Returns a sampler that tells the log-probability of every token.
pub(crate) fn full_sampler(vocab: u32) -> Sampler {
    Sampler::new(SamplingParams { logprobs: Some(vocab), ..SamplingParams::greedy() }, 0, &[])
}

/// Orders what [`full_sampler`] told by token.
pub(crate) fn log_probs_of(sampled: microserving_executor::Sampled, vocab: u32) -> Vec<f32> {
    let mut all = vec![f32::NAN; vocab as usize];
    for (token, logprob) in sampled.logprob.unwrap().top {
        all[token.0 as usize] = logprob;
    }
    assert!(all.iter().all(|x| !x.is_nan()), "every token has a log-probability");
    all
}

/// Brings logits to log-probabilities.
pub(crate) fn log_softmax(logits: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let logits: Vec<f64> = logits.into_iter().collect();
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
    logits.iter().map(|x| x - max - sum.ln()).collect()
}

/// Returns the root of the mean square of the differences, as a share of the spread of `exact`.
pub(crate) fn relative_error(got: &[f32], exact: &[f64]) -> f64 {
    assert_eq!(got.len(), exact.len());
    let mean = exact.iter().sum::<f64>() / exact.len() as f64;
    let spread: f64 = exact.iter().map(|x| (x - mean).powi(2)).sum();
    let error: f64 = got.iter().zip(exact).map(|(&got, exact)| (f64::from(got) - exact).powi(2)).sum();
    (error / spread).sqrt()
}

/// Returns the levels that this machine has, saying which it lacks.
pub(crate) fn levels() -> Vec<KernelLevel> {
    let (have, lack): (Vec<_>, Vec<_>) = KernelLevel::ALL.into_iter().partition(|level| level.is_supported());
    for level in lack {
        eprintln!("SKIPPED: this machine lacks the instructions of {level}");
    }
    have
}

pub(crate) fn tokens(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}

pub(crate) fn pages(ids: impl IntoIterator<Item = u32>) -> Vec<PageId> {
    ids.into_iter().map(PageId).collect()
}

/// Returns the value of an environment variable that names test data. Unset, the test is skipped aloud, or fails if
/// `MICROSERVING_FULL` forbids skipping.
pub(crate) fn test_data(variable: &str) -> Option<std::path::PathBuf> {
    let value = std::env::var_os(variable).map(Into::into);
    if value.is_none() {
        assert!(
            std::env::var_os("MICROSERVING_FULL").is_none_or(|full| full != "1"),
            "{variable} is not set"
        );
        eprintln!("SKIPPED: {variable} is not set");
    }
    value
}
