//! The service, call by call.

use std::pin::Pin;

use futures::{Stream, stream};
use microserving_grpc::wire::engine_server::Engine;
use microserving_grpc::{to_status, wire};
use microserving_protocol::{
    AbortRequest, ApiError, CommitRequest, PauseRequest, PrepRecvRequest, RemoteSendRequest,
    StartGenerateRequest,
};
use microserving_server::{Arrival, EngineService};
use tonic::metadata::MetadataMap;
use tonic::{Extensions, Request, Response, Status};

use crate::deadline::Deadline;

type Items<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// An engine's calls as the generated service has them.
pub(crate) struct Calls {
    service: EngineService,
}

impl Calls {
    pub(crate) fn new(service: EngineService) -> Self {
        Self { service }
    }
}

/// What came beside a message.
struct Beside {
    deadline: Deadline,
    arrival: Arrival,
    stats: bool,
}

impl Beside {
    fn of(metadata: &MetadataMap, extensions: &Extensions) -> Result<Self, ApiError> {
        let arrival = extensions.get::<Arrival>().cloned();
        Ok(Self {
            deadline: Deadline::of(metadata)?,
            arrival: arrival.ok_or_else(|| ApiError::internal("the call has no arrival"))?,
            stats: metadata.get("x-microserving-stats").is_some_and(|value| value == "1"),
        })
    }
}

/// Reads a request, makes the call, and turns its outcome into gRPC's.
async fn answer<M, T, C: Future<Output = Result<T, ApiError>>>(
    request: Request<M>,
    call: impl FnOnce(M, Arrival, bool) -> C,
) -> Result<(T, Deadline), Status> {
    let (metadata, extensions, message) = request.into_parts();
    let outcome = async {
        let Beside { deadline, arrival, stats } = Beside::of(&metadata, &extensions)?;
        Ok((deadline.within(call(message, arrival, stats)).await?, deadline))
    };
    outcome.await.map_err(|error: ApiError| to_status(&error))
}

/// Says that our own answer cannot be written, which would be a fault of ours.
fn unwritable(error: impl std::fmt::Display) -> ApiError {
    ApiError::internal(format!("the answer cannot be written: {error}"))
}

#[tonic::async_trait]
impl Engine for Calls {
    type StartGenerateStream = Items<wire::CompletionResponse>;
    type WatchKvEventsStream = Items<wire::KvEvent>;

    async fn prep_recv(
        &self,
        request: Request<wire::PrepRecvRequest>,
    ) -> Result<Response<wire::PrepRecvResponse>, Status> {
        let call = |message, _, _| async {
            let reply = self.service.prep_recv(PrepRecvRequest::try_from(message)?).await?;
            wire::PrepRecvResponse::try_from(reply).map_err(unwritable)
        };
        Ok(Response::new(answer(request, call).await?.0))
    }

    async fn remote_send(
        &self,
        request: Request<wire::RemoteSendRequest>,
    ) -> Result<Response<wire::RemoteSendResponse>, Status> {
        let call = |message, arrival, _| async move {
            self.service.remote_send(RemoteSendRequest::try_from(message)?, &arrival).await
        };
        Ok(Response::new(answer(request, call).await?.0.into()))
    }

    async fn start_generate(
        &self,
        request: Request<wire::StartGenerateRequest>,
    ) -> Result<Response<Self::StartGenerateStream>, Status> {
        let call = |message, arrival, stats| async move {
            self.service.start_generate(StartGenerateRequest::try_from(message)?, arrival, stats).await
        };
        let (chunks, deadline) = answer(request, call).await?;
        let items = stream::unfold(Some(chunks), move |chunks| async move {
            let mut chunks = chunks?;
            match deadline.within(chunks.next()).await {
                Ok(Some(chunk)) => Some((Ok(chunk.into()), Some(chunks))),
                Ok(None) => None,
                Err(error) => Some((Err(to_status(&error)), None)),
            }
        });
        Ok(Response::new(Box::pin(items)))
    }

    async fn abort(
        &self,
        request: Request<wire::SequenceRequest>,
    ) -> Result<Response<wire::AbortResponse>, Status> {
        let call = |message, _, _| async { self.service.abort(AbortRequest::try_from(message)?).await };
        Ok(Response::new(answer(request, call).await?.0.into()))
    }

    async fn commit(
        &self,
        request: Request<wire::SequenceRequest>,
    ) -> Result<Response<wire::CommitResponse>, Status> {
        let call = |message, _, _| async { self.service.commit(CommitRequest::try_from(message)?).await };
        Ok(Response::new(answer(request, call).await?.0.into()))
    }

    async fn pause(
        &self,
        request: Request<wire::SequenceRequest>,
    ) -> Result<Response<wire::PauseResponse>, Status> {
        let call = |message, _, _| async { self.service.pause(PauseRequest::try_from(message)?).await };
        Ok(Response::new(answer(request, call).await?.0.into()))
    }

    async fn watch_kv_events(
        &self,
        request: Request<wire::WatchKvEventsRequest>,
    ) -> Result<Response<Self::WatchKvEventsStream>, Status> {
        let call = |message: wire::WatchKvEventsRequest, _, _| async move {
            Ok(self.service.kv_events(message.from))
        };
        let (events, deadline) = answer(request, call).await?;
        let items = stream::unfold(Some(events), move |events| async move {
            let mut events = events?;
            let next = async { wire::KvEvent::try_from(events.next().await?).map_err(unwritable) };
            match deadline.within(next).await {
                Ok(event) => Some((Ok(event), Some(events))),
                Err(error) => Some((Err(to_status(&error)), None)),
            }
        });
        Ok(Response::new(Box::pin(items)))
    }

    async fn state(
        &self,
        request: Request<wire::StateRequest>,
    ) -> Result<Response<wire::StateResponse>, Status> {
        let call = |_, _, _| async {
            wire::StateResponse::try_from(self.service.state().await?).map_err(unwritable)
        };
        Ok(Response::new(answer(request, call).await?.0))
    }
}
