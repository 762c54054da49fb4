//! The two doors without the routes before them.

use std::pin::Pin;
use std::sync::Arc;

use axum::extract::Request;
use axum::http::Method;
use axum::response::{IntoResponse, Response};
use microserving_client::Door;

use super::respond::WholeBody;
use super::{generate, headers};
use crate::RouterService;

/// An answer being made.
pub type ResponseFuture = Pin<Box<dyn Future<Output = Response> + Send>>;

impl RouterService {
    /// Serves a request that generates just as [`RouterService::http`] does, without finding its way there through routes and layers, which
    /// is a good part of the cost of a relayed request. Bodies may have `max_body_bytes`.
    ///
    /// # Errors
    /// Gives any other request back.
    #[allow(clippy::result_large_err, reason = "the request is given back as it came")]
    pub fn shortcut(
        self: &Arc<Self>,
        request: Request,
        max_body_bytes: usize,
    ) -> Result<ResponseFuture, Request> {
        if request.method() != Method::POST {
            return Err(request);
        }
        let door = match request.uri().path() {
            "/v1/completions" => Door::Completions,
            "/v1/chat/completions" => Door::Chats,
            _ => return Err(request),
        };
        let service = self.clone();
        Ok(Box::pin(async move {
            let (parts, body) = request.into_parts();
            let id = headers::request_id(&parts.headers);
            let header = id.parse();
            let answer = match WholeBody::read(body, max_body_bytes).await {
                Ok(WholeBody(body)) => generate::answer(&service, id, parts.headers, body, door).await,
                Err(failure) => Err(failure),
            };
            let mut response = answer.into_response();
            if let Ok(header) = header {
                response.headers_mut().insert(headers::REQUEST_ID, header);
            }
            response
        }))
    }
}
