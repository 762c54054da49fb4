//! `/admin/v1/engines`.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use microserving_protocol::{ApiError, Fields};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Write, answer, shown};
use crate::config::EngineEntry;
use crate::control::Change;
use crate::http::respond::{Failure, WholeBody};
use crate::{Engine, RouterService};

type Id = Result<Path<String>, PathRejection>;

pub(super) async fn list(State(service): State<Arc<RouterService>>) -> Response {
    let engines: Vec<Value> = service.cluster().engines().iter().map(|engine| show(engine)).collect();
    shown(&service, json!({"engines": engines}))
}

pub(super) async fn one(State(service): State<Arc<RouterService>>, id: Id) -> Result<Response, Failure> {
    let engine = service.member(number(id)?)?;
    Ok(shown(&service, show(&engine)))
}

pub(super) async fn add(
    State(service): State<Arc<RouterService>>,
    mut write: Write,
    WholeBody(body): WholeBody,
) -> Result<Response, Failure> {
    let mut fields = Fields::parse(&body)?;
    write.expect_revision_of(&mut fields)?;
    let entry = EngineEntry::read(fields)?;
    let mut before = Vec::new();
    let revision = service.configure(&write.change(format!("add engine {}", entry.url)), |config| {
        before = config.engines.iter().map(|known| known.url.clone()).collect();
        config.engines.push(entry);
        Ok(())
    });
    // In the document it is the last of many; in this body it is the only one.
    let field = format!("engines[{}].", before.len());
    let revision = revision.map_err(|mut error| {
        error.message = error.message.replace(&field, "");
        error.param = error.param.map(|param| param.replace(&field, ""));
        error
    })?;
    if write.dry_run {
        return Ok(answer(StatusCode::OK, revision, json!({"dry_run": true})));
    }
    let engines = service.cluster().engines();
    let joined = engines.iter().find(|engine| !before.iter().any(|known| known == engine.address()));
    let body = joined.map_or_else(|| json!({}), |engine| show(engine));
    Ok(answer(StatusCode::CREATED, revision, body))
}

pub(super) async fn change(
    State(service): State<Arc<RouterService>>,
    id: Id,
    mut write: Write,
    WholeBody(body): WholeBody,
) -> Result<Response, Failure> {
    let engine = service.member(number(id)?)?;
    let mut fields = Fields::parse(&body)?;
    write.expect_revision_of(&mut fields)?;
    if fields.has("draining") {
        let message = "draining is changed by POST to drain and undrain";
        return Err(ApiError::bad_request("draining", message).into());
    }
    let change = write.change(format!("change engine {}", engine.name()));
    edit(&service, &engine, &change, |entry| entry.change(fields, "an engine that can change"))
}

pub(super) async fn drain(
    State(service): State<Arc<RouterService>>,
    id: Id,
    write: Write,
) -> Result<Response, Failure> {
    set_draining(&service, id, &write, true)
}

pub(super) async fn undrain(
    State(service): State<Arc<RouterService>>,
    id: Id,
    write: Write,
) -> Result<Response, Failure> {
    set_draining(&service, id, &write, false)
}

pub(super) async fn remove(
    State(service): State<Arc<RouterService>>,
    id: Id,
    write: Write,
) -> Result<Response, Failure> {
    let engine = service.member(number(id)?)?;
    let change = write.change(format!("remove engine {}", engine.name()));
    let was_draining = engine.is_draining();
    let revision = service.configure(&change, |config| {
        // First no new ones, then the look at those there are.
        engine.drain();
        let in_flight = engine.in_flight();
        if in_flight > 0 && !write.force {
            return Err(service.busy(&engine, in_flight));
        }
        config.engines.retain(|entry| entry.url != engine.address());
        Ok(())
    });
    if !was_draining && (revision.is_err() || write.dry_run) {
        engine.undrain();
    }
    Ok(answer(StatusCode::OK, revision?, json!({"removed": engine.number(), "dry_run": write.dry_run})))
}

fn set_draining(service: &RouterService, id: Id, write: &Write, draining: bool) -> Result<Response, Failure> {
    let engine = service.member(number(id)?)?;
    let verb = if draining { "drain" } else { "undrain" };
    let change = write.change(format!("{verb} engine {}", engine.name()));
    edit(service, &engine, &change, |entry| {
        entry.is_draining = draining;
        Ok(())
    })
}

fn edit(
    service: &RouterService,
    engine: &Arc<Engine>,
    change: &Change,
    edit: impl FnOnce(&mut EngineEntry) -> Result<(), ApiError>,
) -> Result<Response, Failure> {
    let revision = service.configure(change, |config| {
        let entry = config.engines.iter_mut().find(|entry| entry.url == engine.address());
        edit(entry.ok_or_else(|| ApiError::not_found("the engine has left").with_param("id"))?)
    })?;
    let mut body = show(engine);
    if change.dry_run {
        body["dry_run"] = true.into();
    }
    Ok(answer(StatusCode::OK, revision, body))
}

fn number(id: Id) -> Result<u32, ApiError> {
    let bad = |what: String| ApiError::bad_request("id", what);
    let Path(id) = id.map_err(|rejection| bad(rejection.body_text()))?;
    id.parse().map_err(|_| bad(format!("id is {id:?}, must be an engine's number")))
}

/// Shows an engine with all that is known of it.
pub(super) fn show(engine: &Engine) -> Value {
    let load = engine.load();
    json!({
        "id": engine.number(),
        "engine": engine.name(),
        "url": engine.address(),
        "kind": engine.kind().name(),
        "wire": engine.calls().wire(),
        "role": engine.role().name(),
        "weight": engine.weight(),
        "effective_weight": engine.effective_weight(Instant::now()),
        "draining": engine.is_draining(),
        "health": engine.health().name(),
        "silence_seconds": engine.silence().as_secs_f64(),
        "breaker": engine.breaker().name(),
        "takes_requests": engine.takes_requests(),
        "models": engine.models().iter().map(|card| card.id.clone()).collect::<Vec<_>>(),
        "in_flight": engine.in_flight(),
        "load": {"requests": load.requests, "queued_tokens": load.queued_tokens},
        "state": engine.state(),
    })
}
