//! Pages and who holds them, in bounded memory.
//!
//! ```text
//! heads     one a page that may be kept; hash → first entry of a chain
//! entries   chunked, never moved: page (16) · holders (16) · next · latest · used · mark = 40 bytes
//! logs      for each engine the entries it was put into: what a wipe walks
//! ```
//!
//! Nothing is ever rehashed or copied as it grows, so that no lookup waits for that. The number of heads follows from the bytes allowed, and
//! the operating system provides their memory only as it is touched.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};

use microserving_protocol::PageHash;

use super::set::{EngineSet, Slot};
use crate::ids::mix;

/// Entries that are allocated at a time.
const CHUNK: usize = 512;
/// Entries whose surroundings are read together before the first of them is evicted; a part of a chunk.
const AHEAD: u32 = 16;
const _: () = assert!(CHUNK.is_multiple_of(AHEAD as usize), "no part reaches beyond its chunk");
/// What an entry takes, its head included.
const ENTRY_BYTES: usize = size_of::<Entry>() + size_of::<u32>();
/// What a page on an engine takes at most in that engine's log: a log is cleaned when half of it is
/// stale, and then has room for twice of what is left.
const HOLDING_BYTES: usize = 4 * size_of::<u32>();
/// Places of a log that are not worth cleaning.
const SMALL_LOG: usize = 32;
/// No entry. Entries count from 1, so that fresh memory is a table of empty chains.
const NONE: u32 = 0;

/// One page.
#[derive(Debug, Default)]
struct Entry {
    page: [u64; 2],
    holders: EngineSet,
    /// The next entry of the chain, or of the free list.
    next: u32,
    /// The engine that came last.
    latest: Slot,
    /// Looked at since the hand passed.
    used: AtomicBool,
    /// Met before, while a log is cleaned.
    mark: bool,
}

/// The entries that an engine was put into, some of them more than once or no longer.
#[derive(Debug, Default)]
struct Log {
    entries: Vec<u32>,
    live: usize,
}

/// Who holds a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holding<'a> {
    pub(super) holders: &'a EngineSet,
    pub(super) latest: Slot,
}

/// A map from pages to sets of engines that never takes more than it is allowed.
#[derive(Debug)]
pub(super) struct PageTable {
    heads: Vec<u32>,
    chunks: Vec<Box<[Entry]>>,
    /// The first entry that is free.
    free: u32,
    num_pages: usize,
    num_holdings: usize,
    logs: Vec<Log>,
    spilled_bytes: usize,
    log_bytes: usize,
    max_holding_bytes: usize,
    /// Where the search for a page to evict goes on.
    hand: u32,
    key: [u64; 2],
    evicted: u64,
}

impl PageTable {
    /// Makes a table of at most `max_bytes`. Hashes are keyed by `seed`: page hashes follow from prompts, which strangers choose.
    pub(super) fn new(max_bytes: usize, seed: u64) -> Self {
        // A page that one engine holds takes 44 and at most 16 bytes.
        let max_pages = (max_bytes / 4 * 3 / ENTRY_BYTES).clamp(1, u32::MAX as usize - CHUNK);
        Self {
            heads: vec![NONE; max_pages],
            chunks: Vec::new(),
            free: NONE,
            num_pages: 0,
            num_holdings: 0,
            logs: Vec::new(),
            spilled_bytes: 0,
            log_bytes: 0,
            max_holding_bytes: max_bytes / 4,
            hand: 0,
            key: [mix(seed) | 1, mix(!seed) | 1],
            evicted: 0,
        }
    }

    /// Returns who holds a page, and notes that it was of use.
    pub(super) fn get(&self, page: PageHash) -> Option<Holding<'_>> {
        let entry = self.entry(self.find(page)?);
        // A store to a line that all readers share is dear; most of the time it is set already.
        if !entry.used.load(Ordering::Relaxed) {
            entry.used.store(true, Ordering::Relaxed);
        }
        Some(Holding { holders: &entry.holders, latest: entry.latest })
    }

    /// Reads the places where pages are looked for, and nothing else. Each is far from the others and in no cache; read one after the
    /// other with nothing in between, the processor waits for all of them together.
    pub(super) fn warm(&self, pages: impl Iterator<Item = PageHash> + Clone) {
        if !self.is_empty() {
            self.warm_halves(pages.map(halves));
        }
    }

    fn warm_halves(&self, pages: impl Iterator<Item = [u64; 2]> + Clone) {
        let first = |page| self.heads[self.head(page)];
        black_box(pages.clone().fold(0, |all, page| all | first(page)));
        let page_of = |id: u32| if id == NONE { 0 } else { self.entry(id).page[0] };
        black_box(pages.fold(0, |all, page| all | page_of(first(page))));
    }

    /// Says whether an engine holds a page.
    pub(super) fn holds(&self, slot: Slot, page: PageHash) -> bool {
        self.logs.get(usize::from(slot)).is_some_and(|log| log.live > 0)
            && self.find(page).is_some_and(|id| self.entry(id).holders.contains(slot))
    }

    /// Notes that an engine holds a page, in place of one of little use if there is no more room.
    pub(super) fn insert(&mut self, slot: Slot, page: PageHash) {
        let id = match self.find(page) {
            Some(id) => id,
            None => self.add(page),
        };
        let entry = self.entry_mut(id);
        entry.latest = slot;
        let before = entry.holders.heap_bytes();
        let new = entry.holders.insert(slot);
        let grown = entry.holders.heap_bytes() - before;
        self.spilled_bytes += grown;
        if !new {
            return;
        }
        self.num_holdings += 1;
        self.log(slot, id);
        while self.holding_bytes() > self.max_holding_bytes && self.num_pages > 1 {
            self.evict(Some(id));
        }
    }

    /// Notes that an engine no longer holds a page.
    pub(super) fn remove(&mut self, slot: Slot, page: PageHash) {
        if let Some(id) = self.find(page)
            && self.take_out(id, slot)
        {
            self.note_stale(slot);
        }
    }

    /// Notes that an engine holds nothing; takes time for what it held, not for the whole table.
    pub(super) fn wipe(&mut self, slot: Slot) {
        let Some(log) = self.logs.get_mut(usize::from(slot)) else { return };
        let log = std::mem::take(log);
        self.log_bytes -= log.entries.capacity() * size_of::<u32>();
        for id in log.entries {
            self.take_out(id, slot);
        }
    }

    /// Forgets everything, and gives the memory back.
    pub(super) fn clear(&mut self) {
        if self.chunks.is_empty() {
            return;
        }
        // Fresh memory is only touched where it is used; filling would touch all of it.
        self.heads = vec![NONE; self.heads.len()];
        self.chunks = Vec::new();
        self.logs = Vec::new();
        (self.free, self.hand) = (NONE, 0);
        (self.num_pages, self.num_holdings) = (0, 0);
        (self.spilled_bytes, self.log_bytes) = (0, 0);
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.num_pages == 0
    }

    pub(super) const fn num_pages(&self) -> usize {
        self.num_pages
    }

    pub(super) const fn num_holdings(&self) -> usize {
        self.num_holdings
    }

    /// Returns how many pages were dropped to stay within the bytes allowed.
    pub(super) const fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Returns the bytes that are allocated.
    pub(super) fn bytes(&self) -> usize {
        self.heads.capacity() * size_of::<u32>()
            + self.chunks.len() * CHUNK * size_of::<Entry>()
            + self.chunks.capacity() * size_of::<Box<[Entry]>>()
            + self.logs.capacity() * size_of::<Log>()
            + self.log_bytes
            + self.spilled_bytes
    }

    /// Calls `f` with every page that an engine holds, in no order.
    pub(super) fn for_each_of(&self, slot: Slot, mut f: impl FnMut(PageHash)) {
        for entry in self.chunks.iter().flat_map(|chunk| chunk.iter()) {
            if entry.holders.contains(slot) {
                f(PageHash(u128::from(entry.page[0]) | u128::from(entry.page[1]) << 64));
            }
        }
    }

    fn holding_bytes(&self) -> usize {
        self.num_holdings * HOLDING_BYTES + self.spilled_bytes
    }

    fn entry(&self, id: u32) -> &Entry {
        let place = (id - 1) as usize;
        &self.chunks[place / CHUNK][place % CHUNK]
    }

    fn entry_mut(&mut self, id: u32) -> &mut Entry {
        let place = (id - 1) as usize;
        &mut self.chunks[place / CHUNK][place % CHUNK]
    }

    fn head(&self, page: [u64; 2]) -> usize {
        let product = u128::from(page[0] ^ self.key[0]) * u128::from(page[1] ^ self.key[1]);
        #[allow(clippy::cast_possible_truncation, reason = "both halves are wanted, then the upper one")]
        // The place is taken from the upper bits, which a small difference reaches only when it is mixed again.
        let hash = mix((product >> 64) as u64 ^ product as u64);
        ((u128::from(hash) * self.heads.len() as u128) >> 64) as usize
    }

    fn find(&self, page: PageHash) -> Option<u32> {
        // The heads of a table that is not used are not in any cache, and are best left alone.
        if self.is_empty() {
            return None;
        }
        let page = halves(page);
        let mut id = self.heads[self.head(page)];
        while id != NONE {
            let entry = self.entry(id);
            if entry.page == page {
                return Some(id);
            }
            id = entry.next;
        }
        None
    }

    fn add(&mut self, page: PageHash) -> u32 {
        if self.num_pages >= self.heads.len() {
            self.evict(None);
        }
        if self.free == NONE {
            self.add_chunk();
        }
        let page = halves(page);
        let head = self.head(page);
        let (id, next) = (self.free, self.heads[head]);
        let entry = self.entry_mut(id);
        let free = entry.next;
        entry.page = page;
        entry.next = next;
        // It has yet to be of use: a page that comes once and is never asked for must not outlive one that is.
        *entry.used.get_mut() = false;
        self.free = free;
        self.heads[head] = id;
        self.num_pages += 1;
        id
    }

    fn add_chunk(&mut self) {
        let first = self.chunks.len() * CHUNK + 1;
        let mut chunk: Vec<Entry> = Vec::with_capacity(CHUNK);
        for id in first..first + CHUNK {
            let next = if id + 1 == first + CHUNK { NONE } else { narrow(id + 1) };
            chunk.push(Entry { next, ..Entry::default() });
        }
        self.chunks.push(chunk.into_boxed_slice());
        self.free = narrow(first);
    }

    /// Takes an engine out of an entry, and the entry out of the table if nobody is left in it.
    fn take_out(&mut self, id: u32, slot: Slot) -> bool {
        let entry = self.entry_mut(id);
        let before = entry.holders.heap_bytes();
        if !entry.holders.remove(slot) {
            return false;
        }
        let shrunk = before - entry.holders.heap_bytes();
        let empty = entry.holders.is_empty();
        self.spilled_bytes -= shrunk;
        self.num_holdings -= 1;
        if let Some(log) = self.logs.get_mut(usize::from(slot)) {
            log.live = log.live.saturating_sub(1);
        }
        if empty {
            self.drop_entry(id);
        }
        true
    }

    fn drop_entry(&mut self, id: u32) {
        let entry = self.entry(id);
        let (head, next) = (self.head(entry.page), entry.next);
        if self.heads[head] == id {
            self.heads[head] = next;
        } else {
            let mut before = self.heads[head];
            while self.entry(before).next != id {
                before = self.entry(before).next;
            }
            self.entry_mut(before).next = next;
        }
        let free = self.free;
        *self.entry_mut(id) = Entry { next: free, ..Entry::default() };
        self.free = id;
        self.num_pages -= 1;
    }

    /// Drops the next page that was of no use since the hand passed it (second chance), but not `kept`.
    fn evict(&mut self, kept: Option<u32>) {
        let num_entries = narrow(self.chunks.len() * CHUNK);
        // In the first round every entry may be in use; in the second one none is.
        for _ in 0..=2 * u64::from(num_entries) {
            self.hand = self.hand % num_entries + 1;
            let id = self.hand;
            if id % AHEAD == 1 {
                // The hand goes through memory in order; the places where entries are looked for lie anywhere.
                let next = (id..id + AHEAD).map(|id| self.entry(id));
                let may_go =
                    |entry: &&Entry| !entry.holders.is_empty() && !entry.used.load(Ordering::Relaxed);
                self.warm_halves(next.filter(may_go).map(|entry| entry.page));
            }
            let entry = self.entry_mut(id);
            if entry.holders.is_empty() || Some(id) == kept || std::mem::take(entry.used.get_mut()) {
                continue;
            }
            let mut slots = Vec::new();
            entry.holders.for_each(|slot| slots.push(slot));
            for slot in slots {
                self.take_out(id, slot);
                self.note_stale(slot);
            }
            self.evicted += 1;
            return;
        }
    }

    fn log(&mut self, slot: Slot, id: u32) {
        let place = usize::from(slot);
        if place >= self.logs.len() {
            self.logs.resize_with(place + 1, Log::default);
        }
        if self.logs[place].entries.len() == self.logs[place].entries.capacity() {
            self.clean_log(slot, Some(id));
        }
        let log = &mut self.logs[place];
        let before = log.entries.capacity();
        log.entries.push(id);
        log.live += 1;
        self.log_bytes += (log.entries.capacity() - before) * size_of::<u32>();
    }

    /// Cleans a log if most of it is stale.
    fn note_stale(&mut self, slot: Slot) {
        let Some(log) = self.logs.get(usize::from(slot)) else { return };
        if log.entries.len() > SMALL_LOG + 2 * log.live {
            self.clean_log(slot, None);
        }
    }

    /// Leaves in a log what the engine holds, each once; `coming` is about to be put in.
    fn clean_log(&mut self, slot: Slot, coming: Option<u32>) {
        let mut log = std::mem::take(&mut self.logs[usize::from(slot)]);
        let before = log.entries.capacity();
        log.entries.retain(|&id| {
            let entry = self.entry_mut(id);
            let keep = Some(id) != coming && !entry.mark && entry.holders.contains(slot);
            entry.mark |= keep;
            keep
        });
        for &id in &log.entries {
            self.entry_mut(id).mark = false;
        }
        // Room for as many again: the next cleaning is as far away as this one was long.
        let room = log.entries.len() + SMALL_LOG / 2;
        log.entries.shrink_to(log.entries.len() + room);
        log.entries.reserve_exact(room);
        self.log_bytes =
            self.log_bytes + log.entries.capacity() * size_of::<u32>() - before * size_of::<u32>();
        self.logs[usize::from(slot)] = log;
    }
}

fn halves(page: PageHash) -> [u64; 2] {
    #[allow(clippy::cast_possible_truncation, reason = "the lower half")]
    let low = page.0 as u64;
    [low, (page.0 >> 64) as u64]
}

fn narrow(id: usize) -> u32 {
    u32::try_from(id).expect("the table is made for fewer than 2^32 entries")
}
