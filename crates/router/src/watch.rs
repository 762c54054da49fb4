//! Watching engines: a look every quarter of a second, and at once after a call failed.

use std::sync::Arc;
use std::time::Duration;

use microserving_client::{CallContext, ClientError};
use microserving_cost::Profile;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::attempts::describe;
use crate::ctx::Shared;
use crate::placement::Placement;
use crate::predict::Traffic;
use crate::{Engine, Health, ProfileSource};

/// Between two looks at an engine.
const INTERVAL: Duration = Duration::from_millis(250);
/// An engine that says nothing for so long gets no requests.
const PATIENCE: Duration = Duration::from_secs(1);
/// Between two reports of its load.
const REPORTS: Duration = Duration::from_millis(500);

/// Watches one engine until it leaves the cluster or the router stops.
pub(crate) async fn watch(engine: Arc<Engine>, shared: Shared, stop: CancellationToken) {
    let mut last_report: Option<Instant> = None;
    loop {
        let look = look(&engine, &shared, &mut last_report);
        tokio::select! {
            () = stop.cancelled() => return,
            () = engine.left().cancelled() => return,
            () = look => {}
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = engine.left().cancelled() => return,
            () = engine.look.notified() => {}
            () = sleep(INTERVAL) => {}
        }
    }
}

async fn look(engine: &Engine, shared: &Shared, last_report: &mut Option<Instant>) {
    let cx = CallContext::within(PATIENCE);
    let health = match engine.calls().ready(&cx).await {
        Ok(()) => Health::Ready,
        Err(ClientError::Refused { .. } | ClientError::Timeout { .. }) => Health::NotReady,
        Err(_) => Health::Down,
    };
    if health == Health::Ready {
        let due = last_report.is_none_or(|at| at.elapsed() >= REPORTS);
        if (due || engine.health() != Health::Ready) && report(engine, &shared.placement, &cx).await {
            *last_report = Some(Instant::now());
        }
        if engine.health() != Health::Ready {
            fetch_profile(engine, &shared.traffic, &cx).await;
        }
        if engine.models().is_empty() {
            // Without its models nobody can know what to send there.
            engine.set_health(Health::NotReady);
            return;
        }
        if let Some((model, rival)) = shared.cluster.rival(engine) {
            if engine.set_health(Health::NotReady) {
                warn!(
                    engine = engine.name(),
                    kind = engine.kind().name(),
                    model,
                    rival = rival.name(),
                    "engine is not used: its model has the name of one on an engine of another kind; say #model= if they are the same"
                );
            }
            return;
        }
    }
    if engine.set_health(health) {
        match health {
            Health::Ready => info!(engine = engine.name(), role = engine.role().name(), "engine is ready"),
            Health::NotReady => warn!(engine = engine.name(), "engine is not ready"),
            Health::Down => warn!(engine = engine.name(), "engine is down"),
        }
    }
}

/// Fetches what the engine says it takes. An engine may have been calibrated since it was ready last.
async fn fetch_profile(engine: &Engine, traffic: &Traffic, cx: &CallContext) {
    let profile = match engine.calls().profile(cx).await {
        Ok(None) => None,
        Ok(Some(value)) => match Profile::from_json(value.to_string().as_bytes()) {
            Ok(profile) => Some(Arc::new(profile)),
            Err(error) => {
                warn!(engine = engine.name(), error = %describe(&error), "engine has a profile that cannot be used");
                None
            }
        },
        Err(error) => {
            warn!(engine = engine.name(), %error, "engine does not tell its profile");
            None
        }
    };
    let (profile, source) = match profile {
        Some(profile) => (Some(profile), ProfileSource::Engine),
        None => (traffic.fallback().cloned(), ProfileSource::Router),
    };
    engine.costs.set_profile(profile, source);
}

/// Fetches what the engine tells of itself; says whether it did.
async fn report(engine: &Engine, placement: &Placement, cx: &CallContext) -> bool {
    if engine.health() != Health::Ready || engine.models().is_empty() {
        match engine.calls().models(cx).await {
            Ok(models) => engine.set_models(models.data),
            Err(error) => {
                warn!(engine = engine.name(), %error, "engine does not tell its models");
                return false;
            }
        }
    }
    if !engine.kind().is_ours() {
        // It has no state to report; our own count of its load must do.
        return true;
    }
    let before = engine.own_load();
    match engine.calls().state(cx).await {
        Ok(state) => {
            if engine.set_state(state, before) {
                info!(engine = engine.name(), "engine was restarted");
                placement.forget(engine.number());
                // Another boot may be another version.
                engine.set_cannot_relay(false);
            }
            true
        }
        // An engine of another make has no state to report; our own count of its load must do.
        Err(ClientError::Refused { error, .. }) if error.status == 404 => true,
        Err(_) => false,
    }
}
