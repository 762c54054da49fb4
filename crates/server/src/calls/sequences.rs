//! `GET /microserving/sequences` and `GET /microserving/sequences/{seq_id}`.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use microserving_engine::SequenceInfo;
use microserving_protocol::{ApiError, SeqId, SequenceList, SequenceView};

use crate::app::App;
use crate::errors::Failure;

/// Lists the live sequences.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Result<Json<SequenceList>, Failure> {
    let sequences = app.engine.sequences().await?.into_iter().map(view).collect();
    Ok(Json(SequenceList { sequences }))
}

/// Shows one sequence.
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    seq_id: Result<Path<String>, PathRejection>,
) -> Result<Json<SequenceView>, Failure> {
    let Path(seq_id) = seq_id.map_err(|rejection| ApiError::bad_request("seq_id", rejection.body_text()))?;
    Ok(Json(view(app.engine.sequence(SeqId::from(seq_id)).await?)))
}

fn view(info: SequenceInfo) -> SequenceView {
    SequenceView {
        seq_id: info.key.seq_id,
        attempt: info.key.attempt,
        state: info.state.to_owned(),
        lease_seconds: info.lease.map(|lease| lease.as_secs_f64()),
        num_pages: info.num_pages,
        prompt_tokens: info.prompt_tokens,
        output_tokens: info.output_tokens,
    }
}
