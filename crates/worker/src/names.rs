//! Names that contracts want for the life of the process.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// Those that were met so far: of transports and what they do, so a handful.
static MET: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
/// A worker that makes up names does not fill our memory with them.
const MOST: usize = 256;

/// Returns a name that stays.
pub(crate) fn keep(name: &str) -> &'static str {
    let mut met = MET.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kept) = met.get(name) {
        return kept;
    }
    if met.len() >= MOST {
        return "another";
    }
    let kept: &'static str = String::from(name).leak();
    met.insert(kept);
    kept
}
