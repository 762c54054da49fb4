//! The stub's calls over gRPC, with the same answers.

use std::pin::Pin;
use std::sync::Arc;

use axum::Router;
use futures::{Stream, StreamExt as _, stream};
use microserving_grpc::to_status;
use microserving_grpc::wire::engine_server::{Engine, EngineServer};
use microserving_grpc::wire::{self, completion_request::Prompt};
use microserving_protocol::{
    ApiError, CompletionResponse, Usage, normalise_begin, normalise_prep_end, normalise_send_range,
};
use tonic::{Request, Response, Status};

use super::{MAX_BODY_BYTES, MAX_CONTEXT, MODEL, Stub, chunk, view};

/// Returns the routes of the service.
pub(super) fn routes(stub: Arc<Stub>) -> Router {
    let service = EngineServer::new(Calls(stub)).max_decoding_message_size(MAX_BODY_BYTES);
    Router::new().route_service("/microserving.v1.Engine/{method}", service)
}

struct Calls(Arc<Stub>);

fn refused(error: ApiError) -> Status {
    to_status(&error)
}

fn len(completion: Option<&wire::CompletionRequest>) -> Result<usize, Status> {
    let len = match completion.and_then(|completion| completion.prompt.as_ref()) {
        Some(Prompt::Tokens(tokens)) => tokens.ids.len(),
        Some(Prompt::Text(text)) => text.len(),
        None => 0,
    };
    if len == 0 { Err(refused(ApiError::bad_request("prompt", "prompt is empty"))) } else { Ok(len) }
}

fn unimplemented<T>() -> Result<T, Status> {
    Err(Status::unimplemented("a stub has no such call"))
}

#[tonic::async_trait]
impl Engine for Calls {
    type StartGenerateStream = Pin<Box<dyn Stream<Item = Result<wire::CompletionResponse, Status>> + Send>>;
    type WatchKvEventsStream = Pin<Box<dyn Stream<Item = Result<wire::KvEvent, Status>> + Send>>;

    async fn prep_recv(
        &self,
        request: Request<wire::PrepRecvRequest>,
    ) -> Result<Response<wire::PrepRecvResponse>, Status> {
        let message = request.into_inner();
        let len = len(message.completion.as_ref())?;
        let end = normalise_prep_end(message.end, len, message.commit).map_err(refused)?;
        Ok(Response::new(wire::PrepRecvResponse {
            kv_addr_info: if end == 0 { Vec::new() } else { b"stu".repeat(64) },
            prefix_matched_length: 0,
            lease_seconds: Some(30.0),
            seq_id: None,
            engine_id: Some(self.0.engine_id.to_string()),
        }))
    }

    async fn remote_send(
        &self,
        request: Request<wire::RemoteSendRequest>,
    ) -> Result<Response<wire::RemoteSendResponse>, Status> {
        let message = request.into_inner();
        let len = len(message.completion.as_ref())?;
        let range = normalise_send_range(message.begin, message.end, len, true).map_err(refused)?;
        Ok(Response::new(wire::RemoteSendResponse {
            sent_tokens: range.num_tokens(),
            computed_tokens: range.end(),
            ..Default::default()
        }))
    }

    async fn start_generate(
        &self,
        request: Request<wire::StartGenerateRequest>,
    ) -> Result<Response<Self::StartGenerateStream>, Status> {
        let message = request.into_inner();
        let len = len(message.completion.as_ref())?;
        normalise_begin(message.begin, len).map_err(refused)?;
        let asked = message.completion.unwrap_or_default();
        if let Some(n) = asked.n.filter(|&n| n != 1) {
            return Err(refused(ApiError::bad_request("n", format!("n is {n}, a stub answers one choice"))));
        }
        let num_tokens = match asked.max_tokens {
            None => self.0.num_tokens,
            Some(tokens) => u32::try_from(tokens)
                .ok()
                .filter(|tokens| (1..=MAX_CONTEXT).contains(tokens))
                .ok_or_else(|| {
                    let message = format!("max_tokens is {tokens}, must be in [1, {MAX_CONTEXT}]");
                    refused(ApiError::bad_request("max_tokens", message))
                })?,
        };
        let (created, pause, ids) = (self.0.created, self.0.pause, asked.return_token_ids);
        let usage = Usage::new(u32::try_from(len).unwrap_or(u32::MAX), num_tokens, 0);
        if !asked.stream {
            if !pause.is_zero() {
                tokio::time::sleep(pause * num_tokens).await;
            }
            let mut whole = chunk(created, num_tokens, ids, true);
            whole.usage = Some(usage);
            return Ok(Response::new(Box::pin(stream::iter([Ok(whole.into())]))));
        }
        let [token, last]: [wire::CompletionResponse; 2] =
            [false, true].map(|last| chunk(created, 1, ids, last).into());
        let tokens = stream::iter(1..=num_tokens).then(move |number| {
            let message = if number == num_tokens { last.clone() } else { token.clone() };
            async move {
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
                Ok(message)
            }
        });
        let wants_usage = asked.stream_options.is_some_and(|options| options.include_usage);
        let end = wants_usage.then(|| {
            let mut end = CompletionResponse::new("cmpl-stub", created, MODEL, Vec::new());
            end.usage = Some(usage);
            Ok(end.into())
        });
        Ok(Response::new(Box::pin(tokens.chain(stream::iter(end)))))
    }

    async fn abort(
        &self,
        _: Request<wire::SequenceRequest>,
    ) -> Result<Response<wire::AbortResponse>, Status> {
        Ok(Response::new(wire::AbortResponse { aborted: false }))
    }

    async fn commit(
        &self,
        _: Request<wire::SequenceRequest>,
    ) -> Result<Response<wire::CommitResponse>, Status> {
        unimplemented()
    }

    async fn pause(
        &self,
        _: Request<wire::SequenceRequest>,
    ) -> Result<Response<wire::PauseResponse>, Status> {
        unimplemented()
    }

    async fn watch_kv_events(
        &self,
        _: Request<wire::WatchKvEventsRequest>,
    ) -> Result<Response<Self::WatchKvEventsStream>, Status> {
        unimplemented()
    }

    async fn state(&self, _: Request<wire::StateRequest>) -> Result<Response<wire::StateResponse>, Status> {
        let view = wire::StateResponse::try_from(view(&self.0));
        view.map(Response::new).map_err(|error| refused(ApiError::internal(error.to_string())))
    }
}
