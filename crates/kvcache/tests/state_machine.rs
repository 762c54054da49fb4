//! The whole facade against a naive model, over random runs of every verb.
//!
//! The model keeps what the cache must not get wrong in the plainest form: a memory with the tokens that were really written
//! to each slot, a map from whole contexts to pages with their last use, and the live handles themselves. Peers write
//! rubbish to every page whose address they may still know, whenever they like.

#![allow(clippy::unwrap_used, reason = "tests may unwrap")]

use std::collections::{BTreeMap, BTreeSet};

use microserving_kvcache::{
    KvCache, KvCacheConfig, KvChange, KvError, PageCounts, PageHash, PageTable, Prefix, ReplacedPages,
    Reservation, invariants, page_hashes,
};
use microserving_protocol::{Generation, PageId, TokenId};
use proptest::prelude::*;

/// One small number a page: contexts that often share a beginning.
type Names = Vec<u8>;
type Context = (usize, Vec<TokenId>);

const SALTS: [&str; 2] = ["", "tenant"];
const RUBBISH: TokenId = TokenId(u32::MAX);

#[derive(Clone, Debug)]
enum Op {
    Match { salt: usize, names: Names, cut: u32 },
    Begin { which: usize, names: Names },
    ReleasePrefix { which: usize },
    Grow { which: usize, by: u32 },
    Write { which: usize, by: u32 },
    Commit { which: usize, less: u32, hold: bool },
    DropReplaced,
    Fork { which: usize, less: u32 },
    ReleaseTable { which: usize },
    DropTable { which: usize },
    Reserve { salt: usize, names: Names, cut: u32, extra: u32 },
    Receive { which: usize },
    LateWrites,
    Accept { which: usize },
    Quarantine { which: usize },
    DropReservation { which: usize },
    Cancel { which: usize },
    Drained { which: usize },
    DrainedUnknown { generation: u64 },
    ClearUnused,
}

fn op() -> impl Strategy<Value = Op> {
    let which = 0..6_usize;
    let salt = 0..2_usize;
    let names = || prop::collection::vec(0..3_u8, 0..6);
    prop_oneof![
        6 => (salt.clone(), names(), 0..3_u32).prop_map(|(salt, names, cut)| Op::Match { salt, names, cut }),
        6 => (which.clone(), names()).prop_map(|(which, names)| Op::Begin { which, names }),
        1 => which.clone().prop_map(|which| Op::ReleasePrefix { which }),
        6 => (which.clone(), 0..9_u32).prop_map(|(which, by)| Op::Grow { which, by }),
        6 => (which.clone(), 0..9_u32).prop_map(|(which, by)| Op::Write { which, by }),
        6 => (which.clone(), 0..3_u32, any::<bool>())
            .prop_map(|(which, less, hold)| Op::Commit { which, less, hold }),
        1 => Just(Op::DropReplaced),
        1 => (which.clone(), 0..4_u32).prop_map(|(which, less)| Op::Fork { which, less }),
        3 => which.clone().prop_map(|which| Op::ReleaseTable { which }),
        1 => which.clone().prop_map(|which| Op::DropTable { which }),
        4 => (salt, names(), 0..3_u32, 0..6_u32)
            .prop_map(|(salt, names, cut, extra)| Op::Reserve { salt, names, cut, extra }),
        3 => which.clone().prop_map(|which| Op::Receive { which }),
        3 => Just(Op::LateWrites),
        3 => which.clone().prop_map(|which| Op::Accept { which }),
        1 => which.clone().prop_map(|which| Op::Quarantine { which }),
        1 => which.clone().prop_map(|which| Op::DropReservation { which }),
        1 => which.clone().prop_map(|which| Op::Cancel { which }),
        3 => which.prop_map(|which| Op::Drained { which }),
        1 => (0..9_u64).prop_map(|generation| Op::DrainedUnknown { generation }),
        1 => Just(Op::ClearUnused),
    ]
}

#[derive(Debug)]
struct Entry {
    page: PageId,
    last_used: u64,
    readers: u32,
}

struct LiveTable {
    table: PageTable,
    salt: usize,
    /// The tokens written, from position 0.
    written: Vec<TokenId>,
    /// What the sequence goes on with.
    names: Names,
}

struct LivePrefix {
    prefix: Prefix,
    salt: usize,
    tokens: Vec<TokenId>,
}

struct LiveReservation {
    reservation: Reservation,
    salt: usize,
    tokens: Vec<TokenId>,
    received: bool,
}

struct World {
    cache: KvCache,
    memory: Vec<Vec<TokenId>>,
    /// What is matchable: every full page by its whole context.
    entries: BTreeMap<Context, Entry>,
    ticks: u64,
    prefixes: Vec<LivePrefix>,
    tables: Vec<LiveTable>,
    reservations: Vec<LiveReservation>,
    replaced: Vec<ReplacedPages>,
    /// Pages that a peer may write to, by generation.
    writers: BTreeMap<Generation, Vec<PageId>>,
    quarantined: BTreeMap<Generation, usize>,
    last_generation: Generation,
    index: BTreeSet<PageHash>,
    next_seq: u64,
    /// Something was dropped and no verb has run since.
    uncollected: bool,
}

impl World {
    fn new(config: KvCacheConfig) -> Self {
        Self {
            cache: KvCache::new(config).unwrap(),
            memory: vec![vec![RUBBISH; config.page_size as usize]; config.num_pages as usize],
            entries: BTreeMap::new(),
            ticks: 0,
            prefixes: Vec::new(),
            tables: Vec::new(),
            reservations: Vec::new(),
            replaced: Vec::new(),
            writers: BTreeMap::new(),
            quarantined: BTreeMap::new(),
            last_generation: Generation(0),
            index: BTreeSet::new(),
            next_seq: 0,
            uncollected: false,
        }
    }

    fn page_size(&self) -> usize {
        self.cache.page_size() as usize
    }

    /// Pages of one name differ from those of another only in their last token.
    fn token(&self, names: &[u8], position: usize) -> TokenId {
        let page_size = self.page_size();
        let name = names.get(position / page_size).copied().unwrap_or(0);
        TokenId(if position % page_size + 1 == page_size { name.into() } else { 9 })
    }

    fn tokens(&self, names: &[u8], cut: u32) -> Vec<TokenId> {
        let len = (names.len() * self.page_size()).saturating_sub(cut as usize);
        (0..len).map(|position| self.token(names, position)).collect()
    }

    fn matched(&self, salt: usize, tokens: &[TokenId]) -> usize {
        let contains = |pages: &usize| {
            self.entries.contains_key(&(salt, tokens[..pages * self.cache.page_size() as usize].to_vec()))
        };
        (1..=tokens.len() / self.page_size()).take_while(contains).count()
    }

    /// Uses the first `num_pages` pages of a context, and changes the number of their readers.
    fn touch(&mut self, salt: usize, tokens: &[TokenId], num_pages: usize, readers: i32) {
        self.ticks += 1;
        for pages in 1..=num_pages {
            let key = (salt, tokens[..pages * self.page_size()].to_vec());
            let entry = self.entries.get_mut(&key).expect("what is read cannot have been evicted");
            entry.last_used = self.ticks;
            entry.readers = entry.readers.checked_add_signed(readers).unwrap();
        }
    }

    fn evict(&mut self, num_pages: u32) {
        for _ in 0..num_pages {
            let leaf = |key: &Context| {
                let below = |other: &&Context| other.0 == key.0 && other.1.starts_with(&key.1);
                self.entries.keys().filter(below).count() == 1
            };
            let candidates = self.entries.iter().filter(|(key, entry)| entry.readers == 0 && leaf(key));
            let victim = candidates.min_by_key(|(_, entry)| entry.last_used).map(|(key, _)| key.clone());
            self.entries.remove(&victim.expect("there is room to be made"));
        }
    }

    fn counts(&self) -> PageCounts {
        let mut owned: BTreeSet<PageId> = BTreeSet::new();
        owned.extend(self.prefixes.iter().flat_map(|live| live.prefix.pages()));
        owned.extend(self.tables.iter().flat_map(|live| live.table.pages()));
        owned.extend(self.replaced.iter().flat_map(ReplacedPages::old_pages));
        let mut reserved = 0;
        for LiveReservation { reservation, .. } in &self.reservations {
            let matched = reservation.num_matched_tokens() as usize / self.page_size();
            owned.extend(&reservation.pages()[..matched]);
            reserved += reservation.pages().len() - matched;
        }
        let cached = self.entries.values().filter(|entry| !owned.contains(&entry.page)).count();
        let quarantined: usize = self.quarantined.values().sum();
        let total = self.memory.len();
        let number = |count: usize| u32::try_from(count).unwrap();
        PageCounts {
            free: number(total - owned.len() - reserved - cached - quarantined),
            reserved: number(reserved),
            owned: number(owned.len()),
            cached: number(cached),
            quarantined: number(quarantined),
            total: number(total),
        }
    }

    /// What the cache must do with a need of pages; evicts in the model if it has room.
    fn make_room(&mut self, needed: u32) -> Result<(), KvError> {
        let PageCounts { free, cached, .. } = self.counts();
        if needed > free + cached {
            return Err(KvError::NoRoom { needed, free, evictable: cached });
        }
        self.evict(needed.saturating_sub(free));
        Ok(())
    }

    /// What the cache does whenever it takes handles back.
    fn keep_bound(&mut self) {
        let surplus = self.counts().cached.saturating_sub(self.cache.config().max_cached_pages);
        self.evict(surplus);
    }

    fn assert_reads(&self, pages: &[PageId], tokens: &[TokenId]) {
        for (position, token) in tokens.iter().enumerate() {
            let slot =
                self.memory[pages[position / self.page_size()].0 as usize][position % self.page_size()];
            assert_eq!(slot, *token, "position {position} of a context was overwritten");
        }
    }

    fn write(memory: &mut [Vec<TokenId>], pages: &[PageId], first: usize, tokens: &[TokenId]) {
        for (at, token) in tokens.iter().enumerate() {
            let page_size = memory[0].len();
            let position = first + at;
            memory[pages[position / page_size].0 as usize][position % page_size] = *token;
        }
    }

    fn apply(&mut self, op: Op) {
        self.uncollected = false;
        match op {
            Op::Match { salt, names, cut } => {
                let tokens = self.tokens(&names, cut);
                let num_pages = self.matched(salt, &tokens);
                let expected = u32::try_from(num_pages * self.page_size()).unwrap();
                assert_eq!(self.cache.peek_prefix(SALTS[salt], &tokens), expected);
                let prefix = self.cache.match_prefix(SALTS[salt], &tokens);
                assert_eq!(prefix.num_tokens(), expected);
                self.touch(salt, &tokens, num_pages, 1);
                let tokens = tokens[..expected as usize].to_vec();
                self.assert_reads(prefix.pages(), &tokens);
                self.prefixes.push(LivePrefix { prefix, salt, tokens });
            }
            Op::Begin { which, names } => {
                if let Some(LivePrefix { prefix, salt, tokens }) = take(&mut self.prefixes, which) {
                    let table = prefix.into_table();
                    self.tables.push(LiveTable { table, salt, written: tokens, names });
                }
            }
            Op::ReleasePrefix { which } => {
                if let Some(LivePrefix { prefix, salt, tokens }) = take(&mut self.prefixes, which) {
                    let num_pages = prefix.pages().len();
                    self.cache.release(prefix);
                    self.touch(salt, &tokens, num_pages, -1);
                    self.keep_bound();
                }
            }
            Op::Grow { which, by } => {
                let Some(which) = which.checked_rem(self.tables.len()) else { return };
                let table = &self.tables[which].table;
                let num_tokens = table.capacity() + by;
                let needed = self.cache.pages_for(num_tokens) - u32::try_from(table.pages().len()).unwrap();
                let expected = self.make_room(needed).map(|()| needed);
                assert_eq!(self.cache.grow(&mut self.tables[which].table, num_tokens), expected);
            }
            Op::Write { which, by } => {
                let Some(which) = which.checked_rem(self.tables.len()) else { return };
                let live = &self.tables[which];
                let first = live.written.len();
                let end = (first + by as usize).min(live.table.capacity() as usize);
                let tokens: Vec<_> = (first..end).map(|at| self.token(&live.names, at)).collect();
                Self::write(&mut self.memory, live.table.pages(), first, &tokens);
                self.tables[which].written.extend(tokens);
            }
            Op::Commit { which, less, hold } => self.commit(which, less, hold),
            Op::DropReplaced => {
                self.replaced.clear();
                self.uncollected = true;
            }
            Op::Fork { which, less } => self.fork(which, less),
            Op::ReleaseTable { which } => self.end_table(which, true),
            Op::DropTable { which } => self.end_table(which, false),
            Op::Reserve { salt, names, cut, extra } => self.reserve(salt, &names, cut, extra),
            Op::Receive { which } => {
                let Some(which) = which.checked_rem(self.reservations.len()) else { return };
                let live = &mut self.reservations[which];
                let first = live.reservation.num_matched_tokens() as usize;
                Self::write(&mut self.memory, live.reservation.pages(), first, &live.tokens[first..]);
                live.received = true;
                self.writers.remove(&live.reservation.generation());
            }
            Op::LateWrites => {
                for page in self.writers.values().flatten() {
                    self.memory[page.0 as usize].fill(RUBBISH);
                }
            }
            Op::Accept { which } => {
                if let Some(live) = take(&mut self.reservations, which) {
                    let LiveReservation { reservation, salt, mut tokens, received } = live;
                    // Not received: the transport has said that no write can land any more.
                    self.writers.remove(&reservation.generation());
                    if !received {
                        tokens.truncate(reservation.num_matched_tokens() as usize);
                    }
                    let table = self.cache.accept(reservation).unwrap();
                    self.tables.push(LiveTable { table, salt, written: tokens, names: Vec::new() });
                }
            }
            Op::Quarantine { which } => self.give_up(which, true),
            Op::DropReservation { which } => self.give_up(which, false),
            Op::Cancel { which } => {
                if let Some(LiveReservation { reservation, salt, tokens, .. }) =
                    take(&mut self.reservations, which)
                {
                    self.writers.remove(&reservation.generation());
                    let matched = reservation.num_matched_tokens() as usize / self.page_size();
                    self.cache.cancel(reservation).unwrap();
                    self.touch(salt, &tokens, matched, -1);
                    self.keep_bound();
                }
            }
            Op::Drained { which } => {
                let generations: Vec<_> = self.quarantined.keys().copied().collect();
                let Some(which) = which.checked_rem(generations.len()) else { return };
                let generation = generations[which];
                self.writers.remove(&generation);
                let num_pages = self.quarantined.remove(&generation).unwrap();
                assert_eq!(self.cache.drained(generation), Ok(u32::try_from(num_pages).unwrap()));
                assert_eq!(self.cache.drained(generation), Err(KvError::NotQuarantined { generation }));
            }
            Op::DrainedUnknown { generation } => {
                let generation = Generation(generation);
                if !self.quarantined.contains_key(&generation) {
                    let refused = Err(KvError::NotQuarantined { generation });
                    assert_eq!(self.cache.drained(generation), refused);
                }
            }
            Op::ClearUnused => {
                let unused = self.counts().cached;
                assert_eq!(self.cache.clear_unused(), unused);
                self.evict(unused);
            }
        }
    }

    fn commit(&mut self, which: usize, less: u32, hold: bool) {
        let Some(which) = which.checked_rem(self.tables.len()) else { return };
        let live = &self.tables[which];
        let salt = live.salt;
        let written = live.written[..live.written.len().saturating_sub(less as usize)].to_vec();
        let first = live.table.num_shared_tokens() as usize / self.page_size();
        let full = (written.len() / self.page_size()).max(first);
        let before = live.table.pages().to_vec();
        let num_matched = self.matched(salt, &written).max(first);
        let committed = self.cache.commit(&mut self.tables[which].table, &written).unwrap();
        let after_commit = self.tables[which].table.pages().to_vec();
        let mut expected = Vec::new();
        if full > first {
            self.touch(salt, &written, first, -1);
            for pages in first + 1..=full {
                let index = pages - 1;
                let key = (salt, written[..pages * self.cache.page_size() as usize].to_vec());
                if pages <= num_matched {
                    expected.push((index, before[index], self.entries[&key].page));
                } else {
                    let page = before[index];
                    self.entries.insert(key, Entry { page, last_used: 0, readers: 0 });
                }
            }
        }
        let mut after = before;
        for (index, _, new) in &expected {
            after[*index] = *new;
        }
        assert_eq!(after_commit, after);
        assert_eq!(committed.replaced.iter().collect::<Vec<_>>(), expected);
        assert_eq!(committed.replaced.is_empty(), expected.is_empty());
        assert_eq!(committed.num_new_pages as usize, full - first - expected.len());
        assert_eq!(committed.num_shared_tokens as usize, full * self.page_size());
        if full > first {
            self.touch(salt, &written, full, 1);
        }
        if hold {
            self.replaced.push(committed.replaced);
        } else {
            drop(committed);
            self.uncollected = true;
        }
    }

    fn fork(&mut self, which: usize, less: u32) {
        let Some(which) = which.checked_rem(self.tables.len()) else { return };
        let live = &self.tables[which];
        let shared = live.table.num_shared_tokens();
        let num_tokens = u32::try_from(live.written.len()).unwrap().saturating_sub(less).max(shared);
        let (salt, names) = (live.salt, live.names.clone());
        let written = live.written[..num_tokens as usize].to_vec();
        let expected = self.make_room(self.cache.pages_for(num_tokens - shared));
        match self.cache.fork(&self.tables[which].table, num_tokens) {
            Err(error) => assert_eq!(Err(error), expected),
            Ok(fork) => {
                expected.unwrap();
                self.touch(salt, &written, shared as usize / self.page_size(), 1);
                for copy in &fork.copies {
                    let from = self.memory[copy.from.0 as usize][..copy.num_slots as usize].to_vec();
                    self.memory[copy.to.0 as usize][..copy.num_slots as usize].copy_from_slice(&from);
                }
                let slots: u32 = fork.copies.iter().map(|copy| copy.num_slots).sum();
                assert_eq!(slots, num_tokens - shared);
                self.tables.push(LiveTable { table: fork.table, salt, written, names });
            }
        }
    }

    fn end_table(&mut self, which: usize, at_once: bool) {
        let Some(LiveTable { table, salt, written, .. }) = take(&mut self.tables, which) else { return };
        let shared = table.num_shared_tokens() as usize / self.page_size();
        if at_once {
            self.cache.release_table(table);
        } else {
            drop(table);
            self.uncollected = true;
        }
        self.touch(salt, &written, shared, -1);
        self.keep_bound();
    }

    fn reserve(&mut self, salt: usize, names: &[u8], cut: u32, extra: u32) {
        let tokens = self.tokens(names, cut);
        let quarantined = self.counts().quarantined;
        let limit = self.cache.config().max_quarantined_pages;
        if quarantined > limit {
            let refused = Err(KvError::QuarantineFull { quarantined, limit });
            assert_eq!(self.cache.reserve(SALTS[salt], &tokens, extra).map(drop), refused);
            return;
        }
        let matched = self.matched(salt, &tokens);
        let end = u32::try_from(tokens.len()).unwrap();
        let needed = self.cache.pages_for(end + extra) - u32::try_from(matched).unwrap();
        // What is matched is held, and so cannot be evicted to make the room.
        let reserved = self.cache.reserve(SALTS[salt], &tokens, extra);
        self.touch(salt, &tokens, matched, 1);
        let held = self.entries.values().filter(|entry| entry.readers == 1);
        let newly_held = held.filter(|entry| !self.is_listed(entry.page)).count();
        let PageCounts { free, cached, .. } = self.counts();
        let evictable = cached - u32::try_from(newly_held).unwrap();
        if needed > free + evictable {
            self.touch(salt, &tokens, matched, -1);
            assert_eq!(reserved.map(drop), Err(KvError::NoRoom { needed, free, evictable }));
            return;
        }
        self.evict(needed.saturating_sub(free));
        let reservation = reserved.unwrap();
        assert!(reservation.generation() > self.last_generation);
        self.last_generation = reservation.generation();
        let begin = u32::try_from(matched * self.page_size()).unwrap();
        assert_eq!((reservation.range().begin(), reservation.range().end()), (begin, end));
        assert_eq!(reservation.pages().len(), matched + needed as usize);
        let receiving = self.cache.pages_for(end - begin) as usize;
        assert_eq!(reservation.receiving_pages(), &reservation.pages()[matched..matched + receiving]);
        self.assert_reads(reservation.pages(), &tokens[..begin as usize]);
        self.writers.insert(reservation.generation(), reservation.receiving_pages().to_vec());
        self.reservations.push(LiveReservation { reservation, salt, tokens, received: false });
    }

    fn is_listed(&self, page: PageId) -> bool {
        self.prefixes.iter().any(|live| live.prefix.pages().contains(&page))
            || self.tables.iter().any(|live| live.table.pages().contains(&page))
            || self.reservations.iter().any(|live| live.reservation.pages().contains(&page))
    }

    fn give_up(&mut self, which: usize, at_once: bool) {
        let Some(live) = take(&mut self.reservations, which) else { return };
        let LiveReservation { reservation, salt, tokens, .. } = live;
        let generation = reservation.generation();
        let matched = reservation.num_matched_tokens() as usize / self.page_size();
        let exposed = reservation.receiving_pages().len();
        if at_once {
            assert_eq!(self.cache.quarantine(reservation) as usize, exposed);
        } else {
            drop(reservation);
            self.uncollected = true;
        }
        if exposed > 0 {
            self.quarantined.insert(generation, exposed);
        }
        self.touch(salt, &tokens, matched, -1);
        self.keep_bound();
    }

    fn check(&mut self) {
        if self.uncollected {
            invariants::check(&self.cache).unwrap();
            return;
        }
        self.cache.collect();
        invariants::check(&self.cache).unwrap();
        let handles = (self.prefixes.iter().map(|live| live.prefix.pages()))
            .chain(self.tables.iter().map(|live| live.table.pages()))
            .chain(self.reservations.iter().map(|live| live.reservation.pages()))
            .chain(self.replaced.iter().map(ReplacedPages::old_pages));
        invariants::check_handles(&self.cache, handles).unwrap();
        assert_eq!(self.cache.counts(), self.counts());
        for live in &self.tables {
            self.assert_reads(live.table.pages(), &live.written);
        }
        for (context, entry) in &self.entries {
            let last = context.1.len() - self.page_size();
            assert_eq!(self.memory[entry.page.0 as usize], context.1[last..]);
        }
        self.check_events();
    }

    /// Whoever follows the events, or starts again from a snapshot after a gap, knows what is matchable.
    fn check_events(&mut self) {
        let page_size = self.cache.page_size();
        let mut named = BTreeSet::new();
        let mut parents = BTreeMap::new();
        for (salt, tokens) in self.entries.keys() {
            let mut chain = page_hashes(SALTS[*salt], tokens, page_size);
            let name = chain.pop().unwrap();
            named.insert(name);
            parents.insert(name, chain.pop().unwrap_or(PageHash::root(SALTS[*salt])));
        }
        let mut gap = false;
        for event in self.cache.take_events() {
            match event.change {
                _ if event.seq != self.next_seq => gap = true,
                KvChange::Gap => gap = true,
                KvChange::Stored { mut parent, pages } => {
                    for page in pages {
                        assert!(self.index.insert(page));
                        // A page that was evicted again in the same verb has no entry to compare with.
                        assert_eq!(parents.get(&page).copied().unwrap_or(parent), parent);
                        parent = page;
                    }
                }
                KvChange::Removed { pages } => {
                    pages.iter().for_each(|page| assert!(self.index.remove(page)));
                }
                KvChange::Cleared => self.index.clear(),
            }
            if gap {
                break;
            }
            self.next_seq = event.seq + 1;
        }
        let snapshot = self.cache.snapshot();
        if gap {
            self.index = snapshot.pages.iter().copied().collect();
            self.next_seq = snapshot.next_seq;
        }
        assert_eq!(self.next_seq, snapshot.next_seq);
        assert_eq!(self.index, snapshot.pages.into_iter().collect());
        assert_eq!(self.index, named);
    }

    /// Everything ends, and nothing is left but what is cached.
    fn finish(mut self) {
        self.prefixes.clear();
        self.tables.clear();
        self.reservations.clear();
        self.replaced.clear();
        self.cache.collect();
        for generation in self.cache.quarantined_generations().collect::<Vec<_>>() {
            self.cache.drained(generation).unwrap();
        }
        invariants::check_idle(&mut self.cache).unwrap();
        let PageCounts { free, cached, total, .. } = self.cache.counts();
        assert_eq!(free + cached, total);
        self.cache.clear_unused();
        assert_eq!(self.cache.counts().free, total);
        assert_eq!((self.cache.prefixes().num_nodes(), self.cache.prefixes().num_tenants()), (0, 0));
    }
}

fn take<T>(all: &mut Vec<T>, which: usize) -> Option<T> {
    let which = which.checked_rem(all.len())?;
    Some(all.remove(which))
}

fn config() -> impl Strategy<Value = KvCacheConfig> {
    (4..24_u32, 1..5_u32, 0..30_u32, 0..12_u32, 1..9_u32).prop_map(
        |(num_pages, page_size, max_cached_pages, max_quarantined_pages, max_buffered_events)| {
            KvCacheConfig {
                num_pages,
                page_size,
                max_cached_pages,
                max_quarantined_pages,
                max_buffered_events,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_the_naive_model(config in config(), ops in prop::collection::vec(op(), 1..150)) {
        let mut world = World::new(config);
        for op in ops {
            world.apply(op);
            world.check();
        }
        world.finish();
    }
}
