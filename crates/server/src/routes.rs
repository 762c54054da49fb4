//! The table of routes: what is served and what `/openapi.json` says are one list.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use axum::{Json, Router, middleware};
use http::header::{CONTENT_TYPE, HeaderValue};
use microserving_protocol::ApiError;

use crate::app::App;
use crate::calls::{
    abort, commit, kv_events, pause, prep_recv, profile, remote_send, sequences, start_generate, state,
};
use crate::errors::Failure;
use crate::openai::{chat, completions, models, tokenize};
use crate::openapi::{self, Operation, Reply, fields};
use crate::tracking::track;

pub(crate) type Route = (Operation, MethodRouter<Arc<App>>);

/// Returns every route with its description.
pub(crate) fn table() -> Vec<Route> {
    let json = Reply::Json;
    let stream = Reply::JsonOrStream;
    let prompted = [fields::PROMPT, fields::COMPLETION];
    let keyed = [fields::PROMPT, fields::COMPLETION, fields::KEY];
    let with = |own: &'static [openapi::Field]| [&keyed[..], &[own]].concat();
    vec![
        (
            Operation::post("/microserving/prep_recv", "Match the prompt's prefix and reserve pages", json)
                .body(&with(fields::PREP_RECV)),
            post(prep_recv::prep_recv),
        ),
        (
            Operation::post("/microserving/remote_send", "Compute KV and deliver it to an address", json)
                .body(&with(fields::REMOTE_SEND)),
            post(remote_send::remote_send),
        ),
        (
            Operation::post(
                "/microserving/start_generate",
                "Prefill the rest of the prompt and decode",
                stream,
            )
            .body(&with(fields::START_GENERATE)),
            post(start_generate::start_generate),
        ),
        (
            Operation::post("/microserving/abort", "Give a request up", json).body(&[fields::SEQUENCE]),
            post(abort::abort),
        ),
        (
            Operation::post("/microserving/commit", "Keep received KV in the context cache", json)
                .body(&[fields::SEQUENCE]),
            post(commit::commit),
        ),
        (
            Operation::post("/microserving/pause", "Stop decoding and answer the tokens so far", json)
                .body(&[fields::SEQUENCE]),
            post(pause::pause),
        ),
        (Operation::get("/microserving/sequences", "The live sequences", json), get(sequences::list)),
        (Operation::get("/microserving/sequences/{seq_id}", "One sequence", json), get(sequences::one)),
        (
            Operation::get("/microserving/kv_events", "Changes of the context cache", Reply::Stream)
                .query("from", "the number of the first change wanted; 0 asks for a snapshot"),
            get(kv_events::kv_events),
        ),
        (Operation::get("/microserving/state", "Load, pages by state, incarnation", json), get(state::state)),
        (
            Operation::get("/microserving/profile", "What the engine takes, if it was calibrated", json),
            get(profile::profile),
        ),
        (
            Operation::get("/microserving/tokenizer", "Vocabulary and chat template", json),
            get(tokenize::tokenizer),
        ),
        (Operation::get("/v1/models", "The model served", json), get(models::models)),
        (
            Operation::post("/v1/completions", "Continue a prompt", stream).body(&prompted),
            post(completions::completions),
        ),
        (
            Operation::post("/v1/chat/completions", "Answer a conversation", stream)
                .body(&[fields::CHAT, fields::COMPLETION]),
            post(chat::chat_completions),
        ),
        (
            Operation::post("/tokenize", "Text to tokens", json).body(&[fields::TOKENIZE]),
            post(tokenize::tokenize),
        ),
        (
            Operation::post("/detokenize", "Tokens to text", json).body(&[fields::DETOKENIZE]),
            post(tokenize::detokenize),
        ),
        (Operation::get("/metrics", "Metrics in OpenMetrics text", Reply::Text), get(metrics)),
        (Operation::get("/openapi.json", "This description", json), get(describe)),
    ]
}

/// Serves the table, and beside it what has routes of its own.
pub(crate) fn router(app: Arc<App>, beside: Router) -> Router {
    let mut router = Router::new();
    for (operation, handler) in table() {
        router = router.route(operation.path, handler);
    }
    router
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(Arc::clone(&app))
        .merge(beside)
        .layer(middleware::from_fn_with_state(app, track))
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    app.scraper.freshen().await;
    let text = app.metrics.render();
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    ([(CONTENT_TYPE, kind)], text).into_response()
}

async fn describe() -> Json<serde_json::Value> {
    let operations: Vec<_> = table().into_iter().map(|(operation, _)| operation).collect();
    Json(openapi::document(&operations))
}

async fn no_route(request: axum::extract::Request) -> Failure {
    Failure(ApiError::not_found(format!("there is no {}", request.uri().path())))
}

async fn wrong_method(request: axum::extract::Request) -> Failure {
    let (method, path) = (request.method(), request.uri().path());
    Failure(ApiError::new(405, format!("{path} does not answer {method}")))
}
