//! Newtypes for the numbers and names that must not be mixed up.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Declares number newtypes that print as their number and never convert silently.
macro_rules! number_id {
    ($($(#[$meta:meta])* $name:ident($inner:ty);)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

/// Declares name newtypes: cheap to clone, compared by content.
macro_rules! name_id {
    ($($(#[$meta:meta])* $name:ident;)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Wraps a name.
            pub fn new(name: impl Into<Arc<str>>) -> Self {
                Self(name.into())
            }

            /// Returns the name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<&str> for $name {
            fn from(name: &str) -> Self {
                Self::new(name)
            }
        }

        impl From<String> for $name {
            fn from(name: String) -> Self {
                Self::new(name)
            }
        }
    )*};
}

number_id! {
    /// A token's number in the model's vocabulary.
    TokenId(u32);
    /// A page of the KV region, counted from 0. Elsewhere called a block.
    #[doc(alias = "block")]
    PageId(u32);
    /// A transformer layer, counted from 0.
    LayerId(u32);
    /// A processing element of a PGAS world (NVSHMEM, OpenSHMEM): the value of `recv_rank`.
    PeId(u32);
    /// A random number drawn at boot, so that a restarted engine is never taken for its former self.
    Incarnation(u64);
    /// The number of one reservation on one engine; grows with every reservation and is never used twice by an incarnation.
    Generation(u64);
    /// The number of one try at a request; a higher attempt replaces a lower one.
    Attempt(u32);
}

name_id! {
    /// The key that ties the calls of one request together (`user` in MLC's JSON, `seq_id` in ours).
    SeqId;
    /// An engine's name, unique in a cluster.
    EngineId;
}
