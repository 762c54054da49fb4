//! A sequence's tokens and KV depend on nothing but its own history, to the bit.

use microserving_executor::{Executor, Sampler};
use microserving_kernels::Order;
use microserving_protocol::{PageId, TokenId};

use crate::support::{Cuda, Item, Kind, PLAIN, TENSOR_CORE, by_token, cuda, full, pages, tokens, write};
use crate::tiny::{Tiny, tiny};

/// What a run of a sequence leaves behind.
#[derive(PartialEq)]
struct Trace {
    /// The bits of all log-probabilities after the prompt and after each decoded token.
    log_probs: Vec<Vec<u32>>,
    kv: Vec<u8>,
}

/// A sequence on its way: a prompt in chunks, then tokens one by one.
struct Run<'a> {
    tokens: &'a [TokenId],
    prompt: usize,
    pages: Vec<PageId>,
    chunk: usize,
    position: usize,
    sampler: Sampler,
    log_probs: Vec<Vec<u32>>,
}

impl<'a> Run<'a> {
    fn new(
        driver: &Cuda,
        (tokens, prompt): (&'a [TokenId], usize),
        pages: Vec<PageId>,
        chunk: usize,
    ) -> Self {
        let sampler = Sampler::new(full(driver.executor.info().vocab_size), 0, &[]);
        Self { tokens, prompt, pages, chunk, position: 0, sampler, log_probs: Vec::new() }
    }

    fn is_done(&self) -> bool {
        self.position == self.tokens.len()
    }
}

/// Runs sequences side by side until all are done.
fn run(driver: &mut Cuda, mut runs: Vec<Run<'_>>) -> Vec<Trace> {
    while runs.iter().any(|run| !run.is_done()) {
        let (mut items, mut who) = (Vec::new(), Vec::new());
        for (index, run) in runs.iter_mut().enumerate().filter(|(_, run)| !run.is_done()) {
            let position = run.position;
            let end = if position < run.prompt { run.prompt.min(position + run.chunk) } else { position + 1 };
            run.position = end;
            let sampler = (end >= run.prompt).then_some(&mut run.sampler);
            who.push(index);
            items.push(Item { tokens: &run.tokens[position..end], position, pages: &run.pages, sampler });
        }
        for (index, sampled) in who.into_iter().zip(driver.step(items)) {
            if let Some(sampled) = sampled {
                let log_probs = by_token(&sampled.unwrap());
                runs[index].log_probs.push(log_probs.iter().map(|x| x.to_bits()).collect());
            }
        }
    }
    let traces = runs.into_iter().map(|run| {
        // What was computed in a copy on the device is asked for.
        driver.executor.export(&run.pages).unwrap();
        let kv = driver.kv_bytes(&run.pages, run.tokens.len() as u32);
        Trace { log_probs: run.log_probs, kv }
    });
    traces.collect()
}

fn check(path: &std::path::Path, kind: Kind) {
    let sequences = [(tokens(1, 40), 36), (tokens(2, 14), 1), (tokens(3, 33), 30)];
    let of = |at: usize| (&sequences[at].0[..], sequences[at].1);
    let mut driver = cuda(path, kind, 32);
    let alone: Vec<Trace> = (0..3)
        .flat_map(|at| {
            let one = Run::new(&driver, of(at), pages(0..3), 512);
            run(&mut driver, vec![one])
        })
        .collect();
    assert!(alone.iter().all(|trace| trace.log_probs.len() > 1 && !trace.kv.is_empty()));
    let same = |what: &str, traces: &[Trace], which: &[usize]| {
        for (trace, &at) in traces.iter().zip(which) {
            assert!(trace.log_probs == alone[at].log_probs, "{kind:?}, {what}, sequence {at}: logits differ");
            assert!(trace.kv == alone[at].kv, "{kind:?}, {what}, sequence {at}: KV differs");
        }
    };
    for chunk in [1, 7, 16, 17] {
        let one = Run::new(&driver, of(0), pages([20, 3, 11]), chunk);
        let traces = run(&mut driver, vec![one]);
        same(&format!("chunks of {chunk}"), &traces, &[0]);
    }
    // Beside others, in another order of threads, in memory of the other kind.
    let other = Kind { order: Order::Shuffled, is_on_device: !kind.is_on_device, ..kind };
    let mut driver = cuda(path, other, 32);
    let together = vec![
        Run::new(&driver, of(2), pages([9, 30, 2]), 10),
        Run::new(&driver, of(0), pages([5, 4, 3]), 13),
        Run::new(&driver, of(1), pages([20, 22]), 1),
        Run::new(&driver, of(0), pages([12, 14, 31]), 512),
    ];
    let traces = run(&mut driver, together);
    same("together", &traces, &[2, 0, 1, 0]);
    let mut driver = cuda(path, Kind { page_size: 5, ..kind }, 32);
    let one = Run::new(&driver, of(0), pages((0..8).rev()), 30);
    let traces = run(&mut driver, vec![one]);
    same("pages of 5", &traces, &[0]);
}

#[test]
fn plain_arithmetic() {
    check(write(&tiny("qwen3")).path(), PLAIN);
}

#[test]
fn tensor_cores() {
    let mut config = tiny("qwen3").config;
    config["head_dim"] = 64.into();
    check(write(&Tiny::new(config)).path(), TENSOR_CORE);
}

/// Longer than a split of attention: decoding has a block for each split, prefilling one for all.
#[test]
fn contexts_of_several_splits() {
    let mut config = tiny("llama_linear").config;
    config["max_position_embeddings"] = 1024.into();
    let directory = write(&Tiny::new(config));
    let all = tokens(5, 300);
    let mut driver = cuda(directory.path(), PLAIN, 48);
    let whole = Run::new(&driver, (&all, 299), pages(0..19), 512);
    let prefilled = run(&mut driver, vec![whole]);
    let decoded = Run::new(&driver, (&all, 280), pages((20..39).rev()), 150);
    let beside = Run::new(&driver, (&all[..40], 20), pages([45, 41, 43]), 3);
    let traces = run(&mut driver, vec![beside, decoded]);
    assert!(traces[1].log_probs.last() == prefilled[0].log_probs.last(), "logits differ");
    assert!(traces[1].kv == prefilled[0].kv, "KV differs");
}
