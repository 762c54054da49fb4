//! A step allocates nothing but the list that it returns. A binary of its own, since it replaces the allocator.
#![allow(clippy::unwrap_used, reason = "a test may stop at a surprise")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::DType;
use microserving_executor::{Batch, BatchItem, Executor, Sampler};
use microserving_executor_candle::{CandleConfig, CandleExecutor, WeightDtype};
use microserving_protocol::{KvDtype, KvGeometry, PageId, SamplingParams, TokenId};

#[path = "it/memory.rs"]
mod memory;
#[path = "it/noise.rs"]
mod noise;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "it/tiny.rs"]
mod tiny;

/// Counts the allocations of all threads.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator, and a counter.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) };
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Greedy, and everything that draws.
fn samplings() -> [SamplingParams; 4] {
    let drawing = SamplingParams { temperature: 0.8, seed: 7, ..SamplingParams::greedy() };
    [
        SamplingParams::greedy(),
        drawing.clone(),
        SamplingParams { top_k: 20, top_p: 0.9, ..drawing.clone() },
        SamplingParams { top_p: 0.9, min_p: 0.05, ..drawing },
    ]
}

fn check(path: &std::path::Path, dtype: WeightDtype, kv_dtype: KvDtype) {
    let mut config = CandleConfig::new(path);
    (config.dtype, config.kv_dtype) = (dtype, kv_dtype);
    config.threads = NonZeroUsize::new(2).unwrap();
    let mut executor = CandleExecutor::load(&config, &mut |_| ()).unwrap();
    let geometry = KvGeometry { layout: executor.info().layout.clone(), num_pages: 64 };
    let memory = memory::HeapMemory::new(geometry.region_bytes(), 0);
    executor.attach(geometry, Arc::new(memory)).unwrap();
    let pages: Vec<Vec<PageId>> =
        (0..4).map(|sequence| (0..16).map(|page| PageId(16 * sequence + page)).collect()).collect();
    let mut samplers = samplings().map(|params| Sampler::new(params, 0, &[]));
    let mut step = |executor: &mut CandleExecutor, position: usize, len: usize| {
        let tokens = [TokenId(5); 40];
        let items = pages.iter().zip(&mut samplers).map(|(pages, sampler)| BatchItem {
            tokens: &tokens[..len],
            position: position as u32,
            pages,
            sampler: Some(sampler),
            is_sent: false,
        });
        let mut batch = Batch { items: items.collect() };
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        let output = executor.forward(&mut batch, &mut |_| ()).unwrap();
        let count = ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert!(output.sampled.iter().all(|sampled| sampled.as_ref().unwrap().is_ok()));
        count
    };
    // A prompt and some steps: buffers, and those of the threads' samplers, take their size.
    let mut position = 40;
    assert!(step(&mut executor, 0, 40) > 1);
    let settled = (0..200).find(|_| {
        position = position % 200 + 1;
        step(&mut executor, position, 1) == 1
    });
    assert!(settled.is_some(), "{dtype} kv {kv_dtype}: no step is without allocations");
    let counts: Vec<usize> = (41..200).map(|position| step(&mut executor, position, 1)).collect();
    // A thread that draws for the first time, or unlike before, makes room once.
    let more = counts.iter().filter(|&&count| count != 1).count();
    assert!(more <= 8, "{dtype} kv {kv_dtype}: allocations a step {counts:?}");
}

#[test]
fn a_step_allocates_only_what_it_returns() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = tiny::tiny("qwen3").config;
    config["max_position_embeddings"] = 256.into();
    tiny::Tiny::new(config).write_directory(directory.path(), DType::F32, 1);
    for (dtype, kv_dtype) in [
        (WeightDtype::Q8_0, KvDtype::F16),
        (WeightDtype::Bf16, KvDtype::Bf16),
        (WeightDtype::F32, KvDtype::F32),
    ] {
        check(directory.path(), dtype, kv_dtype);
    }
}
