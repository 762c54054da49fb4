//! Options that both daemons have.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::{ByteSize, LogFormat, positive_seconds, seconds};

/// Options that both daemons have; flatten it into the daemon's own.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Serving")]
pub struct DaemonOptions {
    /// File to write the bound address to (`host:port` and a newline), atomically, once the port is open.
    #[arg(long, env = "MICROSERVING_PORT_FILE", value_name = "PATH")]
    pub port_file: Option<PathBuf>,

    /// Threads that serve HTTP. They never compute, so two are enough.
    #[arg(long, env = "MICROSERVING_HTTP_THREADS", value_name = "N", default_value = "2",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub http_threads: u32,

    /// Connections open at once, and requests at once on one connection of HTTP/2; more wait unaccepted.
    #[arg(long, env = "MICROSERVING_MAX_CONNECTIONS", value_name = "N", default_value = "4096",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_connections: u32,

    /// Largest request body, in bytes or with a unit (16MiB, 4MB); a larger one is answered 413.
    #[arg(long, env = "MICROSERVING_MAX_BODY_BYTES", value_name = "BYTES", default_value = "16MiB")]
    pub max_body_bytes: ByteSize,

    /// Seconds a client has to send a request's head; idle connections are closed after the same time.
    #[arg(long, env = "MICROSERVING_HEADER_TIMEOUT_SECONDS", value_name = "SECONDS", default_value = "60",
          value_parser = positive_seconds)]
    pub header_timeout_seconds: Duration,

    /// Seconds that a client may read nothing of an answer that is being written to it; then its connection is closed.
    #[arg(long, env = "MICROSERVING_WRITE_TIMEOUT_SECONDS", value_name = "SECONDS", default_value = "60",
          value_parser = positive_seconds)]
    pub write_timeout_seconds: Duration,

    /// Seconds that requests in flight get to finish after SIGTERM or SIGINT. A second signal ends the process at once.
    #[arg(long, env = "MICROSERVING_DRAIN_SECONDS", value_name = "SECONDS", default_value = "30",
          value_parser = seconds)]
    pub drain_seconds: Duration,

    /// What to log: a level, or directives such as `info,microserving_engine=debug`.
    #[arg(long, env = "MICROSERVING_LOG", value_name = "FILTER", default_value = "info")]
    pub log: String,

    /// How log lines look.
    #[arg(long, env = "MICROSERVING_LOG_FORMAT", value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}
