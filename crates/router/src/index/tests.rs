//! The index against engines' true caches.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use microserving_protocol::{KvEvent, KvEventKind, PageHash, TokenId, page_hashes};
use proptest::prelude::*;
use tokio::time::{Duration, Instant};

use super::held::TURN;
use super::*;

/// What the tests' tables may take beside the bytes allowed: a chunk and the smallest logs.
const SLACK: usize = 64 << 10;

fn chain(tokens: &[u32]) -> Vec<PageHash> {
    let tokens: Vec<_> = tokens.iter().copied().map(TokenId).collect();
    page_hashes("", &tokens, 2)
}

fn index() -> Arc<PrefixIndex> {
    Arc::new(PrefixIndex::new(1 << 20, 7))
}

fn note(index: &PrefixIndex, now: Instant, engine: u32, chain: &[PageHash]) {
    index.note(now, engine, chain.len(), |depth| chain.get(depth).copied());
}

fn held<const N: usize>(
    index: &PrefixIndex,
    now: Instant,
    engines: [u32; N],
    chain: &[PageHash],
) -> [(usize, bool); N] {
    let held = index.look_up(now, |depth| chain.get(depth).copied());
    engines.map(|engine| (held.of(engine).num_pages, held.of(engine).is_latest))
}

fn pages<const N: usize>(
    index: &PrefixIndex,
    now: Instant,
    engines: [u32; N],
    chain: &[PageHash],
) -> [usize; N] {
    held(index, now, engines, chain).map(|(pages, _)| pages)
}

fn event(incarnation: &str, number: u64, kind: KvEventKind) -> KvEvent {
    KvEvent { incarnation: incarnation.into(), number, kind }
}

fn names(pages: &[PageHash]) -> Vec<String> {
    pages.iter().map(ToString::to_string).collect()
}

fn snapshot(number: u64, pages: &[PageHash]) -> KvEvent {
    event("a", number, KvEventKind::Snapshot { pages: names(pages) })
}

fn stored(number: u64, pages: &[PageHash]) -> KvEvent {
    event("a", number, KvEventKind::Stored { pages: names(pages) })
}

#[tokio::test(start_paused = true)]
async fn the_longest_prefix_of_each_engine_is_found() {
    let (index, now) = (index(), Instant::now());
    let _feeds: Vec<_> = (10..14).map(|engine| index.join(engine).expect("is new")).collect();
    note(&index, now, 10, &chain(&[1, 2, 3, 4]));
    note(&index, now, 11, &chain(&[1, 2, 3, 4, 5, 6]));
    note(&index, now, 12, &chain(&[9, 9, 3, 4]));
    let prompt = chain(&[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(pages(&index, now, [10, 11, 12, 13, 99], &prompt), [2, 3, 0, 0, 0]);
    // A page in the middle counts only behind its own prefix.
    assert_eq!(pages(&index, now, [10, 12], &chain(&[9, 9, 3, 4])), [0, 2]);
    let mut longest = Vec::new();
    index.look_up(now, |depth| prompt.get(depth).copied()).longest(5, |engine, pages| {
        longest.push((engine, pages));
        true
    });
    assert_eq!(longest, [(11, 3), (10, 2)]);
    index.forget(11);
    assert_eq!(pages(&index, now, [10, 11], &prompt), [2, 0]);
}

#[tokio::test(start_paused = true)]
async fn what_was_routed_is_believed_for_one_to_two_minutes() {
    let (index, start) = (index(), Instant::now());
    let _feed = index.join(0).expect("is new");
    note(&index, start, 0, &chain(&[1, 2, 3, 4]));
    let later = start + TURN + Duration::from_secs(1);
    assert_eq!(pages(&index, later, [0], &chain(&[1, 2, 3, 4])), [2]);
    note(&index, later, 0, &chain(&[1, 2]));
    let end = start + 2 * TURN + Duration::from_secs(2);
    assert_eq!(pages(&index, end, [0], &chain(&[1, 2, 3, 4])), [1], "the page that nobody used is gone");
    assert_eq!(pages(&index, end + 5 * TURN, [0], &chain(&[1, 2])), [0]);
    assert_eq!(index.stats().routed_pages, 0);
}

#[tokio::test(start_paused = true)]
async fn what_an_engine_reports_is_believed_until_it_says_otherwise() {
    let (index, start) = (index(), Instant::now());
    let mut feed = index.join(3).expect("is new");
    let prompt = chain(&[1, 2, 3, 4, 5, 6]);
    assert_eq!(feed.begin(), 0);
    feed.accept(&snapshot(4, &prompt[..1])).expect("a snapshot fits always");
    feed.accept(&stored(5, &prompt[1..2])).expect("the next one");
    // One page reported, one routed behind those.
    note(&index, start, 3, &prompt);
    assert_eq!((index.stats().reported_pages, index.stats().routed_pages), (2, 1));
    assert_eq!(pages(&index, start, [3], &prompt), [3]);
    assert_eq!(pages(&index, start + 4 * TURN, [3], &prompt), [2]);
    note(&index, start + 4 * TURN, 3, &prompt);
    let removed = event("a", 6, KvEventKind::Removed { pages: names(&prompt[2..]) });
    feed.accept(&removed).expect("the next one");
    assert_eq!(
        pages(&index, start + 4 * TURN, [3], &prompt),
        [2],
        "what is removed is not routed there either"
    );
    feed.accept(&event("a", 7, KvEventKind::Cleared)).expect("the next one");
    assert_eq!(pages(&index, start + 4 * TURN, [3], &prompt), [0]);
    let stats = index.stats();
    assert_eq!((stats.events, stats.snapshots, stats.gaps), (4, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn of_equal_holders_the_later_one_is_told() {
    let (index, now) = (index(), Instant::now());
    let _feeds: Vec<_> = (0..3).map(|engine| index.join(engine).expect("is new")).collect();
    let prompt = chain(&[1, 2, 3, 4]);
    note(&index, now, 0, &prompt);
    note(&index, now, 1, &prompt);
    assert_eq!(held(&index, now, [0, 1, 2], &prompt), [(2, false), (2, true), (0, false)]);
}

#[test]
fn events_of_a_boot_that_was_forgotten_come_too_late() {
    let index = index();
    let mut feed = index.join(0).expect("is new");
    feed.begin();
    index.forget(0);
    // The snapshot was on its way when the restart became known.
    assert!(matches!(feed.accept(&snapshot(9, &chain(&[1, 2]))), Err(FeedError::Gap { number: 9, .. })));
    assert_eq!((index.reported_by(0), feed.begin()), (Vec::new(), 0));
    feed.accept(&snapshot(9, &chain(&[1, 2]))).expect("asked for after that");
    assert_eq!((index.reported_by(0).len(), feed.begin()), (1, 10));
    let nonsense = event("a", 10, KvEventKind::Stored { pages: vec!["page".into()] });
    assert!(matches!(feed.accept(&nonsense), Err(FeedError::Malformed(_))));
    assert_eq!(feed.begin(), 0);
}

#[test]
fn an_engine_is_in_once_and_leaves_nothing() {
    let index = index();
    let mut feed = index.join(7).expect("is new");
    assert!(index.join(7).is_none());
    feed.begin();
    feed.accept(&snapshot(0, &chain(&[1, 2, 3, 4]))).expect("a snapshot");
    drop(feed);
    assert_eq!((index.stats().reported_pages, index.reported_by(7)), (0, Vec::new()));
    // Its place is taken by the next one, which holds nothing.
    let _next = index.join(8).expect("is new");
    assert!(index.reported_by(8).is_empty());
    note(&index, Instant::now(), 7, &chain(&[1, 2]));
    assert_eq!(index.stats().routed_pages, 0, "who is not in is not noted");
}

/// An engine's side of the events, with a short memory, as the real one has it.
struct Source {
    incarnation: String,
    pages: BTreeSet<PageHash>,
    log: VecDeque<KvEvent>,
    next: u64,
}

impl Source {
    const MEMORY: usize = 6;

    fn boot(number: u32) -> Self {
        Self { incarnation: format!("{number:016x}"), pages: BTreeSet::new(), log: VecDeque::new(), next: 1 }
    }

    fn emit(&mut self, kind: KvEventKind) {
        self.log.push_back(event(&self.incarnation, self.next, kind));
        self.next += 1;
        if self.log.len() > Self::MEMORY {
            self.log.pop_front();
        }
    }

    /// What a new follower is sent.
    fn since(&self, from: u64) -> VecDeque<KvEvent> {
        let first = self.log.front().map_or(self.next, |event| event.number);
        if from == 0 || from < first || from > self.next {
            let pages = self.pages.iter().map(ToString::to_string).collect();
            return [event(&self.incarnation, self.next - 1, KvEventKind::Snapshot { pages })].into();
        }
        self.log.iter().filter(|event| event.number >= from).cloned().collect()
    }
}

/// What happens to one engine.
#[derive(Clone, Debug)]
enum Happens {
    Store(Vec<u8>),
    Remove(Vec<u8>),
    Clear,
    /// The next event is lost on its way.
    Drop,
    /// It comes twice.
    Repeat,
    /// It changes places with the one after it.
    Swap,
    /// The connection breaks, and with it what was on its way.
    Break,
    /// The engine is restarted, which its watcher notices or not yet.
    Reboot {
        noticed: bool,
    },
    /// What is on its way arrives.
    Deliver,
    /// Something is routed there.
    Route(Vec<u8>),
}

fn happens() -> impl Strategy<Value = (usize, Happens)> {
    let pages = || prop::collection::vec(0u8..40, 1..6);
    let what = prop_oneof![
        6 => pages().prop_map(Happens::Store),
        4 => pages().prop_map(Happens::Remove),
        1 => Just(Happens::Clear),
        1 => Just(Happens::Drop),
        1 => Just(Happens::Repeat),
        1 => Just(Happens::Swap),
        1 => Just(Happens::Break),
        1 => any::<bool>().prop_map(|noticed| Happens::Reboot { noticed }),
        4 => Just(Happens::Deliver),
        1 => pages().prop_map(Happens::Route),
    ];
    (0usize..3, what)
}

/// A source, its follower, and what is on its way between them.
struct Line {
    engine: u32,
    boots: u32,
    source: Source,
    feed: EngineFeed,
    wire: VecDeque<KvEvent>,
}

impl Line {
    fn send(&mut self, kind: KvEventKind) {
        self.source.emit(kind);
        self.wire.extend(self.source.log.back().cloned());
    }

    /// The follower asks anew.
    fn connect(&mut self) {
        let from = self.feed.begin();
        self.wire = self.source.since(from);
    }

    fn deliver(&mut self) {
        while let Some(event) = self.wire.pop_front() {
            if self.feed.accept(&event).is_err() {
                self.connect();
            }
        }
    }
}

proptest! {
    #[test]
    fn dropped_repeated_and_reordered_events_converge(story in prop::collection::vec(happens(), 0..150)) {
        let index = index();
        let mut lines: Vec<Line> = (0..3).map(|engine| Line {
            engine,
            boots: 0,
            source: Source::boot(engine),
            feed: index.join(engine).expect("is new"),
            wire: VecDeque::new(),
        }).collect();
        lines.iter_mut().for_each(Line::connect);
        let page = |number: &u8| PageHash(u128::from(*number) << 60 | 5);
        for (at, what) in story {
            let line = &mut lines[at];
            match what {
                Happens::Store(numbers) => {
                    let new: Vec<_> = numbers.iter().map(page).filter(|page| line.source.pages.insert(*page)).collect();
                    if !new.is_empty() {
                        line.send(KvEventKind::Stored { pages: names(&new) });
                    }
                }
                Happens::Remove(numbers) => {
                    let gone: Vec<_> = numbers.iter().map(page).filter(|page| line.source.pages.remove(page)).collect();
                    if !gone.is_empty() {
                        line.send(KvEventKind::Removed { pages: names(&gone) });
                    }
                }
                Happens::Clear => {
                    line.source.pages.clear();
                    line.send(KvEventKind::Cleared);
                }
                Happens::Drop => drop(line.wire.pop_front()),
                Happens::Repeat => {
                    let first = line.wire.front().cloned();
                    line.wire.extend(first);
                }
                Happens::Swap if line.wire.len() > 1 => line.wire.swap(0, 1),
                Happens::Swap => {}
                Happens::Break => line.connect(),
                Happens::Reboot { noticed } => {
                    line.boots += 1;
                    line.source = Source::boot(line.engine + 3 * line.boots);
                    if noticed {
                        index.forget(line.engine);
                    }
                    line.connect();
                }
                Happens::Deliver => line.deliver(),
                Happens::Route(numbers) => {
                    let pages: Vec<_> = numbers.iter().map(page).collect();
                    note(&index, Instant::now(), line.engine, &pages);
                }
            }
        }
        // The watcher has seen every restart by now; then one look of a follower at the number that it has is enough.
        for line in &mut lines {
            line.deliver();
            if line.boots > 0 {
                index.forget(line.engine);
            }
            line.connect();
            line.deliver();
            let truth: Vec<_> = line.source.pages.iter().copied().collect();
            prop_assert_eq!(index.reported_by(line.engine), truth, "engine {}", line.engine);
        }
    }
}

/// A generator for the churn: what matters is that it is the same each time.
struct Rolls(u64);

impl Rolls {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % bound
    }
}

/// Runs `events` page events on engines that come and go, and checks the index against one that is rebuilt; returns its bytes on the way.
fn churn(max_bytes: usize, events: u64) -> (Vec<usize>, IndexStats) {
    const ENGINES: usize = 12;
    const EACH: u64 = 400;
    let index = Arc::new(PrefixIndex::new(max_bytes, 3));
    let mut rolls = Rolls(9);
    let mut number = 0;
    let mut join = |index: &Arc<PrefixIndex>| {
        number += 1;
        let mut feed = index.join(number).expect("is new");
        feed.begin();
        feed.accept(&snapshot(0, &[])).expect("a snapshot");
        (number, feed, BTreeSet::<PageHash>::new(), 0_u64)
    };
    let mut engines: Vec<_> = (0..ENGINES).map(|_| join(&index)).collect();
    let mut bytes = Vec::new();
    for at in 0..events {
        let place = rolls.below(ENGINES as u64) as usize;
        if rolls.below(500) == 0 {
            engines[place] = join(&index);
        }
        let (_, feed, truth, last) = &mut engines[place];
        // Of each page several engines have a copy, and of some all do.
        let page = PageHash(u128::from(rolls.below(EACH) * rolls.below(3)) << 64 | 1);
        *last += 1;
        let kind = if truth.remove(&page) {
            KvEventKind::Removed { pages: names(&[page]) }
        } else {
            truth.insert(page);
            KvEventKind::Stored { pages: names(&[page]) }
        };
        feed.accept(&event("a", *last, kind)).expect("the next one");
        if (at + 1) % (events / 4) == 0 {
            bytes.push(index.stats().bytes);
        }
    }
    let rebuilt = Arc::new(PrefixIndex::new(max_bytes, 4));
    let mut holders: BTreeMap<PageHash, usize> = BTreeMap::new();
    for (number, _, truth, _) in &engines {
        let mut feed = rebuilt.join(*number).expect("is new");
        feed.begin();
        feed.accept(&snapshot(0, &truth.iter().copied().collect::<Vec<_>>())).expect("a snapshot");
        let reported = index.reported_by(*number);
        if index.stats().evicted_pages == 0 {
            assert_eq!(reported, rebuilt.reported_by(*number), "engine {number}");
        }
        assert!(
            reported.iter().all(|page| truth.contains(page)),
            "engine {number} is said to hold what it does not"
        );
        reported.into_iter().for_each(|page| *holders.entry(page).or_default() += 1);
        std::mem::forget(feed);
    }
    let stats = index.stats();
    assert_eq!((stats.reported_pages, stats.reported_holdings), (holders.len(), holders.values().sum()));
    (bytes, stats)
}

#[test]
fn churn_leaves_bytes_flat_and_the_index_equal_to_a_rebuilt_one() {
    let (bytes, stats) = churn(4 << 20, 40_000);
    assert_eq!(stats.evicted_pages, 0);
    // Logs double and halve; nothing else changes once every engine and page has been there.
    assert!(bytes.iter().all(|now| now.abs_diff(bytes[0]) < bytes[0] / 8), "{bytes:?}");
}

#[test]
fn a_full_index_forgets_pages_and_stays_within_its_bytes() {
    let max_bytes = 64 << 10;
    let (bytes, stats) = churn(max_bytes, 20_000);
    assert!(stats.evicted_pages > 0, "{stats:?}");
    assert!(bytes.iter().all(|now| *now <= max_bytes + SLACK), "{bytes:?}");
}

#[test]
fn what_is_of_use_outlives_what_is_not() {
    let index = Arc::new(PrefixIndex::new(128 << 10, 1));
    let mut feed = index.join(0).expect("is new");
    feed.begin();
    let useful: Vec<_> = (0..100).map(|number| PageHash(number << 70 | 1)).collect();
    feed.accept(&snapshot(0, &useful)).expect("a snapshot");
    let mut number = 0;
    for round in 0..100_u128 {
        let passing: Vec<_> = (0..100).map(|page| PageHash((round * 100 + page) << 70 | 2)).collect();
        number += 1;
        feed.accept(&stored(number, &passing)).expect("the next one");
        assert_eq!(pages(&index, Instant::now(), [0], &useful), [100], "round {round}");
    }
    assert!(index.stats().evicted_pages > 5000, "{:?}", index.stats());
}
