//! What `/metrics` shows of the index.

use std::sync::atomic::Ordering;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::IndexStats;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabel {
    source: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HintLabel {
    hint: &'static str,
}

/// Gauges and counters of the index, copied from it when somebody asks, and the record of its hints.
#[derive(Debug)]
pub(crate) struct IndexMetrics {
    pages: Family<SourceLabel, Gauge>,
    holdings: Gauge,
    bytes: Gauge,
    events: Counter,
    snapshots: Counter,
    gaps: Counter,
    evicted: Counter,
    hints: Family<HintLabel, Counter>,
}

impl IndexMetrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            pages: Family::default(),
            holdings: Gauge::default(),
            bytes: Gauge::default(),
            events: Counter::default(),
            snapshots: Counter::default(),
            gaps: Counter::default(),
            evicted: Counter::default(),
            hints: Family::default(),
        };
        registry.register(
            "index_pages",
            "Pages in the index of held prefixes, by whether engines reported them or they were routed",
            metrics.pages.clone(),
        );
        registry.register(
            "index_holdings",
            "Reported pages, counted once for each engine that holds one",
            metrics.holdings.clone(),
        );
        registry.register_with_unit("index", "Memory of the index", Unit::Bytes, metrics.bytes.clone());
        registry.register(
            "index_events",
            "Cache events of engines applied, snapshots included",
            metrics.events.clone(),
        );
        registry.register("index_snapshots", "Snapshots applied", metrics.snapshots.clone());
        registry.register(
            "index_gaps",
            "Cache events that did not follow the one before, so that a snapshot was asked for",
            metrics.gaps.clone(),
        );
        registry.register(
            "index_evicted_pages",
            "Pages dropped to stay within the memory allowed",
            metrics.evicted.clone(),
        );
        registry.register(
            "index_hint_tokens",
            "Prompt tokens that the index said the chosen engine holds (hinted), that it did hold (held), and both (right)",
            metrics.hints.clone(),
        );
        metrics
    }

    pub(crate) fn set(&self, stats: &IndexStats) {
        let gauge = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let pages = |source| self.pages.get_or_create(&SourceLabel { source });
        pages("reported").set(gauge(stats.reported_pages));
        pages("routed").set(gauge(stats.routed_pages));
        self.holdings.set(gauge(stats.reported_holdings));
        self.bytes.set(gauge(stats.bytes));
        for (counter, count) in [
            (&self.events, stats.events),
            (&self.snapshots, stats.snapshots),
            (&self.gaps, stats.gaps),
            (&self.evicted, stats.evicted_pages),
        ] {
            counter.inner().store(count, Ordering::Relaxed);
        }
    }

    pub(crate) fn hint(&self, hinted: u32, held: u32) {
        for (hint, tokens) in [("hinted", hinted), ("held", held), ("right", hinted.min(held))] {
            self.hints.get_or_create(&HintLabel { hint }).inc_by(tokens.into());
        }
    }
}
