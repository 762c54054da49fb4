//! `POST /microserving/pause`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use microserving_engine::Pause;
use microserving_protocol::{ApiError, PauseRequest, PauseResponse, ServingStats};

use crate::app::App;
use crate::body::WholeBody;
use crate::errors::{Failure, api_error};

/// Stops decoding and answers the tokens so far: the end of a live migration.
pub(crate) async fn pause(
    State(app): State<Arc<App>>,
    body: WholeBody,
) -> Result<Json<PauseResponse>, Failure> {
    let request = body.parse(PauseRequest::from_json).await?;
    Ok(Json(serve(&app, request).await?))
}

/// Serves the call, whatever wire it came over.
pub(crate) async fn serve(app: &App, request: PauseRequest) -> Result<PauseResponse, ApiError> {
    let call = Pause { seq_id: request.seq_id, attempt: request.attempt };
    let reply = app.engine.pause(call).await.map_err(|error| api_error(&error))?;
    let stats = ServingStats { matched_tokens: reply.cached_tokens, ..ServingStats::default() };
    Ok(PauseResponse { token_ids: reply.tokens, microserving: Some(stats) })
}
