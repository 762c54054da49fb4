//! `POST /microserving/remote_send`.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use microserving_engine::RemoteSend;
use microserving_protocol::{
    AddrError, ApiError, KvAddrInfo, RemoteSendRequest, RemoteSendResponse, addr_from_text,
    normalise_send_range,
};

use super::key_of;
use crate::app::App;
use crate::body::WholeBody;
use crate::errors::{Failure, api_error};
use crate::generate::{call_options, parameters};
use crate::prompt;
use crate::tracking::Arrival;

/// Computes what is lacking of `prompt[..end]` and delivers `[begin, end)` to the address.
pub(crate) async fn remote_send(
    State(app): State<Arc<App>>,
    Extension(arrival): Extension<Arrival>,
    body: WholeBody,
) -> Result<Json<RemoteSendResponse>, Failure> {
    let request = body.parse(RemoteSendRequest::from_json).await?;
    Ok(Json(serve(&app, request, &arrival).await?))
}

/// Serves the call, whatever wire it came over.
pub(crate) async fn serve(
    app: &Arc<App>,
    request: RemoteSendRequest,
    arrival: &Arrival,
) -> Result<RemoteSendResponse, ApiError> {
    let params = parameters(app, &request.completion, request.call.seq_id.as_ref())?;
    let key = key_of(&request.call)?;
    let prompt = prompt::tokens(app, request.completion.prompt).await?;
    let kv_addr_info = addr_from_text(&request.kv_addr_info).map_err(|error| address_error(&error))?;
    let address = KvAddrInfo::decode(&kv_addr_info).map_err(|error| address_error(&error))?;
    // Only a `prep_recv` with `commit` hands out an address that reaches the end of the prompt.
    let commit = address.range.end() as usize == prompt.len();
    let range = normalise_send_range(request.begin, request.end, prompt.len(), commit)?;
    let call = RemoteSend {
        key,
        prompt,
        range,
        kv_addr_info,
        recv_rank: request.recv_rank,
        options: call_options(app, &params, request.call.timeout),
    };
    let reply = app.engine.remote_send(call).await.map_err(|error| api_error(&error))?;
    app.metrics.remote_send(arrival.at.elapsed());
    Ok(RemoteSendResponse {
        sent_tokens: reply.sent_tokens,
        cached_tokens: reply.cached_tokens,
        computed_tokens: reply.computed_tokens,
        bytes: reply.bytes,
        transfer_seconds: reply.transfer.as_secs_f64(),
        exposed_transfer_seconds: reply.exposed_transfer.as_secs_f64(),
    })
}

fn address_error(error: &AddrError) -> ApiError {
    ApiError::bad_request("kv_addr_info", format!("kv_addr_info: {error}")).with_code("bad_address")
}
