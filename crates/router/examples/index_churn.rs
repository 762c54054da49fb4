//! Ten thousand engines that come and go and ten million pages that enter and leave their caches: what the index of held prefixes takes
//! meanwhile, and whether it ends as it should.
//!
//! ```text
//! cargo run --release -p microserving-router --example index_churn [REGISTRATIONS PAGE_EVENTS]
//! ```
//!
//! A hundred engines at a time, each with a cache of two thousand pages whose oldest go as new ones come; every hundredth page is one that all of
//! them hold at times. Prints a line of JSON ten times on the way. At the end the index must equal one that is rebuilt from what the engines hold.

#![allow(clippy::print_stdout, reason = "this is a program, and what it prints is its result")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{KvEvent, KvEventKind, PageHash};
use microserving_router::{EngineFeed, PrefixIndex};
use tokio::time::Instant;

const ALIVE: usize = 100;
const CACHE_PAGES: usize = 2000;
const AT_ONCE: usize = 10;
const REPORTS: u64 = 10;

/// An engine's true cache, and the feed that tells of it.
struct Engine {
    number: u32,
    feed: EngineFeed,
    pages: VecDeque<PageHash>,
    events: u64,
}

impl Engine {
    fn join(index: &Arc<PrefixIndex>, number: u32) -> Self {
        let mut feed = index.join(number).expect("numbers are not used again");
        feed.begin();
        let mut engine = Self { number, feed, pages: VecDeque::new(), events: 0 };
        engine.tell(KvEventKind::Snapshot { pages: Vec::new() });
        engine
    }

    fn tell(&mut self, kind: KvEventKind) {
        let event = KvEvent { incarnation: format!("{:016x}", self.number), number: self.events, kind };
        self.feed.accept(&event).expect("in order");
        self.events += 1;
    }

    /// Stores pages, for which old ones must go; returns how many came and went.
    fn store(&mut self, pages: Vec<PageHash>) -> u64 {
        let mut count = pages.len();
        let names = |pages: &[PageHash]| pages.iter().map(ToString::to_string).collect();
        self.tell(KvEventKind::Stored { pages: names(&pages) });
        self.pages.extend(pages);
        let too_many = self.pages.len().saturating_sub(CACHE_PAGES);
        if too_many > 0 {
            let gone: Vec<_> = self.pages.drain(..too_many).collect();
            count += gone.len();
            self.tell(KvEventKind::Removed { pages: names(&gone) });
        }
        count as u64
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<u64>().expect("a number"));
    let registrations = arguments.next().unwrap_or(10_000);
    let page_events = arguments.next().unwrap_or(10_000_000);
    let index = Arc::new(PrefixIndex::new(PrefixIndex::DEFAULT_BYTES, 1));
    let mut state = 1_u64;
    let mut roll = move |bound: u64| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) % bound
    };
    let mut joined = 0;
    let mut engines: Vec<Engine> = Vec::new();
    let (mut events, mut page, mut busy) = (0, 0_u128, Duration::ZERO);
    for tenth in 1..=REPORTS {
        let since = Instant::now();
        while events < page_events * tenth / REPORTS {
            // Registrations are spread over the events.
            if engines.len() < ALIVE || u64::from(joined) * page_events < registrations * events {
                if engines.len() == ALIVE {
                    engines.swap_remove(roll(ALIVE as u64) as usize);
                }
                engines.push(Engine::join(&index, joined));
                joined += 1;
            }
            let at = roll(engines.len() as u64) as usize;
            let engine = &mut engines[at];
            let pages = (0..AT_ONCE).map(|_| {
                page += 1;
                let common = page % 100 == 0;
                PageHash(if common { page % 5000 } else { page } << 64 | u128::from(common))
            });
            let mut pages: Vec<_> = pages.collect();
            pages.retain(|page| !engine.pages.contains(page));
            events += engine.store(pages);
        }
        busy += since.elapsed();
        let stats = index.stats();
        println!(
            r#"{{"registrations": {joined}, "page_events": {events}, "index_pages": {}, "index_holdings": {}, "index_bytes": {}, "rss_bytes": {}, "seconds": {:.2}}}"#,
            stats.reported_pages,
            stats.reported_holdings,
            stats.bytes,
            resident_bytes(),
            busy.as_secs_f64()
        );
    }
    let rebuilt = Arc::new(PrefixIndex::new(PrefixIndex::DEFAULT_BYTES, 2));
    for engine in &engines {
        let mut truth: Vec<_> = engine.pages.iter().copied().collect();
        truth.sort_unstable();
        let mut feed = rebuilt.join(engine.number).expect("is new");
        feed.begin();
        let kind = KvEventKind::Snapshot { pages: truth.iter().map(ToString::to_string).collect() };
        feed.accept(&KvEvent { incarnation: "1".into(), number: 0, kind }).expect("a snapshot");
        assert_eq!(rebuilt.reported_by(engine.number), truth, "the rebuilt index is the truth");
        assert_eq!(index.reported_by(engine.number), truth, "engine {}", engine.number);
    }
    let held: usize = engines.iter().map(|engine| engine.pages.len()).sum();
    assert_eq!(index.stats().reported_holdings, held, "nobody else is said to hold anything");
    println!(r#"{{"equal_to_rebuilt": true, "engines": {}, "holdings": {held}}}"#, engines.len());
}

/// Returns the resident memory of this process, 0 where it cannot be told.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
