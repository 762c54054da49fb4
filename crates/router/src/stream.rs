//! A generation, with the seat it runs on.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures::Stream;
use microserving_client::{ChunkStream, ClientError, RelayStream};
use microserving_protocol::{CompletionResponse, FinishReason, RelayPart, SSE_DONE, Usage};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::predict::StreamTimer;
use crate::program::{PassedOn, Piece};
use crate::relay::judge_fault;
use crate::vitals::Verdict;
use crate::{Error, Seat};

/// What an engine answers.
pub(crate) enum Pieces {
    Read(ChunkStream),
    Marked(RelayStream),
}

/// What has come of it and was not looked at yet.
enum News {
    Chunk(CompletionResponse),
    Part(RelayPart),
}

impl Pieces {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<News, ClientError>>> {
        match self {
            Self::Read(chunks) => chunks.as_mut().poll_next(cx).map_ok(News::Chunk),
            Self::Marked(parts) => parts.as_mut().poll_next(cx).map_ok(News::Part),
        }
    }
}

/// The answer of an engine. Holds the seat until it is complete.
pub(crate) struct Generating {
    pieces: Pieces,
    /// What comes next, without asking the engine.
    next: Option<Next>,
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

/// What follows some events.
enum Next {
    Usage(Usage),
    Fault(Bytes),
}

impl Generating {
    pub(crate) fn new(pieces: Pieces, seat: Seat, timer: StreamTimer, first_by: Option<Instant>) -> Self {
        let lost = Box::pin(seat.engine().lost().cancelled_owned());
        Self {
            pieces,
            next: None,
            seat: Some(seat),
            timer,
            lost,
            begun: false,
            finished: false,
            first_by,
            clock: None,
        }
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
        note_life(seat, &mut self.begun, &self.timer);
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

    /// Takes marked events in; what follows them is kept for the next time.
    fn take_part(&mut self, part: RelayPart) -> PassedOn {
        let RelayPart { mut events, tokens, usage, fault } = part;
        if let Some(seat) = &mut self.seat {
            if !tokens.is_empty() || !events.is_empty() {
                note_life(seat, &mut self.begun, &self.timer);
                self.timer.tokens(seat.engine(), tokens.len());
            }
            if let Some(took) = usage {
                // How the answer ends for the client is the router's to say.
                events.truncate(events.strip_suffix(SSE_DONE.as_bytes()).map_or(events.len(), <[u8]>::len));
                let usage = Usage::new(took.prompt_tokens, took.completion_tokens, took.cached_tokens);
                self.timer.usage(seat.engine(), &usage);
                seat.note_held(took.cached_tokens, took.prompt_tokens);
                self.next = Some(Next::Usage(usage));
                self.finished = true;
            }
        }
        if let Some(fault) = fault {
            self.next = Some(Next::Fault(fault));
        }
        PassedOn { events, tokens }
    }
}

/// Notes that the engine generates.
fn note_life(seat: &mut Seat, begun: &mut bool, timer: &StreamTimer) {
    seat.engine().note_sign();
    if !std::mem::replace(begun, true) {
        seat.engine().note_verdict(Verdict::Good);
        seat.note_first_token(timer.prompt());
    }
}

impl Stream for Generating {
    type Item = Result<Piece, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let item = match self.next.take() {
                Some(Next::Usage(usage)) => {
                    let mut chunk = CompletionResponse::new("", 0, "", Vec::new());
                    chunk.usage = Some(usage);
                    return Poll::Ready(Some(Ok(Piece::Chunk(chunk))));
                }
                Some(Next::Fault(fault)) => match &mut self.seat {
                    Some(seat) => Err(judge_fault(seat, "start_generate", &fault)),
                    None => return Poll::Ready(None),
                },
                None => match ready!(self.poll_item(cx)) {
                    // What follows is all that there was to say.
                    Some(Ok(Piece::Events(passed))) if passed.is_empty() => continue,
                    Some(item) => item,
                    None => return Poll::Ready(None),
                },
            };
            if item.is_err() {
                // Drops the seat, which sends the abort.
                self.seat = None;
            }
            return Poll::Ready(Some(item));
        }
    }
}

impl Generating {
    /// Asks the engine for what comes next; nothing after the end.
    fn poll_item(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, Error>>> {
        let Some(seat) = &self.seat else { return Poll::Ready(None) };
        let news = match self.pieces.poll_next(cx) {
            Poll::Pending if self.lost.as_mut().poll(cx).is_ready() => Some(Err(seat.engine().lost_error())),
            Poll::Pending => {
                self.timer.waits();
                ready!(self.poll_clock(cx));
                let engine =
                    self.seat.as_ref().map_or_else(String::new, |seat| seat.engine().name().to_owned());
                Some(Err(ClientError::Timeout { engine }))
            }
            Poll::Ready(news) => news,
        };
        Poll::Ready(match news {
            Some(Ok(News::Chunk(chunk))) => Some(self.take(chunk).map(Piece::Chunk)),
            Some(Ok(News::Part(part))) => Some(Ok(Piece::Events(self.take_part(part)))),
            Some(Err(error)) => self.seat.as_mut().map(|seat| seat.judge("start_generate", Err(error))),
            None => match self.seat.take() {
                Some(mut seat) if self.finished => {
                    seat.end();
                    None
                }
                Some(seat) => {
                    seat.note_failed();
                    Some(Err(Error::Incomplete { engine: seat.engine().name().to_owned() }))
                }
                None => None,
            },
        })
    }
}
