//! The connection to an engine, which may also answer what is not gRPC.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use microserving_protocol::ApiError;
use tonic::Status;
use tower::Service;

use crate::to_status;

/// How long a connection may take to be made; a host that is down does not say so.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A connection with requests on it is asked for a sign of life so often, and given up without one after as long again.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// What an engine may send ahead on one stream: some hundred chunks.
const STREAM_WINDOW: u32 = 64 << 10;
/// What an engine may send ahead on all streams together. So large that streams whose readers stall never hold up the others.
const CONNECTION_WINDOW: u32 = 1 << 30;
/// Cancelled streams that are remembered, so that what was on its way for them is no fault of the engine.
const CANCELLED_STREAMS: usize = 4096;
/// What is read of an answer that is not gRPC.
const MAX_ERROR_BYTES: usize = 64 << 10;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// One connection of HTTP/2 for all calls, made on the first and again when it is lost. Clones share it.
#[derive(Clone)]
pub(crate) struct Channel(Client<HttpConnector, tonic::body::Body>);

impl Channel {
    pub(crate) fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let client = Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .http2_only(true)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .http2_keep_alive_timeout(KEEP_ALIVE)
            .http2_initial_stream_window_size(STREAM_WINDOW)
            .http2_initial_connection_window_size(CONNECTION_WINDOW)
            .http2_max_concurrent_reset_streams(CANCELLED_STREAMS)
            .http2_max_local_error_reset_streams(None)
            .build(connector);
        Self(client)
    }
}

impl Service<Request<tonic::body::Body>> for Channel {
    type Response = Response<Incoming>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Incoming>, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        let answer = self.0.request(request);
        Box::pin(async move {
            let answer = answer.await?;
            let kind = answer.headers().get(CONTENT_TYPE).map_or(&[][..], |kind| kind.as_bytes());
            if answer.status() == StatusCode::OK && kind.starts_with(b"application/grpc") {
                return Ok(answer);
            }
            Err(other_answer(answer).await.into())
        })
    }
}

/// Says what an answer means that is not gRPC: there is no such service, or the server around it refuses.
async fn other_answer(answer: Response<Incoming>) -> Status {
    let status = answer.status();
    if matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED) {
        return Status::unimplemented(format!("the engine does not serve gRPC: status {status}"));
    }
    if !status.is_client_error() && !status.is_server_error() {
        return Status::unknown(format!("the answer is not gRPC: status {status}"));
    }
    let after = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let body = Limited::new(answer.into_body(), MAX_ERROR_BYTES).collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let mut error = ApiError::from_body(status.as_u16(), &body);
    error.retry_after = after.map(Duration::from_secs);
    to_status(&error)
}
