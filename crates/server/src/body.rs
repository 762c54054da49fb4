//! Reading request bodies: bounded in size and time, parsed off the HTTP threads when long.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use bytes::Bytes;
use microserving_protocol::ApiError;

use crate::app::App;
use crate::errors::Failure;

/// Bodies from this size on are parsed on a blocking thread: a millisecond is too long for a thread that serves health.
const LONG_BODY_BYTES: usize = 64 << 10;

/// A request's whole body, at most as large as configured.
#[derive(Debug)]
pub(crate) struct WholeBody(Bytes);

impl FromRequest<Arc<App>> for WholeBody {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Failure> {
        Ok(Self(read(app, request.into_body()).await?))
    }
}

/// Reads a body to its end.
///
/// # Errors
/// 413 if it is too long, 408 if it takes too long.
pub(crate) async fn read(app: &App, body: Body) -> Result<Bytes, ApiError> {
    let limit = app.config.max_body_bytes;
    if axum::body::HttpBody::size_hint(&body).lower() > limit as u64 {
        return Err(ApiError::too_large(limit));
    }
    match tokio::time::timeout(app.config.body_timeout, axum::body::to_bytes(body, limit)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) if is_length_limit(&error) => Err(ApiError::too_large(limit)),
        // The client went away in the middle; nobody reads this answer.
        Ok(Err(error)) => Err(ApiError::new(400, format!("cannot read the body: {error}"))),
        Err(_) => Err(ApiError::new(408, "the body did not arrive in time")),
    }
}

fn is_length_limit(error: &axum::Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        // The concrete type is in a crate that axum does not re-export; its message is part of its API docs.
        if error.to_string() == "length limit exceeded" {
            return true;
        }
        cause = error.source();
    }
    false
}

impl WholeBody {
    /// Parses the body, on a blocking thread if it is long.
    pub(crate) async fn parse<T: Send + 'static>(
        self,
        from_json: fn(&[u8]) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        if self.0.len() < LONG_BODY_BYTES {
            return from_json(&self.0);
        }
        blocking(move || from_json(&self.0)).await
    }
}

/// Runs long work on a blocking thread; the future waits for it, so the work has an owner.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(ApiError::internal(format!("a blocking task failed: {error}"))),
    }
}
