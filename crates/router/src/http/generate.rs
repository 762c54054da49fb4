//! `POST /v1/completions` and `POST /v1/chat/completions`.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use microserving_client::{CallContext, Door, Written};
use microserving_protocol::{
    ApiError, CallOptions, ChatCompletionRequest, CompletionRequest, Fields, ModelCard, Prompt, SeqId,
    TokenIds,
};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::deliver::{self, Delivery};
use super::headers::{self, RequestId};
use super::respond::{Failure, WholeBody};
use crate::attempts::in_time;
use crate::client_headers::ClientHeaders;
use crate::metrics::RequestRecord;
use crate::pattern::Chosen;
use crate::{Error, Request, RouterService, prompt, relay};

/// Bodies from this size on are parsed on a thread of their own.
const LONG_BODY_BYTES: usize = 64 << 10;

/// Continues a prompt.
pub(crate) async fn completions(
    State(service): State<Arc<RouterService>>,
    Extension(RequestId(id)): Extension<RequestId>,
    headers: HeaderMap,
    WholeBody(body): WholeBody,
) -> Result<Response, Failure> {
    answer(&service, id, headers, body, Door::Completions).await
}

/// Answers the last message of a conversation.
pub(crate) async fn chat_completions(
    State(service): State<Arc<RouterService>>,
    Extension(RequestId(id)): Extension<RequestId>,
    headers: HeaderMap,
    WholeBody(body): WholeBody,
) -> Result<Response, Failure> {
    answer(&service, id, headers, body, Door::Chats).await
}

/// Serves a request that came in by `door`.
pub(crate) async fn answer(
    service: &Arc<RouterService>,
    id: String,
    headers: HeaderMap,
    body: Bytes,
    door: Door,
) -> Result<Response, Failure> {
    Arrival::new(service, id, headers)?.serve(service, body, door).await
}

/// What is known of a request before its body is looked into.
struct Arrival {
    at: Instant,
    call: CallContext,
    headers: ClientHeaders,
    chosen: Arc<Chosen>,
    /// Whether the client chose it.
    is_asked_for: bool,
    record: RequestRecord,
}

/// What a client asks for, as it wrote it.
pub(super) enum Asked {
    Completion(CompletionRequest),
    Chat(ChatCompletionRequest),
}

impl Asked {
    /// Reads a body, and when its client gives up, off the worker threads if it is long.
    async fn read(body: Bytes, door: Door) -> Result<(Self, Option<Duration>), ApiError> {
        if body.len() < LONG_BODY_BYTES {
            return Self::from_json(&body, door);
        }
        prompt::off_thread(move || Self::from_json(&body, door)).await
    }

    fn from_json(body: &[u8], door: Door) -> Result<(Self, Option<Duration>), ApiError> {
        Self::at_door(&mut Fields::parse(body)?, door)
    }

    /// Reads a completion, or a chat if there are messages.
    pub(super) fn from_fields(fields: &mut Fields) -> Result<(Self, Option<Duration>), ApiError> {
        let door = if fields.has("messages") { Door::Chats } else { Door::Completions };
        Self::at_door(fields, door)
    }

    fn at_door(fields: &mut Fields, door: Door) -> Result<(Self, Option<Duration>), ApiError> {
        let asked = match door {
            Door::Completions => Self::Completion(CompletionRequest::from_fields(fields)?),
            Door::Chats => Self::Chat(ChatCompletionRequest::from_fields(fields)?),
        };
        Ok((asked, CallOptions::timeout_from_fields(fields)?))
    }
}

/// A request that was read and turned into tokens.
pub(super) struct Read {
    /// Without its prompt. It names its model, whether the client did or not: engines of another one must not get it.
    completion: CompletionRequest,
    model: ModelCard,
    /// Empty if no engine of the model has a tokenizer that we know: then `written` is there.
    tokens: TokenIds,
    written: Option<Written>,
    text: Text,
}

/// The prompt's own text.
enum Text {
    /// The client sent tokens or messages.
    Unknown,
    /// Nobody asked for it.
    Dropped,
    /// For an echo.
    Kept(String),
}

impl Text {
    fn of(completion: &CompletionRequest, text: &str) -> Self {
        if completion.echo { Self::Kept(text.to_owned()) } else { Self::Dropped }
    }
}

impl Arrival {
    fn new(service: &RouterService, id: String, headers: HeaderMap) -> Result<Self, Failure> {
        let at = Instant::now();
        let asked = headers::pattern(&headers)?;
        let is_asked_for = asked.is_some();
        let chosen = service
            .patterns
            .choose(asked.as_ref())
            .map_err(|error| ApiError::bad_request(headers::PATTERN.as_str(), error.to_string()))?;
        let record = RequestRecord::new(service.shared.metrics.clone(), chosen.program.name());
        let call = call_context(service, id, &headers);
        Ok(Self { at, call, headers: ClientHeaders::keep(headers)?, chosen, is_asked_for, record })
    }

    /// Serves the request, and counts it, whatever becomes of it.
    async fn serve(self, service: &Arc<RouterService>, body: Bytes, door: Door) -> Result<Response, Failure> {
        let Self { at, mut call, headers, mut chosen, is_asked_for, mut record } = self;
        let mut inside = match enter(service) {
            Ok(inside) => inside,
            Err(error) => {
                record.set_status(error.status);
                return Err(Failure(error));
            }
        };
        // What is passed on as it is has no tokens to look at: predictions want those.
        if service.cluster().thresholds().max_ttft.is_none() {
            let rules = (!is_asked_for).then_some(&service.patterns);
            let asked =
                relay::Asked { service, call: &call, chosen: &chosen, rules, headers: &headers, door };
            match relay::begin(asked, &body, inside).await {
                Ok(begun) => return Ok(begun.into_response(service, at, call, headers, record)),
                Err(given_back) => inside = given_back,
            }
        }
        let ready = async {
            let (asked, timeout) = Asked::read(body, door).await?;
            if let Some(timeout) = timeout {
                // A client may make the deadline shorter, not longer.
                call.deadline = Some(at + timeout.min(service.request_timeout));
            }
            let read = in_time(call.deadline, read(service, &call, asked)).await?;
            let mut request = request(service, &read)?.with_kept(headers);
            if service.relay && !call.wants_stats {
                request = request.for_door(door, read.completion.stream);
            }
            let place = in_time(call.deadline, async { Ok(service.admit(inside, &request).await?) }).await?;
            Ok::<_, Error>((place, read, request))
        };
        match ready.await {
            Ok((place, Read { completion, model, text, .. }, request)) => {
                if !is_asked_for {
                    chosen = service.patterns.for_request(&request).1;
                    record.set_pattern(chosen.program.name());
                }
                let chat = door == Door::Chats;
                let text = match text {
                    Text::Kept(text) => Some(text),
                    Text::Unknown | Text::Dropped => None,
                };
                let delivery = Delivery::new(at, call, &chosen, model.id, &completion, text, chat);
                Ok(deliver::deliver(service, request, delivery, record, place).await)
            }
            Err(error) => {
                let error = error.to_api_error();
                record.set_status(error.status);
                Err(Failure(error))
            }
        }
    }
}

/// Lets a request in, to be read.
fn enter(service: &RouterService) -> Result<OwnedSemaphorePermit, ApiError> {
    if service.is_draining() {
        let error = ApiError::unavailable("the router is draining", Duration::from_secs(1));
        return Err(error.with_code("draining"));
    }
    service.let_in()
}

/// Returns what all calls of a request share.
pub(super) fn call_context(service: &RouterService, id: String, headers: &HeaderMap) -> CallContext {
    CallContext {
        request_id: Some(id.into()),
        traceparent: headers::traceparent(headers).map(Into::into),
        deadline: Some(Instant::now() + service.request_timeout),
        wants_stats: headers::wants_stats(headers),
    }
}

pub(super) async fn read(service: &RouterService, call: &CallContext, asked: Asked) -> Result<Read, Error> {
    match asked {
        Asked::Completion(mut completion) => {
            let model = service.model(completion.model.as_deref())?;
            let needs = service.needs(&model.id);
            completion.model = Some(model.id.clone());
            let written = needs.written.then(|| Written::Completion(completion.clone()));
            // A prompt may be long: it is moved from hand to hand, and its text copied only for who wants it back.
            let (tokens, text) = match std::mem::take(&mut completion.prompt) {
                Prompt::Tokens(tokens) => (tokens, Text::Unknown),
                Prompt::Text(text) if !needs.tokens => (TokenIds::default(), Text::of(&completion, &text)),
                Prompt::Text(text) => {
                    let codec = service.codecs.get(service.cluster(), call, &model.id).await?;
                    let kept = Text::of(&completion, &text);
                    (prompt::encode(codec, &model, text, true).await?.into(), kept)
                }
            };
            Ok(Read { completion, model, tokens, written, text })
        }
        Asked::Chat(mut chat) => {
            let model = service.model(chat.rest.model.as_deref())?;
            let needs = service.needs(&model.id);
            chat.rest.model = Some(model.id.clone());
            let written = needs.written.then(|| Written::Chat(chat.clone()));
            let tokens = if needs.tokens {
                let codec = service.codecs.get(service.cluster(), call, &model.id).await?;
                prompt::encode_chat(codec, &model, chat.messages).await?.into()
            } else {
                TokenIds::default()
            };
            Ok(Read { completion: chat.rest, model, tokens, written, text: Text::Unknown })
        }
    }
}

/// Reads a request that was passed on unread, which the engine has found good.
pub(crate) async fn read_again(
    service: &RouterService,
    call: &CallContext,
    body: Bytes,
    door: Door,
    seq_id: SeqId,
) -> Result<(Request, CompletionRequest), Error> {
    let (asked, _) = Asked::read(body, door).await?;
    let read = in_time(call.deadline, read(service, call, asked)).await?;
    Ok((named_request(service, &read, seq_id)?, read.completion))
}

/// Checks every bound that can be checked without an engine.
pub(super) fn request(service: &RouterService, read: &Read) -> Result<Request, Error> {
    named_request(service, read, SeqId::from(service.randomness.name("cmpl-")))
}

fn named_request(service: &RouterService, read: &Read, seq_id: SeqId) -> Result<Request, Error> {
    let params = read.completion.generation(service.randomness.draw())?;
    let num_tokens = read.tokens.len();
    if num_tokens == 0 && read.written.is_none() {
        return Err(ApiError::bad_request("prompt", "prompt has no tokens").into());
    }
    if let Some(most) = read.model.max_model_len
        && num_tokens >= most as usize
    {
        let message = format!("the prompt has {num_tokens} tokens, must leave room in a context of {most}");
        return Err(ApiError::bad_request("prompt", message).with_code("context_length_exceeded").into());
    }
    let mut request = Request::new(seq_id, &read.completion, params, read.tokens.clone());
    if let Some(written) = read.written.clone() {
        request = request.written_as(written);
    }
    Ok(if matches!(read.text, Text::Unknown) { request } else { request.without_echo() })
}
