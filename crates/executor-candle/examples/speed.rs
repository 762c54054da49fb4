//! Measures a model: `cargo run --release -p microserving-executor-candle --example speed -- MODEL [key=value ...]`.
//!
//! Keys: `dtype`, `kv_dtype`, `level`, `threads`, `pin`, `prefill` (tokens), `decode` (steps). Prints tokens per second of a prefill
//! and of decoding at batches of 1, 4, 8 and 16.
#![allow(clippy::print_stdout, reason = "printing is what it is for")]

#[path = "../tests/it/memory.rs"]
mod memory;

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use microserving_executor::{Batch, BatchItem, Executor, Sampler};
use microserving_executor_candle::{CandleConfig, CandleExecutor, KernelLevel, WeightDtype};
use microserving_protocol::{KvDtype, KvGeometry, PageId, SamplingParams, TokenId};

/// Time by the clock, and time that the calling thread had a core: the same on a quiet machine.
#[derive(Clone, Copy)]
struct Taken {
    wall: Duration,
    on_core: Duration,
}

impl Taken {
    fn rates(&self, tokens: usize) -> String {
        let rate = |time: Duration| tokens as f64 / time.as_secs_f64();
        format!("{:.1} tok/s ({:.1} by time on the core)", rate(self.wall), rate(self.on_core))
    }
}

/// Returns the time that the calling thread has had a core so far.
fn on_core() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0))
}

#[allow(
    clippy::disallowed_types,
    reason = "a measurement wants the real clock, and the crate has no runtime"
)]
fn timed<T>(work: impl FnOnce() -> T) -> (T, Taken) {
    let (begin, core) = (std::time::Instant::now(), on_core());
    let result = work();
    (result, Taken { wall: begin.elapsed(), on_core: on_core().saturating_sub(core) })
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let mut config = CandleConfig::new(args.next().ok_or("usage: speed MODEL [key=value ...]")?);
    let (mut prefill, mut decode) = (512_usize, 128_usize);
    for arg in args {
        let (key, value) = arg.split_once('=').ok_or_else(|| format!("{arg} is not key=value"))?;
        match key {
            "dtype" => config.dtype = WeightDtype::from_name(value).ok_or("unknown dtype")?,
            "kv_dtype" => {
                config.kv_dtype = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16]
                    .into_iter()
                    .find(|dtype| dtype.name() == value)
                    .ok_or("unknown kv_dtype")?;
            }
            "level" => config.kernel_level = Some(KernelLevel::from_name(value).ok_or("unknown level")?),
            "threads" => config.threads = value.parse()?,
            "pin" => config.pin_threads = value.parse()?,
            "prefill" => prefill = value.parse()?,
            "decode" => decode = value.parse()?,
            other => return Err(format!("unknown key {other}").into()),
        }
    }
    let (executor, load) = timed(|| CandleExecutor::load(&config, &mut |_| ()));
    let mut executor = executor?;
    let layout = executor.info().layout.clone();
    println!(
        "{} {} kv {} threads {}: {:.1} MB of weights loaded in {:.2} s",
        executor.info().model,
        layout.numeric_mode,
        layout.dtype,
        config.threads,
        executor.weight_bytes() as f64 / 1e6,
        load.wall.as_secs_f64()
    );
    let pages_each = layout.pages_for((prefill.max(64) + decode) as u32);
    let geometry = KvGeometry { layout, num_pages: 16 * pages_each };
    let memory = memory::HeapMemory::new(geometry.region_bytes(), 0);
    executor.attach(geometry, Arc::new(memory))?;
    let vocab = executor.info().vocab_size;
    let prompt: Vec<TokenId> = (0..prefill as u32).map(|i| TokenId((i * 7919 + 13) % vocab)).collect();
    let pages: Vec<Vec<PageId>> = (0..16)
        .map(|sequence| (0..pages_each).map(|page| PageId(sequence * pages_each + page)).collect())
        .collect();

    let mut best: Option<Taken> = None;
    for _ in 0..3 {
        let item =
            BatchItem { tokens: &prompt, position: 0, pages: &pages[0], sampler: None, is_sent: false };
        let (output, time) = timed(|| executor.forward(&mut Batch { items: vec![item] }, &mut |_| ()));
        output?;
        best = best.into_iter().chain([time]).min_by_key(|taken| taken.wall);
    }
    if let Some(best) = best {
        println!("prefill {prefill}: {}", best.rates(prefill));
    }

    for batch in [1, 4, 8, 16] {
        let mut samplers: Vec<Sampler> =
            (0..batch).map(|_| Sampler::new(SamplingParams::greedy(), 0, &[])).collect();
        // Contexts of 64 tokens, as after a short prompt.
        let context = 64;
        for pages in &pages[..batch] {
            let item = BatchItem {
                tokens: &vec![TokenId(1); context],
                position: 0,
                pages,
                sampler: None,
                is_sent: false,
            };
            executor.forward(&mut Batch { items: vec![item] }, &mut |_| ())?;
        }
        let mut last = vec![TokenId(1); batch];
        let (result, time) = timed(|| -> Result<(), Box<dyn Error>> {
            for step in 0..decode {
                let tokens = last.clone();
                let items = samplers.iter_mut().enumerate().map(|(i, sampler)| BatchItem {
                    tokens: &tokens[i..=i],
                    position: (context + step) as u32,
                    pages: &pages[i],
                    sampler: Some(sampler),
                    is_sent: false,
                });
                let output = executor.forward(&mut Batch { items: items.collect() }, &mut |_| ())?;
                for (last, sampled) in last.iter_mut().zip(output.sampled) {
                    *last = sampled.ok_or("every item has a sampler")??.token;
                }
            }
            Ok(())
        });
        result?;
        println!("decode {decode} x {batch}: {}", time.rates(batch * decode));
    }
    Ok(())
}
