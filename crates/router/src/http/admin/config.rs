//! `/admin/v1/config`, `history`, `rollback` and `audit`.

use std::sync::Arc;

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use microserving_protocol::{ApiError, Fields};
use serde::Deserialize;
use serde_json::json;

use super::{Write, answer, shown};
use crate::http::respond::{Failure, WholeBody};
use crate::{Config, RouterService};

/// Rows of the audit that are shown if nobody says how many.
const ROWS: usize = 50;

/// Returns all that can change while serving.
pub(super) async fn config(State(service): State<Arc<RouterService>>) -> Response {
    shown(&service, service.config().to_json())
}

/// Changes all of it at once.
pub(super) async fn set_config(
    State(service): State<Arc<RouterService>>,
    mut write: Write,
    WholeBody(body): WholeBody,
) -> Result<Response, Failure> {
    let mut fields = Fields::parse(&body)?;
    write.expect_revision_of(&mut fields)?;
    let revision = service.configure(&write.change("set configuration"), |config| {
        *config = Config::read(fields, config)?;
        Ok(())
    })?;
    Ok(answer(StatusCode::OK, revision, service.config().to_json()))
}

/// Returns the revisions that can be returned to.
pub(super) async fn history(State(service): State<Arc<RouterService>>) -> Response {
    shown(&service, json!({"history": service.control.history()}))
}

/// Returns the configuration of a revision.
pub(super) async fn revision(
    State(service): State<Arc<RouterService>>,
    revision: Result<Path<String>, PathRejection>,
) -> Result<Response, Failure> {
    let bad = |what: String| ApiError::bad_request("revision", what);
    let Path(text) = revision.map_err(|rejection| bad(rejection.body_text()))?;
    let number = text.parse().map_err(|_| bad(format!("revision is {text:?}, must be a number")))?;
    Ok(answer(StatusCode::OK, number, service.control.at(number)?.to_json()))
}

/// Returns to a revision, which is a new one.
pub(super) async fn rollback(
    State(service): State<Arc<RouterService>>,
    mut write: Write,
    WholeBody(body): WholeBody,
) -> Result<Response, Failure> {
    let mut fields = Fields::parse(&body)?;
    write.expect_revision_of(&mut fields)?;
    let to = fields.int("to")?;
    fields.refuse_rest("a rollback")?;
    let to =
        u64::try_from(to).map_err(|_| ApiError::bad_request("to", format!("to is {to}, no revision")))?;
    let then = service.control.at(to).map_err(|error| error.with_param("to"))?;
    let revision = service.configure(&write.change(format!("roll back to {to}")), |config| {
        *config = then;
        Ok(())
    })?;
    Ok(answer(StatusCode::OK, revision, service.config().to_json()))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rows {
    last: Option<usize>,
}

/// Returns who changed what, newest first.
pub(super) async fn audit(
    State(service): State<Arc<RouterService>>,
    rows: Result<Query<Rows>, QueryRejection>,
) -> Result<Response, Failure> {
    let Query(rows) = rows.map_err(|rejection| ApiError::bad_request("last", rejection.body_text()))?;
    Ok(shown(&service, json!({"audit": service.control.audit(rows.last.unwrap_or(ROWS))})))
}
