//! What a lookup finds.

use std::time::Duration;

use microserving_protocol::PageHash;
use tokio::time::Instant;

use super::set::{EngineSet, Slot};
use super::table::PageTable;

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
pub(super) fn walk(tables: &[&PageTable], mut page: impl FnMut(usize) -> Option<PageHash>) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut depth = 0;
    while let Some(hash) = page(depth) {
        let within = steps.last().map(|step| &step.engines);
        let mut engines = EngineSet::default();
        let mut latest = None;
        for table in tables {
            if within.is_some_and(|within| within.len() == engines.len()) {
                break;
            }
            let Some(holding) = table.get(hash) else { continue };
            engines.add_common(holding.holders, within);
            latest.get_or_insert(holding.latest);
        }
        let Some(latest) = latest.filter(|_| !engines.is_empty()) else { break };
        depth += 1;
        match steps.last_mut() {
            Some(step) if step.engines.len() == engines.len() => (step.pages, step.latest) = (depth, latest),
            _ => steps.push(Step { pages: depth, engines, latest }),
        }
    }
    steps
}

/// Pages that were routed to engines, believed for a while: two tables that take turns.
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

    pub(super) const fn tables(&self) -> [&PageTable; 2] {
        [&self.young, &self.old]
    }
}
