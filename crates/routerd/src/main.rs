//! `routerd`: OpenAI's API over any number of engines.
//!
//! Reads its options, builds the router, and runs until it is told to stop. It never starts engines itself.

#![forbid(unsafe_code)]

mod admin;
mod connect;
mod live;
mod options;
mod run;

use std::process::ExitCode;

/// A request is many small allocations of many threads.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    microserving_daemon::run_daemon(run::run)
}
