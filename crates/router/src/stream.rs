//! A generation, with the seat it runs on.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;
use microserving_client::{ChunkStream, ClientError};
use microserving_protocol::{CompletionResponse, FinishReason};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::predict::StreamTimer;
use crate::vitals::Verdict;
use crate::{Error, Seat};

/// The chunks of an engine. Holds the seat until the answer is complete.
pub(crate) struct Generating {
    chunks: ChunkStream,
    /// Gone once the stream has ended.
    seat: Option<Seat>,
    timer: StreamTimer,
    /// Ready when the engine is given up.
    lost: Pin<Box<WaitForCancellationFutureOwned>>,
    begun: bool,
    finished: bool,
    /// When the first chunk must be here, and the clock that says so once it is needed.
    first_by: Option<Instant>,
    clock: Option<Pin<Box<Sleep>>>,
}

impl Generating {
    pub(crate) fn new(
        chunks: ChunkStream,
        seat: Seat,
        timer: StreamTimer,
        first_by: Option<Instant>,
    ) -> Self {
        let lost = Box::pin(seat.engine().lost().cancelled_owned());
        Self { chunks, seat: Some(seat), timer, lost, begun: false, finished: false, first_by, clock: None }
    }

    /// Waits until the first chunk is too late.
    fn poll_clock(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(first_by) = self.first_by.filter(|_| !self.begun) else { return Poll::Pending };
        self.clock.get_or_insert_with(|| Box::pin(sleep_until(first_by))).as_mut().poll(cx)
    }

    fn take(&mut self, chunk: CompletionResponse) -> Result<CompletionResponse, Error> {
        let Some(seat) = &mut self.seat else { return Ok(chunk) };
        if chunk.choices.iter().any(|choice| choice.finish_reason == Some(FinishReason::Preempt)) {
            seat.note_preempted();
            return Err(Error::Preempted { engine: seat.engine().name().to_owned() });
        }
        seat.engine().note_sign();
        if !self.begun {
            self.begun = true;
            seat.engine().note_verdict(Verdict::Good);
            seat.note_first_token(self.timer.prompt());
        }
        self.timer.chunk(seat.engine());
        if let Some(usage) = &chunk.usage
            && chunk.choices.is_empty()
        {
            self.timer.usage(seat.engine(), usage);
        }
        if let Some(usage) = &chunk.usage
            && usage.prompt_tokens_details.is_some()
        {
            seat.note_held(usage.cached_tokens(), usage.prompt_tokens);
        }
        self.finished |= chunk.choices.iter().any(|choice| choice.finish_reason.is_some());
        Ok(chunk)
    }
}

impl Stream for Generating {
    type Item = Result<CompletionResponse, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.seat.is_none() {
            return Poll::Ready(None);
        }
        let item = match self.chunks.as_mut().poll_next(cx) {
            Poll::Pending if self.lost.as_mut().poll(cx).is_pending() => {
                self.timer.waits();
                if self.poll_clock(cx).is_pending() {
                    return Poll::Pending;
                }
                let engine =
                    self.seat.as_ref().map_or_else(String::new, |seat| seat.engine().name().to_owned());
                Some(Err(ClientError::Timeout { engine }))
            }
            Poll::Pending => self.seat.as_ref().map(|seat| Err(seat.engine().lost_error())),
            Poll::Ready(item) => item,
        };
        let item = match item {
            Some(Ok(chunk)) => self.take(chunk),
            Some(Err(error)) => match &mut self.seat {
                Some(seat) => seat.judge("start_generate", Err(error)),
                None => return Poll::Ready(None),
            },
            None => {
                let Some(mut seat) = self.seat.take() else { return Poll::Ready(None) };
                if self.finished {
                    seat.end();
                    return Poll::Ready(None);
                }
                seat.note_failed();
                Err(Error::Incomplete { engine: seat.engine().name().to_owned() })
            }
        };
        if item.is_err() {
            // Drops the seat, which sends the abort.
            self.seat = None;
        }
        Poll::Ready(Some(item))
    }
}
