//! What a caller can do wrong.

use std::error::Error;
use std::fmt;

use crate::NodeId;

/// Why the tree refused. It is unchanged then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RadixError {
    /// The node was removed since its id was handed out; a pinned node never is.
    StaleNode {
        /// The id.
        node: NodeId,
    },
    /// The keys are not one whole page for each value.
    WrongShape {
        /// Keys given.
        num_keys: usize,
        /// Values given.
        num_values: usize,
        /// Keys in a page.
        page_size: usize,
    },
    /// The node carries no pin that could be given back or moved.
    NotPinned {
        /// The node.
        node: NodeId,
    },
    /// The node is pinned, has children, or is a root where a leaf is wanted (or the other way round).
    InUse {
        /// The node.
        node: NodeId,
    },
}

impl fmt::Display for RadixError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StaleNode { node } => write!(f, "{node:?} is not in the tree any more"),
            Self::WrongShape { num_keys, num_values, page_size } => {
                write!(f, "{num_keys} keys are not {num_values} pages of {page_size}")
            }
            Self::NotPinned { node } => write!(f, "{node:?} is not pinned"),
            Self::InUse { node } => write!(f, "{node:?} is in use"),
        }
    }
}

impl Error for RadixError {}
