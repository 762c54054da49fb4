//! An answer's way to the client: as one body or as a stream, as a completion or as a chat.

use std::collections::VecDeque;

use axum::Json;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::Stream;
use microserving_protocol::{
    ApiError, ChatStream, CompletionAssembler, CompletionResponse, ServingStats, Usage, chat_response,
};

use crate::answer::{Answer, Part};
use crate::sse;

/// How the client wants its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Delivery {
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) chat: bool,
}

/// Delivers an answer whole or chunk by chunk.
///
/// # Errors
/// What the engine failed with, if the answer is delivered whole; in a stream it becomes an event.
pub(crate) async fn deliver(answer: Answer, delivery: Delivery) -> Result<Response, ApiError> {
    if delivery.stream {
        return Ok(sse::response(events(answer, delivery)));
    }
    let whole = assemble(answer).await?;
    Ok(if delivery.chat { Json(chat_response(whole)).into_response() } else { Json(whole).into_response() })
}

async fn assemble(mut answer: Answer) -> Result<CompletionResponse, ApiError> {
    let mut assembler = CompletionAssembler::new();
    while let Some(part) = answer.next().await? {
        match part {
            Part::Chunk(chunk) => assembler.push(chunk),
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
    /// Framed events that the client has not taken yet.
    ready: VecDeque<Bytes>,
}

/// Frames the parts of an answer; the client's pace decides when the next one is made.
fn events(answer: Answer, delivery: Delivery) -> impl Stream<Item = Bytes> {
    let streaming = Streaming {
        answer: Some(answer),
        chat: delivery.chat.then(ChatStream::new),
        include_usage: delivery.include_usage,
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
            Ok(Some(Part::Chunk(chunk))) => Some(self.frame(chunk)),
            Ok(Some(Part::End { usage, stats })) => {
                let last = last_chunk(answer, usage, stats, self.include_usage);
                self.answer = None;
                if let Some(last) = last {
                    let bytes = self.frame(last);
                    self.ready.push_back(bytes);
                }
                self.ready.push_back(sse::done());
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

/// Makes the chunk behind the last choice, if there is anything to say in it.
fn last_chunk(
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
