//! `POST /microserving/abort`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use microserving_engine::Abort;
use microserving_protocol::{AbortRequest, AbortResponse, ApiError};

use crate::app::App;
use crate::body::WholeBody;
use crate::errors::{Failure, api_error};

/// Gives a request up, whatever it is doing here. Idempotent.
pub(crate) async fn abort(
    State(app): State<Arc<App>>,
    body: WholeBody,
) -> Result<Json<AbortResponse>, Failure> {
    let request = body.parse(AbortRequest::from_json).await?;
    Ok(Json(serve(&app, request).await?))
}

/// Serves the call, whatever wire it came over.
pub(crate) async fn serve(app: &App, request: AbortRequest) -> Result<AbortResponse, ApiError> {
    let call = Abort { seq_id: request.seq_id, attempt: request.attempt };
    let aborted = app.engine.abort(call).await.map_err(|error| api_error(&error))?;
    Ok(AbortResponse { aborted })
}
