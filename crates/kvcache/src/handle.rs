//! What all handles have in common: pages that find their way back.

use std::mem;
use std::sync::{Arc, Mutex, PoisonError};

use microserving_protocol::{Generation, PageId};
use microserving_radix::NodeId;

/// What a dropped handle leaves for its cache.
#[derive(Debug)]
pub(crate) struct Returned {
    pub(crate) pages: Vec<PageId>,
    pub(crate) num_shared: usize,
    pub(crate) pin: Option<NodeId>,
    pub(crate) promise: Option<Promise>,
}

/// The way back from handles to the cache that made them. Filled by drops, emptied by the cache's verbs; holds at most one
/// entry a live handle.
#[derive(Debug, Default)]
pub(crate) struct Returns(Mutex<Vec<Returned>>);

impl Returns {
    pub(crate) fn take(&self) -> Vec<Returned> {
        mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn push(&self, returned: Returned) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(returned);
    }
}

/// That the pages behind the shared ones are promised to a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Promise {
    pub(crate) generation: Generation,
    /// Pages, counted from the first one that is not shared, whose address a peer may know.
    pub(crate) num_exposed: usize,
}

/// Pages held, in order of positions: first those that the prefix cache has too, then the holder's own.
#[derive(Debug)]
pub(crate) struct Holding {
    pub(crate) pages: Vec<PageId>,
    /// How many of `pages` are in the prefix cache, on the path that `pin` protects.
    pub(crate) num_shared: usize,
    /// The pinned end of the path; a tenant's root if nothing is shared. `None` only for pages outside any context.
    pub(crate) pin: Option<NodeId>,
    pub(crate) promise: Option<Promise>,
    pub(crate) returns: Arc<Returns>,
}

impl Drop for Holding {
    fn drop(&mut self) {
        if self.pages.is_empty() && self.pin.is_none() && self.promise.is_none() {
            return;
        }
        self.returns.push(Returned {
            pages: mem::take(&mut self.pages),
            num_shared: self.num_shared,
            pin: self.pin.take(),
            promise: self.promise.take(),
        });
    }
}
