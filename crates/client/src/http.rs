//! The calls over HTTP/1.1 and JSON.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use http::{HeaderMap, HeaderValue, Method, Request, Response, header};
use http_body_util::{BodyExt, Limited};
use microserving_protocol::{
    AbortRequest, AbortResponse, ApiError, CommitRequest, CommitResponse, CompletionRequest,
    CompletionResponse, ModelList, PauseRequest, PauseResponse, PrepRecvRequest, PrepRecvResponse,
    RemoteSendRequest, RemoteSendResponse, StartGenerateRequest, StateView,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::address::checked_url;
use crate::body::{self, Prompted};
use crate::connection::Body;
use crate::foreign::Answer;
use crate::pool::Pool;
use crate::relay::{Door, Relayed};
use crate::stream::EventStream;
use crate::{BadUrl, CallContext, ChunkStream, ClientError, EngineCalls, KvEventStream};

/// Answers larger than this are refused; the largest is a tokenizer of some tens of megabytes.
const MAX_BODY_BYTES: usize = 256 << 20;

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

    fn request(
        &self,
        cx: &CallContext,
        method: Method,
        path: &str,
        body: Option<Vec<Bytes>>,
    ) -> Result<Request<Vec<Bytes>>, ClientError> {
        let mut builder = Request::builder().method(method).uri(format!("{}{path}", self.base));
        if body.is_some() {
            builder = builder.header(header::CONTENT_TYPE, "application/json");
        }
        let headers = [("x-request-id", &cx.request_id), ("traceparent", &cx.traceparent)];
        for (name, value) in headers {
            if let Some(value) = value.as_deref().and_then(|value| HeaderValue::from_str(value).ok()) {
                builder = builder.header(name, value);
            }
        }
        if cx.wants_stats {
            builder = builder.header("x-microserving-stats", "1");
        }
        builder
            .body(body.unwrap_or_default())
            .map_err(|error| self.malformed(format!("the request cannot be written: {error}")))
    }

    /// Sends a request and returns the answer once its head is there, if that says success.
    async fn send(
        &self,
        cx: &CallContext,
        method: Method,
        path: &str,
        body: Option<Vec<Bytes>>,
    ) -> Result<Response<Body>, ClientError> {
        let request = self.request(cx, method, path, body)?;
        let answer = self
            .in_time(cx, self.pool.send(request))
            .await?
            .map_err(|error| ClientError::Unreachable { engine: self.base.clone(), reason: chain(&error) })?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let status = answer.status().as_u16();
        let retry_after = retry_after(answer.headers());
        let body = self.body(cx, answer).await.unwrap_or_default();
        let mut error = ApiError::from_body(status, &body);
        error.retry_after = retry_after;
        Err(ClientError::Refused { engine: self.base.clone(), error: Box::new(error) })
    }

    async fn body(&self, cx: &CallContext, answer: Response<Body>) -> Result<Bytes, ClientError> {
        let body = Limited::new(answer.into_body(), MAX_BODY_BYTES).collect();
        match self.in_time(cx, body).await? {
            Ok(body) => Ok(body.to_bytes()),
            Err(error) => Err(self.lost(chain(&*error))),
        }
    }

    async fn json<T: DeserializeOwned>(
        &self,
        cx: &CallContext,
        method: Method,
        path: &str,
        body: Option<Vec<Bytes>>,
    ) -> Result<T, ClientError> {
        let answer = self.send(cx, method, path, body).await?;
        let body = self.body(cx, answer).await?;
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
        self.json(cx, Method::POST, path, Some(body)).await
    }

    async fn get<T: DeserializeOwned>(&self, cx: &CallContext, path: &str) -> Result<T, ClientError> {
        self.json(cx, Method::GET, path, None).await
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
        let answer = self.send(cx, Method::POST, path, Some(body)).await?;
        if is_event_stream(&answer) {
            let events = EventStream::new(self.base.clone(), cx.deadline, answer.into_body());
            return Ok(Box::pin(events.into_events()));
        }
        let body = self.body(cx, answer).await?;
        let whole: T =
            serde_json::from_slice(&body).map_err(|error| self.malformed(format!("{path}: {error}")))?;
        Ok(Box::pin(stream::once(async move { Ok(whole) })))
    }

    /// Asks a path for a status and nothing else.
    pub(crate) async fn healthy(&self, cx: &CallContext, path: &str) -> Result<(), ClientError> {
        let answer = self.send(cx, Method::GET, path, None).await?;
        self.body(cx, answer).await.map(|_| ())
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
        let answer = self.send(cx, Method::GET, &path, None).await?;
        if !is_event_stream(&answer) {
            return Err(self.malformed(format!("{path}: not a stream of events")));
        }
        let events = EventStream::new(self.base.clone(), cx.deadline, answer.into_body());
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

fn is_event_stream(answer: &Response<Body>) -> bool {
    let content_type = answer.headers().get(header::CONTENT_TYPE);
    content_type
        .and_then(|value| value.to_str().ok())
        .is_some_and(|value| value.starts_with("text/event-stream"))
}

pub(crate) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok().map(Duration::from_secs)
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
