//! A relayed stream that is read after all: because its engine was lost, or because it moves.
//!
//! ```text
//! engine A ═ bytes ═▶ a b c ✕
//!                            the body is read, tokenised:  prompt a b c ─▶ engine B ─ chunks ─▶ d e f
//! client              a b c                                                                      d e f
//! ```
//!
//! From there on it is an answer like any other, under the names that its client knows already.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{Stream, StreamExt as _};
use microserving_client::{CallContext, Door};
use microserving_protocol::{CompletionRequest, FinishReason, SeqId, TokenId, sse_event};
use serde::Deserialize;
use tokio::time::Instant;

use crate::admission::Place;
use crate::answering::{Answering, Given};
use crate::client_headers::ClientHeaders;
use crate::http::{self, Answer};
use crate::live::{Done, Listed};
use crate::metrics::RequestRecord;
use crate::moving::{self, Copies, Move, Progress};
use crate::pattern::Chosen;
use crate::{Ctx, Engine, Error, Request, RouterService};

/// What a client asked for, unread.
pub(super) struct Origin {
    pub(super) service: Arc<RouterService>,
    pub(super) arrival: Instant,
    pub(super) call: CallContext,
    pub(super) chosen: Arc<Chosen>,
    pub(super) headers: ClientHeaders,
    /// With the seed that the engine draws by.
    pub(super) body: [Bytes; 2],
    pub(super) door: Door,
}

/// What a relayed answer is called.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Names {
    id: String,
    pub(crate) created: u64,
    model: String,
}

/// What the client has of an answer with one choice.
#[derive(Clone, Debug, Default)]
pub(super) struct Shown {
    pub(super) tokens: Vec<TokenId>,
    /// The events that came last, which tell whether there was more to come.
    pub(super) last: Bytes,
    pub(super) first_at: Option<Instant>,
}

/// Everything that goes over to whoever goes on.
pub(super) struct Estate {
    pub(super) origin: Arc<Origin>,
    pub(super) names: Names,
    pub(super) shown: Shown,
    pub(super) listed: Listed,
    pub(super) ctx: Ctx,
    pub(super) record: RequestRecord,
    pub(super) place: Place,
}

/// A request that was read after all.
pub(super) struct ReadAgain {
    request: Arc<Request>,
    completion: CompletionRequest,
}

pub(super) type Bytestream = Pin<Box<dyn Stream<Item = Result<Bytes, Infallible>> + Send>>;

/// The parts of an event that tell how far an answer is.
#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    finish_reason: Option<FinishReason>,
}

/// Returns the JSON of each event.
fn data(events: &[u8]) -> impl Iterator<Item = &[u8]> {
    events.split(|&byte| byte == b'\n').filter_map(|line| line.strip_prefix(b"data: "))
}

/// Returns the finish reason in an event, if there is one.
pub(super) fn finish_reason(event: &[u8]) -> Option<FinishReason> {
    let json = event.strip_prefix(b"data: ").unwrap_or(event);
    let event: Event = serde_json::from_slice(json).ok()?;
    event.choices.into_iter().find_map(|choice| choice.finish_reason)
}

impl Names {
    /// Reads them in the first event.
    pub(crate) fn read(events: &[u8]) -> Option<Self> {
        serde_json::from_slice(data(events).next()?).ok()
    }

    /// Returns the name of the sequence: chats show it in another form.
    pub(super) fn seq_id(&self) -> SeqId {
        match self.id.strip_prefix("chatcmpl-") {
            Some(rest) => SeqId::from(format!("cmpl-{rest}")),
            None => SeqId::new(self.id.as_str()),
        }
    }
}

impl Shown {
    /// Says whether the client has the end of the text, and the usage behind it.
    pub(super) fn ending(&self) -> (bool, bool) {
        ending(&self.last)
    }
}

/// Says whether some events hold the end of the text, and the usage behind it.
pub(crate) fn ending(events: &[u8]) -> (bool, bool) {
    let (mut finished, mut usage) = (false, false);
    for event in data(events).filter_map(|json| serde_json::from_slice::<Event>(json).ok()) {
        finished |= event.choices.iter().any(|choice| choice.finish_reason.is_some());
        // It is behind the last choice.
        usage |= event.choices.is_empty();
    }
    (finished || usage, usage)
}

impl Origin {
    /// Reads the body as the long way would have.
    async fn read(&self, names: &Names) -> Result<ReadAgain, Error> {
        let body = self.body.concat().into();
        let (request, completion) =
            http::read_again(&self.service, &self.call, body, self.door, names.seq_id()).await?;
        Ok(ReadAgain { request: Arc::new(request.with_kept(self.headers.clone())), completion })
    }

    /// Copies what the source has of the request to another engine.
    pub(super) async fn copy(
        self: Arc<Self>,
        names: Names,
        ctx: Ctx,
        source: Arc<Engine>,
        to: Option<Arc<Engine>>,
        progress: Progress,
    ) -> Result<(ReadAgain, Copies), Error> {
        let read = self.read(&names).await?;
        let target = moving::target(&ctx, &read.request, &source, to.as_ref())?;
        let (request, paused) = (read.request.clone(), Arc::default());
        let copies =
            Move { ctx, request, choice: 0, source, target, progress, paused }.copy_running().await?;
        Ok((read, copies))
    }
}

impl Estate {
    /// Goes on elsewhere behind what the client has, or ends with the error.
    pub(super) fn resume(self, error: Error) -> Bytestream {
        let going_on = async move {
            match self.origin.read(&self.names).await {
                Ok(read) => self.elsewhere(read, error),
                Err(_) => fail(&self.origin.call, &self.names.seq_id(), self.record, &error),
            }
        };
        Box::pin(futures::stream::once(going_on).flatten())
    }

    /// Goes on where the request was copied to, or elsewhere if that fails. The source is left already.
    pub(super) fn arrive(self, read: ReadAgain, copies: Copies, done: Done) -> Bytestream {
        let arriving = async move {
            let metrics = self.ctx.shared.metrics.clone();
            let error = match copies.leave_for(self.shown.tokens.clone()).await {
                Ok(arrived) => {
                    metrics.moved("ok");
                    metrics.paused(Duration::from_micros(arrived.moved.paused_micros));
                    done.tell(Ok(arrived.moved.clone()));
                    return self.go_on(read, |of, ctx, request, given| {
                        let program = &of.chosen.program;
                        Ok(Answering::moved(&ctx.shared, program, request, &of.call, given, arrived))
                    });
                }
                Err(error) => error,
            };
            metrics.moved("failed");
            done.tell(Err(error.clone()));
            self.elsewhere(read, error)
        };
        Box::pin(futures::stream::once(arriving).flatten())
    }

    fn elsewhere(self, read: ReadAgain, error: Error) -> Bytestream {
        self.go_on(read, |of, ctx, request, given| {
            Answering::resume(&ctx.shared, &of.chosen.program, request, &of.call, given, error)
        })
    }

    fn go_on(
        self,
        read: ReadAgain,
        answering: impl FnOnce(&Origin, &Ctx, Arc<Request>, Given) -> Result<Answering, Error>,
    ) -> Bytestream {
        let Self { origin, names, shown, listed, ctx, record, place } = self;
        let ReadAgain { request, completion } = read;
        let (finished, usage_shown) = shown.ending();
        let given = Given { output: shown.tokens, finished, listed, troubles: ctx.troubles.clone() };
        let seq_id = names.seq_id();
        let rest = match answering(&origin, &ctx, request, given) {
            Ok(rest) => rest,
            Err(error) => return fail(&origin.call, &seq_id, record, &error),
        };
        let Chosen { program, text, .. } = &*origin.chosen;
        let (call, label) = (origin.call.clone(), program.label(text));
        let answer = Answer::new(origin.arrival, call, program.name(), label, names.model, &completion, None);
        let answer = answer.begun(names.created, shown.first_at, usage_shown);
        let chat = origin.door == Door::Chats;
        Box::pin(http::go_on(&origin.service, answer, chat, seq_id, rest, record, place))
    }
}

/// Ends a stream by an event that says what went wrong.
fn fail(call: &CallContext, seq_id: &SeqId, mut record: RequestRecord, error: &Error) -> Bytestream {
    let told = http::note_failure(error, call.request_id.as_deref(), seq_id);
    record.set_status(told.status);
    Box::pin(futures::stream::once(std::future::ready(Ok(sse_event(&told.to_event()).into()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_events_tell_how_far_an_answer_is() {
        let ending = |last: &'static str| Shown { last: last.into(), ..Shown::default() }.ending();
        let (token, end) = (
            r#"{"choices":[{"text":"a","finish_reason":null}],"usage":{}}"#,
            r#"{"choices":[{"finish_reason":"stop"}]}"#,
        );
        let usage = r#"{"choices":[],"usage":{}}"#;
        let events = |events: &[&str]| -> &'static str {
            let text: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
            text.leak()
        };
        assert_eq!(ending(events(&[token])), (false, false));
        assert_eq!(ending(events(&[token, end])), (true, false));
        assert_eq!(ending(events(&[end, usage])), (true, true));
        assert_eq!(ending(events(&[usage])), (true, true), "it came alone");
        assert_eq!(finish_reason(events(&[end]).as_bytes()), Some(FinishReason::Stop));
    }

    #[test]
    fn names_are_those_of_the_first_event() {
        let names = |id: &str| {
            let event =
                format!("data: {{\"id\":\"{id}\",\"created\":7,\"model\":\"toy\",\"choices\":[]}}\n\n");
            Names::read(event.as_bytes()).expect("names")
        };
        assert_eq!(names("chatcmpl-1").seq_id().as_str(), "cmpl-1");
        assert_eq!((names("cmpl-1").seq_id().as_str(), names("x").created), ("cmpl-1", 7));
        assert!(Names::read(b"data: [DONE]\n\n").is_none());
    }
}
