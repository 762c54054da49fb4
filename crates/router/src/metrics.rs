//! What `/metrics` shows. One registry a service; nothing global.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use microserving_client::ClientError;
use microserving_cost::Phase;
use microserving_protocol::{ServingStats, Usage};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::index::IndexMetrics;
use crate::{BreakerState, Cluster, Health, PrefixIndex};

/// From a cache hit on a small model to a long prompt in a long queue.
const FIRST_TOKEN_BUCKETS: [f64; 14] =
    [0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
/// Around the speeds that readers notice.
const TOKEN_BUCKETS: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0];
const REQUEST_BUCKETS: [f64; 13] =
    [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    pattern: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PatternLabel {
    pattern: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    call: String,
    outcome: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProgramFailureLabels {
    program: String,
    reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabel {
    phase: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PredictionLabels {
    engine: String,
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClassLabel {
    class: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EngineLabel {
    engine: String,
}

type HistogramFamily = Family<PatternLabel, Histogram, fn() -> Histogram>;

/// What of a pattern is counted for every request, looked up in the families once: a label is a string to make and to hash each time.
#[derive(Debug, Default)]
struct OfPattern {
    first_token: OnceLock<Histogram>,
    per_output_token: OnceLock<Histogram>,
    request_seconds: OnceLock<Histogram>,
    succeeded: OnceLock<Counter>,
}

/// What prompt tokens are counted by, in the order of [`Metrics::answer`].
const PHASES: [&str; 5] = ["decode_matched", "decode_computed", "prefill_cached", "prefill_computed", "sent"];

/// The router's metrics; cheap to share.
#[derive(Debug)]
pub struct Metrics {
    patterns: RwLock<HashMap<String, Arc<OfPattern>>>,
    succeeded_calls: RwLock<HashMap<String, Counter>>,
    phases: [Counter; 5],
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    pub(crate) in_flight: Gauge,
    first_token: HistogramFamily,
    per_output_token: HistogramFamily,
    request_seconds: HistogramFamily,
    calls: Family<CallLabels, Counter>,
    retries: Family<ReasonLabel, Counter>,
    /// Choices that went on with what they had on another engine.
    pub(crate) resumed: Counter,
    recovery: Histogram,
    moves: Family<OutcomeLabel, Counter>,
    move_pause: Histogram,
    context_copies: Family<OutcomeLabel, Counter>,
    context_bytes: Counter,
    context_tokens: Counter,
    pub(crate) aborts: Counter,
    output_tokens: Counter,
    kv_bytes: Counter,
    exposed_transfer: Counter<f64, AtomicU64>,
    pub(crate) pattern_changes: Counter,
    program_failures: Family<ProgramFailureLabels, Counter>,
    engine_ready: Family<EngineLabel, Gauge>,
    engine_in_flight: Family<EngineLabel, Gauge>,
    engine_breaker: Family<EngineLabel, Gauge>,
    turned_away: Family<ReasonLabel, Counter>,
    waiting: Family<ClassLabel, Gauge>,
    retries_refused: Counter,
    prediction_ratio: Family<PredictionLabels, Gauge<f64, AtomicU64>>,
    index: IndexMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Makes metrics that have counted nothing.
    #[must_use]
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("microserving_router");
        let requests = Family::default();
        registry.register(
            "requests",
            "Requests that generate, by pattern and status; 499 is a client that went away",
            requests.clone(),
        );
        let in_flight = Gauge::default();
        registry.register("requests_in_flight", "Requests being served", in_flight.clone());
        let mut histogram = |name: &str, help: &str, make: fn() -> Histogram| {
            let family = HistogramFamily::new_with_constructor(make);
            registry.register_with_unit(name, help, Unit::Seconds, family.clone());
            family
        };
        let first_token = histogram(
            "time_to_first_token",
            "From a request's arrival to its first token, retries included",
            || Histogram::new(FIRST_TOKEN_BUCKETS),
        );
        let per_output_token = histogram(
            "time_per_output_token",
            "Mean time between a request's output tokens, the first left out",
            || Histogram::new(TOKEN_BUCKETS),
        );
        let request_seconds = histogram("request", "From a request's arrival to its last token", || {
            Histogram::new(REQUEST_BUCKETS)
        });
        let calls = Family::default();
        registry.register("engine_calls", "Calls to engines, by call and outcome", calls.clone());
        let retries = Family::default();
        registry.register(
            "retries",
            "Attempts that failed, by reason, and were made again; no_budget is one that was not",
            retries.clone(),
        );
        let resumed = Counter::default();
        registry.register(
            "resumed",
            "Choices that went on elsewhere after their first token, because their engine was lost",
            resumed.clone(),
        );
        let recovery = Histogram::new(FIRST_TOKEN_BUCKETS);
        registry.register_with_unit(
            "recovery",
            "From the loss of an engine to the next token of a request that it was serving",
            Unit::Seconds,
            recovery.clone(),
        );
        let moves = Family::default();
        registry.register("moves", "Running requests moved to another engine, by outcome", moves.clone());
        let move_pause = Histogram::new(FIRST_TOKEN_BUCKETS);
        registry.register_with_unit(
            "move_pause",
            "From the pause of a request that moves to its first token on the other engine",
            Unit::Seconds,
            move_pause.clone(),
        );
        let context_copies = Family::default();
        registry.register(
            "context_copies",
            "Contexts that the router copied by itself, by outcome",
            context_copies.clone(),
        );
        let context_bytes = Counter::default();
        registry.register_with_unit(
            "context_copied",
            "KV of contexts that the router copied by itself",
            Unit::Bytes,
            context_bytes.clone(),
        );
        let context_tokens = Counter::default();
        registry.register(
            "context_copied_tokens",
            "Tokens of contexts that the router copied by itself",
            context_tokens.clone(),
        );
        let aborts = Counter::default();
        registry.register("aborts", "Aborts sent for requests given up", aborts.clone());
        let prompt_tokens = Family::<PhaseLabel, Counter>::default();
        let phases =
            PHASES.map(|phase| prompt_tokens.get_or_create(&PhaseLabel { phase: phase.to_owned() }).clone());
        registry.register(
            "prompt_tokens",
            "Prompt tokens by what became of them: matched and computed on the decoding engine, cached and computed on the prefilling one, sent",
            prompt_tokens,
        );
        let output_tokens = Counter::default();
        registry.register("output_tokens", "Tokens generated", output_tokens.clone());
        let kv_bytes = Counter::default();
        registry.register_with_unit("kv_sent", "KV moved between engines", Unit::Bytes, kv_bytes.clone());
        let exposed_transfer = Counter::default();
        registry.register_with_unit(
            "exposed_transfer",
            "Time spent moving KV that no computing hid",
            Unit::Seconds,
            exposed_transfer.clone(),
        );
        let pattern_changes = Counter::default();
        registry.register("pattern_changes", "Changes of the pattern in use", pattern_changes.clone());
        let program_failures = Family::default();
        registry.register(
            "program_failures",
            "Requests that a program failed by its own fault and its fallback served, by program and reason",
            program_failures.clone(),
        );
        let engine_ready = Family::default();
        registry.register("engine_ready", "Whether an engine gets requests", engine_ready.clone());
        let engine_in_flight = Family::default();
        registry.register(
            "engine_in_flight",
            "This router's requests on an engine",
            engine_in_flight.clone(),
        );
        let prediction_ratio = Family::default();
        registry.register(
            "prediction_ratio",
            "What phases took lately on an engine, over what its profile says",
            prediction_ratio.clone(),
        );
        let turned_away = Family::default();
        registry.register(
            "turned_away",
            "Requests answered 429: too many inside or in their queue, or too late a first token predicted",
            turned_away.clone(),
        );
        let waiting = Family::default();
        registry.register("requests_waiting", "Requests that wait to be served, by class", waiting.clone());
        let retries_refused = Counter::default();
        registry.register(
            "retries_refused",
            "Attempts that were not made again because the retry budget was spent",
            retries_refused.clone(),
        );
        let engine_breaker = Family::default();
        registry.register(
            "engine_breaker_open",
            "Whether failures in a row keep requests away from an engine",
            engine_breaker.clone(),
        );
        let index = IndexMetrics::register(&mut registry);
        Self {
            patterns: RwLock::default(),
            succeeded_calls: RwLock::default(),
            phases,
            registry,
            requests,
            in_flight,
            first_token,
            per_output_token,
            request_seconds,
            calls,
            retries,
            resumed,
            recovery,
            moves,
            move_pause,
            context_copies,
            context_bytes,
            context_tokens,
            aborts,
            output_tokens,
            kv_bytes,
            exposed_transfer,
            pattern_changes,
            program_failures,
            engine_ready,
            engine_in_flight,
            engine_breaker,
            turned_away,
            waiting,
            retries_refused,
            prediction_ratio,
            index,
        }
    }

    pub(crate) fn request(&self, pattern: &str, status: u16) {
        let counter =
            || self.requests.get_or_create(&RequestLabels { pattern: pattern.to_owned(), status }).clone();
        if status == 200 {
            self.of(pattern).succeeded.get_or_init(counter).inc();
        } else {
            counter().inc();
        }
    }

    pub(crate) fn first_token(&self, pattern: &str, after: Duration) {
        let first_token = || self.first_token.get_or_create(&label(pattern)).clone();
        self.of(pattern).first_token.get_or_init(first_token).observe(after.as_secs_f64());
    }

    /// Notes a complete answer: `decoding` is the time from its first to its last chunk.
    pub(crate) fn answer(
        &self,
        pattern: &str,
        whole: Duration,
        decoding: Duration,
        usage: &Usage,
        stats: &ServingStats,
    ) {
        let of = self.of(pattern);
        let request_seconds = || self.request_seconds.get_or_create(&label(pattern)).clone();
        of.request_seconds.get_or_init(request_seconds).observe(whole.as_secs_f64());
        if usage.completion_tokens > 1 {
            let mean = decoding.as_secs_f64() / f64::from(usage.completion_tokens - 1);
            let per_output_token = || self.per_output_token.get_or_create(&label(pattern)).clone();
            of.per_output_token.get_or_init(per_output_token).observe(mean);
        }
        self.output_tokens.inc_by(usage.completion_tokens.into());
        let tokens = [
            stats.matched_tokens,
            stats.computed_tokens,
            stats.prefill_cached_tokens,
            stats.prefill_computed_tokens,
            stats.sent_tokens,
        ];
        for (counter, tokens) in self.phases.iter().zip(tokens) {
            counter.inc_by(tokens.into());
        }
        self.kv_bytes.inc_by(stats.sent_bytes);
        self.exposed_transfer.inc_by(stats.exposed_transfer_seconds.max(0.0));
    }

    fn of(&self, pattern: &str) -> Arc<OfPattern> {
        let known = self.patterns.read().unwrap_or_else(PoisonError::into_inner).get(pattern).cloned();
        known.unwrap_or_else(|| {
            let mut patterns = self.patterns.write().unwrap_or_else(PoisonError::into_inner);
            patterns.entry(pattern.to_owned()).or_default().clone()
        })
    }

    pub(crate) fn call(&self, call: &str, error: Option<&ClientError>) {
        if error.is_none() {
            let calls = self.succeeded_calls.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(counter) = calls.get(call) {
                counter.inc();
                return;
            }
        }
        let outcome = match error {
            None => "ok".to_owned(),
            Some(ClientError::Unreachable { .. }) => "unreachable".to_owned(),
            Some(ClientError::Lost { .. }) => "lost".to_owned(),
            Some(ClientError::Timeout { .. }) => "timeout".to_owned(),
            Some(ClientError::Unsupported { .. }) => "unsupported".to_owned(),
            Some(ClientError::Refused { error, .. }) => error.status.to_string(),
            Some(_) => "malformed".to_owned(),
        };
        let counter = self.calls.get_or_create(&CallLabels { call: call.to_owned(), outcome }).clone();
        counter.inc();
        if error.is_none() {
            let mut calls = self.succeeded_calls.write().unwrap_or_else(PoisonError::into_inner);
            calls.insert(call.to_owned(), counter);
        }
    }

    pub(crate) fn retry(&self, reason: &str) {
        self.retries.get_or_create(&ReasonLabel { reason: reason.to_owned() }).inc();
    }

    pub(crate) fn turned_away(&self, reason: &str) {
        self.turned_away.get_or_create(&ReasonLabel { reason: reason.to_owned() }).inc();
    }

    pub(crate) fn retry_refused(&self) {
        self.retries_refused.inc();
    }

    /// Notes how many wait in each class.
    pub(crate) fn set_waiting(&self, waiting: impl Iterator<Item = (&'static str, usize)>) {
        for (class, number) in waiting {
            let label = ClassLabel { class: class.to_owned() };
            self.waiting.get_or_create(&label).set(i64::try_from(number).unwrap_or(i64::MAX));
        }
    }

    /// Shows an engine that left no longer.
    pub(crate) fn forget_engine(&self, name: &str) {
        let label = EngineLabel { engine: name.to_owned() };
        self.engine_ready.remove(&label);
        self.engine_in_flight.remove(&label);
        self.engine_breaker.remove(&label);
    }

    pub(crate) fn program_failure(&self, program: &str, reason: &str) {
        let labels = ProgramFailureLabels { program: program.to_owned(), reason: reason.to_owned() };
        self.program_failures.get_or_create(&labels).inc();
    }

    /// Notes that a request goes on, so long after its engine was lost.
    pub(crate) fn recovered(&self, after: Duration) {
        self.recovery.observe(after.as_secs_f64());
    }

    /// Notes how a move ended.
    pub(crate) fn moved(&self, outcome: &str) {
        self.moves.get_or_create(&OutcomeLabel { outcome: outcome.to_owned() }).inc();
    }

    /// Notes a copy of a context: what was sent, tokens and bytes, or that it failed.
    pub(crate) fn context_copied(&self, sent: Option<(u32, u64)>) {
        let outcome = if sent.is_some() { "ok" } else { "failed" };
        self.context_copies.get_or_create(&OutcomeLabel { outcome: outcome.to_owned() }).inc();
        if let Some((tokens, bytes)) = sent {
            self.context_tokens.inc_by(tokens.into());
            self.context_bytes.inc_by(bytes);
        }
    }

    /// Notes how long a request that moved stood still.
    pub(crate) fn paused(&self, time: Duration) {
        self.move_pause.observe(time.as_secs_f64());
    }

    /// Notes how many tokens an engine was said to hold, and how many it held.
    pub(crate) fn hint(&self, hinted: u32, held: u32) {
        self.index.hint(hinted, held);
    }

    /// Renders everything in OpenMetrics text.
    #[must_use]
    pub fn render(&self, cluster: &Cluster, index: &PrefixIndex) -> String {
        self.index.set(&index.stats());
        for engine in cluster.engines().iter() {
            let label = EngineLabel { engine: engine.name().to_owned() };
            let ready = i64::from(engine.health() == Health::Ready);
            self.engine_ready.get_or_create(&label).set(ready);
            self.engine_in_flight.get_or_create(&label).set(engine.in_flight().into());
            let open = i64::from(engine.breaker() != BreakerState::Closed);
            self.engine_breaker.get_or_create(&label).set(open);
            let outlook = engine.outlook();
            for phase in Phase::ALL {
                let labels = PredictionLabels { engine: engine.name().to_owned(), phase: phase.name() };
                self.prediction_ratio.get_or_create(&labels).set(outlook.correction(phase));
            }
        }
        let mut text = String::new();
        if encode(&mut text, &self.registry).is_err() {
            let _ = writeln!(text, "# a metric could not be encoded");
        }
        text
    }
}

fn label(pattern: &str) -> PatternLabel {
    PatternLabel { pattern: pattern.to_owned() }
}

/// One request in the gauge and the counters: whatever way it ends, it is counted once.
#[derive(Debug)]
pub(crate) struct RequestRecord {
    metrics: Arc<Metrics>,
    pattern: String,
    /// What a client that goes away is counted as.
    status: u16,
}

impl RequestRecord {
    pub(crate) fn new(metrics: Arc<Metrics>, pattern: &str) -> Self {
        metrics.in_flight.inc();
        Self { metrics, pattern: pattern.to_owned(), status: 499 }
    }

    /// Says which pattern it is, once that is decided.
    pub(crate) fn set_pattern(&mut self, pattern: &str) {
        if self.pattern != pattern {
            pattern.clone_into(&mut self.pattern);
        }
    }

    pub(crate) fn set_status(&mut self, status: u16) {
        self.status = status;
    }

    pub(crate) fn pattern(&self) -> &str {
        &self.pattern
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        self.metrics.in_flight.dec();
        self.metrics.request(&self.pattern, self.status);
    }
}
