//! `POST /microserving/pause`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use microserving_engine::Pause;
use microserving_protocol::{PauseRequest, PauseResponse};

use crate::app::App;
use crate::body::WholeBody;
use crate::errors::Failure;

/// Stops decoding and answers the tokens so far: the end of a live migration.
pub(crate) async fn pause(
    State(app): State<Arc<App>>,
    body: WholeBody,
) -> Result<Json<PauseResponse>, Failure> {
    let request = body.parse(PauseRequest::from_json).await?;
    let reply = app.engine.pause(Pause { seq_id: request.seq_id, attempt: request.attempt }).await?;
    Ok(Json(PauseResponse { token_ids: reply.tokens, microserving: None }))
}
