//! What choosing an engine costs with 10, 100 and 1,000 of them, and what the index of held prefixes costs.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use microserving_client::HttpEngineClient;
use microserving_protocol::{
    CompletionRequest, KvEvent, KvEventKind, PageHash, Prompt, SeqId, TokenId, page_hashes,
};
use microserving_router::{
    Cluster, EngineFeed, EngineSpec, Placement, PlacementPolicy, PrefixIndex, Request, Role,
};
use tokio::time::Instant;

const PAGE_SIZE: u32 = 16;
const ENGINES: [u32; 3] = [10, 100, 1000];

fn tokens(number: u32, num_pages: u32) -> Vec<TokenId> {
    (0..num_pages * PAGE_SIZE).map(|at| TokenId(if at < 64 { at } else { number * 7919 + at })).collect()
}

fn request(number: u32, num_pages: u32) -> Request {
    let tokens = tokens(number, num_pages);
    let completion = CompletionRequest::new(Prompt::Tokens(tokens.clone().into()));
    let params = completion.generation(0).expect("a plain request");
    Request::new(SeqId::new(format!("r{number}")), &completion, params, tokens)
}

fn cluster(num_engines: u32) -> Cluster {
    let specs = (0..num_engines).map(|number| {
        let calls = HttpEngineClient::new(&format!("http://127.0.0.1:{}", 1 + number)).expect("an address");
        EngineSpec::new(Arc::new(calls), Role::Any)
    });
    Cluster::new(specs.collect())
}

fn report(feed: &mut EngineFeed, number: u64, pages: &[PageHash], snapshot: bool) {
    let pages = pages.iter().map(ToString::to_string).collect();
    let kind = if snapshot { KvEventKind::Snapshot { pages } } else { KvEventKind::Stored { pages } };
    feed.accept(&KvEvent { incarnation: "1".into(), number, kind }).expect("the next one");
}

fn choosing(c: &mut Criterion) {
    let mut group = c.benchmark_group("choose");
    for num_engines in ENGINES {
        let cluster = cluster(num_engines);
        let engines = cluster.engines();
        let index = Arc::new(PrefixIndex::new(256 << 20, 1));
        let mut feeds: Vec<_> =
            engines.iter().map(|engine| index.join(engine.number()).expect("is new")).collect();
        // All hold a common beginning, and each twenty conversations of its own.
        for (number, feed) in (0..).zip(&mut feeds) {
            feed.begin();
            report(feed, 0, &page_hashes("", &tokens(0, 4), PAGE_SIZE), true);
            for talk in 0..20 {
                report(
                    feed,
                    1 + talk,
                    &page_hashes("", &tokens(number * 100 + talk as u32, 128), PAGE_SIZE),
                    false,
                );
            }
        }
        for policy in [PlacementPolicy::Prefix, PlacementPolicy::LeastLoaded, PlacementPolicy::RoundRobin] {
            let placement = Placement::new(policy, index.clone(), 1);
            for (what, number) in [("held_128_pages", (num_engines / 2) * 100), ("new_128_pages", 4_000_000)]
            {
                let wanted = request(number, 128);
                group.bench_function(BenchmarkId::new(format!("{policy:?}/{what}"), num_engines), |b| {
                    b.iter(|| placement.place(&engines, black_box(&wanted)));
                });
            }
        }
    }
    group.finish();
}

fn indexing(c: &mut Criterion) {
    let mut group = c.benchmark_group("index");
    let index = Arc::new(PrefixIndex::new(256 << 20, 1));
    let mut feeds: Vec<_> = (0..100).map(|engine| index.join(engine).expect("is new")).collect();
    for (number, feed) in (0..).zip(&mut feeds) {
        feed.begin();
        report(feed, 0, &[], true);
        for talk in 0..20_u32 {
            report(
                feed,
                1 + u64::from(talk),
                &page_hashes("", &tokens(number * 100 + talk, 1024), PAGE_SIZE),
                false,
            );
        }
    }
    for num_pages in [128, 1024] {
        let pages = page_hashes("", &tokens(5005, num_pages), PAGE_SIZE);
        group.throughput(Throughput::Elements(num_pages.into()));
        group.bench_function(BenchmarkId::new("look_up", num_pages), |b| {
            b.iter(|| {
                index.look_up(Instant::now(), |depth| black_box(&pages).get(depth).copied()).of(50).num_pages
            });
        });
        let mut number = 0;
        group.bench_function(BenchmarkId::new("note_new", num_pages), |b| {
            let pages = |number: u32| page_hashes("", &tokens(10_000_000 + number, num_pages), PAGE_SIZE);
            let setup = || {
                number += 1;
                pages(number)
            };
            b.iter_batched_ref(
                setup,
                |pages| index.note(Instant::now(), 7, pages.len(), |depth| pages.get(depth).copied()),
                BatchSize::LargeInput,
            );
        });
        let wanted = tokens(1, num_pages);
        group.bench_function(BenchmarkId::new("hash", num_pages), |b| {
            b.iter(|| page_hashes("", black_box(&wanted), PAGE_SIZE));
        });
    }
    group.finish();
}

criterion_group!(all, choosing, indexing);
criterion_main!(all);
