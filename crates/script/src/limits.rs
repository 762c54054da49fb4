//! What a script may use.

use std::time::Duration;

/// The bounds of one run of a script, and of all runs together.
///
/// What is over a bound ends the run and nothing else: its request is served by the script's fallback.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of source text.
    pub source_bytes: usize,
    /// Operations of a run: statements, expressions and calls evaluated, those of closures included.
    pub operations: u64,
    /// Time that a run may compute. Waiting in calls to engines does not count: that is bounded by the request's deadline.
    pub compute_time: Duration,
    /// Functions within functions.
    pub call_levels: usize,
    /// Variables alive at once in one function.
    pub variables: usize,
    /// Elements of an array, those of arrays within it included.
    pub array_size: usize,
    /// Keys of a map, those of maps within it included.
    pub map_size: usize,
    /// Bytes of a string, or of all strings in one array or map.
    pub string_bytes: usize,
    /// Calls to engines that a run may make.
    pub engine_calls: u32,
    /// Seats that a run may take.
    pub seats: usize,
    /// Lines that a run may log.
    pub log_lines: u32,
    /// Runs at once. Each has a thread, also while it waits for an engine.
    pub concurrent_runs: usize,
    /// How long a request waits for one of those threads.
    pub queue_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            source_bytes: 64 << 10,
            operations: 100_000,
            compute_time: Duration::from_millis(100),
            call_levels: 12,
            variables: 32,
            array_size: 4096,
            map_size: 256,
            string_bytes: 4 << 10,
            engine_calls: 16,
            seats: 16,
            log_lines: 16,
            concurrent_runs: 256,
            queue_time: Duration::from_secs(1),
        }
    }
}
