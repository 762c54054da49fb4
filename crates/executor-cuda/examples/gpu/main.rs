//! Measures the executor on a device: `cargo run --release -p microserving-executor-cuda --features cuda --example gpu -- MODEL [key=value ...]`.
//!
//! Keys: `device` (`cuda`, or `emulated` with that feature: figures of it say nothing, but that all of this runs), `prefill` (tokens), `decode`
//! (steps), `batch` (sequences), `copy_mib` and `matmul` (features of the square product that prefill is held against). Prints one line of JSON.
#![allow(clippy::print_stdout, reason = "printing is what it is for")]

mod bounds;
#[path = "../../../executor-candle/tests/it/memory.rs"]
mod heap;
mod memory;

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use microserving_executor::{Batch, BatchItem, Executor, Sampler};
use microserving_executor_candle::{CandleConfig, CandleExecutor, WeightDtype};
use microserving_executor_cuda::{Accelerator, CudaConfig, CudaDtype, CudaExecutor};
use microserving_protocol::{KvDtype, KvGeometry, KvMemory, PageId, SamplingParams, TokenId};
use serde_json::{Value, json};

use crate::heap::HeapMemory;
use crate::memory::DeviceMemory;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Tokens that are compared with the CPU's.
const COMPARED: usize = 32;

struct Sizes {
    prefill: usize,
    decode: usize,
    batch: usize,
    copy_mib: usize,
    matmul: u32,
}

#[allow(
    clippy::disallowed_types,
    reason = "a measurement wants the real clock, and the crate has no runtime"
)]
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let begin = std::time::Instant::now();
    let result = work();
    (result, begin.elapsed())
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or("usage: gpu MODEL [key=value ...]")?;
    let mut sizes = Sizes { prefill: 2048, decode: 64, batch: 32, copy_mib: 1024, matmul: 8192 };
    let mut device = "cuda".to_owned();
    for arg in args {
        let (key, value) = arg.split_once('=').ok_or_else(|| format!("{arg} is not key=value"))?;
        match key {
            "device" => value.clone_into(&mut device),
            "prefill" => sizes.prefill = value.parse()?,
            "decode" => sizes.decode = value.parse()?,
            "batch" => sizes.batch = value.parse()?,
            "copy_mib" => sizes.copy_mib = value.parse()?,
            "matmul" => sizes.matmul = value.parse()?,
            _ => return Err(format!("unknown key {key}").into()),
        }
    }
    let device = open(&device)?;
    let model = Path::new(&model);
    let tokens = compare(&device, model)?;
    let speed = measure(&device, model, &sizes)?;
    println!("{}", json!({ "device": device.name(), "tokens": tokens, "speed": speed }));
    Ok(())
}

fn open(device: &str) -> Result<Arc<dyn Accelerator>> {
    match device {
        "cuda" => Ok(microserving_executor_cuda::open_cuda(0)?),
        #[cfg(feature = "emulated")]
        "emulated" => {
            let order = microserving_kernels::Order::Forward;
            Ok(Arc::new(microserving_executor_cuda::EmulatedDevice::open(order)?))
        }
        other => {
            Err(format!("device is {other}, must be cuda, or emulated in a build with that feature").into())
        }
    }
}

/// An executor with memory.
struct Running<E> {
    executor: E,
    pages_a_sequence: usize,
}

impl<E: Executor> Running<E> {
    fn new(
        mut executor: E,
        (num_seqs, context): (usize, usize),
        memory: impl FnOnce(usize) -> Result<Arc<dyn KvMemory>>,
    ) -> Result<Self> {
        let layout = executor.info().layout.clone();
        let pages_a_sequence = layout.pages_for(context as u32) as usize;
        let geometry = KvGeometry { layout, num_pages: (num_seqs * pages_a_sequence) as u32 };
        let memory = memory(geometry.region_bytes())?;
        executor.attach(geometry, memory)?;
        Ok(Self { executor, pages_a_sequence })
    }

    fn pages(&self, seq: usize) -> Vec<PageId> {
        let first = seq * self.pages_a_sequence;
        (first..first + self.pages_a_sequence).map(|page| PageId(page as u32)).collect()
    }

    /// Computes new tokens of some sequences and returns the next token of each.
    fn step(&mut self, seqs: &[(Vec<TokenId>, usize)], samplers: &mut [Sampler]) -> Result<Vec<TokenId>> {
        let pages: Vec<Vec<PageId>> = (0..seqs.len()).map(|seq| self.pages(seq)).collect();
        let items =
            seqs.iter().zip(samplers).zip(&pages).map(|(((tokens, position), sampler), pages)| BatchItem {
                tokens: &tokens[*position..],
                position: *position as u32,
                pages,
                sampler: Some(sampler),
                is_sent: false,
            });
        let mut batch = Batch { items: items.collect() };
        let output = self.executor.forward(&mut batch, &mut |_| ())?;
        let drawn = output.sampled.into_iter().flatten().map(|sampled| Ok(sampled?.token));
        drawn.collect()
    }

    /// Continues a prompt greedily.
    fn greedy(&mut self, prompt: &[TokenId], count: usize) -> Result<Vec<TokenId>> {
        let mut samplers = [Sampler::new(SamplingParams::greedy(), 0, prompt)];
        let mut seqs = [(prompt.to_vec(), 0)];
        for _ in 0..count {
            let next = self.step(&seqs, &mut samplers)?[0];
            seqs[0].1 = seqs[0].0.len();
            seqs[0].0.push(next);
        }
        Ok(seqs[0].0.split_off(prompt.len()))
    }
}

fn prompt(seed: usize, len: usize, vocab_size: u32) -> Vec<TokenId> {
    let token = |at: usize| ((seed * 7919 + at * 104_729 + at * at * 31) % vocab_size as usize) as u32;
    (0..len).map(|at| TokenId(token(at))).collect()
}

fn load(device: &Arc<dyn Accelerator>, model: &Path, dtype: CudaDtype, rows: usize) -> Result<CudaExecutor> {
    let mut config = CudaConfig::new(model);
    (config.dtype, config.max_batch_tokens) = (dtype, rows as u32);
    Ok(CudaExecutor::load(device, &config, &mut |_| ())?)
}

/// Greedy tokens beside the CPU's in single precision: equal in f32, and in the usual type as far as the first that differs.
fn compare(device: &Arc<dyn Accelerator>, model: &Path) -> Result<Value> {
    let mut config = CandleConfig::new(model);
    (config.dtype, config.kv_dtype) = (WeightDtype::F32, KvDtype::F32);
    config.threads = std::thread::available_parallelism().unwrap_or(config.threads);
    let cpu = CandleExecutor::load(&config, &mut |_| ())?;
    let context = 2 * COMPARED;
    let mut cpu =
        Running::new(cpu, (1, context), |num_bytes| Ok(Arc::new(HeapMemory::new(num_bytes, 0)) as _))?;
    let prompt = prompt(1, COMPARED, cpu.executor.info().vocab_size);
    let expected = cpu.greedy(&prompt, COMPARED)?;
    drop(cpu);
    let mut result = json!({ "compared": COMPARED });
    for (name, dtype) in [("f32", CudaDtype::F32), ("usual", CudaDtype::Auto)] {
        let gpu = load(device, model, dtype, COMPARED)?;
        let mut gpu = Running::new(gpu, (1, context), |num_bytes| DeviceMemory::allocate(device, num_bytes))?;
        let mode = gpu.executor.info().layout.numeric_mode.clone();
        let got = gpu.greedy(&prompt, COMPARED)?;
        let equal = got.iter().zip(&expected).take_while(|(a, b)| a == b).count();
        result[name] = json!({ "numeric_mode": mode, "equal": equal });
    }
    Ok(result)
}

/// Prefill and decode, beside what the device copies and multiplies.
fn measure(device: &Arc<dyn Accelerator>, model: &Path, sizes: &Sizes) -> Result<Value> {
    let copied = bounds::bytes_a_second(device, sizes.copy_mib)?;
    let multiplied = bounds::flops(device, sizes.matmul)?;
    let gpu = load(device, model, CudaDtype::Auto, sizes.prefill)?;
    let weight_bytes = gpu.weight_bytes();
    let context = sizes.prefill + sizes.decode + 2;
    let mut gpu =
        Running::new(gpu, (sizes.batch, context), |num_bytes| DeviceMemory::allocate(device, num_bytes))?;
    let info = gpu.executor.info().clone();
    let mut samplers: Vec<Sampler> =
        (0..sizes.batch).map(|_| Sampler::new(SamplingParams::greedy(), 0, &[])).collect();

    // The first step pays for what comes once.
    let prompts: Vec<_> =
        (0..sizes.batch).map(|seq| (prompt(seq, sizes.prefill, info.vocab_size), 0)).collect();
    gpu.step(&prompts[..1], &mut samplers[..1])?;
    let (next, prefill) = timed(|| gpu.step(&prompts[..1], &mut samplers[..1]));
    next?;
    // All weights but the embedding's are multiplied with each row, two operations each: the logits' are for one row only.
    let element = info.layout.dtype.num_bytes();
    let flops = 2.0 * (weight_bytes / element) as f64 * sizes.prefill as f64;
    let prefill_flops = flops / prefill.as_secs_f64();

    let mut seqs = Vec::new();
    for (seq, (tokens, _)) in prompts.into_iter().enumerate() {
        let only: Vec<(Vec<TokenId>, usize)> = vec![(tokens.clone(), 0)];
        // Decoding begins behind a prompt that is on the sequence's own pages.
        let mut sampler = Sampler::new(SamplingParams::greedy(), 0, &[]);
        let pages = gpu.pages(seq);
        let item = BatchItem {
            tokens: &only[0].0,
            position: 0,
            pages: &pages,
            sampler: Some(&mut sampler),
            is_sent: false,
        };
        gpu.executor.forward(&mut Batch { items: vec![item] }, &mut |_| ())?;
        let position = tokens.len();
        seqs.push(([tokens, vec![TokenId(1)]].concat(), position));
    }
    let advance =
        |gpu: &mut Running<CudaExecutor>, seqs: &mut Vec<(Vec<TokenId>, usize)>, samplers: &mut [Sampler]| {
            let next = gpu.step(seqs, samplers)?;
            for ((tokens, position), token) in seqs.iter_mut().zip(next) {
                *position = tokens.len();
                tokens.push(token);
            }
            Ok::<_, Box<dyn Error>>(())
        };
    advance(&mut gpu, &mut seqs, &mut samplers)?;
    let (done, decode) =
        timed(|| (0..sizes.decode).try_for_each(|_| advance(&mut gpu, &mut seqs, &mut samplers)));
    done?;
    let step_seconds = decode.as_secs_f64() / sizes.decode as f64;
    let mean_context = sizes.prefill + 2 + sizes.decode / 2;
    let step_bytes = (weight_bytes + sizes.batch * mean_context * info.layout.token_bytes()) as f64;
    Ok(json!({
        "model": info.model,
        "numeric_mode": info.layout.numeric_mode,
        "weight_bytes": weight_bytes,
        "copied_bytes_per_second": copied,
        "multiplied_flops": multiplied,
        "prefill": {
            "tokens": sizes.prefill,
            "seconds": prefill.as_secs_f64(),
            "flops": prefill_flops,
            "share_of_matmul": prefill_flops / multiplied,
        },
        "decode": {
            "sequences": sizes.batch,
            "mean_context": mean_context,
            "step_seconds": step_seconds,
            "bytes_per_second": step_bytes / step_seconds,
            "share_of_copy": step_bytes / step_seconds / copied,
        },
    }))
}
