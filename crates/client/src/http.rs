//! The calls over HTTP/1.1 and JSON.

use std::sync::Arc;
use std::{fmt, io};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::stream::{self, BoxStream};
use microserving_protocol::{
    AbortRequest, AbortResponse, ApiError, CommitRequest, CommitResponse, CompletionRequest,
    CompletionResponse, ModelList, PauseRequest, PauseResponse, PrepRecvRequest, PrepRecvResponse,
    RELAY_HEADER, RemoteSendRequest, RemoteSendResponse, StartGenerateRequest, StateView,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::address::checked_url;
use crate::body::{self, Prompted};
use crate::connection::{Body, Head};
use crate::foreign::Answer;
use crate::pool::{Pool, put_header};
use crate::relay::{Door, Relayed};
use crate::stream::EventStream;
use crate::{BadUrl, CallContext, ChunkStream, ClientError, EngineCalls, KvEventStream};

/// Answers larger than this are refused; the largest is a tokenizer of some tens of megabytes.
const MAX_BODY_BYTES: usize = 256 << 20;

/// A request to an engine.
#[derive(Clone, Copy)]
pub(crate) enum Call<'a> {
    Get {
        path: &'a str,
    },
    Post {
        path: &'a str,
        /// JSON, in parts that follow each other.
        body: &'a [Bytes],
        /// How the answer is to be marked, if it is to be.
        marks: Option<&'a str>,
    },
}

impl<'a> Call<'a> {
    const fn post(path: &'a str, body: &'a [Bytes]) -> Self {
        Self::Post { path, body, marks: None }
    }

    const fn path(&self) -> &'a str {
        match self {
            Self::Get { path } | Self::Post { path, .. } => path,
        }
    }
}

/// An answer whose head says success.
pub(crate) struct Answered {
    pub(crate) head: Head,
    pub(crate) body: Body,
}

/// An engine reached over HTTP. Cheap to clone; clones share their connections.
#[derive(Clone)]
pub struct HttpEngineClient {
    pub(crate) base: String,
    pub(crate) pool: Arc<Pool>,
}

impl fmt::Debug for HttpEngineClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HttpEngineClient").field(&self.base).finish()
    }
}

impl HttpEngineClient {
    /// Makes a client of the engine at `url`, for example `http://10.0.0.7:8001`. Connects on the first call.
    ///
    /// # Errors
    /// If `url` is not `http://host:port`, possibly with a path that goes before those of the calls.
    pub fn new(url: &str) -> Result<Self, BadUrl> {
        let bad = |reason: String| BadUrl { url: url.to_owned(), reason };
        let base = checked_url(url).map_err(bad)?;
        let pool = Pool::new(&base).ok_or_else(|| bad("has no host".into()))?;
        Ok(Self { base, pool: Arc::new(pool) })
    }

    /// Writes the head of a request.
    fn head(&self, cx: &CallContext, call: &Call<'_>) -> Vec<u8> {
        let mut head = match call {
            Call::Get { path } => self.pool.head("GET", path),
            Call::Post { path, .. } => self.pool.head("POST", path),
        };
        if let Call::Post { body, marks, .. } = call {
            let len: usize = body.iter().map(Bytes::len).sum();
            put_header(&mut head, "content-type", b"application/json");
            put_header(&mut head, "content-length", len.to_string().as_bytes());
            if let Some(marks) = marks {
                put_header(&mut head, RELAY_HEADER, marks.as_bytes());
            }
        }
        for (name, value) in [("x-request-id", &cx.request_id), ("traceparent", &cx.traceparent)] {
            // What is no header value would be another request.
            if let Some(value) = value
                && value.bytes().all(|byte| byte == b'\t' || (byte >= b' ' && byte != 0x7f))
            {
                put_header(&mut head, name, value.as_bytes());
            }
        }
        if cx.wants_stats {
            put_header(&mut head, "x-microserving-stats", b"1");
        }
        head.extend_from_slice(b"\r\n");
        head
    }

    /// Sends a request and returns the answer once its head is there, if that says success.
    pub(crate) async fn send(&self, cx: &CallContext, call: Call<'_>) -> Result<Answered, ClientError> {
        let head = self.head(cx, &call);
        let body = match call {
            Call::Get { .. } => &[],
            Call::Post { body, .. } => body,
        };
        let engine = || self.base.clone();
        let (head, body) = self
            .in_time(cx, self.pool.exchange(&head, body))
            .await?
            .map_err(|error| ClientError::Unreachable { engine: engine(), reason: chain(&error) })?;
        if head.is_success() {
            return Ok(Answered { head, body });
        }
        let body = self.body(cx, body).await.unwrap_or_default();
        let mut error = ApiError::from_body(head.status, &body);
        error.retry_after = head.retry_after;
        Err(ClientError::Refused { engine: engine(), error: Box::new(error) })
    }

    /// Reads the rest of an answer. One that came together with its head, as small ones do, is not copied.
    pub(crate) async fn body(&self, cx: &CallContext, mut body: Body) -> Result<Bytes, ClientError> {
        let read = async {
            let first = body.next().await?.unwrap_or_default();
            if body.is_ended() {
                return Ok(first);
            }
            let mut whole = BytesMut::from(first);
            while let Some(more) = body.next().await? {
                if whole.len() + more.len() > MAX_BODY_BYTES {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "the body is too large"));
                }
                whole.extend_from_slice(&more);
            }
            Ok(whole.freeze())
        };
        self.in_time(cx, read).await?.map_err(|error| self.lost(chain(&error)))
    }

    async fn json<T: DeserializeOwned>(&self, cx: &CallContext, call: Call<'_>) -> Result<T, ClientError> {
        let path = call.path();
        let answer = self.send(cx, call).await?;
        let body = self.body(cx, answer.body).await?;
        serde_json::from_slice(&body).map_err(|error| self.malformed(format!("{path}: {error}")))
    }

    pub(crate) async fn post<T: DeserializeOwned>(
        &self,
        cx: &CallContext,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<T, ClientError> {
        self.ask(cx, path, body::whole(body)).await
    }

    /// Sends a written body, and reads an answer in one piece.
    async fn ask<T: DeserializeOwned>(
        &self,
        cx: &CallContext,
        path: &str,
        body: serde_json::Result<Vec<Bytes>>,
    ) -> Result<T, ClientError> {
        let body = self.written(body)?;
        self.json(cx, Call::post(path, &body)).await
    }

    async fn get<T: DeserializeOwned>(&self, cx: &CallContext, path: &str) -> Result<T, ClientError> {
        self.json(cx, Call::Get { path }).await
    }

    async fn chunks(
        &self,
        cx: &CallContext,
        path: &str,
        body: &impl Prompted,
    ) -> Result<ChunkStream, ClientError> {
        self.items::<CompletionResponse>(cx, path, body::with_prompt(body)).await
    }

    /// As engines of other makes answer.
    pub(crate) async fn answers(
        &self,
        cx: &CallContext,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<BoxStream<'static, Result<Answer, ClientError>>, ClientError> {
        self.items(cx, path, body::whole(body)).await
    }

    /// Returns the events of an answer, or the answer if it is in one piece.
    async fn items<T: DeserializeOwned + Send + 'static>(
        &self,
        cx: &CallContext,
        path: &str,
        body: serde_json::Result<Vec<Bytes>>,
    ) -> Result<BoxStream<'static, Result<T, ClientError>>, ClientError> {
        let body = self.written(body)?;
        let Answered { head, body } = self.send(cx, Call::post(path, &body)).await?;
        if head.is_event_stream {
            let events = EventStream::new(self.base.clone(), cx.deadline, body);
            return Ok(Box::pin(events.into_events()));
        }
        let body = self.body(cx, body).await?;
        let whole: T =
            serde_json::from_slice(&body).map_err(|error| self.malformed(format!("{path}: {error}")))?;
        Ok(Box::pin(stream::once(async move { Ok(whole) })))
    }

    /// Asks a path for a status and nothing else.
    pub(crate) async fn healthy(&self, cx: &CallContext, path: &str) -> Result<(), ClientError> {
        let answer = self.send(cx, Call::Get { path }).await?;
        self.body(cx, answer.body).await.map(|_| ())
    }

    pub(crate) async fn in_time<F: Future>(
        &self,
        cx: &CallContext,
        call: F,
    ) -> Result<F::Output, ClientError> {
        match cx.deadline {
            None => Ok(call.await),
            Some(deadline) => tokio::time::timeout_at(deadline, call)
                .await
                .map_err(|_| ClientError::Timeout { engine: self.base.clone() }),
        }
    }

    fn written(&self, body: serde_json::Result<Vec<Bytes>>) -> Result<Vec<Bytes>, ClientError> {
        body.map_err(|error| self.malformed(format!("the request cannot be written: {error}")))
    }

    pub(crate) fn malformed(&self, reason: String) -> ClientError {
        ClientError::Malformed { engine: self.base.clone(), reason }
    }

    pub(crate) fn lost(&self, reason: String) -> ClientError {
        ClientError::Lost { engine: self.base.clone(), reason }
    }
}

#[async_trait]
impl EngineCalls for HttpEngineClient {
    fn name(&self) -> &str {
        &self.base
    }

    async fn prep_recv(
        &self,
        cx: &CallContext,
        request: &PrepRecvRequest,
    ) -> Result<PrepRecvResponse, ClientError> {
        self.ask(cx, "/microserving/prep_recv", body::with_prompt(request)).await
    }

    async fn remote_send(
        &self,
        cx: &CallContext,
        request: &RemoteSendRequest,
    ) -> Result<RemoteSendResponse, ClientError> {
        self.ask(cx, "/microserving/remote_send", body::with_prompt(request)).await
    }

    async fn start_generate(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
    ) -> Result<ChunkStream, ClientError> {
        self.chunks(cx, "/microserving/start_generate", request).await
    }

    async fn start_relayed(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
        door: Door,
    ) -> Result<Option<Relayed>, ClientError> {
        let body = self.written(body::with_prompt(request))?;
        self.start_marked(cx, &body, door).await
    }

    async fn abort(&self, cx: &CallContext, request: &AbortRequest) -> Result<AbortResponse, ClientError> {
        self.post(cx, "/microserving/abort", request).await
    }

    async fn commit(&self, cx: &CallContext, request: &CommitRequest) -> Result<CommitResponse, ClientError> {
        self.post(cx, "/microserving/commit", request).await
    }

    async fn pause(&self, cx: &CallContext, request: &PauseRequest) -> Result<PauseResponse, ClientError> {
        self.post(cx, "/microserving/pause", request).await
    }

    async fn completions(
        &self,
        cx: &CallContext,
        request: &CompletionRequest,
    ) -> Result<ChunkStream, ClientError> {
        self.chunks(cx, "/v1/completions", request).await
    }

    async fn models(&self, cx: &CallContext) -> Result<ModelList, ClientError> {
        self.get(cx, "/v1/models").await
    }

    async fn state(&self, cx: &CallContext) -> Result<StateView, ClientError> {
        self.get(cx, "/microserving/state").await
    }

    async fn ready(&self, cx: &CallContext) -> Result<(), ClientError> {
        self.healthy(cx, "/health/ready").await
    }

    async fn profile(&self, cx: &CallContext) -> Result<Option<serde_json::Value>, ClientError> {
        match self.get(cx, "/microserving/profile").await {
            Ok(profile) => Ok(Some(profile)),
            Err(ClientError::Refused { error, .. }) if error.status == 404 => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn tokenizer(&self, cx: &CallContext) -> Result<serde_json::Value, ClientError> {
        self.get(cx, "/microserving/tokenizer").await
    }

    async fn kv_events(&self, cx: &CallContext, from: u64) -> Result<KvEventStream, ClientError> {
        let path = format!("/microserving/kv_events?from={from}");
        let answer = self.send(cx, Call::Get { path: &path }).await?;
        if !answer.head.is_event_stream {
            return Err(self.malformed(format!("{path}: not a stream of events")));
        }
        let events = EventStream::new(self.base.clone(), cx.deadline, answer.body);
        Ok(Box::pin(events.into_events()))
    }

    fn may_relay(&self) -> bool {
        true
    }

    async fn relay(
        &self,
        cx: &CallContext,
        door: Door,
        body: &[Bytes],
    ) -> Result<Option<Relayed>, ClientError> {
        self.pass_on(cx, door, body).await
    }
}

/// Writes an error with its causes, which is where the system's own words are.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}
