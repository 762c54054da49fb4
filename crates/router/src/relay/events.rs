//! A relayed stream on its way to the client.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use crate::admission::Place;
use bytes::Bytes;
use futures::Stream;
use microserving_client::{CallContext, ClientError, RelayStream, relayed_fault};
use microserving_protocol::{RelayPart, RelayUsage, TokenId, sse_event};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tracing::{info, warn};

use super::note_usage;
use crate::Seat;
use crate::attempts::describe;
use crate::metrics::RequestRecord;

/// The events of an answer; the client's pace decides when more are read. Nothing is made again once the client has seen an event: a
/// failure is an event, and the last one.
pub(crate) struct Events {
    /// Gone after the last event.
    seat: Option<Seat>,
    next: Option<RelayPart>,
    rest: RelayStream,
    fault: Option<Bytes>,
    failed: bool,
    call: CallContext,
    record: RequestRecord,
    _slot: Place,
    arrival: Instant,
    first: Option<Instant>,
    /// The request's deadline, and the engine's being given up; made when something is waited for.
    limits: Option<Limits>,
    /// The tokens that the client has seen, of an answer with one choice: what another engine would need to go on.
    shown: Option<Vec<TokenId>>,
}

/// What ends a stream from this side.
struct Limits {
    deadline: Option<Pin<Box<Sleep>>>,
    lost: Pin<Box<WaitForCancellationFutureOwned>>,
}

enum Limit {
    Deadline,
    Lost,
}

impl Future for Limits {
    type Output = Limit;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Limit> {
        if self.lost.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Limit::Lost);
        }
        match &mut self.deadline {
            Some(deadline) => deadline.as_mut().poll(cx).map(|()| Limit::Deadline),
            None => Poll::Pending,
        }
    }
}

impl Events {
    #[allow(clippy::too_many_arguments, reason = "they are the parts of one request")]
    pub(crate) fn begin(
        seat: Seat,
        first: RelayPart,
        rest: RelayStream,
        arrival: Instant,
        call: CallContext,
        record: RequestRecord,
        slot: Place,
        single: bool,
    ) -> Self {
        Self {
            seat: Some(seat),
            next: Some(first),
            rest,
            fault: None,
            failed: false,
            call,
            record,
            _slot: slot,
            arrival,
            first: None,
            limits: None,
            shown: single.then(Vec::new),
        }
    }

    /// Reads on, until the deadline.
    fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<RelayPart, ClientError>>> {
        let part = self.rest.as_mut().poll_next(cx);
        let (true, Some(seat)) = (part.is_pending(), &self.seat) else { return part };
        let engine = seat.engine();
        let deadline = self.call.deadline;
        let limits = self.limits.get_or_insert_with(|| Limits {
            deadline: deadline.map(|deadline| Box::pin(sleep_until(deadline))),
            lost: Box::pin(engine.lost().cancelled_owned()),
        });
        let error = match ready!(Pin::new(limits).poll(cx)) {
            Limit::Deadline => ClientError::Timeout { engine: engine.name().to_owned() },
            Limit::Lost => engine.lost_error(),
        };
        Poll::Ready(Some(Err(error)))
    }

    /// Takes some events in; returns what the client gets of them.
    fn take(&mut self, mut part: RelayPart) -> Bytes {
        if let Some(shown) = &mut self.shown {
            shown.append(&mut part.tokens);
        }
        self.fault = part.fault;
        if let Some(usage) = part.usage {
            self.finish(&usage);
        } else if self.first.is_none() {
            self.note_first();
        }
        part.events
    }

    fn note_first(&mut self) -> Instant {
        let now = Instant::now();
        let pattern = self.record.pattern().to_owned();
        self.record.metrics().first_token(&pattern, now - self.arrival);
        self.first = Some(now);
        now
    }

    fn finish(&mut self, usage: &RelayUsage) {
        let now = Instant::now();
        let first = self.first.unwrap_or_else(|| self.note_first());
        let (whole, decoding) = (now - self.arrival, now.saturating_duration_since(first));
        note_usage(self.record.metrics(), self.record.pattern(), whole, decoding, usage);
        self.record.set_status(200);
        self.seat = None;
    }

    /// Ends the stream by an event that says what went wrong.
    fn fail(&mut self, error: ClientError) -> Option<Bytes> {
        self.failed = true;
        let mut seat = self.seat.take()?;
        let error = seat.judge::<()>("relay", Err(error)).err()?;
        let told = error.to_api_error();
        let (request_id, reason) = (self.call.request_id.as_deref(), describe(&error));
        let num_shown = self.shown.as_ref().map(Vec::len);
        if told.status >= 500 && told.status != 503 {
            warn!(request_id, num_shown, error = reason, "request failed");
        } else {
            info!(request_id, num_shown, error = reason, "request refused");
        }
        self.record.set_status(told.status);
        Some(sse_event(&told.to_event()).into())
    }
}

impl Stream for Events {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let part = match self.next.take() {
                Some(part) => Some(Ok(part)),
                None => match (self.fault.take(), &self.seat) {
                    (Some(fault), Some(seat)) => Some(Err(relayed_fault(seat.engine().name(), &fault))),
                    _ if self.failed => None,
                    // Reads the end of the body, so that its connection can be used again.
                    _ => ready!(self.poll_rest(cx)),
                },
            };
            let bytes = match part {
                None => return Poll::Ready(None),
                Some(Ok(part)) => self.take(part),
                Some(Err(error)) => match self.fail(error) {
                    Some(bytes) => bytes,
                    None => return Poll::Ready(None),
                },
            };
            if !bytes.is_empty() {
                return Poll::Ready(Some(Ok(bytes)));
            }
        }
    }
}
