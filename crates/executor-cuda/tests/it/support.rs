//! Driving executors as an engine would.

use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use microserving_executor::{Batch, BatchItem, Executor, SampleError, Sampled, Sampler};
use microserving_executor_candle::{CandleConfig, CandleExecutor, WeightDtype};
use microserving_executor_cuda::{Accelerator, CudaConfig, CudaDtype, CudaExecutor, EmulatedDevice};
use microserving_kernels::Order;
use microserving_protocol::{
    KvDtype, KvGeometry, KvMemory, LayerId, MemoryKind, PageId, SamplingParams, TokenId,
};

use crate::memory::HeapMemory;
use crate::tiny::Tiny;

/// An executor with memory attached.
pub(crate) struct Driver<E> {
    pub(crate) executor: E,
    pub(crate) geometry: KvGeometry,
    pub(crate) memory: Arc<HeapMemory>,
}

/// One item of a step.
pub(crate) struct Item<'a> {
    pub(crate) tokens: &'a [TokenId],
    pub(crate) position: usize,
    pub(crate) pages: &'a [PageId],
    pub(crate) sampler: Option<&'a mut Sampler>,
}

/// What a step drew for each item.
pub(crate) type Drawn = Vec<Option<Result<Sampled, SampleError>>>;

/// Heap memory that passes for the emulated device's own.
#[derive(Debug)]
struct OnDevice(Arc<HeapMemory>);

impl KvMemory for OnDevice {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Cuda { ordinal: 0 }
    }
    fn num_bytes(&self) -> usize {
        self.0.num_bytes()
    }
    fn base_address(&self) -> usize {
        self.0.base_address()
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        self.0.read(offset, into);
    }
    fn write(&self, offset: usize, from: &[u8]) {
        self.0.write(offset, from);
    }
}

impl<E: Executor> Driver<E> {
    fn attach(mut executor: E, num_pages: u32, is_on_device: bool) -> Self {
        let geometry = KvGeometry { layout: executor.info().layout.clone(), num_pages };
        // Ones, which are NaNs in every KV type: what is read before it is written shows.
        let memory = Arc::new(HeapMemory::new(geometry.region_bytes(), 0xff));
        let region: Arc<dyn KvMemory> =
            if is_on_device { Arc::new(OnDevice(Arc::clone(&memory))) } else { Arc::clone(&memory) as _ };
        executor.attach(geometry.clone(), region).unwrap();
        Self { executor, geometry, memory }
    }

    pub(crate) fn step(&mut self, items: Vec<Item<'_>>) -> Drawn {
        self.step_sending(items, |_, _| None)
    }

    /// Runs a step in which the items are sent that `send` says so of, and hands it each layer when it is told of.
    pub(crate) fn step_sending(
        &mut self,
        items: Vec<Item<'_>>,
        mut send: impl FnMut(Option<LayerId>, usize) -> Option<()>,
    ) -> Drawn {
        let items = items.into_iter().enumerate().map(|(at, item)| BatchItem {
            tokens: item.tokens,
            position: item.position as u32,
            pages: item.pages,
            sampler: item.sampler,
            is_sent: send(None, at).is_some(),
        });
        let mut batch = Batch { items: items.collect() };
        let mut layers = Vec::new();
        let output = self.executor.forward(&mut batch, &mut |layer| {
            layers.push(layer);
            send(Some(layer), 0);
        });
        assert_eq!(layers, (0..self.geometry.layout.num_layers).map(LayerId).collect::<Vec<_>>());
        output.unwrap().sampled
    }

    /// Prefills `prompt` in chunks of `chunk`, decodes `count` tokens, and returns what was drawn.
    pub(crate) fn generate(
        &mut self,
        params: SamplingParams,
        prompt: &[TokenId],
        (count, chunk): (usize, usize),
        pages: &[PageId],
    ) -> Vec<Sampled> {
        let mut sampler = Sampler::new(params, 0, prompt);
        let mut tokens = prompt.to_vec();
        let mut drawn = Vec::new();
        let mut position = 0;
        while drawn.len() < count {
            let end = if drawn.is_empty() { prompt.len().min(position + chunk) } else { tokens.len() };
            let sampler = (end == tokens.len()).then_some(&mut sampler);
            let sampled = self.step(vec![Item { tokens: &tokens[position..end], position, pages, sampler }]);
            position = end;
            if let Some(sampled) = sampled.into_iter().next().unwrap() {
                tokens.push(sampled.as_ref().unwrap().token);
                drawn.push(sampled.unwrap());
            }
        }
        drawn
    }

    /// Returns the bytes of a sequence's KV, as they lie in the region, in order of layer, k and v, head and position.
    pub(crate) fn kv_bytes(&self, pages: &[PageId], num_tokens: u32) -> Vec<u8> {
        let layout = &self.geometry.layout;
        let mut all = Vec::new();
        let mut slot = vec![0; layout.slot_bytes()];
        for layer in (0..layout.num_layers).map(LayerId) {
            for (kv, head) in (0..2).flat_map(|kv| (0..layout.num_kv_heads).map(move |head| (kv, head))) {
                for position in 0..num_tokens {
                    let page = pages[(position / layout.page_size) as usize];
                    let within = position % layout.page_size;
                    self.memory.read(self.geometry.slot_offset(layer, page, kv, head, within), &mut slot);
                    all.extend_from_slice(&slot);
                }
            }
        }
        all
    }
}

pub(crate) type Cuda = Driver<CudaExecutor>;
pub(crate) type Candle = Driver<CandleExecutor>;

/// What [`cuda`] loads, and onto what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) dtype: CudaDtype,
    pub(crate) tensor_cores: Option<bool>,
    pub(crate) order: Order,
    pub(crate) is_on_device: bool,
    pub(crate) page_size: u32,
}

pub(crate) const PLAIN: Kind = Kind {
    dtype: CudaDtype::F32,
    tensor_cores: None,
    order: Order::Forward,
    is_on_device: false,
    page_size: 16,
};

pub(crate) const TENSOR_CORE: Kind = Kind { dtype: CudaDtype::Bf16, ..PLAIN };

pub(crate) fn cuda_on(device: &Arc<EmulatedDevice>, path: &Path, kind: Kind, num_pages: u32) -> Cuda {
    let device = Arc::clone(device) as Arc<dyn Accelerator>;
    let mut config = CudaConfig::new(path);
    (config.dtype, config.tensor_cores, config.page_size) = (kind.dtype, kind.tensor_cores, kind.page_size);
    config.max_batch_tokens = 8;
    let executor = CudaExecutor::load(&device, &config, &mut |_| ()).unwrap();
    Driver::attach(executor, num_pages, kind.is_on_device)
}

pub(crate) fn cuda(path: &Path, kind: Kind, num_pages: u32) -> Cuda {
    cuda_on(&Arc::new(EmulatedDevice::open(kind.order).unwrap()), path, kind, num_pages)
}

/// The executor for the CPU in single precision: what the other is compared with.
pub(crate) fn candle(path: &Path, num_pages: u32) -> Candle {
    let mut config = CandleConfig::new(path);
    (config.dtype, config.kv_dtype) = (WeightDtype::F32, KvDtype::F32);
    Driver::attach(CandleExecutor::load(&config, &mut |_| ()).unwrap(), num_pages, false)
}

/// Writes a model into a folder of its own.
pub(crate) fn write(tiny: &Tiny) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    tiny.write_directory(directory.path(), DType::F32, 1);
    directory
}

pub(crate) fn pages(ids: impl IntoIterator<Item = u32>) -> Vec<PageId> {
    ids.into_iter().map(PageId).collect()
}

/// Returns tokens of a vocabulary of 64 or more.
pub(crate) fn tokens(seed: u32, len: u32) -> Vec<TokenId> {
    (0..len).map(|at| TokenId((seed * 31 + at * at * 7 + at * 3) % 64)).collect()
}

/// Returns a sampler that tells the log-probability of every token.
pub(crate) fn full(vocab: u32) -> SamplingParams {
    SamplingParams { logprobs: Some(vocab), ..SamplingParams::greedy() }
}

/// Orders log-probabilities by token.
pub(crate) fn by_token(sampled: &Sampled) -> Vec<f32> {
    let mut top = sampled.logprob.as_ref().unwrap().top.clone();
    top.sort_by_key(|entry| entry.0);
    top.into_iter().map(|entry| entry.1).collect()
}
