//! Pages promised to a transfer.

use microserving_protocol::{Generation, KvRange, PageId};

use crate::handle::Holding;

/// Pages promised to a transfer, behind the part of the context that was found here.
///
/// ```text
///  0            matched               end        end + extra
///  |   shared    |    to be received   |   room   |
///  [ s0 ][ s1 ]  [ r2 ][ r3 ][ r4 ]    ][ r5 ]            generation on r2..r5
///                |-- a peer may know --|
/// ```
///
/// It ends in one of three ways: [`crate::KvCache::accept`], [`crate::KvCache::quarantine`] (what dropping does, too), or
/// [`crate::KvCache::cancel`]. [`crate::lifecycle`] says which one when.
#[derive(Debug)]
#[must_use = "a reservation that is dropped is quarantined"]
pub struct Reservation {
    pub(crate) holding: Holding,
    pub(crate) generation: Generation,
    pub(crate) range: KvRange,
    pub(crate) page_size: u32,
}

impl Reservation {
    /// Returns the number under which the pages are promised; higher than that of every earlier reservation of this cache.
    #[must_use]
    pub const fn generation(&self) -> Generation {
        self.generation
    }

    /// Returns the positions to be received: `[matched, end)`. Empty when all of it was found here.
    #[must_use]
    pub const fn range(&self) -> KvRange {
        self.range
    }

    /// Returns the tokens found here: a multiple of the page size.
    #[must_use]
    pub const fn num_matched_tokens(&self) -> u32 {
        self.range.begin()
    }

    /// Returns all pages in order of positions: matched, to be received, room behind.
    #[must_use]
    pub fn pages(&self) -> &[PageId] {
        &self.holding.pages
    }

    /// Returns the pages to be received into; the first one holds `range().begin()` in its slot 0.
    #[must_use]
    pub fn receiving_pages(&self) -> &[PageId] {
        let first = self.holding.num_shared;
        &self.holding.pages[first..first + self.num_exposed()]
    }

    pub(crate) fn num_exposed(&self) -> usize {
        self.range.num_tokens().div_ceil(self.page_size) as usize
    }
}
