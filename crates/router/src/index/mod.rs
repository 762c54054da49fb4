//! Which engine holds which prefix.
//!
//! ```text
//! prompt  [ page 0 ][ page 1 ][ page 2 ] tail        chain: h0 = H(root, page 0), h1 = H(h0, page 1), …
//! index   h0 → {e0, e2}   h1 → {e2}                  hint:  e0 holds 1 page, e2 holds 2
//! ```
//!
//! It is filled from two sides. Engines report what enters and leaves their context caches, and that is kept as it is
//! ([`EngineFeed::accept`]). What is routed to an engine is believed of it for a minute or two ([`PrefixIndex::note`]): engines of another
//! make report nothing, and those that report do so only when a prompt is computed, while the next request with the same prompt may come before that.
//!
//! It is a hint. Truth is what `prep_recv` or the engine itself matches, so an index that is wrong, late or too small costs time, never
//! correctness.

mod feed;
mod follow;
mod held;
mod metrics;
mod set;
mod table;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use microserving_protocol::{KvEvent, KvEventKind, PageHash};
use tokio::sync::Notify;
use tokio::time::{Duration, Instant};

pub(crate) use follow::follow;
pub(crate) use metrics::IndexMetrics;

use feed::{Count, Verdict};
use held::{Routed, Step, walk};
use set::{EngineSet, Slot};
use table::PageTable;

use crate::ids::Draws;

/// Pages that are put in under one lock: requests wait for no more than these.
const BATCH: usize = 256;
/// The first pause of a follower that lost its engine.
const FIRST_PAUSE: Duration = Duration::from_millis(200);

/// Page chains and the engines that hold them. Shared by all requests and by the followers of engines' events.
#[derive(Debug)]
pub struct PrefixIndex {
    inner: RwLock<Inner>,
    counts: Counts,
    draws: Draws,
}

#[derive(Debug)]
struct Inner {
    /// What engines reported.
    reported: PageTable,
    /// What was routed to them.
    routed: Routed,
    places: Vec<Option<Place>>,
    slots: HashMap<u32, Slot>,
    free: Vec<Slot>,
}

/// An engine in the index.
#[derive(Debug)]
struct Place {
    engine: u32,
    count: Count,
    /// Goes up when the engine is forgotten, so that who is putting pages in notices.
    epoch: u64,
    wake: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Counts {
    events: AtomicU64,
    snapshots: AtomicU64,
    gaps: AtomicU64,
}

/// What the index holds and what it was told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// Pages that engines reported.
    pub reported_pages: usize,
    /// The same, counted once for each engine that holds one.
    pub reported_holdings: usize,
    /// Pages known from routing only, or from both.
    pub routed_pages: usize,
    /// Memory allocated, in bytes.
    pub bytes: usize,
    /// Events applied, snapshots included.
    pub events: u64,
    /// Snapshots among them.
    pub snapshots: u64,
    /// Events that did not follow the one before, and so made us ask for a snapshot.
    pub gaps: u64,
    /// Pages dropped to stay within the bytes allowed.
    pub evicted_pages: u64,
}

impl Default for PrefixIndex {
    fn default() -> Self {
        Self::new(Self::DEFAULT_BYTES, 0)
    }
}

impl PrefixIndex {
    /// Memory that an index takes at most if nobody says: about two million pages that engines reported, and as many that were routed.
    pub const DEFAULT_BYTES: usize = 256 << 20;

    /// Makes an empty index of at most `max_bytes`, half of them for what engines report and half for what is routed.
    #[must_use]
    pub fn new(max_bytes: usize, seed: u64) -> Self {
        let inner = Inner {
            reported: PageTable::new(max_bytes / 2, seed),
            routed: Routed::new(max_bytes / 2, seed),
            places: Vec::new(),
            slots: HashMap::new(),
            free: Vec::new(),
        };
        Self { inner: RwLock::new(inner), counts: Counts::default(), draws: Draws::new(seed) }
    }

    /// Takes an engine in, by its number in the cluster; nothing if it is in already, or there are 65,536.
    ///
    /// The engine is in the index until the feed is dropped.
    #[must_use]
    pub fn join(self: &Arc<Self>, engine: u32) -> Option<EngineFeed> {
        let mut inner = self.write();
        if inner.slots.contains_key(&engine) {
            return None;
        }
        let slot = match inner.free.pop() {
            Some(slot) => slot,
            None => Slot::try_from(inner.places.len()).ok()?,
        };
        let wake = Arc::new(Notify::new());
        let place = Place { engine, count: Count::default(), epoch: 0, wake: wake.clone() };
        let at = usize::from(slot);
        if at == inner.places.len() {
            inner.places.push(None);
        }
        inner.places[at] = Some(place);
        inner.slots.insert(engine, slot);
        drop(inner);
        Some(EngineFeed { index: self.clone(), engine, slot, epoch: 0, wake })
    }

    /// Notes that the first `num_pages` of a chain were routed to an engine, which holds them soon if it does not yet.
    pub fn note(
        &self,
        now: Instant,
        engine: u32,
        num_pages: usize,
        page: impl FnMut(usize) -> Option<PageHash>,
    ) {
        self.note_all(now, &[(engine, num_pages)], page);
    }

    /// As [`PrefixIndex::note`], for several engines at once: a page that is not in any cache is then looked for once.
    pub fn note_all(
        &self,
        now: Instant,
        holders: &[(u32, usize)],
        mut page: impl FnMut(usize) -> Option<PageHash>,
    ) {
        let mut inner = self.write();
        inner.routed.turn(now);
        let slot_of = |&(engine, pages): &(u32, usize)| Some((*inner.slots.get(&engine)?, pages));
        let mut holders: Vec<(Slot, usize)> = holders.iter().filter_map(slot_of).collect();
        let longest = holders.iter().map(|&(_, pages)| pages).max().unwrap_or(0);
        // From the end: what an engine has reported need not be believed as well, and what is before that it has reported too.
        let named = |pages: usize| Some((pages, page(pages - 1)?));
        let samples: Vec<(usize, PageHash)> = held::samples(longest).filter_map(named).collect();
        inner.routed.warm(samples.iter().map(|&(_, hash)| hash));
        for (pages, hash) in samples {
            holders.retain(|&(slot, longest)| {
                let reported = pages <= longest && inner.reported.holds(slot, hash);
                if pages <= longest && !reported {
                    inner.routed.insert(slot, hash);
                }
                !reported
            });
            if holders.is_empty() {
                break;
            }
        }
    }

    /// Returns who probably holds how much of a chain.
    #[must_use]
    pub fn look_up(&self, now: Instant, page: impl FnMut(usize) -> Option<PageHash>) -> HeldPrefixes<'_> {
        let due = self.read().routed.is_due(now);
        if due {
            self.write().routed.turn(now);
        }
        let inner = self.read();
        let steps = walk(&inner.reported, &inner.routed, page);
        HeldPrefixes { inner, steps }
    }

    /// Drops everything believed of an engine, and has its follower ask again: it was restarted, and its cache with it.
    pub fn forget(&self, engine: u32) {
        let mut inner = self.write();
        if let Some(&slot) = inner.slots.get(&engine) {
            inner.forget(slot);
            if let Some(place) = inner.place(slot) {
                place.wake.notify_one();
            }
        }
    }

    /// Has the follower of an engine's events try again now: the engine is back.
    pub fn wake(&self, engine: u32) {
        let inner = self.read();
        let slot = inner.slots.get(&engine);
        if let Some(place) = slot.and_then(|slot| inner.places[usize::from(*slot)].as_ref()) {
            place.wake.notify_one();
        }
    }

    /// Returns what the index holds and what it was told.
    #[must_use]
    pub fn stats(&self) -> IndexStats {
        let inner = self.read();
        let [young, old] = inner.routed.tables();
        IndexStats {
            reported_pages: inner.reported.num_pages(),
            reported_holdings: inner.reported.num_holdings(),
            routed_pages: young.num_pages() + old.num_pages(),
            bytes: inner.reported.bytes() + young.bytes() + old.bytes(),
            events: self.counts.events.load(Ordering::Relaxed),
            snapshots: self.counts.snapshots.load(Ordering::Relaxed),
            gaps: self.counts.gaps.load(Ordering::Relaxed),
            evicted_pages: inner.reported.evicted() + young.evicted() + old.evicted(),
        }
    }

    /// Returns every page that an engine reported, in order. Looks at the whole index: for checks.
    #[must_use]
    pub fn reported_by(&self, engine: u32) -> Vec<PageHash> {
        let inner = self.read();
        let mut pages = Vec::new();
        if let Some(&slot) = inner.slots.get(&engine) {
            inner.reported.for_each_of(slot, |page| pages.push(page));
        }
        pages.sort_unstable();
        pages
    }

    fn read(&self) -> RwLockReadGuard<'_, Inner> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn place(&mut self, slot: Slot) -> Option<&mut Place> {
        self.places.get_mut(usize::from(slot))?.as_mut()
    }

    fn forget(&mut self, slot: Slot) {
        self.reported.wipe(slot);
        self.routed.wipe(slot);
        if let Some(place) = self.place(slot) {
            place.count = Count::default();
            place.epoch += 1;
        }
    }

    fn leave(&mut self, engine: u32, slot: Slot) {
        self.forget(slot);
        self.places[usize::from(slot)] = None;
        self.slots.remove(&engine);
        self.free.push(slot);
    }
}

/// Who probably holds how much of one prompt. Holds the index for reading: short, and never over an await.
#[derive(Debug)]
pub struct HeldPrefixes<'a> {
    inner: RwLockReadGuard<'a, Inner>,
    steps: Vec<Step>,
}

/// What an engine probably holds of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldPrefix {
    /// Pages, from the first on.
    pub num_pages: usize,
    /// No engine got the last of them later: of two that hold the same, this one went on to decode behind it.
    pub is_latest: bool,
}

impl HeldPrefixes<'_> {
    /// Returns what an engine probably holds.
    #[must_use]
    pub fn of(&self, engine: u32) -> HeldPrefix {
        let Some(&slot) = self.inner.slots.get(&engine) else { return HeldPrefix::default() };
        let longest = self.steps.iter().rev().find(|step| step.engines.contains(slot));
        longest.map_or_else(HeldPrefix::default, |step| HeldPrefix {
            num_pages: step.pages,
            is_latest: step.latest == slot,
        })
    }

    /// Calls `f` with engines that hold something, those that hold most first, until it returns false. Among equals it begins anywhere that
    /// `start` says.
    pub fn longest(&self, start: usize, mut f: impl FnMut(u32, usize) -> bool) {
        let mut seen = EngineSet::default();
        for step in self.steps.iter().rev() {
            let more = step.engines.each_from(start, |slot| {
                if !seen.insert(slot) {
                    return true;
                }
                let place = self.inner.places[usize::from(slot)].as_ref();
                place.is_none_or(|place| f(place.engine, step.pages))
            });
            if !more {
                return;
            }
        }
    }
}

/// What one engine reports, on its way into the index. Dropping it takes the engine out of the index.
#[derive(Debug)]
pub struct EngineFeed {
    index: Arc<PrefixIndex>,
    engine: u32,
    slot: Slot,
    /// The engine's epoch when its events were asked for: those of a boot that was forgotten since come too late.
    epoch: u64,
    wake: Arc<Notify>,
}

/// An event cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FeedError {
    /// It does not follow the one before: a snapshot is needed.
    #[error("event {number} of boot {incarnation} does not follow the one before")]
    Gap {
        /// Its number.
        number: u64,
        /// Its boot.
        incarnation: String,
    },
    /// It names no page.
    #[error("{0}")]
    Malformed(String),
}

impl EngineFeed {
    /// Begins to follow, and returns the number of the event to begin with; 0 asks for a snapshot.
    pub fn begin(&mut self) -> u64 {
        let inner = self.index.read();
        let Some(place) = &inner.places[usize::from(self.slot)] else { return 0 };
        self.epoch = place.epoch;
        place.count.from()
    }

    /// Applies an event to the index.
    ///
    /// # Errors
    /// If it does not follow the one before, or makes no sense. The index keeps what it has; the next event must be a snapshot, which
    /// [`EngineFeed::begin`] asks for.
    pub fn accept(&mut self, event: &KvEvent) -> Result<(), FeedError> {
        let (pages, adds) = match &event.kind {
            KvEventKind::Stored { pages } | KvEventKind::Snapshot { pages } => (pages.as_slice(), true),
            KvEventKind::Removed { pages } => (pages.as_slice(), false),
            KvEventKind::Cleared => (&[][..], false),
        };
        let parsed: Result<Vec<PageHash>, String> = pages.iter().map(|page| page.parse()).collect();
        {
            let mut inner = self.index.write();
            let Some(place) = inner.place(self.slot) else { return Ok(()) };
            let fits = parsed.is_ok() && place.epoch == self.epoch;
            match if fits { place.count.judge(event) } else { Verdict::Resync } {
                Verdict::Resync => {
                    place.count = Count::default();
                    self.index.counts.gaps.fetch_add(1, Ordering::Relaxed);
                    parsed.map_err(FeedError::Malformed)?;
                    let incarnation = event.incarnation.clone();
                    return Err(FeedError::Gap { number: event.number, incarnation });
                }
                Verdict::Replace => {
                    self.index.counts.snapshots.fetch_add(1, Ordering::Relaxed);
                    inner.reported.wipe(self.slot);
                }
                Verdict::Apply if event.kind == KvEventKind::Cleared => {
                    inner.reported.wipe(self.slot);
                    inner.routed.wipe(self.slot);
                }
                Verdict::Apply => {}
            }
        }
        self.index.counts.events.fetch_add(1, Ordering::Relaxed);
        for batch in parsed.unwrap_or_default().chunks(BATCH) {
            let mut inner = self.index.write();
            if inner.place(self.slot).is_none_or(|place| place.epoch != self.epoch) {
                break;
            }
            for page in batch {
                if adds {
                    inner.reported.insert(self.slot, *page);
                } else {
                    inner.reported.remove(self.slot, *page);
                    inner.routed.remove(self.slot, *page);
                }
            }
        }
        Ok(())
    }

    /// Waits until somebody wants the engine asked anew.
    async fn woken(&self) {
        self.wake.notified().await;
    }

    /// Returns what is to be waited before the `failures`-th try in a row: longer each time, and different for each engine and router, so that
    /// those that lost an engine together do not come back together.
    fn pause(&self, failures: u32) -> Duration {
        let whole = FIRST_PAUSE * 2_u32.pow(failures.min(5));
        whole.mul_f64(0.5 + 0.5 * self.index.draws.fraction())
    }
}

impl Drop for EngineFeed {
    fn drop(&mut self) {
        self.index.write().leave(self.engine, self.slot);
    }
}
