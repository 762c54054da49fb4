//! What operators ask and change.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use microserving_protocol::{ApiError, Fields};
use serde_json::{Value, json};
use tracing::info;

use super::respond::{Failure, WholeBody};
use crate::{Health, Pattern, RouterService};

/// Returns the pattern in use and those there are.
pub(crate) async fn pattern(State(service): State<Arc<RouterService>>) -> Json<Value> {
    Json(shown(&service))
}

/// Changes the pattern for requests that come from now on.
pub(crate) async fn set_pattern(
    State(service): State<Arc<RouterService>>,
    WholeBody(body): WholeBody,
) -> Result<Json<Value>, Failure> {
    let next = read_pattern(Fields::parse(&body)?)?;
    let before = service
        .patterns
        .set(&next)
        .map_err(|error| ApiError::bad_request(error.field(), error.to_string()))?;
    service.metrics().pattern_changes.inc();
    info!(target: "audit", %before, after = %service.patterns.current(), "pattern changed");
    Ok(Json(shown(&service)))
}

/// Reads `{"name": …, parameter: value, …}`; a null is as good as absent, and so is the list that comes with `GET`.
fn read_pattern(mut fields: Fields) -> Result<Pattern, ApiError> {
    let mut pattern = Pattern::named(&fields.string("name")?);
    for (name, value) in fields.rest() {
        if name != "available" && !value.is_null() {
            pattern = pattern.with(&name, value);
        }
    }
    Ok(pattern)
}

fn shown(service: &RouterService) -> Value {
    let mut shown = service.patterns.current().to_json();
    shown["available"] = service.patterns.names().into();
    shown
}

/// Returns the engines as the router sees them.
pub(crate) async fn engines(State(service): State<Arc<RouterService>>) -> Json<Value> {
    let engines: Vec<Value> = service
        .cluster()
        .engines()
        .iter()
        .map(|engine| {
            let load = engine.load();
            let health = match engine.health() {
                Health::Ready => "ready",
                Health::NotReady => "not_ready",
                Health::Down => "down",
            };
            json!({
                "engine": engine.name(),
                "kind": engine.kind().name(),
                "wire": engine.calls().wire(),
                "role": engine.role().name(),
                "health": health,
                "models": engine.models().iter().map(|card| card.id.clone()).collect::<Vec<_>>(),
                "in_flight": engine.in_flight(),
                "load": {"requests": load.requests, "queued_tokens": load.queued_tokens},
                "state": engine.state(),
            })
        })
        .collect();
    Json(json!({"engines": engines}))
}
