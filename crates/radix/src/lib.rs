//! A radix tree over fixed-size pages of keys, generic in its value, with pins and least-recently-used eviction.
//!
//! [`RadixTree`] maps sequences of keys (tokens, say) to one value for each *page* of `page_size` keys. Nodes are split at
//! page borders only, and a node's children are told apart by the whole first page of their keys. What is pinned stays:
//! [`RadixTree::pin_longest`] finds the longest stored prefix and pins it, [`RadixTree::advance`] moves a pin forward while
//! storing more pages, [`RadixTree::evict`] takes pages from the end of the leaf that has been unused for the longest time.
//!
//! # Why children are keyed by a page and not by a key
//!
//! A tree that branches at single keys finds matches that end inside a page. Nobody can use them: a page is shared whole or
//! not at all, because its holder goes on writing behind the shared part. With page-wide branching a match is always a
//! number of whole pages, two sequences that differ anywhere in a page share nothing of it, and a split never tears the
//! value of a page. The price is that a child's key is `page_size` keys wide; it is paid once a node, not once a page.
//!
//! Children live in ordered maps: no hash function to attack with chosen tokens, and every walk over the tree is the same
//! in every run, which simulations rely on.
//!
//! ```
//! use std::num::NonZeroUsize;
//! use microserving_radix::RadixTree;
//!
//! let mut tree = RadixTree::new(NonZeroUsize::new(2).expect("not 0"));
//! let root = tree.add_root();
//! // Two pages of two keys; each page has a value.
//! tree.insert(root, &[1, 2, 3, 4], &mut ['a', 'b'])?;
//!
//! // The longest match is counted in whole pages, and pinned until it is given back.
//! let mut seen = Vec::new();
//! let pinned = tree.pin_longest(root, &[1, 2, 3, 9], |value| seen.push(*value))?;
//! assert_eq!((pinned.num_pages, seen), (1, vec!['a']));
//!
//! // Only the second page can be evicted now.
//! assert_eq!(tree.evict(usize::MAX).map(|evicted| evicted.values), Some(vec!['b']));
//! assert!(tree.evict(usize::MAX).is_none());
//! tree.unpin(pinned.node)?;
//! assert_eq!(tree.evict(usize::MAX).map(|evicted| evicted.values), Some(vec!['a']));
//! # Ok::<(), microserving_radix::RadixError>(())
//! ```

#![forbid(unsafe_code)]

mod error;
mod node;
mod tree;

pub use error::RadixError;
pub use node::NodeId;
pub use tree::{Evicted, NodeView, Pinned, RadixTree};
