//! A relayed stream on its way to the client.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures::Stream;
use microserving_client::{ClientError, RelayStream};
use microserving_protocol::{RelayPart, RelayUsage, sse_event};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tracing::{debug, info, warn};

use super::handover::{Bytestream, Estate, Names, Origin, ReadAgain, Shown};
use super::{judge_fault, note_usage};
use crate::admission::Place;
use crate::attempts::describe;
use crate::live::{Done, Listed, Order};
use crate::metrics::RequestRecord;
use crate::moving::{Copies, Progress, cannot_move};
use crate::predict::StreamTimer;
use crate::{Error, Seat};

/// The events of an answer; the client's pace decides when more are read. An engine that is lost, or a request that is to move, makes
/// it an answer that is read.
pub(crate) enum Events {
    Relayed(Box<Relayed>),
    Read(Bytestream),
    Over,
}

/// A stream as it comes from its engine.
pub(crate) struct Relayed {
    /// Gone after the last event.
    seat: Option<Seat>,
    next: Option<RelayPart>,
    rest: RelayStream,
    fault: Option<Bytes>,
    timer: StreamTimer,
    origin: Arc<Origin>,
    record: RequestRecord,
    place: Place,
    first_at: Option<Instant>,
    /// The request's deadline, and the engine's being given up; made when something is waited for.
    limits: Option<Limits>,
    /// What the client has seen, of an answer with one choice: what another engine needs to go on.
    shown: Option<Shown>,
    /// Where others find it; nothing if its events cannot be read.
    listed: Option<(Names, Listed)>,
    moving: Option<Moving>,
}

type Copying = Pin<Box<dyn Future<Output = Result<(ReadAgain, Copies), Error>> + Send>>;

/// A move under way.
struct Moving {
    copying: Copying,
    progress: Progress,
    done: Done,
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

/// What there is to see to next.
enum News {
    Part(RelayPart),
    Failed(Error),
    Arrived(Box<(ReadAgain, Copies)>, Done),
    Ended,
}

impl Events {
    #[allow(clippy::too_many_arguments, reason = "they are the parts of one request")]
    pub(crate) fn begin(
        seat: Seat,
        first: RelayPart,
        rest: RelayStream,
        timer: StreamTimer,
        origin: Origin,
        record: RequestRecord,
        place: Place,
        single: bool,
    ) -> Self {
        let listed = Names::read(&first.events).map(|names| {
            let live = &origin.service.shared.live;
            let listed = live.enter(&names.seq_id(), origin.call.request_id.as_deref());
            listed.set_engine(seat.engine());
            (names, listed)
        });
        Self::Relayed(Box::new(Relayed {
            seat: Some(seat),
            next: Some(first),
            rest,
            fault: None,
            timer,
            origin: Arc::new(origin),
            record,
            place,
            first_at: None,
            limits: None,
            shown: single.then(Shown::default),
            listed,
            moving: None,
        }))
    }
}

impl Relayed {
    fn poll_news(&mut self, cx: &mut Context<'_>) -> Poll<News> {
        if let Some(part) = self.next.take() {
            return Poll::Ready(News::Part(part));
        }
        if let (Some(fault), Some(seat)) = (self.fault.take(), &mut self.seat) {
            return Poll::Ready(News::Failed(judge_fault(seat, "relay", &fault)));
        }
        while let Some((_, listed)) = &mut self.listed
            && let Poll::Ready(Some(order)) = listed.orders.poll_recv(cx)
        {
            self.obey(order);
        }
        if let Some(moving) = &mut self.moving
            && let Poll::Ready(copied) = moving.copying.as_mut().poll(cx)
            && let Some(Moving { done, .. }) = self.moving.take()
        {
            match copied {
                Ok(copied) => return Poll::Ready(News::Arrived(Box::new(copied), done)),
                Err(error) => {
                    debug!(%error, "the move failed; the source goes on");
                    if !matches!(error, Error::CannotMove { .. }) {
                        self.record.metrics().moved("failed");
                    }
                    done.tell(Err(error));
                }
            }
        }
        // Reads the end of the body, too, so that its connection can be used again.
        let part = ready!(self.poll_rest(cx));
        let Some(seat) = &mut self.seat else { return Poll::Ready(News::Ended) };
        Poll::Ready(match part {
            Some(Ok(part)) => News::Part(part),
            Some(Err(error)) => match seat.judge("relay", Err(error)) {
                Ok(part) => News::Part(part),
                Err(error) => News::Failed(error),
            },
            None => {
                seat.note_failed();
                News::Failed(Error::Incomplete { engine: seat.engine().name().to_owned() })
            }
        })
    }

    /// Reads on, until the deadline.
    fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<RelayPart, ClientError>>> {
        let part = self.rest.as_mut().poll_next(cx);
        let (true, Some(seat)) = (part.is_pending(), &self.seat) else { return part };
        self.timer.waits();
        let engine = seat.engine();
        let deadline = self.origin.call.deadline;
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
        if let Some(seat) = &self.seat {
            seat.engine().note_sign();
            if self.shown.is_some() {
                self.timer.tokens(seat.engine(), part.tokens.len());
            }
        }
        if let Some(shown) = &mut self.shown {
            self.place.note_tokens(u32::try_from(part.tokens.len()).unwrap_or(u32::MAX));
            if let Some(moving) = &self.moving {
                moving.progress.extend(&part.tokens);
            }
            shown.tokens.append(&mut part.tokens);
            if !part.events.is_empty() {
                shown.last = part.events.clone();
            }
        }
        self.fault = part.fault;
        if let Some(usage) = part.usage {
            self.finish(&usage);
        } else if self.first_at.is_none() {
            self.note_first();
        }
        part.events
    }

    fn note_first(&mut self) -> Instant {
        let now = Instant::now();
        let pattern = self.record.pattern().to_owned();
        self.record.metrics().first_token(&pattern, now - self.origin.arrival);
        self.first_at = Some(now);
        now
    }

    fn finish(&mut self, usage: &RelayUsage) {
        let now = Instant::now();
        let first = self.first_at.unwrap_or_else(|| self.note_first());
        let (whole, decoding) = (now - self.origin.arrival, now.saturating_duration_since(first));
        note_usage(self.record.metrics(), self.record.pattern(), whole, decoding, usage);
        if self.shown.is_none() {
            self.place.note_tokens(usage.completion_tokens);
        }
        self.record.set_status(200);
        if let Some(seat) = self.seat.take() {
            self.timer.relayed(seat.engine(), usage);
        }
        self.listed = None;
        self.stay("it has finished");
    }

    /// Gives up a move, if there is one.
    fn stay(&mut self, reason: &str) {
        if let Some(moving) = self.moving.take() {
            moving.done.tell(Err(cannot_move(reason)));
        }
    }

    /// Begins to move.
    fn obey(&mut self, Order { to, done }: Order) {
        let (Some(shown), Some(seat), Some((names, _))) = (&self.shown, &self.seat, &self.listed) else {
            done.tell(Err(cannot_move("several choices do not move together")));
            return;
        };
        if self.moving.is_some() {
            done.tell(Err(cannot_move("it is moving already")));
            return;
        }
        let progress = Progress::new(&shown.tokens);
        let (ctx, source) = (seat.ctx().clone(), seat.engine().clone());
        let copying = self.origin.clone().copy(names.clone(), ctx, source, to, progress.clone());
        self.moving = Some(Moving { copying: Box::pin(copying), progress, done });
    }

    /// Leaves the engine and hands over what is known; nothing if nobody could go on with it.
    fn leave(&mut self) -> Option<(Seat, Shown, Names, Listed)> {
        self.stay("its engine was lost");
        let seat = self.seat.take()?;
        // Its engine ends what nobody reads.
        self.rest = Box::pin(futures::stream::empty());
        let (shown, (names, listed)) = (self.shown.take()?, self.listed.take()?);
        Some((seat, Shown { first_at: self.first_at, ..shown }, names, listed))
    }

    /// Ends the stream by an event that says what went wrong.
    fn fail(&mut self, error: &Error) -> Bytes {
        let told = error.to_api_error();
        let (request_id, reason) = (self.origin.call.request_id.as_deref(), describe(error));
        if told.status >= 500 && told.status != 503 {
            warn!(request_id, error = reason, "request failed");
        } else {
            info!(request_id, error = reason, "request refused");
        }
        self.record.set_status(told.status);
        sse_event(&told.to_event()).into()
    }

    fn into_estate(self, seat: &Seat, shown: Shown, names: Names, listed: Listed) -> Estate {
        let Self { origin, record, place, .. } = self;
        Estate { origin, names, shown, listed, ctx: seat.ctx().clone(), record, place }
    }
}

impl Stream for Events {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let relayed = match &mut *self {
                Self::Read(events) => return events.as_mut().poll_next(cx),
                Self::Over => return Poll::Ready(None),
                Self::Relayed(relayed) => relayed,
            };
            match ready!(relayed.poll_news(cx)) {
                News::Part(part) => {
                    let bytes = relayed.take(part);
                    if !bytes.is_empty() {
                        return Poll::Ready(Some(Ok(bytes)));
                    }
                }
                News::Ended => *self = Self::Over,
                News::Arrived(_, done) if relayed.shown.as_ref().is_some_and(|shown| shown.ending().0) => {
                    done.tell(Err(cannot_move("it has finished")));
                }
                News::Arrived(copied, done) => {
                    let left = relayed.leave();
                    if let (Some((seat, shown, names, listed)), Self::Relayed(relayed)) =
                        (left, std::mem::replace(&mut *self, Self::Over))
                    {
                        let estate = relayed.into_estate(&seat, shown, names, listed);
                        let (read, copies) = *copied;
                        *self = Self::Read(estate.arrive(read, copies, done));
                    }
                }
                News::Failed(error) => {
                    let left = relayed.leave().filter(|_| error.is_worth_another_attempt());
                    let Some((seat, shown, names, listed)) = left else {
                        let bytes = relayed.fail(&error);
                        *self = Self::Over;
                        return Poll::Ready(Some(Ok(bytes)));
                    };
                    if let Self::Relayed(relayed) = std::mem::replace(&mut *self, Self::Over) {
                        let estate = relayed.into_estate(&seat, shown, names, listed);
                        *self = Self::Read(estate.resume(error));
                    }
                }
            }
        }
    }
}
