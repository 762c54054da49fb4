//! Time for telemetry, for signs of life and for how long to be patient; nothing else reads a clock here.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Returns the time since some origin.
pub(crate) fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
