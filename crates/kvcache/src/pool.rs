//! The state of every page.

use microserving_protocol::{Generation, PageId};

use crate::KvError;

/// What a page is for. The arrows are the only moves there are.
///
/// ```text
///            take                    release, not in the prefix cache
///   Free ──────────▶ Owned{1} ─ share ▶ Owned{n} ─────────────────────▶ Free
///    │ ▲               ▲  ▲                │ release, in the prefix cache
///    │ │ cancel        │  └──── share ──── Cached ── evict ──▶ Free
///    │ │               │ accept
///    │ └─ Reserved(G) ─┘
///    └──────▶  │ quarantine
///  promise     ▼          drain
///           Quarantined(G) ─────▶ Free
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// Holds nothing.
    Free,
    /// Promised to a transfer; a peer that knows the generation's address may be writing to it.
    Reserved(Generation),
    /// Held by so many live handles, at least one.
    Owned {
        /// The handles that list it.
        refs: u32,
    },
    /// Held by the prefix cache alone.
    Cached,
    /// Given up, but a peer that knows the generation's address might still write to it.
    Quarantined(Generation),
}

impl PageState {
    const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Reserved(_) => "reserved",
            Self::Owned { .. } => "owned",
            Self::Cached => "cached",
            Self::Quarantined(_) => "quarantined",
        }
    }
}

/// Pages by state: the first five add up to `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Holding nothing.
    pub free: u32,
    /// Promised to a transfer.
    pub reserved: u32,
    /// Held by a live handle, alone or shared, whether being written or read.
    pub owned: u32,
    /// Held by the prefix cache alone: these could be evicted.
    pub cached: u32,
    /// Given up, but a peer might still write to them.
    pub quarantined: u32,
    /// All of them.
    pub total: u32,
}

impl PageCounts {
    fn of(&mut self, state: PageState) -> &mut u32 {
        match state {
            PageState::Free => &mut self.free,
            PageState::Reserved(_) => &mut self.reserved,
            PageState::Owned { .. } => &mut self.owned,
            PageState::Cached => &mut self.cached,
            PageState::Quarantined(_) => &mut self.quarantined,
        }
    }

    /// Counts states.
    pub fn count(states: impl IntoIterator<Item = PageState>) -> Self {
        let mut counts = Self::default();
        for state in states {
            *counts.of(state) += 1;
            counts.total += 1;
        }
        counts
    }
}

/// The states of all pages, a counter for each state, and the list of free ones.
///
/// Every move is O(1) and checks where it starts: a page freed twice, or drained under another generation than it was
/// promised under, is [`KvError::WrongState`] and changes nothing.
#[derive(Clone, Debug)]
pub struct PagePool {
    states: Vec<PageState>,
    /// Free pages; the last one is taken next, so that a page just freed, and warm in caches, is used first.
    free: Vec<PageId>,
    counts: PageCounts,
}

impl PagePool {
    /// Makes a pool of free pages.
    #[must_use]
    pub fn new(num_pages: u32) -> Self {
        Self {
            states: vec![PageState::Free; num_pages as usize],
            free: (0..num_pages).rev().map(PageId).collect(),
            counts: PageCounts { free: num_pages, total: num_pages, ..PageCounts::default() },
        }
    }

    /// Returns the pages by state.
    #[must_use]
    pub const fn counts(&self) -> PageCounts {
        self.counts
    }

    /// Returns a page's state; `None` for a page that does not exist.
    #[must_use]
    pub fn state(&self, page: PageId) -> Option<PageState> {
        self.states.get(page.0 as usize).copied()
    }

    /// Returns the states in order of pages.
    #[must_use]
    pub fn states(&self) -> &[PageState] {
        &self.states
    }

    /// Returns the free pages, the one taken next last.
    #[must_use]
    pub fn free_pages(&self) -> &[PageId] {
        &self.free
    }

    /// Free → owned by one: takes a page. `None` if there is none.
    pub fn take(&mut self) -> Option<PageId> {
        let page = self.free.pop()?;
        self.set(page, PageState::Owned { refs: 1 });
        Some(page)
    }

    /// Free → reserved: takes a page for a transfer. `None` if there is none.
    pub fn promise(&mut self, generation: Generation) -> Option<PageId> {
        let page = self.free.pop()?;
        self.set(page, PageState::Reserved(generation));
        Some(page)
    }

    /// Reserved → owned by one: nobody else will write to the page any more.
    ///
    /// # Errors
    /// [`KvError::WrongState`] unless the page is reserved under this generation.
    pub fn accept(&mut self, page: PageId, generation: Generation) -> Result<(), KvError> {
        self.expect(page, PageState::Reserved(generation))?;
        self.set(page, PageState::Owned { refs: 1 });
        Ok(())
    }

    /// Reserved → free: the page's address was never handed out, or no write under it can land any more.
    ///
    /// # Errors
    /// [`KvError::WrongState`] unless the page is reserved under this generation.
    pub fn cancel(&mut self, page: PageId, generation: Generation) -> Result<(), KvError> {
        self.expect(page, PageState::Reserved(generation))?;
        self.set_free(page);
        Ok(())
    }

    /// Reserved → quarantined: given up while a peer may still write.
    ///
    /// # Errors
    /// [`KvError::WrongState`] unless the page is reserved under this generation.
    pub fn quarantine(&mut self, page: PageId, generation: Generation) -> Result<(), KvError> {
        self.expect(page, PageState::Reserved(generation))?;
        self.set(page, PageState::Quarantined(generation));
        Ok(())
    }

    /// Quarantined → free: no write under the generation can land any more.
    ///
    /// # Errors
    /// [`KvError::WrongState`] unless the page is quarantined under this generation.
    pub fn drain(&mut self, page: PageId, generation: Generation) -> Result<(), KvError> {
        self.expect(page, PageState::Quarantined(generation))?;
        self.set_free(page);
        Ok(())
    }

    /// Owned or cached → owned by one more.
    ///
    /// # Errors
    /// [`KvError::WrongState`] if nobody could be reading the page.
    pub fn share(&mut self, page: PageId) -> Result<(), KvError> {
        let refs = match self.state(page) {
            Some(PageState::Owned { refs }) => refs + 1,
            Some(PageState::Cached) => 1,
            other => return Err(Self::wrong(page, other, "owned or cached")),
        };
        self.set(page, PageState::Owned { refs });
        Ok(())
    }

    /// Owned → owned by one less; the last one leaves it cached if `keep`, else free.
    ///
    /// # Errors
    /// [`KvError::WrongState`] if nobody owns the page.
    pub fn release(&mut self, page: PageId, keep: bool) -> Result<(), KvError> {
        match self.state(page) {
            Some(PageState::Owned { refs: 1 }) if keep => self.set(page, PageState::Cached),
            Some(PageState::Owned { refs: 1 }) => self.set_free(page),
            Some(PageState::Owned { refs }) => self.set(page, PageState::Owned { refs: refs - 1 }),
            other => return Err(Self::wrong(page, other, "owned")),
        }
        Ok(())
    }

    /// Cached → free.
    ///
    /// # Errors
    /// [`KvError::WrongState`] unless the page is held by the cache alone.
    pub fn evict(&mut self, page: PageId) -> Result<(), KvError> {
        self.expect(page, PageState::Cached)?;
        self.set_free(page);
        Ok(())
    }

    fn expect(&self, page: PageId, wanted: PageState) -> Result<(), KvError> {
        match self.state(page) {
            Some(state) if state == wanted => Ok(()),
            other => Err(Self::wrong(page, other, wanted.name())),
        }
    }

    fn wrong(page: PageId, state: Option<PageState>, wanted: &'static str) -> KvError {
        KvError::WrongState { page, state: state.map_or("not a page", PageState::name), wanted }
    }

    fn set_free(&mut self, page: PageId) {
        self.set(page, PageState::Free);
        self.free.push(page);
    }

    fn set(&mut self, page: PageId, state: PageState) {
        let slot = &mut self.states[page.0 as usize];
        *self.counts.of(*slot) -= 1;
        *self.counts.of(state) += 1;
        *slot = state;
    }
}
