//! Answers that are passed on as they are.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures::Stream;
use microserving_protocol::{ApiError, RELAY_HEADER, RelayCutter, RelayPart, RelayUsage};

use crate::connection::Body;
use crate::http::{Answered, Call};
use crate::{CallContext, ClientError, HttpEngineClient};

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

    /// Returns the value by which `start_generate` is asked to write an answer as this door's clients read it, and to mark it.
    const fn marks(self) -> &'static str {
        match self {
            Self::Completions => "completion",
            Self::Chats => "chat",
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
        self.marked(cx, Call::Post { path: door.path(), body, marks: Some("1") }).await
    }

    /// See [`crate::EngineCalls::start_relayed`].
    pub(crate) async fn start_marked(
        &self,
        cx: &CallContext,
        body: &[Bytes],
        door: Door,
    ) -> Result<Option<Relayed>, ClientError> {
        let marks = Some(door.marks());
        self.marked(cx, Call::Post { path: "/microserving/start_generate", body, marks }).await
    }

    async fn marked(&self, cx: &CallContext, call: Call<'_>) -> Result<Option<Relayed>, ClientError> {
        let Answered { head, body } = self.send(cx, call).await?;
        let Some(mark) = head.relay else { return Ok(None) };
        if head.is_event_stream {
            return Ok(Some(Relayed::Stream(Box::pin(RelayedEvents::new(self.base.clone(), body)))));
        }
        let usage = mark.parse().map_err(|_| self.malformed(format!("{RELAY_HEADER} is {mark:?}")))?;
        Ok(Some(Relayed::Whole { body: self.body(cx, body).await?, usage }))
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
            let is_empty = part.events.is_empty() && part.tokens.is_empty();
            if !is_empty || part.fault.is_some() || part.usage.is_some() {
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
