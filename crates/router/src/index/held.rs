//! What a lookup finds.

use std::time::Duration;

use microserving_protocol::PageHash;
use tokio::time::Instant;

use super::set::{EngineSet, Slot};
use super::table::{Holding, PageTable};

/// Engines that share a length of held prefix, at least.
#[derive(Clone, Debug)]
pub(super) struct Step {
    /// Pages from the first on that all of `engines` hold.
    pub(super) pages: usize,
    pub(super) engines: EngineSet,
    /// The engine that the last of these pages was noted for last.
    pub(super) latest: Slot,
}

/// Follows a chain of pages until nobody holds the next one.
///
/// The result is one step for each length at which engines drop out, the longest length last. Its cost follows from the pages held and from the
/// engines that hold them, not from the engines there are.
pub(super) fn walk(
    reported: &PageTable,
    routed: &Routed,
    mut page: impl FnMut(usize) -> Option<PageHash>,
) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut sample = Sample::default();
    let mut depth = 0;
    let reported = Some(reported).filter(|table| !table.is_empty());
    while let Some(hash) = page(depth) {
        let within = steps.last().map(|step| &step.engines);
        let mut engines = EngineSet::default();
        let mut latest = None;
        let mut add = |holding: Holding<'_>| {
            if within.is_none_or(|within| within.len() > engines.len()) {
                engines.add_common(holding.holders, within);
                latest.get_or_insert(holding.latest);
            }
        };
        if let Some(holding) = reported.and_then(|table| table.get(hash)) {
            add(holding);
        }
        // Who was sent a longer prefix was sent this one.
        sample.at(depth, routed, &mut page).into_iter().flatten().for_each(&mut add);
        let Some(latest) = latest.filter(|_| !engines.is_empty()) else { break };
        depth += 1;
        match steps.last_mut() {
            Some(step) if step.engines.len() == engines.len() => (step.pages, step.latest) = (depth, latest),
            _ => steps.push(Step { pages: depth, engines, latest }),
        }
    }
    steps
}

/// What the routed pages say of a length, kept for the lengths that share it.
#[derive(Default)]
struct Sample<'a> {
    pages: usize,
    found: [Option<Holding<'a>>; 2],
}

impl<'a> Sample<'a> {
    /// Returns who was sent the page at `depth`.
    fn at(
        &mut self,
        depth: usize,
        routed: &'a Routed,
        page: &mut impl FnMut(usize) -> Option<PageHash>,
    ) -> [Option<Holding<'a>>; 2] {
        let pages = sampled_from(depth + 1);
        if pages != self.pages {
            let hash = if routed.is_empty() { None } else { page(pages - 1) };
            self.pages = pages;
            self.found = hash.map_or([None, None], |hash| routed.tables().map(|table| table.get(hash)));
        }
        self.found
    }
}

/// Of the lengths above 32, those that are noted lie apart by a sixteenth to a thirty-second of their own: a long prompt then takes a tenth
/// of the work and of the memory, and a hint is short by a few hundredths.
const SAMPLES_AN_OCTAVE: u32 = 4;

/// Returns how far apart the lengths are that are noted around one of `pages`.
fn spacing(pages: usize) -> usize {
    1 << pages.saturating_sub(1).checked_ilog2().unwrap_or(0).saturating_sub(SAMPLES_AN_OCTAVE)
}

/// Returns the shortest length that is noted and holds `pages`.
fn sampled_from(pages: usize) -> usize {
    pages.next_multiple_of(spacing(pages))
}

/// Returns the lengths that are noted of a prefix of `pages`, the longest first.
pub(super) fn samples(pages: usize) -> impl Iterator<Item = usize> {
    let below = |pages: usize| Some(pages - pages % spacing(pages)).filter(|&pages| pages > 0);
    std::iter::successors(below(pages), move |&pages| below(pages - 1))
}

/// Pages that were routed to engines, believed for a while: two tables that take turns. Of a long prefix they hold a sample ([`samples`]).
///
/// What is noted goes into the young one; when that is of age it becomes the old one, which is forgotten. So a page that nobody routed again is
/// believed for one to two turns, and neither a timer nor a time is kept for each.
#[derive(Debug)]
pub(super) struct Routed {
    young: PageTable,
    old: PageTable,
    since: Option<Instant>,
}

/// How long a table is the young one.
pub(super) const TURN: Duration = Duration::from_secs(60);

impl Routed {
    pub(super) fn new(max_bytes: usize, seed: u64) -> Self {
        Self {
            young: PageTable::new(max_bytes / 2, seed),
            old: PageTable::new(max_bytes / 2, seed),
            since: None,
        }
    }

    /// Forgets what is too old.
    pub(super) fn turn(&mut self, now: Instant) {
        let since = *self.since.get_or_insert(now);
        if now < since + TURN {
            return;
        }
        std::mem::swap(&mut self.young, &mut self.old);
        self.young.clear();
        if now >= since + 2 * TURN {
            self.old.clear();
        }
        self.since = Some(now);
    }

    /// Says whether it is time for [`Routed::turn`].
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.since.is_some_and(|since| now >= since + TURN)
    }

    /// Brings what pages that are about to be put in will need into the cache.
    pub(super) fn warm(&self, pages: impl Iterator<Item = PageHash> + Clone) {
        self.young.warm(pages);
    }

    pub(super) fn insert(&mut self, slot: Slot, page: PageHash) {
        self.young.insert(slot, page);
    }

    pub(super) fn remove(&mut self, slot: Slot, page: PageHash) {
        self.young.remove(slot, page);
        self.old.remove(slot, page);
    }

    pub(super) fn wipe(&mut self, slot: Slot) {
        self.young.wipe(slot);
        self.old.wipe(slot);
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.young.is_empty() && self.old.is_empty()
    }

    pub(super) const fn tables(&self) -> [&PageTable; 2] {
        [&self.young, &self.old]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_noted_closely_and_few() {
        let all: Vec<usize> = samples(100_000).collect();
        assert!(all.is_sorted_by(|a, b| a > b));
        assert_eq!(all[all.len() - 32..], (1..=32).rev().collect::<Vec<_>>());
        assert_eq!(samples(1024).count(), 32 + 5 * 16);
        assert_eq!(samples(0).count(), 0);
        for pages in 1..10_000 {
            let from = sampled_from(pages);
            assert!(from >= pages && from * 16 <= pages * 17, "{pages}: {from}");
            assert!(all.binary_search_by(|length| from.cmp(length)).is_ok(), "{pages}: {from}");
            let longest = samples(pages).next().expect("one page at least");
            assert!(longest <= pages && pages * 16 <= longest * 17, "{pages}: {longest}");
            assert_eq!(sampled_from(longest), longest, "{pages}");
        }
    }
}
