//! A sequence's tokens and KV depend on nothing but its own history: byte for byte, in every form and at every level.

use std::num::NonZeroUsize;
use std::path::Path;

use candle_core::DType;
use candle_core::quantized::GgmlDType;
use microserving_executor::{Batch, BatchItem, Executor, Sampler};
use microserving_executor_candle::{CandleConfig, KernelLevel, WeightDtype};
use microserving_protocol::{KvDtype, PageId, TokenId};

use crate::support::{Driver, full_sampler, levels, log_probs_of, pages};
use crate::tiny::tiny;

const VOCAB: u32 = 85;

/// What a run of a sequence leaves behind.
#[derive(PartialEq)]
struct Trace {
    /// The bits of all log-probabilities after the prompt and after each decoded token.
    log_probs: Vec<Vec<u32>>,
    kv: Vec<u8>,
}

/// A sequence: a prompt, and tokens decoded one by one after it.
struct Sequence {
    prompt: Vec<TokenId>,
    decoded: Vec<TokenId>,
}

impl Sequence {
    fn new(seed: u32, prompt: u32, decoded: u32) -> Self {
        let token = |i: u32| TokenId((seed * 31 + i * i * 7 + i * 3) % VOCAB);
        Self {
            prompt: (0..prompt).map(token).collect(),
            decoded: (prompt..prompt + decoded).map(token).collect(),
        }
    }

    fn len(&self) -> u32 {
        (self.prompt.len() + self.decoded.len()) as u32
    }
}

/// A sequence on its way through a driver.
struct Run<'a> {
    sequence: &'a Sequence,
    pages: Vec<PageId>,
    chunk: usize,
    position: usize,
    sampler: Sampler,
    log_probs: Vec<Vec<u32>>,
}

impl<'a> Run<'a> {
    fn new(sequence: &'a Sequence, pages: Vec<PageId>, chunk: usize) -> Self {
        Self { sequence, pages, chunk, position: 0, sampler: full_sampler(VOCAB), log_probs: Vec::new() }
    }

    fn is_done(&self) -> bool {
        self.position == self.sequence.len() as usize
    }
}

/// Runs sequences side by side, each with its own chunks and pages, until all are done.
fn run(driver: &mut Driver, mut runs: Vec<Run<'_>>) -> Vec<Trace> {
    while runs.iter().any(|run| !run.is_done()) {
        let mut items = Vec::new();
        let mut who = Vec::new();
        for (index, run) in runs.iter_mut().enumerate().filter(|(_, run)| !run.is_done()) {
            let prompt = run.sequence.prompt.len();
            let begin = run.position;
            let tokens = if begin < prompt {
                &run.sequence.prompt[begin..prompt.min(begin + run.chunk)]
            } else {
                &run.sequence.decoded[begin - prompt..=begin - prompt]
            };
            run.position += tokens.len();
            let sampler = (run.position >= prompt).then_some(&mut run.sampler);
            who.push(index);
            items.push(BatchItem {
                tokens,
                position: begin as u32,
                pages: &run.pages,
                sampler,
                is_sent: false,
            });
        }
        let mut layers = Vec::new();
        let output =
            driver.executor.forward(&mut Batch { items }, &mut |layer| layers.push(layer.0)).unwrap();
        assert_eq!(layers, (0..driver.geometry.layout.num_layers).collect::<Vec<_>>());
        for (index, sampled) in who.into_iter().zip(output.sampled) {
            if let Some(sampled) = sampled {
                let log_probs = log_probs_of(sampled.unwrap(), VOCAB);
                runs[index].log_probs.push(log_probs.iter().map(|x| x.to_bits()).collect());
            }
        }
    }
    runs.iter()
        .map(|run| Trace {
            log_probs: run.log_probs.clone(),
            kv: driver.kv_bytes(&run.pages, run.sequence.len()),
        })
        .collect()
}

fn check(path: &Path, level: KernelLevel, dtype: WeightDtype, kv_dtype: KvDtype) {
    let load = |threads: usize, page_size: u32| {
        let mut config = CandleConfig::new(path);
        config.kernel_level = Some(level);
        config.dtype = dtype;
        config.kv_dtype = kv_dtype;
        config.threads = NonZeroUsize::new(threads).unwrap();
        config.page_size = page_size;
        Driver::load(&config, 64)
    };
    let sequences =
        [Sequence::new(1, 75, 5), Sequence::new(2, 1, 40), Sequence::new(3, 33, 8), Sequence::new(4, 64, 2)];
    let mut driver = load(1, 16);
    // Alone, the whole prompt at once, pages in order.
    let alone: Vec<Trace> = sequences
        .iter()
        .flat_map(|sequence| run(&mut driver, vec![Run::new(sequence, pages(0..6), 512)]))
        .collect();
    for trace in &alone {
        assert!(trace.log_probs.len() > 1 && !trace.kv.is_empty());
    }
    let same = |what: &str, traces: &[Trace], of: &[usize]| {
        for (trace, &which) in traces.iter().zip(of) {
            let name = format!("{dtype}/{level} kv {kv_dtype}, {what}, sequence {which}");
            assert!(trace.log_probs == alone[which].log_probs, "{name}: logits differ");
            assert!(trace.kv == alone[which].kv, "{name}: KV differs");
        }
    };
    for chunk in [1, 7, 16, 17, 32, 50] {
        let traces = run(&mut driver, vec![Run::new(&sequences[0], pages(0..6), chunk)]);
        same(&format!("chunks of {chunk}"), &traces, &[0]);
    }
    let traces = run(&mut driver, vec![Run::new(&sequences[0], pages([50, 3, 41, 7, 0]), 20)]);
    same("scattered pages", &traces, &[0]);
    for threads in [1, 2, 3] {
        let mut driver = load(threads, 16);
        let together = vec![
            Run::new(&sequences[2], pages([9, 60, 2]), 10),
            Run::new(&sequences[0], pages([5, 4, 3, 62, 63]), 31),
            Run::new(&sequences[1], pages([20, 22, 21]), 1),
            Run::new(&sequences[3], pages(30..36), 64),
            Run::new(&sequences[0], pages(40..46), 512),
        ];
        let traces = run(&mut driver, together);
        same(&format!("together on {threads} threads"), &traces, &[2, 0, 1, 3, 0]);
    }
    // Another page size is another layout, but the tokens are the same.
    for page_size in [5, 64] {
        let mut driver = load(2, page_size);
        let traces = run(&mut driver, vec![Run::new(&sequences[0], pages((0..16).rev()), 30)]);
        same(&format!("pages of {page_size}"), &traces, &[0]);
    }
}

#[test]
fn batches_chunks_pages_and_threads_change_nothing() {
    let directory = tempfile::tempdir().unwrap();
    tiny("qwen3").write_directory(directory.path(), DType::F32, 1);
    for level in levels() {
        for dtype in [WeightDtype::F32, WeightDtype::F16, WeightDtype::Bf16, WeightDtype::Q8_0] {
            check(directory.path(), level, dtype, KvDtype::F16);
        }
        for kv_dtype in [KvDtype::F32, KvDtype::Bf16] {
            check(directory.path(), level, WeightDtype::Q8_0, kv_dtype);
        }
    }
}

/// The types that files keep, and a file that mixes them in one product.
#[test]
fn quantised_files_change_nothing() {
    let mut config = tiny("qwen3").config;
    config["hidden_size"] = 256.into();
    config["intermediate_size"] = 256.into();
    config["head_dim"] = 64.into();
    let tiny = crate::tiny::Tiny::new(config);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tiny.gguf");
    let mixed = |name: &str| match name {
        name if name.ends_with("attn_v.weight") || name.starts_with("token") => GgmlDType::Q6K,
        _ => GgmlDType::Q4K,
    };
    for level in levels() {
        for kind in [GgmlDType::Q8_0, GgmlDType::Q4_0, GgmlDType::Q4_1] {
            tiny.write_gguf(&path, kind);
            check(&path, level, WeightDtype::Auto, KvDtype::F16);
        }
        tiny.write_gguf_with(&path, mixed, |_| ());
        check(&path, level, WeightDtype::Auto, KvDtype::F16);
    }
}

#[test]
fn odd_sizes_change_nothing() {
    // Head dimension 12, intermediate size 100, three query heads a KV head: nothing is a multiple of a vector.
    let mut config = tiny("llama3_scaled_untied").config;
    config["vocab_size"] = VOCAB.into();
    config["num_attention_heads"] = 3.into();
    config["head_dim"] = 12.into();
    let directory = tempfile::tempdir().unwrap();
    crate::tiny::Tiny::new(config).write_directory(directory.path(), DType::F32, 1);
    for level in levels() {
        for dtype in [WeightDtype::F32, WeightDtype::Bf16, WeightDtype::Q8_0] {
            check(directory.path(), level, dtype, KvDtype::Bf16);
        }
    }
}

/// A prompt of more rows than go through a layer together, over several segments of attention, alone and beside others, prefilled
/// or decoded, on one to three threads.
#[test]
fn long_prompts_change_nothing() {
    let mut config = tiny("qwen3").config;
    config["vocab_size"] = VOCAB.into();
    config["head_dim"] = 32.into();
    config["max_position_embeddings"] = 1024.into();
    let directory = tempfile::tempdir().unwrap();
    crate::tiny::Tiny::new(config).write_directory(directory.path(), DType::F32, 1);
    let (long, short) = (Sequence::new(7, 620, 2), Sequence::new(8, 200, 2));
    // The same tokens, decoded from early on.
    let decoded = Sequence { prompt: long.prompt[..250].to_vec(), decoded: long.prompt[250..].to_vec() };
    for level in levels() {
        for (dtype, kv_dtype) in [
            (WeightDtype::F32, KvDtype::F32),
            (WeightDtype::F32, KvDtype::Bf16),
            (WeightDtype::Bf16, KvDtype::Bf16),
            (WeightDtype::Q8_0, KvDtype::F16),
        ] {
            let load = |threads| {
                let mut config = CandleConfig::new(directory.path());
                (config.dtype, config.kv_dtype, config.kernel_level) = (dtype, kv_dtype, Some(level));
                config.threads = NonZeroUsize::new(threads).unwrap();
                Driver::load(&config, 128)
            };
            let name = format!("{dtype}/{level} kv {kv_dtype}");
            let mut driver = load(1);
            let alone = run(&mut driver, vec![Run::new(&long, pages(0..40), 100)]);
            for threads in [1, 2, 3] {
                let mut driver = load(threads);
                let together = vec![
                    Run::new(&short, pages(50..70), 512),
                    Run::new(&long, pages((80..120).rev()), 1024),
                    Run::new(&short, pages(120..128).into_iter().chain(pages(70..80)).collect(), 199),
                ];
                let traces = run(&mut driver, together);
                assert!(traces[1] == alone[0] && traces[0] == traces[2], "{name} on {threads} threads");
            }
            let mut driver = load(2);
            let traces = run(&mut driver, vec![Run::new(&decoded, pages(0..40), 64)]);
            // 370 tokens are decoded, the last of which is the prompt's end.
            assert!(traces[0].log_probs.last() == alone[0].log_probs.first(), "{name}, decoded");
        }
    }
}

/// Positions past a query hold whatever an earlier owner of the page left, NaNs included; nothing of it may leak.
#[test]
fn stale_pages_do_not_leak() {
    let directory = tempfile::tempdir().unwrap();
    tiny("qwen3").write_directory(directory.path(), DType::F32, 1);
    let sequence = Sequence::new(5, 37, 3);
    let mut driver = Driver::load(&CandleConfig::new(directory.path()), 64);
    let fresh = run(&mut driver, vec![Run::new(&sequence, pages(0..6), 512)]);
    let other = Sequence::new(6, 80, 0);
    run(&mut driver, vec![Run::new(&other, pages(10..16), 512)]);
    let reused = run(&mut driver, vec![Run::new(&sequence, pages(10..16), 9)]);
    assert!(fresh == reused);
}
