//! Random numbers for ids and seeds.

use std::sync::atomic::{AtomicU64, Ordering};

/// Draws a number. If the operating system has none to give, a counter stands in: ids stay unique in this process.
pub(crate) fn number() -> u64 {
    static COUNTER: AtomicU64 = AtomicU64::new(1);
    getrandom::u64().unwrap_or_else(|_| COUNTER.fetch_add(1, Ordering::Relaxed))
}

/// Draws 128 bits as 32 hex digits.
pub(crate) fn hex_id() -> String {
    format!("{:016x}{:016x}", number(), number())
}
