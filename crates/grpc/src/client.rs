//! The calls over gRPC.

use std::fmt;
use std::pin::Pin;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{Stream, stream};
use http::Uri;
use microserving_client::{
    BadUrl, CallContext, ChunkStream, ClientError, Door, EngineCalls, HttpEngineClient, KvEventStream,
    Relayed,
};
use microserving_protocol::{
    AbortRequest, AbortResponse, AddrError, ApiError, CommitRequest, CommitResponse, CompletionRequest,
    ModelList, PauseRequest, PauseResponse, PrepRecvRequest, PrepRecvResponse, RemoteSendRequest,
    RemoteSendResponse, StartGenerateRequest, StateView,
};
use tokio::time::Instant;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status, Streaming};

use crate::channel::Channel;
use crate::error::{error_of, guess};
use crate::wire;
use crate::wire::engine_client::EngineClient;

/// Answers larger than this are refused, as over REST.
const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// An engine reached over gRPC, all calls on one connection. Cheap to clone; clones share it.
#[derive(Clone)]
pub struct GrpcEngineClient {
    engine: EngineClient<Channel>,
    /// For what is asked by plain HTTP on either wire.
    rest: HttpEngineClient,
}

impl fmt::Debug for GrpcEngineClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GrpcEngineClient").field(&self.name()).finish()
    }
}

impl GrpcEngineClient {
    /// Makes a client of the engine at `url`, the same as for REST. Connects on the first call.
    ///
    /// # Errors
    /// If `url` is not `http://host:port`, possibly with a path that goes before those of the calls.
    pub fn new(url: &str) -> Result<Self, BadUrl> {
        let rest = HttpEngineClient::new(url)?;
        let origin: Uri = rest.name().parse().map_err(|error: http::uri::InvalidUri| BadUrl {
            url: url.to_owned(),
            reason: error.to_string(),
        })?;
        let engine =
            EngineClient::with_origin(Channel::new(), origin).max_decoding_message_size(MAX_MESSAGE_BYTES);
        Ok(Self { engine, rest })
    }

    /// Puts what the calls of a request share beside a message, as metadata.
    fn request<T>(&self, cx: &CallContext, message: T) -> Result<tonic::Request<T>, ClientError> {
        let mut request = tonic::Request::new(message);
        let texts = [("x-request-id", &cx.request_id), ("traceparent", &cx.traceparent)];
        for (name, text) in texts {
            if let Some(value) = text.as_deref().and_then(|text| MetadataValue::try_from(text).ok()) {
                request.metadata_mut().insert(name, value);
            }
        }
        if cx.wants_stats {
            request.metadata_mut().insert("x-microserving-stats", MetadataValue::from_static("1"));
        }
        match cx.remaining() {
            Some(left) if left.is_zero() => Err(ClientError::Timeout { engine: self.name().to_owned() }),
            Some(left) => {
                request.set_timeout(left);
                Ok(request)
            }
            None => Ok(request),
        }
    }

    async fn in_time<T>(
        &self,
        deadline: Option<Instant>,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, ClientError> {
        let outcome = match deadline {
            None => call.await,
            Some(deadline) => tokio::time::timeout_at(deadline, call)
                .await
                .map_err(|_| ClientError::Timeout { engine: self.name().to_owned() })?,
        };
        outcome.map_err(|status| self.refusal(&status))
    }

    /// Says what a status means that came instead of an answer.
    fn refusal(&self, status: &Status) -> ClientError {
        let engine = self.name().to_owned();
        if let Some(error) = error_of(status) {
            return ClientError::Refused { engine, error: Box::new(error) };
        }
        if is_ours(status) {
            return ClientError::Unreachable { engine, reason: words(status) };
        }
        ClientError::Refused { engine, error: Box::new(guess(status)) }
    }

    /// Says what a status means that came within an answer.
    fn interruption(&self, status: &Status) -> ClientError {
        match error_of(status) {
            Some(error) => ClientError::Refused { engine: self.name().to_owned(), error: Box::new(error) },
            None => ClientError::Lost { engine: self.name().to_owned(), reason: words(status) },
        }
    }

    fn malformed(&self, reason: impl fmt::Display) -> ClientError {
        ClientError::Malformed { engine: self.name().to_owned(), reason: reason.to_string() }
    }

    /// Returns the messages of a stream; the first error is the last item. Dropping it cancels the call.
    fn items<M, T>(
        &self,
        deadline: Option<Instant>,
        messages: Streaming<M>,
    ) -> Pin<Box<dyn Stream<Item = Result<T, ClientError>> + Send>>
    where
        M: Send + 'static,
        T: TryFrom<M, Error: fmt::Display> + Send + 'static,
    {
        Box::pin(stream::unfold(Some((self.clone(), messages)), move |state| async move {
            let (client, mut messages) = state?;
            let next = match deadline {
                None => messages.message().await,
                Some(deadline) => match tokio::time::timeout_at(deadline, messages.message()).await {
                    Ok(next) => next,
                    Err(_) => {
                        let error = ClientError::Timeout { engine: client.name().to_owned() };
                        return Some((Err(error), None));
                    }
                },
            };
            match next {
                Ok(Some(message)) => match T::try_from(message) {
                    Ok(item) => Some((Ok(item), Some((client, messages)))),
                    Err(error) => Some((Err(client.malformed(error)), None)),
                },
                Ok(None) => None,
                Err(status) => Some((Err(client.interruption(&status)), None)),
            }
        }))
    }

    /// Answers as the engine would, for an address that has no bytes to be sent.
    fn bad_address(&self, error: &AddrError) -> ClientError {
        let error = ApiError::bad_request("kv_addr_info", format!("kv_addr_info: {error}"));
        ClientError::Refused {
            engine: self.name().to_owned(),
            error: Box::new(error.with_code("bad_address")),
        }
    }
}

/// Says whether a status was made on this side, of a connection that failed or an answer without an end.
fn is_ours(status: &Status) -> bool {
    std::error::Error::source(status).is_some() || matches!(status.code(), Code::Unknown | Code::Cancelled)
}

/// Writes a status with its causes, which is where the system's own words are.
fn words(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text.push_str(": ");
            text.push_str(&inner_text);
        }
        cause = inner.source();
    }
    text
}

#[async_trait]
impl EngineCalls for GrpcEngineClient {
    fn name(&self) -> &str {
        self.rest.name()
    }

    fn wire(&self) -> &'static str {
        "grpc"
    }

    async fn prep_recv(
        &self,
        cx: &CallContext,
        request: &PrepRecvRequest,
    ) -> Result<PrepRecvResponse, ClientError> {
        let request = self.request(cx, wire::PrepRecvRequest::from(request))?;
        let mut engine = self.engine.clone();
        Ok(self.in_time(cx.deadline, engine.prep_recv(request)).await?.into_inner().into())
    }

    async fn remote_send(
        &self,
        cx: &CallContext,
        request: &RemoteSendRequest,
    ) -> Result<RemoteSendResponse, ClientError> {
        let message = wire::RemoteSendRequest::try_from(request).map_err(|error| self.bad_address(&error))?;
        let request = self.request(cx, message)?;
        let mut engine = self.engine.clone();
        Ok(self.in_time(cx.deadline, engine.remote_send(request)).await?.into_inner().into())
    }

    async fn start_generate(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
    ) -> Result<ChunkStream, ClientError> {
        let request = self.request(cx, wire::StartGenerateRequest::from(request))?;
        let mut engine = self.engine.clone();
        let answer = self.in_time(cx.deadline, engine.start_generate(request)).await?;
        Ok(self.items(cx.deadline, answer.into_inner()))
    }

    async fn abort(&self, cx: &CallContext, request: &AbortRequest) -> Result<AbortResponse, ClientError> {
        let request = self.request(cx, wire::SequenceRequest::from(request))?;
        let mut engine = self.engine.clone();
        Ok(self.in_time(cx.deadline, engine.abort(request)).await?.into_inner().into())
    }

    async fn commit(&self, cx: &CallContext, request: &CommitRequest) -> Result<CommitResponse, ClientError> {
        let request = self.request(cx, wire::SequenceRequest::from(request))?;
        let mut engine = self.engine.clone();
        Ok(self.in_time(cx.deadline, engine.commit(request)).await?.into_inner().into())
    }

    async fn pause(&self, cx: &CallContext, request: &PauseRequest) -> Result<PauseResponse, ClientError> {
        let request = self.request(cx, wire::SequenceRequest::from(request))?;
        let mut engine = self.engine.clone();
        Ok(self.in_time(cx.deadline, engine.pause(request)).await?.into_inner().into())
    }

    async fn completions(
        &self,
        cx: &CallContext,
        request: &CompletionRequest,
    ) -> Result<ChunkStream, ClientError> {
        self.rest.completions(cx, request).await
    }

    async fn models(&self, cx: &CallContext) -> Result<ModelList, ClientError> {
        self.rest.models(cx).await
    }

    async fn state(&self, cx: &CallContext) -> Result<StateView, ClientError> {
        let request = self.request(cx, wire::StateRequest {})?;
        let mut engine = self.engine.clone();
        Ok(self.in_time(cx.deadline, engine.state(request)).await?.into_inner().into())
    }

    async fn ready(&self, cx: &CallContext) -> Result<(), ClientError> {
        self.rest.ready(cx).await
    }

    async fn profile(&self, cx: &CallContext) -> Result<Option<serde_json::Value>, ClientError> {
        self.rest.profile(cx).await
    }

    async fn tokenizer(&self, cx: &CallContext) -> Result<serde_json::Value, ClientError> {
        self.rest.tokenizer(cx).await
    }

    async fn kv_events(&self, cx: &CallContext, from: u64) -> Result<KvEventStream, ClientError> {
        let request = self.request(cx, wire::WatchKvEventsRequest { from })?;
        let mut engine = self.engine.clone();
        let answer = self.in_time(cx.deadline, engine.watch_kv_events(request)).await?;
        Ok(self.items(cx.deadline, answer.into_inner()))
    }

    /// An answer that is passed on is JSON, as its client reads it.
    async fn start_relayed(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
        door: Door,
    ) -> Result<Option<Relayed>, ClientError> {
        self.rest.start_relayed(cx, request, door).await
    }

    /// A client's own body and the answer to it are JSON, and go as they are.
    async fn relay(
        &self,
        cx: &CallContext,
        door: Door,
        body: &[Bytes],
    ) -> Result<Option<Relayed>, ClientError> {
        self.rest.relay(cx, door, body).await
    }
}
