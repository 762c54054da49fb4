//! `POST /microserving/abort`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use microserving_engine::Abort;
use microserving_protocol::{AbortRequest, AbortResponse};

use crate::app::App;
use crate::body::WholeBody;
use crate::errors::Failure;

/// Gives a request up, whatever it is doing here. Idempotent.
pub(crate) async fn abort(
    State(app): State<Arc<App>>,
    body: WholeBody,
) -> Result<Json<AbortResponse>, Failure> {
    let request = body.parse(AbortRequest::from_json).await?;
    let call = Abort { seq_id: request.seq_id, attempt: request.attempt };
    Ok(Json(AbortResponse { aborted: app.engine.abort(call).await? }))
}
