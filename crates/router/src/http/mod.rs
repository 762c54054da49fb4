//! What clients and operators reach over HTTP.

mod admin;
mod answer;
mod deliver;
mod generate;
mod headers;
mod info;
mod moves;
mod openapi;
mod respond;
mod scripts;
mod shortcut;

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use microserving_protocol::ApiError;

pub(crate) use answer::Answer;
pub(crate) use deliver::{go_on, note_failure};
pub(crate) use generate::read_again;
pub(crate) use headers::PATTERN;
pub use shortcut::ResponseFuture;

use crate::RouterService;
use respond::Failure;

impl RouterService {
    /// Returns the routes of clients and operators: OpenAI's, `/tokenize` and `/detokenize`, health, metrics and administration;
    /// `/openapi.json` lists them. Bodies are limited by axum's `DefaultBodyLimit`, which whoever serves this may set.
    pub fn http(self: &Arc<Self>) -> Router {
        self.serve(Doors { clients: true, operators: true })
    }

    /// Returns the routes of clients alone: for addresses that strangers reach.
    pub fn client_http(self: &Arc<Self>) -> Router {
        self.serve(Doors { clients: true, operators: false })
    }

    /// Returns the routes of operators alone: for an address of their own.
    pub fn admin_http(self: &Arc<Self>) -> Router {
        self.serve(Doors { clients: false, operators: true })
    }

    fn serve(self: &Arc<Self>, doors: Doors) -> Router {
        let mut router =
            Router::new().route("/openapi.json", get(move || async move { openapi::document(doors) }));
        if doors.clients {
            for route in routes() {
                router = router.route(route.path, route.handler);
            }
        }
        if doors.operators {
            for route in admin::routes() {
                let guard = from_fn_with_state(self.clone(), admin::guard);
                router = router.route(route.path, route.handler.layer(guard));
            }
        }
        router
            .fallback(|| async { Failure(ApiError::not_found("no such path")) })
            .method_not_allowed_fallback(|| async { Failure(ApiError::new(405, "method not allowed")) })
            .layer(from_fn(name_request))
            .with_state(self.clone())
    }
}

/// Whose routes are served.
#[derive(Clone, Copy, Debug)]
struct Doors {
    clients: bool,
    operators: bool,
}

impl Doors {
    fn routes(self) -> impl Iterator<Item = Route> {
        let clients = self.clients.then(routes);
        let operators = self.operators.then(admin::routes);
        clients.into_iter().chain(operators).flatten()
    }
}

/// One path with what serves it and what is said of it.
struct Route {
    path: &'static str,
    handler: MethodRouter<Arc<RouterService>>,
    /// Each method with its summary.
    operations: &'static [(&'static str, &'static str)],
}

/// The one list of what clients reach: served, and described.
fn routes() -> Vec<Route> {
    let route = |path, handler, operations| Route { path, handler, operations };
    vec![
        route("/v1/completions", post(generate::completions), &[("post", "Continue a prompt")]),
        route("/v1/chat/completions", post(generate::chat_completions), &[("post", "Answer a conversation")]),
        route("/v1/models", get(info::models), &[("get", "The models served")]),
        route("/v1/models/{*model}", get(info::model), &[("get", "One model")]),
        route("/tokenize", post(info::tokenize), &[("post", "Text or messages to tokens")]),
        route("/detokenize", post(info::detokenize), &[("post", "Tokens to text")]),
        route("/health", get(info::ready), &[("get", "As /health/ready")]),
        route("/health/ready", get(info::ready), &[("get", "May it get work")]),
        route("/health/live", get(info::live), &[("get", "Should this process go on living")]),
        route("/metrics", get(info::metrics), &[("get", "Metrics in OpenMetrics text")]),
    ]
}

/// Gives every answer the `x-request-id` of its request; one that came without gets one made.
async fn name_request(mut request: Request, next: Next) -> Response {
    let id = headers::request_id(request.headers());
    request.extensions_mut().insert(headers::RequestId(id.clone()));
    let mut response = next.run(request).await;
    if let Ok(value) = id.parse() {
        response.headers_mut().insert(headers::REQUEST_ID, value);
    }
    response
}
