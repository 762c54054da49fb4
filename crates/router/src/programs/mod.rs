//! The patterns that come with the crate, one file each.

mod adaptive;
mod balanced;
mod data_parallel;
mod migrate;
mod prefill_decode;

pub use adaptive::{Adaptive, AdaptiveFactory, Roles};
pub use balanced::{Balanced, BalancedFactory};
pub use data_parallel::DataParallel;
pub use migrate::{Migrate, MigrateFactory};
pub use prefill_decode::PrefillDecode;
