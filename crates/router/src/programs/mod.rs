//! The patterns that come with the crate, one file each.

mod balanced;
mod data_parallel;
mod prefill_decode;

pub use balanced::{Balanced, BalancedFactory};
pub use data_parallel::DataParallel;
pub use prefill_decode::PrefillDecode;
