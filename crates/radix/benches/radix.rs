//! What a match, a step of growth and an eviction cost in trees of 1,000 to 100,000 pages.

use std::hint::black_box;
use std::num::NonZeroUsize;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use microserving_radix::{NodeId, RadixTree};

const PAGE_SIZE: usize = 16;
/// Pages of one stored context: 64 tokens of common prefix, the rest its own.
const CONTEXT_PAGES: usize = 20;
const SIZES: [usize; 3] = [1_000, 10_000, 100_000];

fn context(number: usize) -> Vec<u32> {
    (0..CONTEXT_PAGES * PAGE_SIZE)
        .map(|at| if at < 4 * PAGE_SIZE { 7 } else { u32::try_from(number * 31 + at).unwrap_or(0) })
        .collect()
}

fn filled(num_pages: usize) -> (RadixTree<u32, u32>, NodeId) {
    let mut tree = RadixTree::new(NonZeroUsize::new(PAGE_SIZE).expect("not 0"));
    let root = tree.add_root();
    let mut number = 0;
    while tree.num_pages() < num_pages {
        tree.insert(root, &context(number), &mut [0; CONTEXT_PAGES]).expect("whole pages below a live root");
        number += 1;
    }
    (tree, root)
}

fn benches(c: &mut Criterion) {
    let mut group = c.benchmark_group("radix");
    for size in SIZES {
        let (mut tree, root) = filled(size);
        let wanted = context(size / CONTEXT_PAGES / 2);
        group.throughput(Throughput::Elements(1));
        group.bench_function(BenchmarkId::new("match_20_pages", size), |b| {
            b.iter(|| tree.longest_match(root, black_box(&wanted), |_| ()).expect("live root"));
        });
        group.bench_function(BenchmarkId::new("pin_and_unpin_20_pages", size), |b| {
            b.iter(|| {
                let pinned = tree.pin_longest(root, black_box(&wanted), |_| ()).expect("live root");
                tree.unpin(pinned.node).expect("pinned a line ago");
            });
        });
        let mut number = size;
        group.bench_function(BenchmarkId::new("evict_and_insert_20_pages", size), |b| {
            b.iter(|| {
                let mut missing = CONTEXT_PAGES;
                while let Some(evicted) = tree.evict(missing) {
                    missing -= evicted.values.len();
                }
                number += 1;
                tree.insert(root, &context(number), &mut [0; CONTEXT_PAGES]).expect("live root")
            });
        });
        let mut pinned = tree.pin_longest(root, &wanted, |_| ()).expect("live root").node;
        let mut at = 0;
        group.bench_function(BenchmarkId::new("advance_1_page", size), |b| {
            b.iter(|| {
                at += 1;
                let page = [at; PAGE_SIZE];
                pinned = tree.advance(pinned, &page, &mut [0]).expect("pinned").0.node;
                tree.evict(1);
            });
        });
    }
    group.finish();
}

criterion_group!(radix, benches);
criterion_main!(radix);
