//! Servers of MLC-LLM with its microserving endpoints.
//!
//! The calls are the ones that this project's are compatible with; what differs is around them:
//!
//! - A request is known by its `user` alone. It has no attempts, so every attempt gets a `user` of its own.
//! - `debug_config` must be an object, or the server fails on it.
//! - The sampling parameters that count are those of `prep_recv`, where the server begins the sequence.
//! - There is no call for abort, commit, pause, state or events, and no lease: closing a connection ends what runs on it, and a reservation
//!   that was answered stays until `start_generate`.
//! - It ignores what it does not know, so whatever a client asks for beyond its list is refused here.

use async_trait::async_trait;
use microserving_protocol::{
    AbortRequest, AbortResponse, ApiError, CallOptions, CommitRequest, CommitResponse, CompletionRequest,
    ModelList, PrepRecvRequest, PrepRecvResponse, Prompt, RemoteSendRequest, RemoteSendResponse,
    ResponseFormat, StartGenerateRequest, StateView,
};
use serde_json::{Map, Value, json};

use crate::foreign::{Names, Reader, bare, unsupported};
use crate::{CallContext, ChunkStream, ClientError, EngineCalls, EngineKind, HttpEngineClient, Written};

/// A server of MLC-LLM.
#[derive(Debug)]
pub struct MlcEngineClient {
    http: HttpEngineClient,
    names: Names,
}

impl MlcEngineClient {
    pub(crate) const fn new(http: HttpEngineClient, names: Names) -> Self {
        Self { http, names }
    }

    /// Returns the parameters that completions and chats have in common, every field of MLC's in it, most of them null.
    fn common(
        &self,
        request: &CompletionRequest,
        user: Option<String>,
    ) -> Result<Map<String, Value>, ClientError> {
        if let Some(field) = unknown_to_mlc(request) {
            let message =
                format!("{field} is not known to MLC-LLM servers, and one of them would serve this request");
            let error = ApiError::bad_request(field, message).with_code("unsupported_parameter");
            return Err(ClientError::Refused { engine: self.http.name().to_owned(), error: Box::new(error) });
        }
        let stream_options = request
            .stream_options
            .filter(|_| request.stream)
            .map(|options| json!({"include_usage": options.include_usage}));
        let body = json!({
            "model": self.names.theirs(request.model.as_deref()),
            "frequency_penalty": request.frequency_penalty,
            "presence_penalty": request.presence_penalty,
            "logit_bias": (!request.logit_bias.is_empty()).then_some(&request.logit_bias),
            "max_tokens": request.max_tokens,
            "n": request.n,
            "seed": request.seed,
            "stop": (!request.stop.is_empty()).then_some(&request.stop),
            "stream": request.stream,
            "stream_options": stream_options,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "user": user,
            "response_format": request.response_format.as_ref().map(response_format),
            "debug_config": {
                "ignore_eos": request.ignore_eos,
                "pinned_system_prompt": false,
                "special_request": null,
                "grammar_execution_mode": "jump_forward",
                "disagg_config": null,
            },
        });
        match body {
            Value::Object(map) => Ok(map),
            _ => Err(self.http.malformed("a body is an object".into())),
        }
    }

    /// Returns the body of `/v1/completions`, which is also the common part of the three calls.
    fn completion(
        &self,
        request: &CompletionRequest,
        user: Option<String>,
    ) -> Result<Map<String, Value>, ClientError> {
        let mut body = self.common(request, user)?;
        body.insert("prompt".into(), json!(request.prompt));
        body.insert("best_of".into(), 1.into());
        body.insert("echo".into(), request.echo.into());
        body.insert("logprobs".into(), json!(request.logprobs));
        body.insert("suffix".into(), Value::Null);
        Ok(body)
    }

    fn reader(&self) -> Reader {
        Reader::new(self.http.name(), false)
    }
}

/// Returns the parameter that a client set and MLC-LLM has no word for.
fn unknown_to_mlc(request: &CompletionRequest) -> Option<&'static str> {
    let set = [
        ("top_k", request.top_k.is_some_and(|k| k > 0)),
        ("min_p", request.min_p.is_some_and(|p| p > 0.0)),
        ("repetition_penalty", request.repetition_penalty.is_some_and(|penalty| (penalty - 1.0).abs() > 0.0)),
        ("min_tokens", request.min_tokens.is_some_and(|tokens| tokens > 0)),
        ("stop_token_ids", !request.stop_token_ids.is_empty()),
        ("cache_salt", request.cache_salt.as_ref().is_some_and(|salt| !salt.is_empty())),
        ("priority", request.priority.is_some_and(|priority| priority != 0)),
        ("return_token_ids", request.return_token_ids),
        (
            "stream_options.continuous_usage_stats",
            request.stream_options.is_some_and(|options| options.continuous_usage_stats),
        ),
    ];
    set.into_iter().find(|(_, set)| *set).map(|(name, _)| name)
}

/// There a schema is text, under `schema`.
fn response_format(format: &ResponseFormat) -> Value {
    match format {
        ResponseFormat::Text => json!({"type": "text"}),
        ResponseFormat::JsonObject => json!({"type": "json_object"}),
        ResponseFormat::JsonSchema { schema, .. } => {
            json!({"type": "json_object", "schema": schema.to_string()})
        }
    }
}

/// Returns the `user` of an attempt.
fn user(call: &CallOptions) -> Option<String> {
    let id = call.seq_id.as_ref()?.as_str();
    Some(match call.attempt {
        Some(attempt) if attempt.0 > 0 => format!("{id}.{}", attempt.0),
        _ => id.to_owned(),
    })
}

#[async_trait]
impl EngineCalls for MlcEngineClient {
    fn name(&self) -> &str {
        self.http.name()
    }

    fn kind(&self) -> EngineKind {
        EngineKind::Mlc
    }

    fn vouched(&self) -> bool {
        self.names.are_given()
    }

    async fn prep_recv(
        &self,
        cx: &CallContext,
        request: &PrepRecvRequest,
    ) -> Result<PrepRecvResponse, ClientError> {
        if request.commit || request.reserve_tokens > 0 {
            return Err(unsupported(self.name(), "commit"));
        }
        let mut body = self.completion(&request.completion, user(&request.call))?;
        body.insert("end".into(), request.end.into());
        self.http.post(&bare(cx), "/microserving/prep_recv", &body).await
    }

    async fn remote_send(
        &self,
        cx: &CallContext,
        request: &RemoteSendRequest,
    ) -> Result<RemoteSendResponse, ClientError> {
        let mut body = self.completion(&request.completion, user(&request.call))?;
        body.insert("begin".into(), request.begin.into());
        body.insert("end".into(), request.end.into());
        body.insert("kv_addr_info".into(), request.kv_addr_info.as_str().into());
        body.insert("recv_rank".into(), request.recv_rank.into());
        let answer: RemoteSendResponse =
            self.http.post(&bare(cx), "/microserving/remote_send", &body).await?;
        // It answers `{}`. What it was asked to send is what it says it has sent.
        let sent = u32::try_from(request.end.saturating_sub(request.begin)).unwrap_or(0);
        Ok(RemoteSendResponse { sent_tokens: answer.sent_tokens.max(sent), ..answer })
    }

    async fn start_generate(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
    ) -> Result<ChunkStream, ClientError> {
        if request.generated_from.is_some() || request.choice_index.is_some() || request.resume_from.is_some()
        {
            return Err(unsupported(self.name(), "resume"));
        }
        let mut body = self.completion(&request.completion, user(&request.call))?;
        body.insert("begin".into(), request.begin.into());
        let answers = self.http.answers(&bare(cx), "/microserving/start_generate", &body).await?;
        Ok(self.reader().stream(answers))
    }

    async fn generate(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
        written: Option<&Written>,
    ) -> Result<ChunkStream, ClientError> {
        if request.generated_from.is_some() || request.choice_index.is_some() || request.resume_from.is_some()
        {
            return Err(unsupported(self.name(), "resume"));
        }
        let user = user(&request.call);
        let (path, body) = match written {
            Some(Written::Chat(chat)) if request.completion.prompt.is_empty() => {
                let params = CompletionRequest {
                    stream: request.completion.stream,
                    stream_options: request.completion.stream_options,
                    model: request.completion.model.clone(),
                    seed: request.completion.seed,
                    ..chat.rest.clone()
                };
                let mut body = self.common(&params, user)?;
                body.insert("messages".into(), json!(chat.messages));
                body.insert("logprobs".into(), params.logprobs.is_some().into());
                body.insert("top_logprobs".into(), params.logprobs.unwrap_or(0).into());
                ("/v1/chat/completions", body)
            }
            Some(Written::Completion(completion)) if request.completion.prompt.is_empty() => {
                let text: Prompt = completion.prompt.clone();
                let completion = CompletionRequest { prompt: text, ..request.completion.clone() };
                ("/v1/completions", self.completion(&completion, user)?)
            }
            _ => ("/v1/completions", self.completion(&request.completion, user)?),
        };
        let answers = self.http.answers(&bare(cx), path, &body).await?;
        Ok(self.reader().stream(answers))
    }

    async fn abort(&self, _: &CallContext, _: &AbortRequest) -> Result<AbortResponse, ClientError> {
        Err(unsupported(self.name(), "abort"))
    }

    async fn commit(&self, _: &CallContext, _: &CommitRequest) -> Result<CommitResponse, ClientError> {
        Err(unsupported(self.name(), "commit"))
    }

    async fn completions(
        &self,
        cx: &CallContext,
        request: &CompletionRequest,
    ) -> Result<ChunkStream, ClientError> {
        let body = self.completion(request, None)?;
        let answers = self.http.answers(&bare(cx), "/v1/completions", &body).await?;
        Ok(self.reader().stream(answers))
    }

    async fn models(&self, cx: &CallContext) -> Result<ModelList, ClientError> {
        let models = self.http.models(&bare(cx)).await?;
        self.names.learn(models).map_err(|reason| self.http.malformed(reason))
    }

    async fn state(&self, _: &CallContext) -> Result<StateView, ClientError> {
        Err(unsupported(self.name(), "state"))
    }

    /// It has no path for health; it lists its models once it serves.
    async fn ready(&self, cx: &CallContext) -> Result<(), ClientError> {
        self.http.models(&bare(cx)).await.map(|_| ())
    }

    async fn tokenizer(&self, _: &CallContext) -> Result<Value, ClientError> {
        Err(unsupported(self.name(), "tokenizer"))
    }
}
