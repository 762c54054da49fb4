//! What must hold after every verb, numbered.
//!
//! 1. Free + reserved + owned + cached + quarantined pages are all pages, and the counters agree with the states.
//! 2. A page that can be written has one owner: only pages in the prefix cache are owned by more than one handle.
//! 3. Pins match readers: a page in the prefix cache is owned by exactly as many handles as have pins at or below it; if
//!    there are none, it is cached. So what is pinned is never evicted, and what is not can be.
//! 4. Nothing is matchable that is not fully written: pages in the prefix cache are owned or cached, never free, reserved or
//!    quarantined; none is there twice; and each is known by the hash of exactly the tokens on its path.
//! 5. The free list holds exactly the free pages, each once.
//! 6. Generations are never used twice: pages are reserved and quarantined only under numbers given out, and a
//!    generation's list of quarantined pages is exact.
//! 7. An idle engine holds no owned, reserved or quarantined page.
//! 8. Every reference belongs to a live handle.
//!
//! [`check`] looks at 1 to 6, which need only the cache; [`check_idle`] adds 7, [`check_handles`] 8. They walk everything:
//! for tests, simulation, and debug builds.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use microserving_protocol::{Generation, PageId};
use microserving_radix::NodeId;

use crate::{KvCache, PageCounts, PageHash, PageState};

/// The invariants by number; the module's page has them in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Invariant {
    /// 1.
    PagesAddUp = 1,
    /// 2.
    OneOwnerOfWritablePages = 2,
    /// 3.
    PinsMatchReaders = 3,
    /// 4.
    OnlyWrittenIsMatchable = 4,
    /// 5.
    FreeListIsExact = 5,
    /// 6.
    GenerationsAreUnique = 6,
    /// 7.
    IdleHoldsNothing = 7,
    /// 8.
    ReferencesHaveHolders = 8,
}

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invariant {} ({invariant:?}): {detail}", *invariant as u8)]
pub struct Violation {
    /// Which one.
    pub invariant: Invariant,
    /// What was seen.
    pub detail: String,
}

/// Checks invariants 1 to 6. Handles dropped since the last verb count as live.
///
/// # Errors
/// The first violation found.
pub fn check(cache: &KvCache) -> Result<(), Violation> {
    pages_add_up(cache)?;
    let readers = readers_by_page(cache)?;
    owners(cache, &readers)?;
    hashes(cache)?;
    free_list(cache)?;
    generations(cache)
}

/// Takes dropped handles back and checks invariants 1 to 7: what must hold when no sequence lives and every lease and every
/// quarantine has ended.
///
/// # Errors
/// The first violation found.
pub fn check_idle(cache: &mut KvCache) -> Result<(), Violation> {
    cache.collect();
    check(cache)?;
    let PageCounts { reserved, owned, quarantined, .. } = cache.counts();
    require(reserved + owned + quarantined == 0, Invariant::IdleHoldsNothing, || {
        format!("{owned} pages are owned, {reserved} reserved, {quarantined} quarantined")
    })
}

/// Checks invariant 8, given the pages of every live handle ([`crate::ReplacedPages::old_pages`] included).
/// Handles dropped since the last verb still count as live; [`KvCache::collect`] first.
///
/// # Errors
/// The first violation found.
pub fn check_handles<'a>(
    cache: &KvCache,
    handles: impl IntoIterator<Item = &'a [PageId]>,
) -> Result<(), Violation> {
    let mut listed: BTreeMap<PageId, u32> = BTreeMap::new();
    for page in handles.into_iter().flatten() {
        *listed.entry(*page).or_default() += 1;
    }
    for (page, state) in pages(cache) {
        let held = match state {
            PageState::Owned { refs } => refs,
            PageState::Reserved(_) => 1,
            PageState::Free | PageState::Cached | PageState::Quarantined(_) => 0,
        };
        let listed = listed.get(&page).copied().unwrap_or(0);
        require(held == listed, Invariant::ReferencesHaveHolders, || {
            format!("page {page} is {state:?} and listed by {listed} handles")
        })?;
    }
    Ok(())
}

fn require(holds: bool, invariant: Invariant, detail: impl FnOnce() -> String) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(Violation { invariant, detail: detail() }) }
}

fn pages(cache: &KvCache) -> impl Iterator<Item = (PageId, PageState)> {
    (0..).map(PageId).zip(cache.pool().states().iter().copied())
}

fn pages_add_up(cache: &KvCache) -> Result<(), Violation> {
    let kept = cache.counts();
    let counted = PageCounts::count(cache.pool().states().iter().copied());
    let sum = kept.free + kept.reserved + kept.owned + kept.cached + kept.quarantined;
    require(kept == counted && sum == cache.config().num_pages, Invariant::PagesAddUp, || {
        format!("the counters say {kept:?}, the states {counted:?}")
    })
}

/// Returns how many pins stand at or below each page of the prefix cache.
fn readers_by_page(cache: &KvCache) -> Result<BTreeMap<PageId, usize>, Violation> {
    let tree = cache.prefixes().tree();
    tree.check().map_err(|detail| Violation { invariant: Invariant::PinsMatchReaders, detail })?;
    let readers = tree.readers();
    let mut by_page = BTreeMap::new();
    for node in cache.prefixes().nodes() {
        for page in node.values {
            let count = readers.get(&node.node).copied().unwrap_or(0);
            require(by_page.insert(*page, count).is_none(), Invariant::OnlyWrittenIsMatchable, || {
                format!("page {page} is in the prefix cache twice")
            })?;
        }
    }
    Ok(by_page)
}

fn owners(cache: &KvCache, readers: &BTreeMap<PageId, usize>) -> Result<(), Violation> {
    for (page, state) in pages(cache) {
        let seen = || format!("page {page} is {state:?}, with readers {:?}", readers.get(&page));
        match (readers.get(&page), state) {
            (None, PageState::Owned { refs: 1 }) => {}
            (None, PageState::Owned { .. }) => {
                require(false, Invariant::OneOwnerOfWritablePages, seen)?;
            }
            (None, state) => {
                require(state != PageState::Cached, Invariant::PinsMatchReaders, seen)?;
            }
            (Some(readers), PageState::Owned { refs }) => {
                require(*readers == refs as usize, Invariant::PinsMatchReaders, seen)?;
            }
            (Some(readers), PageState::Cached) => {
                require(*readers == 0, Invariant::PinsMatchReaders, seen)?;
            }
            (Some(_), PageState::Free | PageState::Reserved(_) | PageState::Quarantined(_)) => {
                require(false, Invariant::OnlyWrittenIsMatchable, seen)?;
            }
        }
    }
    Ok(())
}

fn hashes(cache: &KvCache) -> Result<(), Violation> {
    let prefixes = cache.prefixes();
    // Every node's end, computed from its tenant's root down; parents may come after their children in the iteration.
    let nodes: BTreeMap<NodeId, _> = prefixes.nodes().map(|node| (node.node, node)).collect();
    let mut ends: BTreeMap<NodeId, PageHash> = BTreeMap::new();
    let mut named = BTreeSet::new();
    for start in nodes.keys() {
        let mut path = Vec::new();
        let mut at = *start;
        while let Some(node) = nodes.get(&at).filter(|_| !ends.contains_key(&at)) {
            path.push(node);
            let Some(parent) = node.parent else { break };
            at = parent;
        }
        for node in path.into_iter().rev() {
            let begin = match node.parent {
                Some(parent) => ends.get(&parent).copied(),
                None => prefixes.tenant_hash(node.node),
            };
            let mut hash = begin.ok_or_else(|| Violation {
                invariant: Invariant::OnlyWrittenIsMatchable,
                detail: format!("{:?} is the root of no tenant", node.node),
            })?;
            for (tokens, page) in node.keys.chunks_exact(prefixes.tree().page_size()).zip(node.values) {
                hash = hash.child(tokens);
                named.insert(*page);
                let known = prefixes.hash(*page);
                require(known == Some(hash), Invariant::OnlyWrittenIsMatchable, || {
                    format!("page {page} is known as {known:?}, its tokens hash to {hash}")
                })?;
            }
            ends.insert(node.node, hash);
        }
    }
    for (page, _) in pages(cache) {
        let known = prefixes.hash(page).is_some();
        require(known == named.contains(&page), Invariant::OnlyWrittenIsMatchable, || {
            format!("page {page} has a name but is not in the prefix cache")
        })?;
    }
    Ok(())
}

fn free_list(cache: &KvCache) -> Result<(), Violation> {
    let listed: BTreeSet<PageId> = cache.pool().free_pages().iter().copied().collect();
    let free: BTreeSet<PageId> =
        pages(cache).filter(|(_, state)| *state == PageState::Free).map(|(page, _)| page).collect();
    require(
        listed == free && listed.len() == cache.pool().free_pages().len(),
        Invariant::FreeListIsExact,
        || format!("listed {listed:?}, free {free:?}"),
    )
}

fn generations(cache: &KvCache) -> Result<(), Violation> {
    let mut waiting: BTreeMap<Generation, BTreeSet<PageId>> = BTreeMap::new();
    for (page, state) in pages(cache) {
        let (PageState::Reserved(generation) | PageState::Quarantined(generation)) = state else { continue };
        require(generation.0 < cache.next_generation(), Invariant::GenerationsAreUnique, || {
            format!("page {page} is {state:?}, a number not given out yet")
        })?;
        if matches!(state, PageState::Quarantined(_)) {
            waiting.entry(generation).or_default().insert(page);
        }
    }
    let listed: BTreeMap<Generation, BTreeSet<PageId>> = cache
        .quarantined()
        .iter()
        .map(|(generation, pages)| (*generation, pages.iter().copied().collect()))
        .collect();
    require(listed == waiting, Invariant::GenerationsAreUnique, || {
        format!("quarantined by lists {listed:?}, by states {waiting:?}")
    })
}

impl fmt::Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", *self as u8)
    }
}
