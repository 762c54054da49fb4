//! `POST /microserving/prep_recv`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use microserving_engine::PrepRecv;
use microserving_protocol::{ApiError, PrepRecvRequest, PrepRecvResponse, addr_to_text, normalise_prep_end};

use super::key_of;
use crate::app::App;
use crate::body::WholeBody;
use crate::errors::{Failure, api_error};
use crate::generate::{call_options, parameters};
use crate::prompt;

/// Matches `prompt[..end]` and reserves pages for the rest of it.
pub(crate) async fn prep_recv(
    State(app): State<Arc<App>>,
    body: WholeBody,
) -> Result<Json<PrepRecvResponse>, Failure> {
    let request = body.parse(PrepRecvRequest::from_json).await?;
    Ok(Json(serve(&app, request).await?))
}

/// Serves the call, whatever wire it came over.
pub(crate) async fn serve(app: &Arc<App>, request: PrepRecvRequest) -> Result<PrepRecvResponse, ApiError> {
    // The sampling fields are those of a later call, but a bad one is better refused before anything is reserved.
    let params = parameters(app, &request.completion, request.call.seq_id.as_ref())?;
    let key = key_of(&request.call)?;
    let prompt = prompt::tokens(app, request.completion.prompt).await?;
    let end = normalise_prep_end(request.end, prompt.len(), request.commit)?;
    let call = PrepRecv {
        key,
        prompt,
        end,
        reserve_tokens: request.reserve_tokens,
        commit: request.commit,
        options: call_options(app, &params, request.call.timeout),
    };
    let reply = app.engine.prep_recv(call).await.map_err(|error| api_error(&error))?;
    Ok(PrepRecvResponse {
        kv_addr_info: reply.kv_addr_info.as_deref().map(addr_to_text).unwrap_or_default(),
        prefix_matched_length: reply.prefix_matched_length,
        lease_seconds: Some(reply.lease.as_secs_f64()),
        seq_id: Some(reply.key.seq_id),
        engine_id: Some(reply.engine_id),
    })
}
