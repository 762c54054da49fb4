//! Reading a stream of events off a body.

use std::collections::VecDeque;
use std::marker::PhantomData;

use futures::Stream;
use microserving_protocol::{ApiError, SseEvent, SseParser};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::ClientError;
use crate::connection::Body;
use crate::http::chain;

/// A body that is being cut into events of one type. Dropping it before its end closes the connection.
pub(crate) struct EventStream<T> {
    engine: String,
    deadline: Option<Instant>,
    body: Body,
    parser: SseParser,
    pending: VecDeque<SseEvent>,
    events: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned + Send> EventStream<T> {
    pub(crate) fn new(engine: String, deadline: Option<Instant>, body: Body) -> Self {
        Self {
            engine,
            deadline,
            body,
            parser: SseParser::new(),
            pending: VecDeque::new(),
            events: PhantomData,
        }
    }

    /// Returns the events; the first error is the last item.
    pub(crate) fn into_events(self) -> impl Stream<Item = Result<T, ClientError>> + Send {
        futures::stream::unfold(Some(self), |state| async move {
            let mut events = state?;
            match events.next_event().await {
                Ok(Some(event)) => Some((Ok(event), Some(events))),
                Ok(None) => None,
                Err(error) => Some((Err(error), None)),
            }
        })
    }

    /// Returns the next event, or nothing after `[DONE]`. Only `[DONE]` is a proper end.
    async fn next_event(&mut self) -> Result<Option<T>, ClientError> {
        loop {
            match self.pending.pop_front() {
                Some(SseEvent::Done) => {
                    self.finish_body().await;
                    return Ok(None);
                }
                Some(SseEvent::Data(data)) => return self.parse(&data).map(Some),
                None => {}
            }
            let Some(bytes) = self.next_bytes().await? else {
                return Err(self.lost("the stream ended without [DONE]".into()));
            };
            let events = self.parser.push(&bytes).map_err(|error| self.malformed(error.to_string()))?;
            self.pending.extend(events);
        }
    }

    async fn next_bytes(&mut self) -> Result<Option<bytes::Bytes>, ClientError> {
        let read = match self.deadline {
            None => self.body.next().await,
            Some(deadline) => tokio::time::timeout_at(deadline, self.body.next())
                .await
                .map_err(|_| ClientError::Timeout { engine: self.engine.clone() })?,
        };
        read.map_err(|error| self.lost(chain(&error)))
    }

    /// Reads the end of the body, which follows `[DONE]` at once, so that the connection can be used again.
    async fn finish_body(&mut self) {
        let rest = async { while let Ok(Some(_)) = self.body.next().await {} };
        // An engine that keeps the body open costs us a connection, not the answer.
        let _ = tokio::time::timeout(std::time::Duration::from_millis(50), rest).await;
    }

    fn parse(&self, data: &str) -> Result<T, ClientError> {
        // Whatever has no error in it is read in one go.
        if !data.contains("\"error\"") {
            return serde_json::from_str(data)
                .map_err(|error| self.malformed(format!("an event is malformed: {error}")));
        }
        let value: serde_json::Value = serde_json::from_str(data)
            .map_err(|error| self.malformed(format!("an event is no JSON: {error}")))?;
        if let Some(error) = ApiError::from_value(500, &value) {
            return Err(ClientError::Refused { engine: self.engine.clone(), error: Box::new(error) });
        }
        serde_json::from_value(value)
            .map_err(|error| self.malformed(format!("an event is malformed: {error}")))
    }

    fn lost(&self, reason: String) -> ClientError {
        ClientError::Lost { engine: self.engine.clone(), reason }
    }

    fn malformed(&self, reason: String) -> ClientError {
        ClientError::Malformed { engine: self.engine.clone(), reason }
    }
}
