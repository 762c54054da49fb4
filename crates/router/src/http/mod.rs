//! What clients and operators reach over HTTP.

mod admin;
mod answer;
mod deliver;
mod generate;
mod headers;
mod info;
mod respond;

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::{get, post};
use microserving_protocol::ApiError;

use crate::RouterService;
use respond::Failure;

impl RouterService {
    /// Returns the routes: OpenAI's, `/tokenize` and `/detokenize`, health, metrics and administration. Bodies are limited by axum's
    /// `DefaultBodyLimit`, which whoever serves this may set.
    pub fn http(self: &Arc<Self>) -> Router {
        Router::new()
            .route("/v1/completions", post(generate::completions))
            .route("/v1/chat/completions", post(generate::chat_completions))
            .route("/v1/models", get(info::models))
            .route("/v1/models/{*model}", get(info::model))
            .route("/tokenize", post(info::tokenize))
            .route("/detokenize", post(info::detokenize))
            .route("/health", get(info::ready))
            .route("/health/ready", get(info::ready))
            .route("/health/live", get(info::live))
            .route("/metrics", get(info::metrics))
            .route("/admin/v1/pattern", get(admin::pattern).put(admin::set_pattern))
            .route("/admin/v1/engines", get(admin::engines))
            .fallback(|| async { Failure(ApiError::not_found("no such path")) })
            .method_not_allowed_fallback(|| async { Failure(ApiError::new(405, "method not allowed")) })
            .layer(from_fn(name_request))
            .with_state(self.clone())
    }
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
