//! Pages of the KV region: who holds them, what they contain, and when they may serve something else.
//!
//! [`KvCache`] is what an engine holds. It hands out four kinds of handle and takes them back:
//!
//! ```text
//!                     match_prefix                       commit: full pages become matchable
//!  PrefixCache  ───────────────────▶  Prefix ──▶ PageTable ────────────────────────────▶  PrefixCache
//!   (radix tree)                                  ▲   │ release
//!                     reserve                     │   └───────────▶ cached, or free
//!  PagePool  ───────▶  Reservation ── accept ─────┘
//!                        │ quarantine            drained
//!                        └───────────▶ (quarantined) ───────────▶ free
//! ```
//!
//! - [`PagePool`]: the state of every page ([`PageState`]), reference counts, one counter a state ([`PageCounts`]).
//! - [`PrefixCache`]: which contexts are in which pages, separated by salt; least recently used goes first.
//! - [`Prefix`], [`PageTable`], [`Reservation`], [`ReplacedPages`]: the handles.
//! - [`lifecycle`]: what may happen to a reservation, as one pure function; [`invariants`]: what must always hold.
//! - [`KvEvent`]: what entered and left the cache, for a router's index.
//!
//! Nothing here reads a clock, sleeps or does IO: eviction goes by the order of uses, and leases are the engine's.
//!
//! # Why a dropped reservation is quarantined and not freed
//!
//! A reservation's pages are an address in somebody else's hands: a peer may write to them until it has said, or been made
//! certain, that it will not. Freeing them at the end of the request, after a time limit, or after the receiver has marked
//! the generation as stale all let a late write land in another request's context (`tests/model_check` finds each of
//! these by search). So the only way from reserved to free for a page that was shown to a peer leads through
//! [`KvCache::drained`], and forgetting a [`Reservation`] takes that way too. The other handles give their pages back when
//! they are dropped; the verbs that take them do the same at once.
//!
//! ```
//! use microserving_kvcache::{KvCache, KvCacheConfig, KvError};
//! use microserving_protocol::TokenId;
//!
//! let mut cache = KvCache::new(KvCacheConfig::new(8, 4))?;
//! let prompt: Vec<TokenId> = (0..10).map(TokenId).collect();
//!
//! // The first request finds nothing, computes 10 tokens into 3 pages and leaves the two full ones behind.
//! let mut table = cache.match_prefix("tenant", &prompt[..9]).into_table();
//! cache.grow(&mut table, 10)?;
//! cache.commit(&mut table, &prompt)?;
//! cache.release_table(table);
//! assert_eq!((cache.counts().free, cache.counts().cached), (6, 2));
//!
//! // The second one finds them; another tenant does not.
//! let prefix = cache.match_prefix("tenant", &prompt[..9]);
//! assert_eq!(prefix.num_tokens(), 8);
//! assert_eq!(cache.peek_prefix("another", &prompt[..9]), 0);
//! cache.release(prefix);
//! # Ok::<(), KvError>(())
//! ```

#![forbid(unsafe_code)]

mod cache;
mod config;
mod error;
mod events;
mod handle;
pub mod invariants;
pub mod lifecycle;
mod pool;
mod prefix_cache;
mod reservation;
mod table;

pub use cache::{Committed, Fork, KvCache, KvStats, PageCopy};
pub use config::KvCacheConfig;
pub use error::KvError;
pub use events::{KvChange, KvEvent, KvSnapshot};
pub use microserving_protocol::{PageHash, page_hashes};
pub use pool::{PageCounts, PagePool, PageState};
pub use prefix_cache::PrefixCache;
pub use reservation::Reservation;
pub use table::{PageTable, Prefix, ReplacedPages};
