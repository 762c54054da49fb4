//! `POST /microserving/commit`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use microserving_engine::Commit;
use microserving_protocol::{CommitRequest, CommitResponse};

use crate::app::App;
use crate::body::WholeBody;
use crate::errors::Failure;

/// Keeps received KV in the context cache without generating: the end of a context migration.
pub(crate) async fn commit(
    State(app): State<Arc<App>>,
    body: WholeBody,
) -> Result<Json<CommitResponse>, Failure> {
    let request = body.parse(CommitRequest::from_json).await?;
    let reply = app.engine.commit(Commit { seq_id: request.seq_id, attempt: request.attempt }).await?;
    Ok(Json(CommitResponse { committed_tokens: reply.committed_tokens }))
}
