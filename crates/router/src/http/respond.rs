//! Errors as answers, and bodies as bytes.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use microserving_protocol::ApiError;

use crate::Error;

/// How long a body may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// An error on its way to a client.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) ApiError);

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self(error.to_api_error())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = Response::new(Body::from(self.0.to_json()));
        *response.status_mut() = status;
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.0.retry_after_seconds() {
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}

/// A whole body; one that is too large, too slow or breaks off is an error in OpenAI's form.
#[derive(Debug)]
pub(crate) struct WholeBody(pub(crate) Bytes);

impl WholeBody {
    /// Reads a body of at most `max_bytes`.
    pub(crate) async fn read(body: Body, max_bytes: usize) -> Result<Self, Failure> {
        match tokio::time::timeout(BODY_TIMEOUT, axum::body::to_bytes(body, max_bytes)).await {
            Ok(Ok(body)) => Ok(Self(body)),
            Ok(Err(error)) => {
                let reason = error.to_string();
                // The concrete type is in a crate that axum does not re-export; its message is part of its API docs.
                Err(Failure(match reason.as_str() {
                    "length limit exceeded" => ApiError::too_large(max_bytes),
                    _ => ApiError::new(400, format!("failed to buffer the request body: {reason}")),
                }))
            }
            Err(_) => Err(Failure(ApiError::new(408, "the body did not arrive in time"))),
        }
    }
}

impl<S: Send + Sync> FromRequest<S> for WholeBody {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        match tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(request, state)).await {
            Ok(Ok(body)) => Ok(Self(body)),
            Ok(Err(rejection)) => {
                let status = rejection.status().as_u16();
                Err(Failure(ApiError::new(status, rejection.body_text().to_lowercase())))
            }
            Err(_) => Err(Failure(ApiError::new(408, "the body did not arrive in time"))),
        }
    }
}
