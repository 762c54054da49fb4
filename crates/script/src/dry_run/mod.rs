//! A script over a recorded trace, without an engine.
//!
//! It runs in a router of its own, the same one that serves, over engines that keep count and compute nothing. So placement, seats,
//! retries, bounds and fallback are not imitated here: they are the real ones.

mod fake;
mod trace;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use microserving_protocol::ApiError;
use microserving_router::{EngineSpec, Pattern, ProgramFactory, Role, RouterConfig, RouterService, Script};
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::ScriptFactory;
use fake::{FakeEngine, Journal};
pub use trace::Trace;
use trace::TraceRequest;

/// Fakes answer at once; what takes longer than this does not end.
const PATIENCE: Duration = Duration::from_secs(5);
/// For all of a trace.
const WHOLE: Duration = Duration::from_secs(60);
/// An answer of a fake, with room to spare.
const BODY_BYTES: usize = 1 << 20;

/// Runs the requests of a trace one after the other, and returns what each led to:
/// `{"requests": [{"request", "status", "pattern", "calls": [{"engine", "call", …}], "fault"}], "faults", "engines"}`.
///
/// # Errors
/// 400 if the trace cannot be run, 504 if it takes too long.
pub async fn run(script: ScriptFactory, trace: Trace) -> Result<Value, ApiError> {
    let journal = Journal::default();
    let engines = trace
        .engines
        .iter()
        .map(|engine| {
            let fake = FakeEngine::new(engine, &trace.models(), journal.clone());
            EngineSpec::new(Arc::new(fake), engine.role)
        })
        .collect();
    let mut config = RouterConfig::new(engines);
    config.pattern = Pattern::named(script.name());
    config.factories = vec![Arc::new(script.clone())];
    config.request_timeout = PATIENCE;
    let (service, tasks) =
        RouterService::start(config).map_err(|error| ApiError::bad_request("script", error.to_string()))?;
    let report = tokio::time::timeout(WHOLE, replay(&service, &script, &trace, &journal)).await;
    tasks.stop().await;
    report.unwrap_or_else(|_| Err(ApiError::timeout("the dry run took too long")))
}

async fn replay(
    service: &Arc<RouterService>,
    script: &ScriptFactory,
    trace: &Trace,
    journal: &Journal,
) -> Result<Value, ApiError> {
    let wanted = trace.engines.len();
    tokio::time::timeout(PATIENCE, async {
        while service.cluster().num_ready() < wanted {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .map_err(|_| ApiError::internal("the engines of the dry run did not come up"))?;
    let app = service.http();
    let mut requests = Vec::with_capacity(trace.requests.len());
    for (number, request) in trace.requests.iter().enumerate() {
        let faults = script.counts().faults;
        let response = app.clone().oneshot(http(request)?).await.unwrap_or_else(|never| match never {});
        let status = response.status().as_u16();
        let pattern = response.headers().get("x-microserving-pattern");
        let pattern = pattern.and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
        let body = http_body_util::Limited::new(response.into_body(), BODY_BYTES).collect().await;
        let body = body.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        let mut row = json!({
            "request": number,
            "tokens": request.tokens.len(),
            "status": status,
            "pattern": pattern,
            "calls": journal.take(),
        });
        if status != 200 {
            row["error"] = ApiError::from_body(status, &body).message.into();
        }
        if script.counts().faults > faults {
            row["fault"] = script.counts().last_fault.into();
        }
        requests.push(row);
    }
    let faults = script.counts().faults;
    let engines: Vec<&str> = trace.engines.iter().map(|engine| engine.name.as_str()).collect();
    Ok(json!({"requests": requests, "faults": faults, "engines": engines}))
}

fn http(request: &TraceRequest) -> Result<Request<Body>, ApiError> {
    let body = json!({
        "prompt": request.tokens,
        "model": request.model,
        "max_tokens": request.max_tokens,
        "priority": request.priority,
        "temperature": 0,
    });
    let mut built = Request::post("/v1/completions").header("content-type", "application/json");
    for (name, value) in &request.headers {
        built = built.header(name, value);
    }
    let bad = |error: axum::http::Error| ApiError::bad_request("headers", error.to_string());
    built.body(Body::from(body.to_string())).map_err(bad)
}

/// Reads a role by its name.
fn role(name: &str) -> Option<Role> {
    [Role::Any, Role::Prefill, Role::Decode].into_iter().find(|role| role.name() == name)
}
