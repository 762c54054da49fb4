//! What one token costs to choose, by the ways of choosing it, in a vocabulary of 150,000.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use microserving_executor::Sampler;
use microserving_protocol::{SamplingParams, TokenId};

const VOCAB_SIZE: u32 = 150_000;

/// Logits with a model's shape: a bell, and a few that stand out.
fn logits() -> Vec<f32> {
    let noise = |token: u32, salt: u32| (token ^ salt).wrapping_mul(2_654_435_761) as f32 / u32::MAX as f32;
    (0..VOCAB_SIZE)
        .map(|token| {
            let bell: f32 = (1..=6).map(|salt| noise(token, salt * 0x9E37)).sum();
            bell * 4.0 + if token.is_multiple_of(9973) { 6.0 } else { 0.0 }
        })
        .collect()
}

fn benches(c: &mut Criterion) {
    let base = SamplingParams::default();
    let ways = [
        ("greedy", SamplingParams::greedy()),
        ("temperature", base.clone()),
        ("top_k 50", SamplingParams { top_k: 50, ..base.clone() }),
        ("top_p 0.9", SamplingParams { top_p: 0.9, ..base.clone() }),
        ("top_p 0.9, flat", SamplingParams { top_p: 0.9, temperature: 20.0, ..base.clone() }),
        ("min_p 0.05", SamplingParams { min_p: 0.05, ..base.clone() }),
        ("logprobs 5", SamplingParams { logprobs: Some(5), ..SamplingParams::greedy() }),
        ("penalties", SamplingParams { repetition_penalty: 1.1, presence_penalty: 0.5, ..base }),
    ];
    let prompt: Vec<_> = (0..4096).map(|place| TokenId(place * 31 % VOCAB_SIZE)).collect();
    let logits = logits();
    let mut group = c.benchmark_group("sampler");
    for (name, params) in ways {
        let mut sampler = Sampler::new(params, 0, &prompt);
        group.bench_function(name, |bencher| {
            bencher.iter_batched_ref(
                || logits.clone(),
                |logits| black_box(sampler.sample(logits).expect("these logits can be sampled")),
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

criterion_group!(sampler, benches);
criterion_main!(sampler);
