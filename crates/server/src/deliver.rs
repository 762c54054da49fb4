//! An answer's way to the client: as one body or as a stream, as a completion or as a chat.

use std::collections::VecDeque;
use std::time::Duration;

use axum::Json;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::Stream;
use http::HeaderValue;
use microserving_protocol::{
    ApiError, ChatStream, CompletionAssembler, CompletionChoice, CompletionResponse, FinishReason,
    RELAY_HEADER, RelayUsage, ServingStats, Usage, chat_response, relay_bare_mark, relay_end_mark,
    relay_mark,
};

use crate::answer::{Answer, Part};
use crate::sse;

/// How the client wants its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Delivery {
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) chat: bool,
    /// Marks the answer for a router that passes it on.
    pub(crate) marks: Marks,
}

/// What is marked of an answer for a router that passes it on (see `microserving_protocol::relay_mark`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Marks {
    Nothing,
    /// The tokens that events show.
    Events,
    /// Every token at once.
    Tokens,
}

impl Marks {
    pub(crate) fn any(self) -> bool {
        self != Self::Nothing
    }
}

/// Delivers an answer whole or chunk by chunk.
///
/// # Errors
/// What the engine failed with, if the answer is delivered whole; in a stream it becomes an event.
pub(crate) async fn deliver(answer: Answer, delivery: Delivery) -> Result<Response, ApiError> {
    if delivery.stream {
        let mut response = sse::response(events(answer, delivery));
        if delivery.marks.any() {
            response.headers_mut().insert(RELAY_HEADER, HeaderValue::from_static("1"));
        }
        return Ok(response);
    }
    let mut answer = answer;
    let whole = assemble(&mut answer).await?;
    let preempted = |choice: &CompletionChoice| choice.finish_reason == Some(FinishReason::Preempt);
    if delivery.marks.any() && whole.choices.iter().any(preempted) {
        // Not for the client: the router will have the answer from elsewhere.
        return Err(ApiError::unavailable("the request was preempted", Duration::from_secs(1)));
    }
    let mark =
        delivery.marks.any().then(|| relay_usage(&answer, whole.usage.unwrap_or_default()).to_string());
    let mut response =
        if delivery.chat { Json(chat_response(whole)).into_response() } else { Json(whole).into_response() };
    if let Some(mark) = mark.and_then(|mark| HeaderValue::try_from(mark).ok()) {
        response.headers_mut().insert(RELAY_HEADER, mark);
    }
    Ok(response)
}

/// Says what an answer took, to a router that does not read it.
fn relay_usage(answer: &Answer, usage: Usage) -> RelayUsage {
    RelayUsage {
        prompt_tokens: usage.prompt_tokens,
        completion_tokens: usage.completion_tokens,
        cached_tokens: usage.cached_tokens(),
        first_token_micros: u64::try_from(answer.first_token_after().as_micros()).unwrap_or(u64::MAX),
    }
}

pub(crate) async fn assemble(answer: &mut Answer) -> Result<CompletionResponse, ApiError> {
    let mut assembler = CompletionAssembler::new();
    while let Some(part) = answer.next().await? {
        match part {
            Part::Chunk(chunk) => assembler.push(chunk),
            Part::HeldBack => {}
            Part::End { usage, stats } => {
                let mut last = answer.empty_chunk();
                last.usage = Some(usage);
                last.microserving = stats;
                assembler.push(last);
            }
        }
    }
    assembler.finish().ok_or_else(|| ApiError::internal(format!("{} ended without an answer", answer.id())))
}

struct Streaming {
    answer: Option<Answer>,
    chat: Option<ChatStream>,
    include_usage: bool,
    relay: bool,
    /// Framed events that the client has not taken yet.
    ready: VecDeque<Bytes>,
}

/// Frames the parts of an answer; the client's pace decides when the next one is made.
fn events(answer: Answer, delivery: Delivery) -> impl Stream<Item = Bytes> {
    let streaming = Streaming {
        answer: Some(answer),
        chat: delivery.chat.then(ChatStream::new),
        include_usage: delivery.include_usage,
        relay: delivery.marks.any(),
        ready: VecDeque::new(),
    };
    futures::stream::unfold(streaming, |mut streaming| async move {
        let bytes = streaming.next().await?;
        Some((bytes, streaming))
    })
}

impl Streaming {
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(bytes) = self.ready.pop_front() {
            return Some(bytes);
        }
        let answer = self.answer.as_mut()?;
        match answer.next().await {
            Ok(Some(Part::Chunk(chunk))) => {
                let preempted = chunk.choices.iter().any(|c| c.finish_reason == Some(FinishReason::Preempt));
                // A chunk without a mark is not for the client: the router will have the rest from elsewhere.
                let mark = (self.relay && !preempted).then(|| relay_mark(&answer.take_unmarked()));
                Some(marked(mark, self.frame(chunk)))
            }
            Ok(Some(Part::HeldBack)) => Some(relay_bare_mark(&answer.take_unmarked()).into()),
            Ok(Some(Part::End { usage, stats })) => {
                let last = last_chunk(answer, usage, stats, self.include_usage);
                let end = self.relay.then(|| relay_end_mark(&relay_usage(answer, usage)));
                self.answer = None;
                if let Some(last) = last {
                    let bytes = self.frame(last);
                    self.ready.push_back(marked(self.relay.then(|| relay_mark(&[])), bytes));
                }
                self.ready.push_back(marked(end, sse::done()));
                self.ready.pop_front()
            }
            Ok(None) => {
                self.answer = None;
                Some(sse::error(&ApiError::internal("the answer ended early")))
            }
            Err(error) => {
                self.answer = None;
                Some(sse::error(&error))
            }
        }
    }

    fn frame(&mut self, chunk: CompletionResponse) -> Bytes {
        match &mut self.chat {
            Some(chat) => sse::event(&chat.convert(chunk)),
            None => sse::event(&chunk),
        }
    }
}

/// Puts a mark before an event.
fn marked(mark: Option<String>, event: Bytes) -> Bytes {
    match mark {
        None => event,
        Some(mark) => [mark.as_bytes(), &event].concat().into(),
    }
}

/// Makes the chunk behind the last choice, if there is anything to say in it.
pub(crate) fn last_chunk(
    answer: &Answer,
    usage: Usage,
    stats: Option<ServingStats>,
    include_usage: bool,
) -> Option<CompletionResponse> {
    if !include_usage && stats.is_none() {
        return None;
    }
    let mut last = answer.empty_chunk();
    last.usage = include_usage.then_some(usage);
    last.microserving = stats;
    Some(last)
}
