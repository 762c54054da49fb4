//! The options of `routerd`, each declared once.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use microserving_daemon::{Daemon, DaemonOptions, positive_seconds};
use microserving_grpc::WirePolicy;
use microserving_router::{Pattern, PlacementPolicy};

/// Serves OpenAI's API over MicroServing engines, each request by a pattern of calls that can change while serving.
#[derive(Clone, Debug, Parser)]
#[command(name = "routerd", version)]
pub(crate) struct Options {
    /// Engine for any role, such as http://127.0.0.1:8001. May be given several times, as may --prefill and --decode. A kind in front says
    /// that it is of another make: mlc+http://... (MLC-LLM) or openai+http://... (any server of OpenAI's API). Options of one engine follow a
    /// #: mlc+http://127.0.0.1:8002#recv_rank=4&model=NAME.
    #[arg(
        long,
        env = "MICROSERVING_ENGINES",
        value_name = "URL",
        value_delimiter = ',',
        help_heading = "Engines"
    )]
    pub(crate) engine: Vec<String>,

    /// Engine that only prefills for others.
    #[arg(
        long,
        env = "MICROSERVING_PREFILL_ENGINES",
        value_name = "URL",
        value_delimiter = ',',
        help_heading = "Engines"
    )]
    pub(crate) prefill: Vec<String>,

    /// Engine that decodes, and prefills only its own requests.
    #[arg(
        long,
        env = "MICROSERVING_DECODE_ENGINES",
        value_name = "URL",
        value_delimiter = ',',
        help_heading = "Engines"
    )]
    pub(crate) decode: Vec<String>,

    /// How engines are called: auto (gRPC where an engine offers it, else REST), grpc or rest.
    #[arg(long, env = "MICROSERVING_WIRE", value_name = "WIRE", default_value_t, help_heading = "Engines")]
    pub(crate) wire: WirePolicy,

    /// Engines that must be ready before the router says that it is.
    #[arg(long, env = "MICROSERVING_MIN_ENGINES", value_name = "N", default_value = "1", help_heading = "Engines",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) min_engines: u32,

    /// Pattern of requests that name none: data_parallel, prefill_decode, or balanced:RATIO with the part of each prompt that
    /// the decoding engine prefills.
    #[arg(
        long,
        env = "MICROSERVING_PATTERN",
        value_name = "PATTERN",
        default_value = "data_parallel",
        help_heading = "Routing"
    )]
    pub(crate) pattern: Pattern,

    /// Script to load as a pattern: NAME=PATH. May be given several times.
    #[arg(
        long,
        env = "MICROSERVING_SCRIPTS",
        value_name = "NAME=PATH",
        value_delimiter = ',',
        help_heading = "Routing"
    )]
    pub(crate) script: Vec<String>,

    /// Scripts that may run at once, those that wait for an engine included; more requests wait for a second, then the
    /// script's fallback serves them.
    #[arg(long, env = "MICROSERVING_SCRIPT_RUNS", value_name = "N", default_value = "256",
          help_heading = "Routing", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) script_runs: u32,

    /// How engines are chosen: prefix (nearest first token, by load and by cached prefix), least-loaded or round-robin.
    #[arg(
        long,
        env = "MICROSERVING_PLACEMENT",
        value_name = "POLICY",
        default_value = "prefix",
        help_heading = "Routing"
    )]
    pub(crate) placement: PlacementPolicy,

    /// Seconds that a request may take, all calls and retries together.
    #[arg(long, env = "MICROSERVING_REQUEST_TIMEOUT_SECONDS", value_name = "SECONDS", default_value = "600",
          help_heading = "Routing", value_parser = positive_seconds)]
    pub(crate) request_timeout_seconds: Duration,

    /// Requests served at once; more are answered 429.
    #[arg(long, env = "MICROSERVING_MAX_IN_FLIGHT", value_name = "N", default_value = "4096",
          help_heading = "Routing", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_in_flight: u32,

    /// Pass requests of data parallel on as they are, placed by their text. When false, every request is tokenised, and placed by pages.
    #[arg(long, env = "MICROSERVING_RELAY", value_name = "BOOL", default_value = "true", action = clap::ArgAction::Set,
          help_heading = "Routing")]
    pub(crate) relay: bool,

    /// Tokenizer to use for every model: a model directory, a GGUF file, a tokenizer.json or a saved bundle. By default each
    /// model's own is fetched from an engine.
    #[arg(long, env = "MICROSERVING_TOKENIZER", value_name = "PATH", help_heading = "Routing")]
    pub(crate) tokenizer: Option<PathBuf>,

    /// Address to serve on; port 0 takes a free one.
    #[arg(
        long,
        env = "MICROSERVING_LISTEN",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:8000",
        help_heading = "Serving"
    )]
    pub(crate) listen: String,

    #[command(flatten)]
    pub(crate) daemon: DaemonOptions,
}

impl Daemon for Options {
    fn daemon(&self) -> &DaemonOptions {
        &self.daemon
    }
}
