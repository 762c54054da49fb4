//! `engined`: one model on one device, served over HTTP.
//!
//! Reads its options, builds executor, transport, engine and server, and runs until it is told to stop.

#![forbid(unsafe_code)]

mod calibrate;
#[cfg(feature = "candle")]
mod device;
#[cfg(not(feature = "candle"))]
#[path = "no_device.rs"]
mod device;
#[cfg(feature = "candle")]
mod files;
mod hub;
mod model;
mod options;
mod profile;
mod run;
mod self_test;
mod transport;

use std::process::ExitCode;

fn main() -> ExitCode {
    microserving_daemon::run_daemon(run::run)
}
