//! What should come out: every request run alone, on memory of its own.

use std::collections::BTreeMap;
use std::sync::Arc;

use microserving_executor::{Batch, BatchItem, Executor, Sampler, ToyConfig, ToyExecutor};
use microserving_protocol::{
    FinishReason, KvGeometry, KvMemory, LayerId, PageHash, PageId, SamplingParams, TokenId, page_hashes,
};

use crate::PlainMemory;

/// The tokens that a request yields, and why they end.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Reference {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) finish: FinishReason,
}

/// Runs requests alone and remembers what their pages hold.
pub(crate) struct Oracle {
    executor: ToyExecutor,
    memory: Arc<PlainMemory>,
    geometry: KvGeometry,
    /// What a page of this name holds, layer by layer.
    pages: BTreeMap<PageHash, Vec<u8>>,
}

impl Oracle {
    /// `max_tokens` is the longest sequence, prompt and output together.
    pub(crate) fn new(config: ToyConfig, max_tokens: u32) -> Self {
        let mut executor = ToyExecutor::new(config).expect("the simulation's toy is within its bounds");
        let layout = executor.info().layout.clone();
        let geometry = KvGeometry { num_pages: layout.pages_for(max_tokens), layout };
        let memory = PlainMemory::new(geometry.region_bytes());
        executor.attach(geometry.clone(), memory.clone()).expect("the memory was made for it");
        Self { executor, memory, geometry, pages: BTreeMap::new() }
    }

    /// Runs a request to its end.
    pub(crate) fn run(
        &mut self,
        prompt: &[TokenId],
        sampling: &SamplingParams,
        max_output: u32,
        salt: &str,
    ) -> Reference {
        let pages: Vec<_> = (0..self.geometry.num_pages).map(PageId).collect();
        let mut sampler = Sampler::new(sampling.clone(), 0, prompt);
        let (mut tokens, mut at) = (prompt.to_vec(), 0);
        let finish = loop {
            let item = BatchItem {
                tokens: &tokens[at..],
                position: at as u32,
                pages: &pages,
                sampler: Some(&mut sampler),
                is_sent: false,
            };
            let output = self.executor.forward(&mut Batch { items: vec![item] }, &mut |_| {});
            let sampled = output.expect("well formed").sampled[0].clone().expect("had a sampler");
            at = tokens.len();
            tokens.push(sampled.expect("parameters are within their bounds").token);
            if tokens[at] == ToyExecutor::EOS {
                break FinishReason::Stop;
            }
            if tokens.len() - prompt.len() >= max_output as usize {
                break FinishReason::Length;
            }
        };
        // The last token's own KV is never computed.
        let names = page_hashes(salt, &tokens[..at], self.geometry.layout.page_size);
        for (page, name) in (0..).map(PageId).zip(names) {
            let content = read_page(&*self.memory, &self.geometry, page);
            self.pages.insert(name, content);
        }
        Reference { tokens: tokens.split_off(prompt.len()), finish }
    }

    /// Returns what a page of this name must hold; `None` if no request has such a page.
    pub(crate) fn page(&self, name: PageHash) -> Option<&[u8]> {
        self.pages.get(&name).map(Vec::as_slice)
    }
}

/// Reads a page, layer by layer.
pub(crate) fn read_page(memory: &dyn KvMemory, geometry: &KvGeometry, page: PageId) -> Vec<u8> {
    let page_bytes = geometry.layout.page_bytes();
    let mut content = vec![0; page_bytes * geometry.layout.num_layers as usize];
    for (layer, into) in (0..).map(LayerId).zip(content.chunks_exact_mut(page_bytes)) {
        memory.read(geometry.page_offset(layer, page), into);
    }
    content
}
