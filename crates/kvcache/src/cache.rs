//! The facade: pool, prefix cache and quarantine, changed together.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use microserving_protocol::{Generation, PageId};
use microserving_radix::NodeId;

use crate::handle::{Holding, Promise, Returned, Returns};
use crate::{KvCacheConfig, KvError, KvEvent, KvSnapshot, PageCounts, PagePool, PrefixCache};

mod receiving;
mod sequences;

pub use sequences::{Committed, Fork, PageCopy};

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

/// All pages of one engine's KV region. See the crate's page for a drawing.
///
/// Handles given out ([`crate::Prefix`], [`crate::PageTable`], [`crate::Reservation`], [`crate::ReplacedPages`]) return
/// their pages when they are dropped; the cache sees that at its next verb, or at [`KvCache::collect`]. A verb that takes a
/// handle has its effect at once. No verb panics, blocks or reads a clock; every verb costs O(pages it touches · log(nodes)).
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

    fn holding(&self, pages: Vec<PageId>, pin: NodeId) -> Holding {
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
