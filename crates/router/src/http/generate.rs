//! `POST /v1/completions` and `POST /v1/chat/completions`.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use microserving_client::CallContext;
use microserving_protocol::{
    ApiError, ChatCompletionRequest, CompletionRequest, Fields, ModelCard, Prompt, SeqId, TokenId,
};
use tokio::time::Instant;

use super::deliver::{self, Delivery};
use super::headers::{self, RequestId};
use super::respond::{Failure, WholeBody};
use crate::attempts::in_time;
use crate::metrics::RequestRecord;
use crate::pattern::Chosen;
use crate::{Error, Request, RouterService, prompt};

/// The longest deadline that a client may set, in seconds.
const MAX_TIMEOUT_SECONDS: f64 = 86_400.0;

/// Continues a prompt.
pub(crate) async fn completions(
    State(service): State<Arc<RouterService>>,
    Extension(RequestId(id)): Extension<RequestId>,
    headers: HeaderMap,
    WholeBody(body): WholeBody,
) -> Result<Response, Failure> {
    Arrival::new(&service, id, &headers, &body)?.serve(&service, &body, Door::Completions).await
}

/// Answers the last message of a conversation.
pub(crate) async fn chat_completions(
    State(service): State<Arc<RouterService>>,
    Extension(RequestId(id)): Extension<RequestId>,
    headers: HeaderMap,
    WholeBody(body): WholeBody,
) -> Result<Response, Failure> {
    Arrival::new(&service, id, &headers, &body)?.serve(&service, &body, Door::Chats).await
}

/// Where a request came in, which says how it is read and answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Door {
    Completions,
    Chats,
}

/// What is known of a request before its body is looked into.
struct Arrival {
    at: Instant,
    call: CallContext,
    chosen: Chosen,
    record: RequestRecord,
}

/// A request that was read and turned into tokens.
struct Read {
    /// Names its model, whether the client did or not: engines of another one must not get it.
    completion: CompletionRequest,
    model: ModelCard,
    tokens: Vec<TokenId>,
    /// The prompt's own text, if the client sent text.
    text: Option<String>,
}

impl Arrival {
    fn new(service: &RouterService, id: String, headers: &HeaderMap, body: &[u8]) -> Result<Self, Failure> {
        let at = Instant::now();
        let asked = headers::pattern(headers)?;
        let chosen = service
            .patterns
            .choose(asked.as_ref())
            .map_err(|error| ApiError::bad_request(headers::PATTERN.as_str(), error.to_string()))?;
        let mut record = RequestRecord::new(service.shared.metrics.clone(), chosen.program.name());
        let timeout = match timeout(body) {
            Ok(timeout) => timeout.unwrap_or(service.request_timeout),
            Err(error) => {
                record.set_status(error.status);
                return Err(error.into());
            }
        };
        let call = CallContext {
            request_id: Some(id),
            traceparent: headers::traceparent(headers),
            deadline: Some(at + timeout.min(service.request_timeout)),
            wants_stats: headers::wants_stats(headers),
        };
        Ok(Self { at, call, chosen, record })
    }

    /// Serves the request, and counts it, whatever becomes of it.
    async fn serve(self, service: &Arc<RouterService>, body: &[u8], door: Door) -> Result<Response, Failure> {
        let Self { at, call, chosen, mut record } = self;
        let ready = async {
            if service.is_draining() {
                let error = ApiError::unavailable("the router is draining", Duration::from_secs(1));
                return Err(error.with_code("draining").into());
            }
            let slot = service.slots.clone().try_acquire_owned().map_err(|_| {
                let reason = "the router serves as many requests at once as it may";
                ApiError::too_many_requests(reason, Duration::from_secs(1))
            })?;
            let read = in_time(&call, read(service, &call, body, door)).await?;
            let request = request(service, &read)?;
            Ok::<_, Error>((slot, read, request))
        };
        match ready.await {
            Ok((slot, Read { completion, model, text, .. }, request)) => {
                let chat = door == Door::Chats;
                let delivery = Delivery::new(at, call, chosen, model.id, &completion, text, chat);
                Ok(deliver::deliver(service, request, delivery, record, slot).await)
            }
            Err(error) => {
                let error = error.to_api_error();
                record.set_status(error.status);
                Err(Failure(error))
            }
        }
    }
}

async fn read(service: &RouterService, call: &CallContext, body: &[u8], door: Door) -> Result<Read, Error> {
    match door {
        Door::Completions => {
            let completion = CompletionRequest::from_json(body)?;
            let model = service.model(completion.model.as_deref())?;
            let (tokens, text) = match &completion.prompt {
                Prompt::Tokens(tokens) => (tokens.clone(), None),
                Prompt::Text(text) => {
                    let codec = service.codecs.get(service.cluster(), call, &model.id).await?;
                    (prompt::encode(codec, text.clone(), true).await?, Some(text.clone()))
                }
            };
            Ok(Read {
                completion: CompletionRequest { model: Some(model.id.clone()), ..completion },
                model,
                tokens,
                text,
            })
        }
        Door::Chats => {
            let chat = ChatCompletionRequest::from_json(body)?;
            let model = service.model(chat.rest.model.as_deref())?;
            let codec = service.codecs.get(service.cluster(), call, &model.id).await?;
            let tokens = prompt::encode_chat(codec, chat.messages).await?;
            let completion = CompletionRequest { model: Some(model.id.clone()), ..chat.rest };
            Ok(Read { completion, model, tokens, text: None })
        }
    }
}

/// Checks every bound that can be checked without an engine.
fn request(service: &RouterService, read: &Read) -> Result<Request, Error> {
    let params = read.completion.generation(service.randomness.draw())?;
    let num_tokens = read.tokens.len();
    if num_tokens == 0 {
        return Err(ApiError::bad_request("prompt", "prompt has no tokens").into());
    }
    if let Some(most) = read.model.max_model_len
        && num_tokens >= most as usize
    {
        let message = format!("the prompt has {num_tokens} tokens, must leave room in a context of {most}");
        return Err(ApiError::bad_request("prompt", message).with_code("context_length_exceeded").into());
    }
    let seq_id = SeqId::from(service.randomness.name("cmpl-"));
    let request = Request::new(seq_id, &read.completion, params, read.tokens.clone());
    Ok(if read.text.is_some() { request.without_echo() } else { request })
}

/// Reads `timeout_seconds`, our own field, which may make the deadline shorter.
fn timeout(body: &[u8]) -> Result<Option<Duration>, ApiError> {
    const NAME: &[u8] = b"timeout_seconds";
    // Most requests do not have it, and a body is worth parsing only once.
    if !body.windows(NAME.len()).any(|window| window == NAME) {
        return Ok(None);
    }
    let Some(seconds) = Fields::parse(body)?.opt_f64("timeout_seconds")? else { return Ok(None) };
    if seconds > 0.0 && seconds <= MAX_TIMEOUT_SECONDS {
        return Ok(Some(Duration::from_secs_f64(seconds)));
    }
    let message = format!("timeout_seconds is {seconds}, must be in (0, {MAX_TIMEOUT_SECONDS}]");
    Err(ApiError::bad_request("timeout_seconds", message))
}
