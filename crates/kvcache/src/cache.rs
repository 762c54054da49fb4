//! The facade: pool, prefix cache and reservations, changed together.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use microserving_protocol::{Generation, KvRange, PageId, TokenId};

use crate::handle::{Holding, Promise, Returned, Returns};
use crate::table::num_tokens;
use crate::{
    KvError, KvEvent, KvSnapshot, PageCounts, PagePool, PageTable, Prefix, PrefixCache, ReplacedPages,
    Reservation,
};

/// How large a cache is and where its bounds are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCacheConfig {
    /// Pages in the KV region; at least 1.
    pub num_pages: u32,
    /// Tokens in a page; at least 1.
    pub page_size: u32,
    /// The most pages that the prefix cache may keep for itself; pages in use do not count. All of them by default.
    pub max_cached_pages: u32,
    /// No reservation is made while more pages than this wait for a peer's last write. 5 % of the pages by default, but 16
    /// at least.
    pub max_quarantined_pages: u32,
    /// The most events kept until somebody takes them; 0 records none. 4,096 by default.
    pub max_buffered_events: u32,
}

impl KvCacheConfig {
    /// Makes a configuration with the default bounds.
    #[must_use]
    pub fn new(num_pages: u32, page_size: u32) -> Self {
        Self {
            num_pages,
            page_size,
            max_cached_pages: num_pages,
            max_quarantined_pages: (num_pages / 20).max(16),
            max_buffered_events: 4096,
        }
    }
}

/// Counters since the cache was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvStats {
    /// Contexts looked up by [`KvCache::match_prefix`] and [`KvCache::reserve`].
    pub lookups: u64,
    /// Tokens looked up.
    pub lookup_tokens: u64,
    /// Tokens found.
    pub matched_tokens: u64,
    /// Pages that became matchable.
    pub committed_pages: u64,
    /// Pages that were given up for an equal one when they were committed.
    pub deduplicated_pages: u64,
    /// Pages taken from the prefix cache to make room or to keep its bound.
    pub evicted_pages: u64,
    /// Reservations made.
    pub reservations: u64,
    /// Reservations given up while a peer might still write.
    pub quarantines: u64,
}

/// What [`KvCache::commit`] did.
#[derive(Debug)]
#[must_use = "replaced pages are given back when this is dropped"]
pub struct Committed {
    /// Tokens of the sequence in shared pages now, from position 0.
    pub num_shared_tokens: u32,
    /// Pages that became matchable by this call.
    pub num_new_pages: u32,
    /// The table's pages that were replaced by equal ones; the old ones are given back when this is dropped.
    pub replaced: ReplacedPages,
}

/// What [`KvCache::fork`] made.
#[derive(Debug)]
pub struct Fork {
    /// The new sequence's pages.
    pub table: PageTable,
    /// What has to be copied, in every layer, before the new sequence is computed with.
    pub copies: Vec<PageCopy>,
}

/// A copy of the first slots of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// The page to read.
    pub from: PageId,
    /// The page to write.
    pub to: PageId,
    /// Slots to copy.
    pub num_slots: u32,
}

/// All pages of one engine's KV region. See the crate's page for a drawing.
///
/// Handles given out ([`Prefix`], [`PageTable`], [`Reservation`], [`ReplacedPages`]) return their pages when they are
/// dropped; the cache sees that at its next verb, or at [`KvCache::collect`]. A verb that takes a handle has its effect at
/// once. No verb panics, blocks or reads a clock; every verb costs O(pages it touches · log(nodes)).
#[derive(Debug)]
pub struct KvCache {
    config: KvCacheConfig,
    pool: PagePool,
    prefixes: PrefixCache,
    /// Pages that wait for a peer's last write.
    quarantined: BTreeMap<Generation, Vec<PageId>>,
    next_generation: u64,
    returns: Arc<Returns>,
    stats: KvStats,
}

impl KvCache {
    /// Makes a cache whose pages are all free.
    ///
    /// # Errors
    /// [`KvError::InvalidConfig`] if there are no pages, or pages of no tokens, or more tokens than a `u32` counts.
    pub fn new(config: KvCacheConfig) -> Result<Self, KvError> {
        let invalid = |field, value: u32, bound| KvError::InvalidConfig { field, value: value.into(), bound };
        if config.num_pages == 0 {
            return Err(invalid("num_pages", 0, "at least 1"));
        }
        let page_size = usize::try_from(config.page_size).ok().and_then(NonZeroUsize::new);
        let page_size = page_size.ok_or_else(|| invalid("page_size", config.page_size, "at least 1"))?;
        if config.num_pages.checked_mul(config.page_size).is_none() {
            return Err(invalid("num_pages", config.num_pages, "less than 2^32 tokens"));
        }
        Ok(Self {
            config,
            pool: PagePool::new(config.num_pages),
            prefixes: PrefixCache::new(page_size, config.num_pages, config.max_buffered_events as usize),
            quarantined: BTreeMap::new(),
            next_generation: 1,
            returns: Arc::default(),
            stats: KvStats::default(),
        })
    }

    /// Returns the configuration.
    #[must_use]
    pub const fn config(&self) -> &KvCacheConfig {
        &self.config
    }

    /// Returns the tokens in a page.
    #[must_use]
    pub const fn page_size(&self) -> u32 {
        self.config.page_size
    }

    /// Returns the pages that `num_tokens` tokens need.
    #[must_use]
    pub const fn pages_for(&self, num_tokens: u32) -> u32 {
        num_tokens.div_ceil(self.config.page_size)
    }

    /// Returns the pages by state. What was dropped since the last verb still counts as it did before.
    #[must_use]
    pub const fn counts(&self) -> PageCounts {
        self.pool.counts()
    }

    /// Returns the counters since start.
    #[must_use]
    pub const fn stats(&self) -> KvStats {
        self.stats
    }

    /// Returns the state of every page.
    #[must_use]
    pub const fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Returns what can be matched.
    #[must_use]
    pub const fn prefixes(&self) -> &PrefixCache {
        &self.prefixes
    }

    /// Takes back what dropped handles held. Every other verb that changes something does this first.
    pub fn collect(&mut self) {
        let returned = self.returns.take();
        if returned.is_empty() {
            return;
        }
        for returned in returned {
            self.take_back(returned);
        }
        let surplus = self.counts().cached.saturating_sub(self.config.max_cached_pages);
        self.evict(surplus);
    }

    /// Returns how many of `tokens` could be matched now, without holding them or counting as a use.
    #[must_use]
    pub fn peek_prefix(&self, salt: &str, tokens: &[TokenId]) -> u32 {
        num_tokens(self.prefixes.peek(salt, tokens), self.config.page_size)
    }

    /// Finds the longest cached context at the beginning of `tokens`, whole pages only, and holds it.
    ///
    /// Give the tokens only up to where the match may end: `&prompt[..prompt.len() - 1]` for a sequence that is to be
    /// generated from, because its last token must be computed to have logits. An empty match is a match, too: it begins a
    /// table for this salt.
    pub fn match_prefix(&mut self, salt: &str, tokens: &[TokenId]) -> Prefix {
        self.collect();
        let (pin, pages) = self.prefixes.pin_longest(salt, tokens);
        for page in &pages {
            self.pool.share(*page).expect("a page in the prefix cache is owned or cached");
        }
        self.stats.lookups += 1;
        self.stats.lookup_tokens += tokens.len() as u64;
        self.stats.matched_tokens += u64::from(num_tokens(pages.len(), self.config.page_size));
        Prefix { holding: self.holding(pages, pin), page_size: self.config.page_size }
    }

    /// Gives a match up.
    pub fn release(&mut self, prefix: Prefix) {
        drop(prefix);
        self.collect();
    }

    /// Returns the pages that could be had now: free ones, and cached ones that nobody uses.
    #[must_use]
    pub const fn available(&self) -> u32 {
        let counts = self.counts();
        counts.free + counts.cached
    }

    /// Says whether `num_pages` pages could be had now.
    #[must_use]
    pub const fn can_allocate(&self, num_pages: u32) -> bool {
        num_pages <= self.available()
    }

    /// Grows a table until it has room for `num_tokens` tokens, evicting what is needed; returns the pages added.
    ///
    /// A table that has the room already is unchanged.
    ///
    /// # Errors
    /// [`KvError::NoRoom`]: the table is unchanged and nothing was evicted. [`KvError::ForeignHandle`].
    pub fn grow(&mut self, table: &mut PageTable, num_tokens: u32) -> Result<u32, KvError> {
        self.check_ours(&table.holding)?;
        self.collect();
        let missing = self.pages_for(num_tokens).saturating_sub(self.pages_for(table.capacity()));
        self.make_room(missing)?;
        for _ in 0..missing {
            table.holding.pages.push(self.pool.take().expect("room was made"));
        }
        Ok(missing)
    }

    /// Makes the full pages of `written` matchable. The sequence goes on using them; they do not change any more.
    ///
    /// `written` are the tokens from position 0 whose KV is completely in the table's pages, in every layer. The last, partly
    /// filled page stays the table's own. Where the cache has an equal page already, the table is pointed to that one; the
    /// old page is given back when [`Committed::replaced`] is dropped. Committing less than before changes nothing.
    ///
    /// # Errors
    /// [`KvError::OutOfRange`] if `written` is longer than the table's capacity; [`KvError::TokensDiffer`] if it is seen not
    /// to continue what was committed before; [`KvError::ForeignHandle`].
    pub fn commit(&mut self, table: &mut PageTable, written: &[TokenId]) -> Result<Committed, KvError> {
        self.check_ours(&table.holding)?;
        self.collect();
        let capacity = table.capacity();
        if written.len() > capacity as usize {
            return Err(KvError::OutOfRange {
                field: "written",
                value: written.len() as u64,
                min: 0,
                max: capacity.into(),
            });
        }
        let page_size = self.config.page_size as usize;
        let holding = &mut table.holding;
        let first = holding.num_shared;
        let full = (written.len() / page_size).max(first);
        let pin = holding.pin.expect("a table has the pin that its prefix or reservation had");
        let mut num_new_pages = 0;
        let mut old = Vec::new();
        let mut new = Vec::new();
        if full > first {
            let before = &written[..first * page_size];
            if let Some(last) = self.prefixes.last_page_tokens(pin)
                && !before.ends_with(last)
            {
                return Err(KvError::TokensDiffer { position: table.num_shared_tokens() });
            }
            let tokens = &written[first * page_size..full * page_size];
            let last_shared = first.checked_sub(1).map(|last| holding.pages[last]);
            let pages = &mut holding.pages[first..full];
            let mine = pages.to_vec();
            let stored = self.prefixes.advance(pin, last_shared, tokens, pages)?;
            for (mine, cached) in mine.iter().zip(pages.iter()).take(stored.num_matched) {
                self.pool.share(*cached).expect("a page in the prefix cache is owned or cached");
                old.push(*mine);
                new.push(*cached);
            }
            holding.num_shared = full;
            holding.pin = Some(stored.pin);
            num_new_pages = full - first - stored.num_matched;
            self.stats.committed_pages += num_new_pages as u64;
            self.stats.deduplicated_pages += old.len() as u64;
        }
        let old =
            Holding { pages: old, num_shared: 0, pin: None, promise: None, returns: self.returns.clone() };
        Ok(Committed {
            num_shared_tokens: table.num_shared_tokens(),
            num_new_pages: u32::try_from(num_new_pages).unwrap_or(u32::MAX),
            replaced: ReplacedPages { old, first_index: first, new },
        })
    }

    /// Ends a sequence: its shared pages stay cached, the others become free.
    pub fn release_table(&mut self, table: PageTable) {
        drop(table);
        self.collect();
    }

    /// Makes a second sequence that begins with the first `num_tokens` tokens of `table`.
    ///
    /// Shared pages are shared, the rest is to be copied into pages of its own: commit first, and at most one page is.
    ///
    /// # Errors
    /// [`KvError::OutOfRange`] unless `num_tokens` is in `[table.num_shared_tokens(), table.capacity()]`;
    /// [`KvError::NoRoom`]; [`KvError::ForeignHandle`].
    pub fn fork(&mut self, table: &PageTable, num_tokens: u32) -> Result<Fork, KvError> {
        self.check_ours(&table.holding)?;
        self.collect();
        let (min, max) = (table.num_shared_tokens(), table.capacity());
        if !(min..=max).contains(&num_tokens) {
            return Err(KvError::OutOfRange {
                field: "num_tokens",
                value: num_tokens.into(),
                min: min.into(),
                max: max.into(),
            });
        }
        let shared = &table.holding.pages[..table.holding.num_shared];
        let own = &table.holding.pages[table.holding.num_shared..];
        let mut rest = num_tokens - min;
        self.make_room(self.pages_for(rest))?;
        let pin = table.holding.pin.expect("a table has the pin that its prefix or reservation had");
        self.prefixes.pin(pin);
        for page in shared {
            self.pool.share(*page).expect("the table owns the page");
        }
        let mut copy = self.holding(shared.to_vec(), pin);
        let mut copies = Vec::new();
        for from in own {
            if rest == 0 {
                break;
            }
            let to = self.pool.take().expect("room was made");
            let num_slots = rest.min(self.config.page_size);
            copy.pages.push(to);
            copies.push(PageCopy { from: *from, to, num_slots });
            rest -= num_slots;
        }
        Ok(Fork { table: PageTable { holding: copy, page_size: self.config.page_size }, copies })
    }

    /// Promises pages to a transfer: finds what is cached of `tokens`, holds it, and reserves pages for the rest and for
    /// `extra_tokens` more, under a new generation.
    ///
    /// `tokens` is the prompt up to the `end` of the range to be received.
    ///
    /// # Errors
    /// [`KvError::NoRoom`]; [`KvError::QuarantineFull`]; [`KvError::OutOfRange`] if tokens and room together are more than a
    /// `u32` counts.
    pub fn reserve(
        &mut self,
        salt: &str,
        tokens: &[TokenId],
        extra_tokens: u32,
    ) -> Result<Reservation, KvError> {
        self.collect();
        let all = tokens.len() as u64 + u64::from(extra_tokens);
        let out_of_range =
            || KvError::OutOfRange { field: "extra_tokens", value: all, min: 0, max: u32::MAX.into() };
        let capacity = u32::try_from(all).map_err(|_| out_of_range())?;
        let end = capacity - extra_tokens;
        let (quarantined, limit) = (self.counts().quarantined, self.config.max_quarantined_pages);
        if quarantined > limit {
            return Err(KvError::QuarantineFull { quarantined, limit });
        }
        let mut holding = self.match_prefix(salt, tokens).holding;
        let matched = num_tokens(holding.num_shared, self.config.page_size);
        let num_pages = self.pages_for(capacity) - self.pages_for(matched);
        if let Err(no_room) = self.make_room(num_pages) {
            drop(holding);
            self.collect();
            return Err(no_room);
        }
        let range = KvRange::new(matched, end).expect("a match is no longer than the tokens");
        let generation = Generation(self.next_generation);
        self.next_generation += 1;
        for _ in 0..num_pages {
            holding.pages.push(self.pool.promise(generation).expect("room was made"));
        }
        let num_exposed = self.pages_for(range.num_tokens()) as usize;
        holding.promise = Some(Promise { generation, num_exposed });
        self.stats.reservations += 1;
        Ok(Reservation { holding, generation, range, page_size: self.config.page_size })
    }

    /// Turns a reservation into a table, whose KV is valid up to what has arrived.
    ///
    /// Call it only when no write under its generation can land any more: the whole range has arrived, or the transport
    /// has released the grant and the range is going to be computed here.
    ///
    /// # Errors
    /// [`KvError::ForeignHandle`]; the reservation is quarantined where it belongs then.
    pub fn accept(&mut self, reservation: Reservation) -> Result<PageTable, KvError> {
        self.check_ours(&reservation.holding)?;
        self.collect();
        let Reservation { mut holding, generation, page_size, .. } = reservation;
        for page in &holding.pages[holding.num_shared..] {
            self.pool
                .accept(*page, generation)
                .expect("a reservation's pages are reserved under its generation");
        }
        holding.promise = None;
        Ok(PageTable { holding, page_size })
    }

    /// Gives a reservation up while a peer may still write: returns the pages that wait for [`KvCache::drained`].
    ///
    /// The matched context is released and pages that no peer knows of become free at once. With 0 pages left to wait for,
    /// the generation is over.
    pub fn quarantine(&mut self, reservation: Reservation) -> u32 {
        let waiting = reservation.receiving_pages().len();
        drop(reservation);
        self.collect();
        u32::try_from(waiting).unwrap_or(u32::MAX)
    }

    /// Frees the pages of a quarantined generation, because no write under it can land any more; returns their number.
    ///
    /// # Errors
    /// [`KvError::NotQuarantined`] if none wait under this generation, or they have been drained already.
    pub fn drained(&mut self, generation: Generation) -> Result<u32, KvError> {
        self.collect();
        let pages = self.quarantined.remove(&generation).ok_or(KvError::NotQuarantined { generation })?;
        for page in &pages {
            self.pool
                .drain(*page, generation)
                .expect("pages listed under a generation are quarantined under it");
        }
        Ok(u32::try_from(pages.len()).unwrap_or(u32::MAX))
    }

    /// Gives a reservation up and frees its pages at once.
    ///
    /// Only when its address was never handed out, or no write under it can land any more.
    ///
    /// # Errors
    /// [`KvError::ForeignHandle`]; the reservation is quarantined where it belongs then.
    pub fn cancel(&mut self, reservation: Reservation) -> Result<(), KvError> {
        self.check_ours(&reservation.holding)?;
        let mut holding = reservation.holding;
        for page in holding.pages.drain(holding.num_shared..) {
            let generation = reservation.generation;
            self.pool
                .cancel(page, generation)
                .expect("a reservation's pages are reserved under its generation");
        }
        holding.promise = None;
        drop(holding);
        self.collect();
        Ok(())
    }

    /// Returns the generations whose pages wait for a peer's last write.
    pub fn quarantined_generations(&self) -> impl Iterator<Item = Generation> {
        self.quarantined.keys().copied()
    }

    /// Takes every page that nobody uses out of the prefix cache; returns their number.
    pub fn clear_unused(&mut self) -> u32 {
        self.collect();
        let pages = self.prefixes.clear();
        self.free_evicted(&pages)
    }

    /// Takes the changes of the prefix cache since the last call.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.collect();
        self.prefixes.take_events()
    }

    /// Returns everything that can be matched, for a reader that missed events.
    #[must_use]
    pub fn snapshot(&self) -> KvSnapshot {
        self.prefixes.snapshot()
    }

    pub(crate) const fn next_generation(&self) -> u64 {
        self.next_generation
    }

    pub(crate) const fn quarantined(&self) -> &BTreeMap<Generation, Vec<PageId>> {
        &self.quarantined
    }

    fn holding(&self, pages: Vec<PageId>, pin: microserving_radix::NodeId) -> Holding {
        let num_shared = pages.len();
        Holding { pages, num_shared, pin: Some(pin), promise: None, returns: self.returns.clone() }
    }

    fn check_ours(&self, holding: &Holding) -> Result<(), KvError> {
        if Arc::ptr_eq(&self.returns, &holding.returns) { Ok(()) } else { Err(KvError::ForeignHandle) }
    }

    fn take_back(&mut self, returned: Returned) {
        let Returned { pages, num_shared, pin, promise } = returned;
        let (shared, own) = pages.split_at(num_shared);
        for page in shared {
            self.pool.release(*page, true).expect("a handle owns its pages");
        }
        if let Some(Promise { generation, num_exposed }) = promise {
            let (exposed, unknown) = own.split_at(num_exposed);
            for page in unknown {
                self.pool.cancel(*page, generation).expect("the pages are reserved under the generation");
            }
            for page in exposed {
                self.pool.quarantine(*page, generation).expect("the pages are reserved under the generation");
            }
            if !exposed.is_empty() {
                self.quarantined.insert(generation, exposed.to_vec());
                self.stats.quarantines += 1;
            }
        } else {
            for page in own {
                self.pool.release(*page, false).expect("a handle owns its pages");
            }
        }
        if let Some(pin) = pin {
            self.prefixes.unpin(pin);
        }
    }

    /// Makes sure that so many pages are free.
    fn make_room(&mut self, needed: u32) -> Result<(), KvError> {
        let PageCounts { free, cached: evictable, .. } = self.counts();
        if needed > free + evictable {
            return Err(KvError::NoRoom { needed, free, evictable });
        }
        self.evict(needed.saturating_sub(free));
        Ok(())
    }

    fn evict(&mut self, num_pages: u32) {
        if num_pages == 0 {
            return;
        }
        let pages = self.prefixes.evict(num_pages as usize);
        self.stats.evicted_pages += u64::from(self.free_evicted(&pages));
    }

    fn free_evicted(&mut self, pages: &[PageId]) -> u32 {
        for page in pages {
            self.pool.evict(*page).expect("what nobody pins is held by the cache alone");
        }
        u32::try_from(pages.len()).unwrap_or(u32::MAX)
    }
}
