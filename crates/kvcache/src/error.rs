//! What the cache cannot do.

use microserving_protocol::{Generation, PageId};

/// Why the cache refused. Nothing has changed then, unless the variant says so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// There are not enough pages that are free or could be evicted. Nothing was evicted.
    #[error("{needed} pages are needed, {free} are free and {evictable} could be evicted")]
    NoRoom {
        /// Pages asked for.
        needed: u32,
        /// Pages that hold nothing.
        free: u32,
        /// Pages that only the cache holds.
        evictable: u32,
    },
    /// Too many pages wait for a peer's last write; no new reservation is made until some are drained.
    #[error("{quarantined} pages are quarantined, at most {limit} may be when a reservation is made")]
    QuarantineFull {
        /// Pages in quarantine.
        quarantined: u32,
        /// [`crate::KvCacheConfig::max_quarantined_pages`].
        limit: u32,
    },
    /// A configuration value is out of bounds.
    #[error("{field} is {value}, it must be {bound}")]
    InvalidConfig {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What it must be.
        bound: &'static str,
    },
    /// The handle was made by another cache.
    #[error("the handle belongs to another cache")]
    ForeignHandle,
    /// An argument is out of bounds.
    #[error("{field} is {value}, it must be in [{min}, {max}]")]
    OutOfRange {
        /// The argument.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The smallest that is allowed.
        min: u64,
        /// The largest that is allowed.
        max: u64,
    },
    /// The tokens to commit are not a continuation of what the table has committed before.
    #[error("the tokens differ from those committed before, in the page that ends at {position}")]
    TokensDiffer {
        /// Where the page ends that differs.
        position: u32,
    },
    /// No pages wait under this generation: it was never quarantined, or has been drained already.
    #[error("no pages are quarantined under generation {generation}")]
    NotQuarantined {
        /// The generation.
        generation: Generation,
    },
    /// A page is not in the state that the operation starts from.
    #[error("page {page} is {state}, not {wanted}")]
    WrongState {
        /// The page.
        page: PageId,
        /// What it is.
        state: &'static str,
        /// What it should be.
        wanted: &'static str,
    },
}
