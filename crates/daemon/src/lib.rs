//! What the daemons share: configuration from one declaration, logging, signals, health, and an HTTP server that drains.
//!
//! - [`load`] reads a clap declaration from defaults, a TOML file, the environment and the command line, in that order.
//! - [`Daemon`] and [`run_daemon`] are a daemon's `main`: load, log, catch signals, run, report.
//! - [`HttpServer`] serves an axum router from a port, owns every connection, and answers health before the daemon is ready.
//! - [`Shutdown`] is the one word for "stop": a signal begins it, a second one ends the process at once.
//!
//! # Health answers come from threads that never compute
//!
//! An engine is busiest exactly when an operator asks whether it is alive. A thread of its own for `/health` would have to
//! own a second port, because a connection's path is known only after its request is read. Instead the whole HTTP runtime is
//! kept free of work: its few worker threads parse small requests and move bytes; the engine steps on its own thread, and
//! whatever is long (tokenising, templates, large bodies) goes to `spawn_blocking`. What is left on the workers takes
//! microseconds, so a health request waits for microseconds. The rule is simple to keep and it serves every route, streams
//! included, not only health.
//!
//! # Example
//!
//! ```
//! use clap::Parser;
//! use microserving_daemon::{Loaded, load};
//!
//! /// A daemon that greets.
//! #[derive(Debug, Parser)]
//! #[command(name = "greetd")]
//! struct Options {
//!     /// Greetings per second.
//!     #[arg(long, env = "MICROSERVING_RATE", default_value_t = 3)]
//!     rate: u32,
//! }
//!
//! let Loaded::Run(options) = load::<Options>(["greetd", "--rate", "5"].map(Into::into))? else {
//!     unreachable!("nothing asked for a print-out");
//! };
//! assert_eq!(options.rate, 5);
//! # Ok::<(), microserving_daemon::ConfigError>(())
//! ```

#![forbid(unsafe_code)]

mod config;
mod connection;
mod health;
mod in_flight;
mod logging;
mod options;
mod reference;
mod run;
mod serve;
mod shutdown;
mod stall;
mod values;

pub use config::{ConfigError, Loaded, load, values};
pub use health::Health;
pub use logging::{LogFormat, init_logging};
pub use options::DaemonOptions;
pub use reference::reference_table;
pub use run::{Daemon, Refused, describe, run_daemon};
pub use serve::{HttpServer, ResponseFuture, ServeError, Shortcut};
pub use shutdown::{Hangups, Shutdown};
pub use values::{ByteSize, positive_seconds, seconds};
