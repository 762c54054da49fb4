//! What operators do with scripts.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use microserving_protocol::ApiError;
use serde_json::{Value, json};

use super::admin::{Write, tagged};
use super::respond::{Failure, WholeBody};
use crate::{BadScript, RouterService};

type Name = Result<Path<String>, PathRejection>;

/// Returns the scripts there are, without their texts.
pub(crate) async fn list(State(service): State<Arc<RouterService>>) -> Response {
    tagged(StatusCode::OK, service.revision(), json!({"scripts": service.scripts.list()}))
}

/// Returns one script: its text, its revision, and how it has done.
pub(crate) async fn get(State(service): State<Arc<RouterService>>, name: Name) -> Result<Response, Failure> {
    let shown = service.scripts.get(&read_name(name)?)?;
    Ok(tagged(StatusCode::OK, service.revision(), shown))
}

/// Loads a script from its source text, or only tries it.
pub(crate) async fn put(
    State(service): State<Arc<RouterService>>,
    name: Name,
    write: Write,
    WholeBody(body): WholeBody,
) -> Result<Response, Failure> {
    let name = read_name(name)?;
    write.refuse_force()?;
    let source = text(&body)?;
    // Before anything else, so that the answer has line and column as numbers too.
    if let Err(bad) = service.scripts.loader()?.load(&name, source, &service.patterns) {
        return Ok(refused(&bad));
    }
    if write.dry_run {
        let loader = service.scripts.loader()?;
        return Ok(Json(loader.dry_run(&name, source, &service.patterns, None).await?).into_response());
    }
    changed(&service, &name, &write, "load", || service.scripts.put(&service.patterns, &name, source))
}

/// Runs a script that is loaded over the trace in the body, or over a small one of the loader's own.
pub(crate) async fn dry_run(
    State(service): State<Arc<RouterService>>,
    name: Name,
    WholeBody(body): WholeBody,
) -> Result<Json<Value>, Failure> {
    let name = read_name(name)?;
    let source = service.scripts.source(&name)?;
    let trace = (!body.is_empty()).then_some(&body[..]);
    Ok(Json(service.scripts.loader()?.dry_run(&name, &source, &service.patterns, trace).await?))
}

/// Puts the revision before the one in use back into use.
pub(crate) async fn roll_back(
    State(service): State<Arc<RouterService>>,
    name: Name,
    write: Write,
) -> Result<Response, Failure> {
    let name = read_name(name)?;
    write.refuse_force()?;
    write.refuse_dry_run()?;
    changed(&service, &name, &write, "roll back", || service.scripts.roll_back(&service.patterns, &name))
}

/// Takes a script away, unless it is the pattern in use.
pub(crate) async fn remove(
    State(service): State<Arc<RouterService>>,
    name: Name,
    write: Write,
) -> Result<Response, Failure> {
    let name = read_name(name)?;
    write.refuse_force()?;
    write.refuse_dry_run()?;
    changed(&service, &name, &write, "remove", || {
        service.scripts.remove(&service.patterns, &name)?;
        Ok(json!({"name": name, "removed": true}))
    })
}

/// Makes a change of a script, with its row of the audit. The answer's `ETag` is the router's revision, its body tells the script's.
fn changed(
    service: &RouterService,
    name: &str,
    write: &Write,
    verb: &str,
    make: impl FnOnce() -> Result<Value, ApiError>,
) -> Result<Response, Failure> {
    let (shown, revision) =
        service.recorded_beside(&write.change(format!("{verb} script {name}")), || {
            let before = service.scripts.in_audit(name);
            let shown = make()?;
            Ok((shown, before, service.scripts.in_audit(name)))
        })?;
    Ok(tagged(StatusCode::OK, revision, shown))
}

fn read_name(name: Name) -> Result<String, ApiError> {
    name.map(|Path(name)| name).map_err(|rejection| ApiError::bad_request("name", rejection.body_text()))
}

fn text(body: &Bytes) -> Result<&str, ApiError> {
    std::str::from_utf8(body).map_err(|_| ApiError::bad_request("source", "the source is not UTF-8"))
}

/// The usual error, with the place beside it.
fn refused(bad: &BadScript) -> Response {
    let error = bad.to_api_error();
    let mut body: Value = serde_json::from_str(&error.to_json()).unwrap_or_default();
    body["error"]["line"] = bad.line.into();
    body["error"]["column"] = bad.column.into();
    let headers = [(header::CONTENT_TYPE, "application/json")];
    (StatusCode::BAD_REQUEST, headers, body.to_string()).into_response()
}
