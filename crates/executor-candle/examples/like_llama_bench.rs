//! Times our executor as llama-bench and llama-batched-bench time theirs, so that the figures stand beside each other:
//! `cargo run --release -p microserving-executor-candle --example like_llama_bench -- MODEL [key=value ...]`
//!
//! | key | default | means |
//! |---|---|---|
//! | `threads` | 1 | threads that compute |
//! | `pp` | none | a list: prompts of so many random tokens from an empty context, in steps of 512 (llama.cpp's `ubatch`), logits for the last token |
//! | `tg` | none | a list: so many steps of one token from an empty context, logits and a greedy token each |
//! | `batched` | none | a list: steps of so many sequences that have `npp` tokens each before, `ntg` steps |
//! | `npp`, `ntg` | 128, 32 | see there |
//! | `dtype`, `kv_dtype`, `level` | auto, f16, best | as the executor's options |
//!
//! Before each list comes an untimed prompt of 32 tokens; nothing else is warmed. KV memory is what the longest test needs. llama-bench feeds
//! random tokens and draws none; ours are the same mixture, with the drawing included. Prints JSON objects: of the process, of the
//! model's shape, then one a test.
#![allow(clippy::print_stdout, reason = "printing is what it is for")]
#![allow(clippy::disallowed_types, reason = "a measurement wants the real clock")]

#[path = "../tests/it/memory.rs"]
mod memory;

use std::error::Error;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::quantized::gguf_file::Content;
use microserving_executor::{Batch, BatchItem, Executor, Sampler};
use microserving_executor_candle::{CandleConfig, CandleExecutor, KernelLevel, WeightDtype};
use microserving_protocol::{KvDtype, KvGeometry, PageId, SamplingParams, TokenId};
use serde_json::json;

/// Tokens of a step in prefill.
const CHUNK: usize = 512;
const WARM_UP: usize = 32;

/// What is to be measured.
#[derive(Debug, Default)]
struct Tests {
    pp: Vec<usize>,
    tg: Vec<usize>,
    batched: Vec<usize>,
    npp: usize,
    ntg: usize,
}

impl Tests {
    /// Returns the sequences at a time, and the tokens of each, that memory must hold.
    fn needed(&self) -> (usize, usize) {
        let longest = self.pp.iter().chain(&self.tg).copied().max().unwrap_or(0).max(WARM_UP);
        match self.batched.iter().max() {
            None => (1, longest),
            Some(&most) => (most, longest.max(self.npp + self.ntg)),
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let begin = Instant::now();
    let mut args = std::env::args().skip(1);
    let mut config = CandleConfig::new(args.next().ok_or("usage: like_llama_bench MODEL [key=value ...]")?);
    let mut tests = Tests { npp: 128, ntg: 32, ..Tests::default() };
    for arg in args {
        let (key, value) = arg.split_once('=').ok_or_else(|| format!("{arg} is not key=value"))?;
        let list = || value.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>();
        match key {
            "threads" => config.threads = value.parse()?,
            "pp" => tests.pp = list()?,
            "tg" => tests.tg = list()?,
            "batched" => tests.batched = list()?,
            "npp" => tests.npp = value.parse()?,
            "ntg" => tests.ntg = value.parse()?,
            "dtype" => config.dtype = WeightDtype::from_name(value).ok_or("unknown dtype")?,
            "kv_dtype" => {
                config.kv_dtype = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16]
                    .into_iter()
                    .find(|dtype| dtype.name() == value)
                    .ok_or("unknown kv_dtype")?;
            }
            "level" => config.kernel_level = Some(KernelLevel::from_name(value).ok_or("unknown level")?),
            other => return Err(format!("unknown key {other}").into()),
        }
    }
    let executor = CandleExecutor::load(&config, &mut |_| ())?;
    let load = begin.elapsed();
    let info = executor.info();
    println!(
        "{}",
        json!({"model": info.model, "numeric_mode": info.layout.numeric_mode, "kv_dtype": info.layout.dtype.name(),
            "threads": config.threads, "load_seconds": load.as_secs_f64(), "weight_bytes": executor.weight_bytes()})
    );
    println!("{}", shape(&config.path)?);
    Runner::new(executor, tests.needed())?.run(&tests)
}

/// Says what a file's matrices hold, which is what a roofline is made of: the layers' and the one that makes logits.
fn shape(path: &Path) -> Result<serde_json::Value, Box<dyn Error>> {
    let content = Content::read(&mut File::open(path)?)?;
    let tied = !content.tensor_infos.contains_key("output.weight");
    let logits_name = if tied { "token_embd.weight" } else { "output.weight" };
    let (mut layers, mut logits) = ([0, 0], [0, 0]);
    for (name, info) in &content.tensor_infos {
        if info.shape.rank() < 2 || (name == "token_embd.weight" && !tied) {
            continue;
        }
        let elements = info.shape.elem_count();
        let into = if name == logits_name { &mut logits } else { &mut layers };
        into[0] += elements;
        into[1] += elements / info.ggml_dtype.block_size() * info.ggml_dtype.type_size();
    }
    let architecture =
        content.metadata.get("general.architecture").and_then(|name| name.to_string().ok().cloned());
    let architecture = architecture.ok_or("the file does not say its architecture")?;
    let size = |key: &str| {
        content.metadata.get(&format!("{architecture}.{key}")).and_then(|value| value.to_u32().ok())
    };
    let heads = size("attention.head_count").ok_or("the file does not say its heads")?;
    let hidden = size("embedding_length").ok_or("the file does not say its width")?;
    Ok(json!({
        "layer_weights": layers[0], "layer_bytes": layers[1], "logits_weights": logits[0], "logits_bytes": logits[1],
        "num_layers": size("block_count"), "num_heads": heads,
        "num_kv_heads": size("attention.head_count_kv").unwrap_or(heads),
        "head_dim": size("attention.key_length").unwrap_or(hidden / heads),
    }))
}

struct Runner {
    executor: CandleExecutor,
    /// Pages of each sequence.
    pages: Vec<Vec<PageId>>,
    tokens: Vec<TokenId>,
}

impl Runner {
    fn new(mut executor: CandleExecutor, (sequences, len): (usize, usize)) -> Result<Self, Box<dyn Error>> {
        let layout = executor.info().layout.clone();
        let pages_each = layout.pages_for(len as u32);
        let geometry = KvGeometry { layout, num_pages: sequences as u32 * pages_each };
        executor.attach(geometry.clone(), Arc::new(memory::HeapMemory::new(geometry.region_bytes(), 0)))?;
        let vocab = executor.info().vocab_size;
        let tokens = (0..len as u32).map(|i| TokenId(i.wrapping_mul(2_654_435_761) % vocab)).collect();
        let pages = (0..sequences as u32)
            .map(|sequence| (0..pages_each).map(|page| PageId(sequence * pages_each + page)).collect())
            .collect();
        Ok(Self { executor, pages, tokens })
    }

    fn run(mut self, tests: &Tests) -> Result<(), Box<dyn Error>> {
        self.prompt(WARM_UP, 0)?;
        for &len in &tests.pp {
            let time = timed(|| self.prompt(len, 0))?;
            report(&format!("pp{len}"), len, time);
        }
        for &steps in &tests.tg {
            let time = timed(|| self.generate(1, 0, steps))?;
            report(&format!("tg{steps}"), steps, time);
        }
        for &sequences in &tests.batched {
            for sequence in 0..sequences {
                self.prompt(tests.npp, sequence)?;
            }
            let time = timed(|| self.generate(sequences, tests.npp, tests.ntg))?;
            report(&format!("batched{sequences}"), sequences * tests.ntg, time);
        }
        Ok(())
    }

    /// Prefills a sequence from its beginning; the last token's logits are computed and one drawn.
    fn prompt(&mut self, len: usize, sequence: usize) -> Result<(), Box<dyn Error>> {
        let mut sampler = Sampler::new(SamplingParams::greedy(), 0, &[]);
        for begin in (0..len).step_by(CHUNK) {
            let end = (begin + CHUNK).min(len);
            let item = BatchItem {
                tokens: &self.tokens[begin..end],
                position: begin as u32,
                pages: &self.pages[sequence],
                sampler: (end == len).then_some(&mut sampler),
                is_sent: false,
            };
            self.executor.forward(&mut Batch { items: vec![item] }, &mut |_| ())?;
        }
        Ok(())
    }

    /// Decodes one token a sequence and step.
    fn generate(&mut self, sequences: usize, position: usize, steps: usize) -> Result<(), Box<dyn Error>> {
        let mut samplers: Vec<Sampler> =
            (0..sequences).map(|_| Sampler::new(SamplingParams::greedy(), 0, &[])).collect();
        for step in 0..steps {
            let items = samplers.iter_mut().enumerate().map(|(sequence, sampler)| {
                let at = (step * sequences + sequence) % self.tokens.len();
                BatchItem {
                    tokens: &self.tokens[at..=at],
                    position: (position + step) as u32,
                    pages: &self.pages[sequence],
                    sampler: Some(sampler),
                    is_sent: false,
                }
            });
            let output = self.executor.forward(&mut Batch { items: items.collect() }, &mut |_| ())?;
            for sampled in output.sampled {
                sampled.ok_or("every item has a sampler")??;
            }
        }
        Ok(())
    }
}

fn timed(work: impl FnOnce() -> Result<(), Box<dyn Error>>) -> Result<Duration, Box<dyn Error>> {
    let begin = Instant::now();
    work()?;
    Ok(begin.elapsed())
}

fn report(test: &str, tokens: usize, time: Duration) {
    let seconds = time.as_secs_f64();
    println!("{}", json!({"test": test, "tokens_per_second": tokens as f64 / seconds, "seconds": seconds}));
}
