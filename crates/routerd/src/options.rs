//! The options of `routerd`, each declared once.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use microserving_daemon::{ByteSize, Daemon, DaemonOptions, positive_seconds, seconds};
use microserving_grpc::WirePolicy;
use microserving_router::{Pattern, PlacementPolicy, Rule, rules_from_json};

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

    /// Rules that choose a pattern by what a request is, the first that fits: JSON as in `PUT /admin/v1/rules`.
    #[arg(long, env = "MICROSERVING_RULES", value_name = "JSON", help_heading = "Routing", value_parser = rules)]
    pub(crate) rules: Option<Rules>,

    /// How engines are chosen: prefix (nearest first token, by load and by cached prefix), least-loaded or round-robin.
    #[arg(
        long,
        env = "MICROSERVING_PLACEMENT",
        value_name = "POLICY",
        default_value = "prefix",
        help_heading = "Routing"
    )]
    pub(crate) placement: PlacementPolicy,

    /// Memory that the index of held prefixes takes at most.
    #[arg(
        long,
        env = "MICROSERVING_INDEX_BYTES",
        value_name = "BYTES",
        default_value = "256MiB",
        help_heading = "Routing"
    )]
    pub(crate) index_bytes: ByteSize,

    /// Seconds that a request may take, all calls and retries together.
    #[arg(long, env = "MICROSERVING_REQUEST_TIMEOUT_SECONDS", value_name = "SECONDS", default_value = "600",
          help_heading = "Routing", value_parser = positive_seconds)]
    pub(crate) request_timeout_seconds: Duration,

    /// Seconds that one step of a request may take (prep_recv, remote_send, the first token) where no engine's profile predicts
    /// anything; otherwise four times what is predicted and a second.
    #[arg(long, env = "MICROSERVING_STEP_TIMEOUT_SECONDS", value_name = "SECONDS", default_value = "60",
          help_heading = "Routing", value_parser = positive_seconds)]
    pub(crate) step_timeout_seconds: Duration,

    /// Requests served at once; more wait.
    #[arg(long, env = "MICROSERVING_MAX_IN_FLIGHT", value_name = "N", default_value = "4096",
          help_heading = "Routing", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_in_flight: u32,

    /// Pass requests of data parallel on as they are, placed by their text. When false, every request is tokenised, and placed by pages.
    #[arg(long, env = "MICROSERVING_RELAY", value_name = "BOOL", default_value = "true", action = clap::ArgAction::Set,
          help_heading = "Routing")]
    pub(crate) relay: bool,

    /// Copy contexts, the prefixes that prompts share, to the engines where they will be asked for. When true, nothing is relayed.
    #[arg(long, env = "MICROSERVING_CONTEXT_MIGRATION", value_name = "BOOL", default_value = "false", action = clap::ArgAction::Set,
          help_heading = "Routing")]
    pub(crate) context_migration: bool,

    /// Requests that may wait in each class of priority (above, at and below 0); more are answered 429.
    #[arg(
        long,
        env = "MICROSERVING_MAX_QUEUED",
        value_name = "N",
        default_value = "1024",
        help_heading = "Routing"
    )]
    pub(crate) max_queued: u32,

    /// Seconds to the first token that a request may be predicted to take; beyond it is answered 429. By default there is no bound.
    #[arg(long, env = "MICROSERVING_MAX_TTFT_SECONDS", value_name = "SECONDS", help_heading = "Routing",
          value_parser = positive_seconds)]
    pub(crate) max_ttft_seconds: Option<Duration>,

    /// Tokenizer to use for every model: a model directory, a GGUF file, a tokenizer.json or a saved bundle. By default each
    /// model's own is fetched from an engine.
    #[arg(long, env = "MICROSERVING_TOKENIZER", value_name = "PATH", help_heading = "Routing")]
    pub(crate) tokenizer: Option<PathBuf>,

    /// Seconds between two looks at an engine.
    #[arg(long, env = "MICROSERVING_HEARTBEAT_SECONDS", value_name = "SECONDS", default_value = "0.25",
          help_heading = "Health", value_parser = positive_seconds)]
    pub(crate) heartbeat_seconds: Duration,

    /// Seconds without a sign of life after which an engine gets no new requests.
    #[arg(long, env = "MICROSERVING_SUSPECT_SECONDS", value_name = "SECONDS", default_value = "1",
          help_heading = "Health", value_parser = positive_seconds)]
    pub(crate) suspect_seconds: Duration,

    /// Seconds without a sign of life after which an engine is given up: what runs there runs elsewhere.
    #[arg(long, env = "MICROSERVING_DEAD_SECONDS", value_name = "SECONDS", default_value = "3",
          help_heading = "Health", value_parser = positive_seconds)]
    pub(crate) dead_seconds: Duration,

    /// Seconds in which the share of an engine that is new or came back rises to its weight; 0 is at once.
    #[arg(long, env = "MICROSERVING_SLOW_START_SECONDS", value_name = "SECONDS", default_value = "10",
          help_heading = "Health", value_parser = seconds)]
    pub(crate) slow_start_seconds: Duration,

    /// Failures in a row after which an engine gets no new requests for a while; 0 is never.
    #[arg(
        long,
        env = "MICROSERVING_BREAKER_FAILURES",
        value_name = "N",
        default_value = "5",
        help_heading = "Health"
    )]
    pub(crate) breaker_failures: u32,

    /// Seconds after which one request may try such an engine again.
    #[arg(long, env = "MICROSERVING_BREAKER_COOLDOWN_SECONDS", value_name = "SECONDS", default_value = "5",
          help_heading = "Health", value_parser = positive_seconds)]
    pub(crate) breaker_cooldown_seconds: Duration,

    /// Address of the admin API. By default it is on the main address if that is a loopback one, and nowhere if not.
    #[arg(
        long,
        env = "MICROSERVING_ADMIN_LISTEN",
        value_name = "HOST:PORT",
        help_heading = "Administration"
    )]
    pub(crate) admin_listen: Option<String>,

    /// Bearer token of the admin API: 8 characters or more. Must be given where --admin-listen is not a loopback address.
    #[arg(
        long,
        env = "MICROSERVING_ADMIN_TOKEN",
        value_name = "TOKEN",
        hide_env_values = true,
        help_heading = "Administration"
    )]
    pub(crate) admin_token: Option<String>,

    /// File that holds the admin token; keeps it out of the process list.
    #[arg(
        long,
        env = "MICROSERVING_ADMIN_TOKEN_FILE",
        value_name = "PATH",
        conflicts_with = "admin_token",
        help_heading = "Administration"
    )]
    pub(crate) admin_token_file: Option<PathBuf>,
    /// Profile of engines that have none of their own, as `engined --calibrate` writes it. Without it their costs are learned from what
    /// they take.
    #[arg(long, env = "MICROSERVING_PROFILE", value_name = "FILE", help_heading = "Routing")]
    pub(crate) profile: Option<PathBuf>,

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

/// Rules as one option's value.
#[derive(Clone, Debug)]
pub(crate) struct Rules(pub(crate) Vec<Rule>);

fn rules(text: &str) -> Result<Rules, String> {
    rules_from_json(text).map(Rules).map_err(|error| error.message)
}

impl Daemon for Options {
    fn daemon(&self) -> &DaemonOptions {
        &self.daemon
    }
}
