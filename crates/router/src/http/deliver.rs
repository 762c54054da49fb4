//! An answer's way to the client: whole or as a stream, as a completion or as a chat.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures::Stream;
use microserving_client::CallContext;
use microserving_protocol::{
    ApiError, ChatStream, CompletionRequest, CompletionResponse, SSE_DONE, SeqId, chat_response, sse_event,
};
use tokio::time::Instant;
use tracing::{info, warn};

use super::answer::Answer;
use super::headers;
use super::respond::Failure;
use crate::admission::Place;
use crate::answering::Answering;
use crate::attempts::{self, describe};
use crate::metrics::RequestRecord;
use crate::pattern::Chosen;
use crate::program::Piece;
use crate::stats::StatsCell;
use crate::{Error, Program, Request, RouterService};

/// How one client wants its answer.
pub(crate) struct Delivery {
    answer: Answer,
    program: Arc<dyn Program>,
    stream: bool,
    chat: bool,
}

impl Delivery {
    pub(crate) fn new(
        arrival: Instant,
        call: CallContext,
        chosen: &Chosen,
        model: String,
        completion: &CompletionRequest,
        text: Option<String>,
        chat: bool,
    ) -> Self {
        let pattern = chosen.program.label(&chosen.text);
        let answer = Answer::new(arrival, call, chosen.program.name(), pattern, model, completion, text);
        Self { answer, program: chosen.program.clone(), stream: completion.stream, chat }
    }
}

/// Serves a request to the end, or to the beginning of its stream.
pub(crate) async fn deliver(
    service: &Arc<RouterService>,
    request: Request,
    delivery: Delivery,
    mut record: RequestRecord,
    place: Place,
) -> Response {
    let mut pattern = delivery.answer.pattern.clone();
    let call = delivery.answer.call.clone();
    let seq_id = request.seq_id().clone();
    let outcome = if delivery.stream {
        match attempts::open(&service.shared, &delivery.program, request, &call).await {
            Ok((first, rest)) => {
                pattern = rest.stats().pattern().unwrap_or(pattern);
                Ok(Events::begin(service, seq_id.clone(), delivery, first, rest, record, place)
                    .into_response())
            }
            Err(error) => Err((error, record)),
        }
    } else {
        match whole(service, request, delivery, &place).await {
            Ok((response, instead)) => {
                pattern = instead.unwrap_or(pattern);
                record.set_status(200);
                Ok(response)
            }
            Err(error) => Err((error, record)),
        }
    };
    let mut response = outcome.unwrap_or_else(|(error, mut record)| {
        let error = note_failure(&error, call.request_id.as_deref(), &seq_id);
        record.set_status(error.status);
        Failure(error).into_response()
    });
    if let Ok(pattern) = HeaderValue::from_str(&pattern) {
        response.headers_mut().insert(headers::PATTERN, pattern);
    }
    response
}

/// Returns the answer, and the pattern that served if it is another one than asked for.
async fn whole(
    service: &RouterService,
    request: Request,
    delivery: Delivery,
    place: &Place,
) -> Result<(Response, Option<String>), Error> {
    let Delivery { mut answer, program, chat, .. } = delivery;
    let seq_id = request.seq_id().clone();
    let metrics = &service.shared.metrics;
    let call = answer.call.clone();
    let (whole, stats) = attempts::collect(&service.shared, &program, request, &call, |num_tokens| {
        answer.note_chunk(metrics);
        place.note_tokens(num_tokens);
    })
    .await?;
    let whole = answer.whole(&seq_id, whole, &stats, metrics);
    let response =
        if chat { Json(chat_response(whole)).into_response() } else { Json(whole).into_response() };
    Ok((response, stats.pattern()))
}

/// Logs what went wrong, and returns what the client is told.
pub(crate) fn note_failure(error: &Error, request_id: Option<&str>, seq_id: &SeqId) -> ApiError {
    let told = error.to_api_error();
    // Too little room is told to everybody and counted; a line for each would only bury the rest.
    if told.status >= 500 && told.status != 503 {
        warn!(request_id, %seq_id, error = %describe(error), "request failed");
    } else {
        info!(request_id, %seq_id, error = %describe(error), "request refused");
    }
    told
}

/// Goes on with a stream whose beginning the client has had in another way.
pub(crate) fn go_on(
    service: &Arc<RouterService>,
    answer: Answer,
    chat: bool,
    seq_id: SeqId,
    rest: Answering,
    record: RequestRecord,
    place: Place,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send + use<> {
    let events = Events {
        service: service.clone(),
        seq_id,
        answer,
        chat: chat.then(|| ChatStream::going_on([0])),
        first: None,
        rest: Some(rest),
        record,
        place,
    };
    events.into_stream()
}

/// A stream on its way to a client; the client's pace decides when the next chunk is asked for.
struct Events {
    service: Arc<RouterService>,
    seq_id: SeqId,
    answer: Answer,
    chat: Option<ChatStream>,
    first: Option<Piece>,
    /// Gone after the last event.
    rest: Option<Answering>,
    record: RequestRecord,
    place: Place,
}

impl Events {
    fn begin(
        service: &Arc<RouterService>,
        seq_id: SeqId,
        delivery: Delivery,
        first: Piece,
        rest: Answering,
        record: RequestRecord,
        place: Place,
    ) -> Self {
        Self {
            service: service.clone(),
            seq_id,
            answer: delivery.answer,
            chat: delivery.chat.then(ChatStream::new),
            first: Some(first),
            rest: Some(rest),
            record,
            place,
        }
    }

    fn into_stream(self) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
        futures::stream::unfold(self, |mut events| async move {
            let bytes = events.next().await?;
            Some((Ok(bytes), events))
        })
    }

    fn into_response(self) -> Response {
        let headers = [
            (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
            (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        ];
        (headers, Body::from_stream(self.into_stream())).into_response()
    }

    /// Returns the next event. After the first token an error is an event, and the last one.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            let rest = self.rest.as_mut()?;
            let piece = match self.first.take() {
                Some(first) => Ok(Some(first)),
                None => rest.next().await,
            };
            match piece {
                Ok(Some(Piece::Events(passed))) => {
                    self.answer.note_chunk(&self.service.shared.metrics);
                    self.place.note_tokens(u32::try_from(passed.tokens.len()).unwrap_or(u32::MAX));
                    self.answer.note_passed_on(&passed.events);
                    if let Some(chat) = &mut self.chat {
                        chat.note_begun(0);
                    }
                    return Some(passed.events);
                }
                Ok(Some(Piece::Chunk(chunk))) => {
                    self.answer.note_chunk(&self.service.shared.metrics);
                    self.place.note_token();
                    let stats = rest.stats().clone();
                    if let Some(bytes) = self.frame(chunk, &stats) {
                        return Some(bytes);
                    }
                }
                Ok(None) => {
                    self.rest = None;
                    self.record.set_status(200);
                    return Some(Bytes::from_static(SSE_DONE.as_bytes()));
                }
                Err(error) => {
                    self.rest = None;
                    let id = self.answer.call.request_id.as_deref();
                    let told = note_failure(&error, id, &self.seq_id);
                    self.record.set_status(told.status);
                    return Some(sse_event(&told.to_event()).into());
                }
            }
        }
    }

    fn frame(&mut self, chunk: CompletionResponse, stats: &StatsCell) -> Option<Bytes> {
        let metrics = &self.service.shared.metrics;
        let chunk = self.answer.chunk(&self.seq_id, chunk, stats, metrics)?;
        Some(match &mut self.chat {
            Some(chat) => sse_event(&chat.convert(chunk)).into(),
            None => sse_event(&chunk).into(),
        })
    }
}
