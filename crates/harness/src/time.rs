//! The clock of the measuring side.

#[allow(
    clippy::disallowed_types,
    reason = "this side measures real processes; there is no clock to pause"
)]
pub use std::time::Instant;
