//! What `/metrics` shows, each definition with its help text and buckets. One registry an instance; nothing global.

use std::fmt::{self, Write as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use microserving_engine::{EngineInfo, EngineState};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

/// From a cache hit on a small model to a long prompt in a long queue.
const FIRST_TOKEN_BUCKETS: [f64; 16] =
    [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];
/// Around the speeds that readers notice.
const TOKEN_BUCKETS: [f64; 14] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0];
const REQUEST_BUCKETS: [f64; 14] =
    [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0];
const REMOTE_SEND_BUCKETS: [f64; 12] = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabels {
    route: String,
    status: u16,
}

/// An engine's metrics; cheap to share.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RouteLabels, Counter>,
    first_token: Histogram,
    per_output_token: Histogram,
    generation: Histogram,
    remote_send: Histogram,
    state: Arc<StateCollector>,
}

impl Metrics {
    pub(crate) fn new(info: &EngineInfo) -> Self {
        let mut registry = Registry::with_prefix("microserving");
        let requests = Family::default();
        registry.register("requests", "HTTP requests answered, by route and status", requests.clone());
        let mut histogram = |name: &str, help: &str, buckets: &[f64]| {
            let histogram = Histogram::new(buckets.iter().copied());
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
            histogram
        };
        let first_token = histogram(
            "time_to_first_token",
            "From the arrival of a generating request to its first token",
            &FIRST_TOKEN_BUCKETS,
        );
        let per_output_token = histogram(
            "time_per_output_token",
            "Mean time between the output tokens of a request, the first left out",
            &TOKEN_BUCKETS,
        );
        let generation =
            histogram("generation", "From the arrival of a generating request to its end", &REQUEST_BUCKETS);
        let remote_send = histogram(
            "remote_send",
            "From the arrival of a remote_send to its acknowledgement, computing included",
            &REMOTE_SEND_BUCKETS,
        );
        registry.register("engine", "What this engine is", engine_info(info));
        let state = Arc::new(StateCollector::default());
        registry.register_collector(Box::new(Arc::clone(&state)));
        Self { registry, requests, first_token, per_output_token, generation, remote_send, state }
    }

    pub(crate) fn request(&self, route: &str, status: u16) {
        self.requests.get_or_create(&RouteLabels { route: route.to_owned(), status }).inc();
    }

    pub(crate) fn first_token(&self, after: Duration) {
        self.first_token.observe(after.as_secs_f64());
    }

    /// Notes a finished generation: `decoding` is the time from the first to the last of `num_tokens` tokens of a choice.
    pub(crate) fn generation(&self, whole: Duration, decoding: Duration, num_tokens: u32) {
        self.generation.observe(whole.as_secs_f64());
        if num_tokens > 1 {
            self.per_output_token.observe(decoding.as_secs_f64() / f64::from(num_tokens - 1));
        }
    }

    pub(crate) fn remote_send(&self, whole: Duration) {
        self.remote_send.observe(whole.as_secs_f64());
    }

    /// Returns where the engine's own counters are put to be shown.
    pub(crate) fn collector(&self) -> Arc<StateCollector> {
        Arc::clone(&self.state)
    }

    /// Renders the registry in OpenMetrics text.
    pub(crate) fn render(&self) -> String {
        let mut text = String::new();
        if encode(&mut text, &self.registry).is_err() {
            // Writing to a string fails only if a metric's own encoding does; say so in a comment line.
            let _ = writeln!(text, "# a metric could not be encoded");
        }
        text
    }
}

fn engine_info(info: &EngineInfo) -> Info<Vec<(&'static str, String)>> {
    let layout = &info.executor.layout;
    Info::new(vec![
        ("engine_id", info.engine_id.to_string()),
        ("model", info.executor.model.clone()),
        ("numeric_mode", layout.numeric_mode.clone()),
        ("kv_dtype", layout.dtype.to_string()),
        ("transport", info.transport.to_owned()),
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
    ])
}

/// Shows the engine's own counters, which it keeps itself.
#[derive(Debug, Default)]
pub(crate) struct StateCollector {
    latest: Mutex<Option<EngineState>>,
}

impl StateCollector {
    pub(crate) fn show(&self, state: EngineState) {
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(state);
    }
}

impl Collector for StateCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(state) = self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone() else {
            return Ok(());
        };
        let mut out = Out { encoder };
        out.gauges(
            "sequences",
            "Live sequences by state",
            "state",
            &[
                ("waiting", state.waiting.into()),
                ("running", state.running.into()),
                ("receiving", state.receiving.into()),
                ("sending", state.sending.into()),
            ],
        )?;
        let pages = &state.pages;
        out.gauges(
            "kv_pages",
            "Pages of the KV region by state",
            "state",
            &[
                ("free", pages.free.into()),
                ("reserved", pages.reserved.into()),
                ("owned", pages.owned.into()),
                ("cached", pages.cached.into()),
                ("quarantined", pages.quarantined.into()),
            ],
        )?;
        let queued = i64::try_from(state.queued_prefill_tokens).unwrap_or(i64::MAX);
        out.gauge("queued_prefill_tokens", "Prefill tokens not yet computed", queued)?;
        let counters = &state.counters;
        out.counter("steps", "Steps run", counters.steps)?;
        out.counter("prefill_tokens", "Prompt tokens computed", counters.prefill_tokens)?;
        out.counter("decode_tokens", "Tokens sampled", counters.decode_tokens)?;
        out.counter(
            "prefix_lookup_tokens",
            "Prompt tokens looked up in the context cache",
            counters.lookup_tokens,
        )?;
        out.counter(
            "prefix_matched_tokens",
            "Prompt tokens found in the context cache",
            counters.matched_tokens,
        )?;
        out.counter("evicted_pages", "Pages evicted from the context cache", counters.evicted_pages)?;
        out.counter(
            "preemptions",
            "Sequences preempted for want of pages or of a device",
            counters.preemptions,
        )?;
        out.counter("leases_expired", "Leases that ran out", counters.leases_expired)?;
        out.counter("transfers_lost", "Transfers given up or corrupt on arrival", counters.transfers_lost)?;
        out.counter(
            "aborted_sequences",
            "Sequences given up by a caller or its going away",
            counters.aborted,
        )?;
        out.counter("transfer_sent_bytes", "KV bytes sent", counters.bytes_sent)?;
        out.counter("transfer_received_bytes", "KV bytes received", counters.bytes_received)?;
        out.seconds("transfer_seconds", "Time spent sending KV", counters.transfer_micros)?;
        out.seconds(
            "exposed_transfer_seconds",
            "Time spent sending KV that no computing hid",
            counters.exposed_transfer_micros,
        )?;
        out.counter("devices_lost", "Devices that were lost and had to be replaced", counters.devices_lost)
    }
}

struct Out<'a> {
    encoder: DescriptorEncoder<'a>,
}

impl Out<'_> {
    fn gauges(&mut self, name: &str, help: &str, label: &'static str, values: &[(&str, i64)]) -> fmt::Result {
        let kind = ConstGauge::new(0_i64).metric_type();
        let mut metric = self.encoder.encode_descriptor(name, help, None, kind)?;
        for (value_of_label, value) in values {
            ConstGauge::new(*value).encode(metric.encode_family(&[(label, *value_of_label)])?)?;
        }
        Ok(())
    }

    fn gauge(&mut self, name: &str, help: &str, value: i64) -> fmt::Result {
        let gauge = ConstGauge::new(value);
        gauge.encode(self.encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let counter = ConstCounter::new(value);
        counter.encode(self.encoder.encode_descriptor(name, help, None, counter.metric_type())?)
    }

    fn seconds(&mut self, name: &str, help: &str, micros: u64) -> fmt::Result {
        let counter = ConstCounter::new(Duration::from_micros(micros).as_secs_f64());
        counter.encode(self.encoder.encode_descriptor(name, help, None, counter.metric_type())?)
    }
}
