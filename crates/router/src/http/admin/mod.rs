//! What operators ask and change, under `/admin/v1/`.
//!
//! Every answer of a GET carries the revision as its `ETag`; a write that brings `If-Match` is refused with 412 if the revision is another
//! one by then. `?dry_run=true` checks a write and makes nothing.

mod config;
mod engines;
mod explain;
mod patterns;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Json;
use axum::extract::{ConnectInfo, FromRequestParts, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use constant_time_eq::constant_time_eq;
use microserving_protocol::{ApiError, Fields};
use serde::Deserialize;
use serde_json::Value;

use super::respond::Failure;
use super::{Route, moves, scripts};
use crate::RouterService;
use crate::control::Change;

/// The one list of what operators reach: served, and described.
pub(super) fn routes() -> Vec<Route> {
    let route = |path, handler, operations| Route { path, handler, operations };
    vec![
        route(
            "/admin/v1/engines",
            get(engines::list).post(engines::add),
            &[("get", "The engines as the router sees them"), ("post", "Take in an engine")],
        ),
        route(
            "/admin/v1/engines/{id}",
            get(engines::one).patch(engines::change).merge(delete(engines::remove)),
            &[
                ("get", "One engine"),
                ("patch", "Change an engine's weight or role"),
                ("delete", "Let an engine go; force=true sends its requests elsewhere"),
            ],
        ),
        route(
            "/admin/v1/engines/{id}/drain",
            post(engines::drain),
            &[("post", "Give an engine no new requests")],
        ),
        route(
            "/admin/v1/engines/{id}/undrain",
            post(engines::undrain),
            &[("post", "Give an engine requests again")],
        ),
        route(
            "/admin/v1/pattern",
            get(patterns::pattern).put(patterns::set_pattern),
            &[
                ("get", "The pattern in use"),
                ("put", "Change the pattern for requests that come from now on"),
            ],
        ),
        route(
            "/admin/v1/patterns",
            get(patterns::patterns),
            &[("get", "The patterns there are, with their parameters")],
        ),
        route(
            "/admin/v1/rules",
            get(patterns::rules).put(patterns::set_rules),
            &[("get", "The rules that choose a pattern"), ("put", "Change the rules")],
        ),
        route(
            "/admin/v1/config",
            get(config::config).put(config::set_config),
            &[("get", "All that can change while serving"), ("put", "Change it as a whole")],
        ),
        route("/admin/v1/history", get(config::history), &[("get", "The revisions that can be returned to")]),
        route(
            "/admin/v1/history/{revision}",
            get(config::revision),
            &[("get", "The configuration of a revision")],
        ),
        route("/admin/v1/rollback", post(config::rollback), &[("post", "Return to a revision")]),
        route(
            "/admin/v1/migrate",
            post(moves::request),
            &[("post", "Move a running request to another engine")],
        ),
        route(
            "/admin/v1/contexts/migrate",
            post(moves::context),
            &[("post", "Copy a prompt's KV from one engine's cache to another's")],
        ),
        route("/admin/v1/scripts", get(scripts::list), &[("get", "The scripts there are")]),
        route(
            "/admin/v1/scripts/{name}",
            get(scripts::get).put(scripts::put).delete(scripts::remove),
            &[
                ("get", "A script: its text, its revision, how it has done"),
                ("put", "Load a script, or with dry_run=true only try it"),
                ("delete", "Take a script away"),
            ],
        ),
        route(
            "/admin/v1/scripts/{name}/rollback",
            post(scripts::roll_back),
            &[("post", "Put the revision before back into use")],
        ),
        route(
            "/admin/v1/scripts/{name}/dry_run",
            post(scripts::dry_run),
            &[("post", "Run a script over a recorded trace, without an engine")],
        ),
        route("/admin/v1/audit", get(config::audit), &[("get", "Who changed what, newest first")]),
        route(
            "/admin/v1/explain",
            post(explain::explain),
            &[("post", "What would be chosen for a request, and why; changes nothing")],
        ),
    ]
}

/// Lets through whoever has the token, if there is one.
pub(super) async fn guard(
    State(service): State<Arc<RouterService>>,
    request: Request,
    next: Next,
) -> Response {
    if let Some(token) = &service.admin_token {
        let given = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        let given = given.and_then(|given| given.strip_prefix(b"Bearer ")).unwrap_or_default();
        if !constant_time_eq(given, token.as_bytes()) {
            let mut response =
                Failure(ApiError::new(401, "the admin token is missing or wrong")).into_response();
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            return response;
        }
    }
    next.run(request).await
}

/// What a write says about itself beside its body.
#[derive(Debug)]
pub(in crate::http) struct Write {
    who: String,
    expected: Option<Vec<u64>>,
    pub(in crate::http) dry_run: bool,
    force: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Flags {
    #[serde(default)]
    dry_run: bool,
    #[serde(default)]
    force: bool,
}

impl Write {
    pub(in crate::http) fn change(&self, what: impl Into<String>) -> Change {
        Change {
            who: self.who.clone(),
            what: what.into(),
            expected: self.expected.clone(),
            dry_run: self.dry_run,
            force: self.force,
        }
    }

    /// Refuses `force` where nothing can be forced.
    pub(in crate::http) fn refuse_force(&self) -> Result<(), ApiError> {
        if self.force {
            Err(ApiError::bad_request("force", "force is for engines that leave"))
        } else {
            Ok(())
        }
    }

    /// Refuses `dry_run` where nothing can be tried.
    pub(in crate::http) fn refuse_dry_run(&self) -> Result<(), ApiError> {
        if self.dry_run {
            Err(ApiError::bad_request("dry_run", "only loading a script can be tried"))
        } else {
            Ok(())
        }
    }

    /// Takes the revision that came with a `GET` out of a body: it says what the change was made for, as `If-Match` does.
    fn expect_revision_of(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        if let Some(revision) = fields.opt_int("revision")? {
            let revision = u64::try_from(revision).map_err(|_| {
                ApiError::bad_request("revision", format!("revision is {revision}, must not be negative"))
            })?;
            self.expected.get_or_insert_default().push(revision);
        }
        Ok(())
    }
}

impl FromRequestParts<Arc<RouterService>> for Write {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, service: &Arc<RouterService>) -> Result<Self, Failure> {
        let flags = Query::<Flags>::try_from_uri(&parts.uri)
            .map_err(|rejection| ApiError::bad_request("query", rejection.body_text()))?;
        let peer = parts.extensions.get::<ConnectInfo<SocketAddr>>().map(|peer| peer.0.to_string());
        let peer = peer.unwrap_or_else(|| "local".to_owned());
        let who = if service.admin_token.is_some() { format!("admin token from {peer}") } else { peer };
        let expected = if_match(&parts.headers)?;
        Ok(Self { who, expected, dry_run: flags.dry_run, force: flags.force })
    }
}

/// Returns the revisions of `If-Match`; none if any will do.
fn if_match(headers: &HeaderMap) -> Result<Option<Vec<u64>>, ApiError> {
    let Some(value) = headers.get(header::IF_MATCH) else { return Ok(None) };
    let text = value.to_str().unwrap_or_default().trim();
    if text == "*" {
        return Ok(None);
    }
    let revision = |tag: &str| {
        let number = tag.trim().strip_prefix('"')?.strip_suffix('"')?;
        number.parse().ok()
    };
    // A tag that is none of ours matches nothing, which is for 412 to say.
    let revisions: Option<Vec<u64>> = text.split(',').map(revision).collect();
    match revisions {
        Some(revisions) => Ok(Some(revisions)),
        None => Err(ApiError::new(412, format!("If-Match is {text:?}, no revision of this router"))),
    }
}

/// An answer with the revision it holds for.
fn answer(status: StatusCode, revision: u64, mut body: Value) -> Response {
    body["revision"] = revision.into();
    tagged(status, revision, body)
}

/// An answer whose `ETag` is the revision it holds for; a `revision` in its body is another one.
pub(in crate::http) fn tagged(status: StatusCode, revision: u64, body: Value) -> Response {
    let mut response = (status, Json(body)).into_response();
    if let Ok(tag) = HeaderValue::from_str(&format!("\"{revision}\"")) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

fn shown(service: &RouterService, body: Value) -> Response {
    answer(StatusCode::OK, service.revision(), body)
}
