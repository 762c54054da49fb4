//! Watching engines: a look at every heartbeat, and at once after a call failed.
//!
//! ```text
//!  answers ─▶ ready ──(no sign of life for `suspect`)──▶ suspect ──(for `dead`)──▶ down, and what runs there runs elsewhere
//!               │                                         │ answers, or a stream delivers
//!               ├── 503 not_ready or draining ─▶ not ready at once, and asked
//!               └── refused or reset ─▶ down at once      └─▶ ready
//! ```

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
use crate::{Engine, Health, ProfileSource, Thresholds};

/// Between two reports of its load.
const REPORTS: Duration = Duration::from_millis(500);

/// Watches one engine until it leaves the cluster or the router stops.
pub(crate) async fn watch(engine: Arc<Engine>, shared: Shared, stop: CancellationToken) {
    let mut last_report: Option<Instant> = None;
    loop {
        let thresholds = engine.thresholds();
        let look = look(&engine, &thresholds, &shared, &mut last_report);
        tokio::select! {
            () = stop.cancelled() => return,
            () = engine.left().cancelled() => return,
            () = look => {}
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = engine.left().cancelled() => return,
            () = engine.look.notified() => {}
            () = sleep(thresholds.heartbeat) => {}
        }
    }
}

/// Returns how long a look may take: until the engine's silence would mean something new.
fn patience(silence: Duration, thresholds: &Thresholds) -> Duration {
    let left = |bound: Duration| bound.checked_sub(silence).filter(|left| !left.is_zero());
    left(thresholds.suspect).or_else(|| left(thresholds.dead)).unwrap_or(thresholds.suspect)
}

/// Returns what an engine is that did not answer.
fn judge_silence(before: Health, silence: Duration, thresholds: &Thresholds) -> Health {
    match before {
        _ if silence >= thresholds.dead => Health::Down,
        Health::Ready | Health::Suspect if silence >= thresholds.suspect => Health::Suspect,
        // A stream of it delivered since.
        Health::Suspect => Health::Ready,
        before => before,
    }
}

async fn look(engine: &Engine, thresholds: &Thresholds, shared: &Shared, last_report: &mut Option<Instant>) {
    let cx = CallContext::within(patience(engine.silence(), thresholds));
    let answer = engine.calls().ready(&cx).await;
    let answered = matches!(answer, Ok(()) | Err(ClientError::Refused { .. }));
    if answered {
        engine.note_sign();
    }
    let health = match answer {
        Ok(()) => Health::Ready,
        Err(ClientError::Refused { .. }) => Health::NotReady,
        Err(ClientError::Timeout { .. }) => judge_silence(engine.health(), engine.silence(), thresholds),
        Err(_) => Health::Down,
    };
    if answered && health == Health::Ready {
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
        if health == Health::Ready {
            shared.placement.index().wake(engine.number());
        }
        match health {
            Health::Ready => info!(engine = engine.name(), role = engine.role().name(), "engine is ready"),
            Health::NotReady => warn!(engine = engine.name(), "engine is not ready"),
            Health::Suspect => warn!(engine = engine.name(), "engine gives no sign of life"),
            Health::Down => warn!(engine = engine.name(), "engine is down"),
        }
    }
    if health == Health::Down && engine.in_flight() > 0 && engine.silence() >= thresholds.dead {
        warn!(engine = engine.name(), in_flight = engine.in_flight(), "engine is given up");
        engine.give_up();
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
