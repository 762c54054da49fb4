//! What sequences do: match, grow, commit, fork, end.

use microserving_protocol::{PageId, TokenId};

use super::KvCache;
use crate::handle::Holding;
use crate::table::num_tokens;
use crate::{KvError, PageTable, Prefix, ReplacedPages};

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

impl KvCache {
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
}
