//! Which engine probably holds which prefix.
//!
//! ```text
//! prompt  [ page 0 ][ page 1 ][ page 2 ] tail        chain: h0 = H(root, page 0), h1 = H(h0, page 1), …
//! index   h0 → {e0, e2}   h1 → {e2}                  hint:  e0 holds 1 page, e2 holds 2
//! ```
//!
//! It is filled by what was routed where, so it is a hint: engines evict without telling, and truth is what `prep_recv` or the
//! engine itself matches. A wrong hint costs time, never correctness. Entries live for two minutes after their last use.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use microserving_protocol::PageHash;
use tokio::time::Instant;

/// How long an engine is believed to keep a page that nobody used.
const TIME_TO_LIVE: Duration = Duration::from_secs(120);
/// Page-on-engine entries at most: about 100 MB, and as much again for the order of their insertion.
const MAX_ENTRIES: usize = 1 << 20;

/// A page on an engine.
type Key = (PageHash, u32);

/// What an engine probably holds of one prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldPrefix {
    /// Pages, from the first on.
    pub num_pages: usize,
    /// When the last of them was noted; of two engines that hold the same, the later one went on to decode behind it.
    pub last_seen: Option<Instant>,
}

/// The index. Time is an argument.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    /// When each page was last seen on each engine.
    pages: HashMap<PageHash, Vec<(u32, Instant)>>,
    /// Every insertion, oldest first; one that was refreshed later is skipped when its turn comes.
    order: VecDeque<(Instant, Key)>,
    num_entries: usize,
}

impl PrefixIndex {
    /// Notes that `engine` holds the pages named by `chain`, the pages of one prompt from its beginning.
    pub fn insert(&mut self, now: Instant, engine: u32, chain: &[PageHash]) {
        for &page in chain {
            let holders = self.pages.entry(page).or_default();
            match holders.iter_mut().find(|(holder, _)| *holder == engine) {
                Some((_, seen)) => *seen = now,
                None => {
                    holders.push((engine, now));
                    self.num_entries += 1;
                }
            }
            self.order.push_back((now, (page, engine)));
        }
        self.prune(now);
    }

    /// Returns for each of `engines` what it probably holds of `chain`, from the first page on.
    #[must_use]
    pub fn held(&self, now: Instant, engines: &[u32], chain: &[PageHash]) -> Vec<HeldPrefix> {
        let mut held = vec![HeldPrefix::default(); engines.len()];
        let mut going: Vec<usize> = (0..engines.len()).collect();
        for (depth, page) in chain.iter().enumerate() {
            let Some(holders) = self.pages.get(page) else { break };
            going.retain(|&i| {
                let holder = holders.iter().find(|(holder, _)| *holder == engines[i]);
                let Some(&(_, seen)) = holder.filter(|(_, seen)| now < *seen + TIME_TO_LIVE) else {
                    return false;
                };
                held[i] = HeldPrefix { num_pages: depth + 1, last_seen: Some(seen) };
                true
            });
            if going.is_empty() {
                break;
            }
        }
        held
    }

    /// Drops everything believed of an engine: it was restarted, and its cache with it.
    pub fn forget(&mut self, engine: u32) {
        self.pages.retain(|_, holders| {
            holders.retain(|(holder, _)| *holder != engine);
            !holders.is_empty()
        });
        self.num_entries = self.pages.values().map(Vec::len).sum();
    }

    /// Returns the number of page-on-engine entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.num_entries
    }

    /// Says whether nothing is believed of any engine.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.num_entries == 0
    }

    fn prune(&mut self, now: Instant) {
        while let Some(&(at, (page, engine))) = self.order.front() {
            // Refreshed entries are in the queue several times; it is kept short too.
            let too_many = self.num_entries > MAX_ENTRIES || self.order.len() > 2 * MAX_ENTRIES;
            if !too_many && now < at + TIME_TO_LIVE {
                break;
            }
            self.order.pop_front();
            let Some(holders) = self.pages.get_mut(&page) else { continue };
            let before = holders.len();
            holders.retain(|(holder, seen)| *holder != engine || *seen > at);
            self.num_entries -= before - holders.len();
            if holders.is_empty() {
                self.pages.remove(&page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use microserving_protocol::{TokenId, page_hashes};

    use super::*;

    fn pages(index: &PrefixIndex, now: Instant, engines: &[u32], chain: &[PageHash]) -> Vec<usize> {
        index.held(now, engines, chain).into_iter().map(|held| held.num_pages).collect()
    }

    fn chain(tokens: &[u32]) -> Vec<PageHash> {
        let tokens: Vec<_> = tokens.iter().copied().map(TokenId).collect();
        page_hashes("", &tokens, 2)
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_prefix_of_each_engine_is_found() {
        let now = Instant::now();
        let mut index = PrefixIndex::default();
        index.insert(now, 0, &chain(&[1, 2, 3, 4]));
        index.insert(now, 1, &chain(&[1, 2, 3, 4, 5, 6]));
        index.insert(now, 2, &chain(&[9, 9, 3, 4]));
        let prompt = chain(&[1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(pages(&index, now, &[0, 1, 2, 3], &prompt), [2, 3, 0, 0]);
        // A page in the middle counts only behind its own prefix.
        assert_eq!(pages(&index, now, &[0, 2], &chain(&[9, 9, 3, 4])), [0, 2]);
        index.forget(1);
        assert_eq!(pages(&index, now, &[0, 1], &prompt), [2, 0]);
        assert_eq!(index.len(), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn of_equal_holders_the_later_one_is_told() {
        let start = Instant::now();
        let later = start + Duration::from_secs(1);
        let mut index = PrefixIndex::default();
        index.insert(start, 0, &chain(&[1, 2, 3, 4]));
        index.insert(later, 1, &chain(&[1, 2, 3, 4]));
        let held = index.held(later, &[0, 1, 2], &chain(&[1, 2, 3, 4, 5, 6]));
        assert_eq!(
            held.iter().map(|held| held.last_seen).collect::<Vec<_>>(),
            [Some(start), Some(later), None]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn entries_end_unless_used() {
        let start = Instant::now();
        let mut index = PrefixIndex::default();
        index.insert(start, 0, &chain(&[1, 2, 3, 4]));
        let later = start + Duration::from_secs(100);
        index.insert(later, 0, &chain(&[1, 2]));
        let end = start + Duration::from_secs(121);
        assert_eq!(pages(&index, end, &[0], &chain(&[1, 2, 3, 4])), [1]);
        index.insert(end, 1, &chain(&[7, 7]));
        assert_eq!(index.len(), 2, "the page that nobody used is gone");
        index.insert(start + Duration::from_secs(600), 1, &[]);
        assert!(index.is_empty());
    }
}
