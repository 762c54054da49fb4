//! Answers that are passed on as they are.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use futures::Stream;
use microserving_protocol::{ApiError, RELAY_HEADER, RelayCutter, RelayPart, RelayUsage};

use crate::connection::Body;
use crate::http::{chain, retry_after};
use crate::pool::put_header;
use crate::{CallContext, ClientError, HttpEngineClient};

/// Answers larger than this are refused.
const MAX_BODY_BYTES: usize = 256 << 20;

/// A door of an engine that clients know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chats,
}

impl Door {
    /// Returns the door's path.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chats => "/v1/chat/completions",
        }
    }
}

/// The events of an answer. Ends after the part that holds `[DONE]` and the usage, or with one error; dropping it cancels the
/// generation. Its reader watches the deadline, as it has more to do at it than to stop.
pub type RelayStream = Pin<Box<dyn Stream<Item = Result<RelayPart, ClientError>> + Send>>;

/// An answer as the engine wrote it for the client.
pub enum Relayed {
    /// JSON.
    Whole {
        /// The body.
        body: Bytes,
        /// What it took.
        usage: RelayUsage,
    },
    /// Events.
    Stream(RelayStream),
}

impl std::fmt::Debug for Relayed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Whole { body, usage } => {
                f.debug_struct("Whole").field("body", body).field("usage", usage).finish()
            }
            Self::Stream(_) => f.write_str("Stream(..)"),
        }
    }
}

impl HttpEngineClient {
    /// See [`crate::EngineCalls::relay`].
    pub(crate) async fn pass_on(
        &self,
        cx: &CallContext,
        door: Door,
        body: &[Bytes],
    ) -> Result<Option<Relayed>, ClientError> {
        let mut head = self.pool.head("POST", door.path());
        let len: usize = body.iter().map(Bytes::len).sum();
        put_header(&mut head, "content-type", b"application/json");
        put_header(&mut head, "content-length", len.to_string().as_bytes());
        put_header(&mut head, RELAY_HEADER, b"1");
        for (name, value) in [("x-request-id", &cx.request_id), ("traceparent", &cx.traceparent)] {
            // What is no header value would be another request.
            if let Some(value) = value
                && value.bytes().all(|byte| byte == b'\t' || (byte >= b' ' && byte != 0x7f))
            {
                put_header(&mut head, name, value.as_bytes());
            }
        }
        head.extend_from_slice(b"\r\n");
        let engine = self.base.clone();
        let (head, body) = match self.in_time(cx, self.pool.exchange(&head, body)).await? {
            Ok(answer) => answer,
            Err(error) => return Err(ClientError::Unreachable { engine, reason: chain(&error) }),
        };
        if !(200..300).contains(&head.status) {
            let body = self.collect(cx, body).await.unwrap_or_default();
            let mut error = ApiError::from_body(head.status, &body);
            error.retry_after = retry_after(&head.headers);
            return Err(ClientError::Refused { engine, error: Box::new(error) });
        }
        let Some(mark) = head.headers.get(RELAY_HEADER) else { return Ok(None) };
        if head.is_event_stream() {
            return Ok(Some(Relayed::Stream(Box::pin(RelayedEvents::new(engine, body)))));
        }
        let usage = mark.to_str().ok().and_then(|mark| mark.parse().ok());
        let usage = usage.ok_or_else(|| self.malformed(format!("{RELAY_HEADER} is {mark:?}")))?;
        Ok(Some(Relayed::Whole { body: self.collect(cx, body).await?, usage }))
    }

    async fn collect(&self, cx: &CallContext, mut body: Body) -> Result<Bytes, ClientError> {
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
}

/// A marked stream that is being cut. Dropping it before its end closes the connection.
pub(crate) struct RelayedEvents {
    engine: String,
    body: Body,
    cutter: RelayCutter,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Going,
    /// `[DONE]` has come; what is left of the body is its end.
    Done,
    Over,
}

impl RelayedEvents {
    pub(crate) fn new(engine: String, body: Body) -> Self {
        Self { engine, body, cutter: RelayCutter::default(), state: State::Going }
    }

    fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<RelayPart>, ClientError>> {
        let engine = || self.engine.clone();
        loop {
            let bytes = match (ready!(self.body.poll_next(cx)), self.state) {
                (_, State::Done) => return Poll::Ready(Ok(None)),
                (Ok(Some(bytes)), _) => bytes,
                (Ok(None), _) => {
                    let reason = "the stream ended without [DONE]".to_owned();
                    return Poll::Ready(Err(ClientError::Lost { engine: engine(), reason }));
                }
                (Err(error), _) => {
                    return Poll::Ready(Err(ClientError::Lost {
                        engine: engine(),
                        reason: error.to_string(),
                    }));
                }
            };
            let part = self
                .cutter
                .push(bytes)
                .map_err(|error| ClientError::Malformed { engine: engine(), reason: error.to_string() })?;
            if part.usage.is_some() {
                self.state = State::Done;
            }
            if !part.events.is_empty() || part.fault.is_some() || part.usage.is_some() {
                return Poll::Ready(Ok(Some(part)));
            }
        }
    }
}

impl Stream for RelayedEvents {
    type Item = Result<RelayPart, ClientError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.state == State::Over {
            return Poll::Ready(None);
        }
        let outcome = ready!(self.poll_part(cx));
        if !matches!(outcome, Ok(Some(_))) {
            self.state = State::Over;
        }
        Poll::Ready(outcome.transpose())
    }
}

/// Reads the error that an event without a mark holds.
#[must_use]
pub fn relayed_fault(engine: &str, event: &[u8]) -> ClientError {
    let data = event.strip_prefix(b"data: ").unwrap_or(event).trim_ascii();
    let error = serde_json::from_slice(data).ok().and_then(|value| ApiError::from_value(500, &value));
    let engine = engine.to_owned();
    match error {
        Some(error) => ClientError::Refused { engine, error: Box::new(error) },
        None => ClientError::Malformed { engine, reason: "an event without a mark is no error".into() },
    }
}
