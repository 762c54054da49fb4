//! `GET /microserving/profile`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, HeaderValue};
use microserving_protocol::ApiError;

use crate::app::App;
use crate::errors::Failure;

/// Shows what the engine takes, as its calibration found.
pub(crate) async fn profile(State(app): State<Arc<App>>) -> Result<Response, Failure> {
    let Some(profile) = app.config.profile.clone() else {
        return Err(Failure(
            ApiError::not_found("this engine has no profile: it was not calibrated").with_code("no_profile"),
        ));
    };
    Ok(([(CONTENT_TYPE, HeaderValue::from_static("application/json"))], profile.to_string()).into_response())
}
