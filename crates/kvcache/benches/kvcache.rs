//! What the engine's verbs cost with 1,000 to 100,000 pages, the cache full of contexts.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use microserving_kvcache::{KvCache, KvCacheConfig};
use microserving_protocol::TokenId;

const PAGE_SIZE: u32 = 16;
/// Tokens of one context: 20 pages, the first 4 of them common to all.
const CONTEXT_TOKENS: u32 = 20 * PAGE_SIZE;
const SIZES: [u32; 3] = [1_000, 10_000, 100_000];

fn context(number: u32) -> Vec<TokenId> {
    (0..=CONTEXT_TOKENS)
        .map(|at| TokenId(if at < 4 * PAGE_SIZE { 7 } else { number.wrapping_mul(31).wrapping_add(at) }))
        .collect()
}

/// One whole request: match, grow, commit, release; evicts when the cache is full.
fn serve(cache: &mut KvCache, prompt: &[TokenId]) {
    let mut table = cache.match_prefix("", &prompt[..prompt.len() - 1]).into_table();
    cache.grow(&mut table, CONTEXT_TOKENS + 1).expect("there is room for one request");
    drop(cache.commit(&mut table, prompt).expect("the table has the room"));
    cache.release_table(table);
}

fn full(num_pages: u32) -> KvCache {
    let config = KvCacheConfig { max_buffered_events: 0, ..KvCacheConfig::new(num_pages, PAGE_SIZE) };
    let mut cache = KvCache::new(config).expect("sizes above 0");
    for number in 0..num_pages / 16 + 1 {
        serve(&mut cache, &context(number));
    }
    cache
}

fn benches(c: &mut Criterion) {
    let mut group = c.benchmark_group("kvcache");
    for size in SIZES {
        let mut cache = full(size);
        let hit = context(size / 16);
        group.bench_function(BenchmarkId::new("match_and_release_20_pages", size), |b| {
            b.iter(|| {
                let prefix = cache.match_prefix("", black_box(&hit));
                assert_eq!(prefix.num_tokens(), CONTEXT_TOKENS);
                cache.release(prefix);
            });
        });
        let mut number = size;
        group.bench_function(BenchmarkId::new("serve_20_pages_evicting_16", size), |b| {
            b.iter(|| {
                number += 1;
                serve(&mut cache, &context(number));
            });
        });
        group.bench_function(BenchmarkId::new("reserve_and_accept_20_pages", size), |b| {
            b.iter(|| {
                number += 1;
                let prompt = context(number);
                let reservation = cache.reserve("", &prompt, 0).expect("there is room for one request");
                let table = cache.accept(reservation).expect("it is ours");
                cache.release_table(table);
            });
        });
        group.bench_function(BenchmarkId::new("decode_16_tokens_and_commit", size), |b| {
            let mut tokens = context(0);
            tokens.truncate(CONTEXT_TOKENS as usize);
            let mut table = cache.match_prefix("decode", &[]).into_table();
            b.iter(|| {
                tokens.extend([TokenId(3); PAGE_SIZE as usize]);
                if tokens.len() > 400 * PAGE_SIZE as usize {
                    tokens.truncate(CONTEXT_TOKENS as usize);
                    table = cache.match_prefix("decode", &[]).into_table();
                    cache.clear_unused();
                }
                let num_tokens = u32::try_from(tokens.len()).expect("a few thousand");
                cache.grow(&mut table, num_tokens).expect("there is room for one sequence");
                drop(cache.commit(&mut table, &tokens).expect("the table has the room"));
            });
        });
    }
    group.finish();
}

criterion_group!(kvcache, benches);
criterion_main!(kvcache);
