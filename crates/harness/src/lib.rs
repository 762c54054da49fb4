//! Starts the daemons as processes and talks to them over HTTP.
//!
//! The demo, the benchmarks and the end-to-end tests all need the same three things: [`Daemon`] (a child process that is
//! ready, and gone when dropped), [`Cluster`] (engines and a router on free loopback ports), and [`http`] (plain calls and
//! timed streams). It is synchronous on purpose: one thread a client is simple, and the measured side is the other process.
//!
//! ```no_run
//! use microserving_harness::{Cluster, ClusterOptions};
//! let cluster = Cluster::start(&ClusterOptions::toy(2))?;
//! println!("a router listens at {}", cluster.router().url());
//! # Ok::<(), anyhow::Error>(())
//! ```

#![forbid(unsafe_code)]
#![allow(clippy::disallowed_types, reason = "this side measures real processes; there is no clock to pause")]

mod cluster;
mod daemon;
pub mod http;
mod proxy;
mod world;

pub use cluster::{Cluster, ClusterOptions};
pub use daemon::{Daemon, binary_dir};
pub use proxy::{OnPoint, Points, Proxy};
pub use world::{World, launcher};
