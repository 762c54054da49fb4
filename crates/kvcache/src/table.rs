//! Handles on pages that are read or written here.

use microserving_protocol::PageId;

use crate::handle::Holding;

/// A context found in the cache, held so that it stays.
///
/// Drop it, or give it to [`crate::KvCache::release`], when it is not needed any more.
#[derive(Debug)]
#[must_use = "a match that is dropped is given up"]
pub struct Prefix {
    pub(crate) holding: Holding,
    pub(crate) page_size: u32,
}

impl Prefix {
    /// Returns the tokens found: a multiple of the page size.
    #[must_use]
    pub fn num_tokens(&self) -> u32 {
        num_tokens(self.holding.pages.len(), self.page_size)
    }

    /// Returns the pages, in order of positions.
    #[must_use]
    pub fn pages(&self) -> &[PageId] {
        &self.holding.pages
    }

    /// Begins a sequence with this context. Its pages are shared and only read; what the table grows by is its own.
    pub fn into_table(self) -> PageTable {
        PageTable { holding: self.holding, page_size: self.page_size }
    }
}

/// A sequence's pages in order of positions.
///
/// ```text
/// pages   [ s0 ][ s1 ][ s2 ][ p3 ][ p4 ]
///         |--- shared ------|-- own ---|
///         matched or        only this table writes here
///         committed, read
///         only
/// ```
///
/// Drop it, or give it to [`crate::KvCache::release_table`], when the sequence ends: shared pages stay cached, the others
/// become free.
#[derive(Debug)]
#[doc(alias = "block table")]
#[must_use = "a table that is dropped gives its pages back"]
pub struct PageTable {
    pub(crate) holding: Holding,
    pub(crate) page_size: u32,
}

impl PageTable {
    /// Returns the pages, in order of positions; `pages()[i]` holds positions `i * page_size ..`.
    #[must_use]
    pub fn pages(&self) -> &[PageId] {
        &self.holding.pages
    }

    /// Returns the tokens that the pages have room for.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        num_tokens(self.holding.pages.len(), self.page_size)
    }

    /// Returns the tokens in shared pages, matched or committed: positions below this are never written again.
    #[must_use]
    pub fn num_shared_tokens(&self) -> u32 {
        num_tokens(self.holding.num_shared, self.page_size)
    }
}

/// Pages that a commit replaced by equal ones from the cache.
///
/// They stay as they are until this is dropped, so that a transfer that reads them can end first.
#[derive(Debug)]
pub struct ReplacedPages {
    /// The old pages.
    pub(crate) old: Holding,
    pub(crate) first_index: usize,
    pub(crate) new: Vec<PageId>,
}

impl ReplacedPages {
    /// Says whether the table is unchanged.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.new.is_empty()
    }

    /// Returns the number of replaced pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.new.len()
    }

    /// Returns the pages that were replaced, and that this holds.
    #[must_use]
    pub fn old_pages(&self) -> &[PageId] {
        &self.old.pages
    }

    /// Returns `(index in the table, old page, new page)` for each replaced page.
    pub fn iter(&self) -> impl Iterator<Item = (usize, PageId, PageId)> {
        let pairs = self.old.pages.iter().zip(&self.new).enumerate();
        pairs.map(|(at, (old, new))| (self.first_index + at, *old, *new))
    }
}

pub(crate) fn num_tokens(num_pages: usize, page_size: u32) -> u32 {
    u32::try_from(num_pages).unwrap_or(u32::MAX).saturating_mul(page_size)
}
