//! `engined`: one model on one device, served over HTTP.
//!
//! Reads its options, builds executor, transport, engine and server, and runs until it is told to stop. As `engined worker` it is
//! executor and transport alone, for an engine whose front is another process.

#![forbid(unsafe_code)]

mod calibrate;
#[cfg(feature = "candle")]
mod device;
#[cfg(not(feature = "candle"))]
#[path = "no_device.rs"]
mod device;
#[cfg(feature = "candle")]
mod files;
mod fronted;
mod hub;
mod model;
#[cfg(not(feature = "candle"))]
mod no_files;
mod options;
mod profile;
mod run;
mod self_test;
mod transport;
mod worker;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|first| first == worker::SUBCOMMAND) {
        return worker::main(arguments);
    }
    microserving_daemon::run_daemon(run::run)
}
