//! `POST /microserving/commit`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use microserving_engine::Commit;
use microserving_protocol::{ApiError, CommitRequest, CommitResponse};

use crate::app::App;
use crate::body::WholeBody;
use crate::errors::{Failure, api_error};

/// Keeps received KV in the context cache without generating: the end of a context migration.
pub(crate) async fn commit(
    State(app): State<Arc<App>>,
    body: WholeBody,
) -> Result<Json<CommitResponse>, Failure> {
    let request = body.parse(CommitRequest::from_json).await?;
    Ok(Json(serve(&app, request).await?))
}

/// Serves the call, whatever wire it came over.
pub(crate) async fn serve(app: &App, request: CommitRequest) -> Result<CommitResponse, ApiError> {
    let call = Commit { seq_id: request.seq_id, attempt: request.attempt };
    let reply = app.engine.commit(call).await.map_err(|error| api_error(&error))?;
    Ok(CommitResponse { committed_tokens: reply.committed_tokens })
}
