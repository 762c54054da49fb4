//! Driving an executor as an engine would.

use std::sync::Arc;

use microserving_executor::{Batch, BatchItem, Executor, Sampler};
use microserving_executor_candle::{CandleConfig, CandleExecutor};
use microserving_protocol::{KvGeometry, KvMemory, PageId, SamplingParams, TokenId};

use crate::memory::HeapMemory;

/// An executor with memory attached.
pub(crate) struct Driver {
    pub(crate) executor: CandleExecutor,
    pub(crate) geometry: KvGeometry,
    pub(crate) memory: Arc<HeapMemory>,
}

impl Driver {
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
        let mut batch = Batch { items: vec![BatchItem { tokens, position, pages, sampler }] };
        let output = self.executor.forward(&mut batch, &mut |_| ()).unwrap();
        output.sampled.into_iter().next().unwrap().map(|sampled| sampled.unwrap().token)
    }
}

pub(crate) fn tokens(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}

pub(crate) fn pages(ids: std::ops::Range<u32>) -> Vec<PageId> {
    ids.map(PageId).collect()
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
