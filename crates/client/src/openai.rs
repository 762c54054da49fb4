//! Servers that speak OpenAI's API and nothing of ours: vLLM, SGLang, llama.cpp and others.
//!
//! A request goes there as its client wrote it. Nobody but the server has its tokenizer, so text stays text and messages stay messages.

use async_trait::async_trait;
use microserving_protocol::{
    AbortRequest, AbortResponse, ChatCompletionRequest, CommitRequest, CommitResponse, CompletionRequest,
    ModelList, PrepRecvRequest, PrepRecvResponse, RemoteSendRequest, RemoteSendResponse,
    StartGenerateRequest, StateView, StreamOptions,
};
use serde_json::{Map, Value, json};

use crate::foreign::{Names, Reader, bare, unsupported};
use crate::{CallContext, ChunkStream, ClientError, EngineCalls, EngineKind, HttpEngineClient, Written};

/// A server that speaks OpenAI's API and nothing of ours.
#[derive(Debug)]
pub struct OpenAiEngineClient {
    http: HttpEngineClient,
    names: Names,
}

impl OpenAiEngineClient {
    pub(crate) const fn new(http: HttpEngineClient, names: Names) -> Self {
        Self { http, names }
    }

    async fn complete(
        &self,
        cx: &CallContext,
        request: &CompletionRequest,
    ) -> Result<ChunkStream, ClientError> {
        let body = self.body(request)?;
        self.send(cx, "/v1/completions", request, body).await
    }

    async fn chat(
        &self,
        cx: &CallContext,
        request: &ChatCompletionRequest,
    ) -> Result<ChunkStream, ClientError> {
        let params = CompletionRequest { logprobs: None, ..request.rest.clone() };
        let mut body = self.body(&params)?;
        body.remove("prompt");
        body.insert("messages".into(), json!(request.messages));
        if let Some(top) = request.rest.logprobs {
            body.insert("logprobs".into(), true.into());
            body.insert("top_logprobs".into(), top.into());
        }
        self.send(cx, "/v1/chat/completions", &request.rest, body).await
    }

    /// The answer is always asked for as a stream with usage: the first token shows when it is there.
    fn body(&self, request: &CompletionRequest) -> Result<Map<String, Value>, ClientError> {
        let options = StreamOptions { include_usage: true, ..request.stream_options.unwrap_or_default() };
        let request = CompletionRequest {
            model: self.names.theirs(request.model.as_deref()),
            stream: true,
            stream_options: Some(options),
            ..request.clone()
        };
        match serde_json::to_value(request) {
            Ok(Value::Object(body)) => Ok(body),
            Ok(_) => Err(self.http.malformed("a body is an object".into())),
            Err(error) => Err(self.http.malformed(format!("the request cannot be written: {error}"))),
        }
    }

    async fn send(
        &self,
        cx: &CallContext,
        path: &str,
        request: &CompletionRequest,
        body: Map<String, Value>,
    ) -> Result<ChunkStream, ClientError> {
        let keeps_usage = request.stream_options.is_some_and(|options| options.continuous_usage_stats);
        let answers = self.http.answers(&bare(cx), path, &body).await?;
        Ok(Reader::new(self.http.name(), keeps_usage).stream(answers))
    }
}

#[async_trait]
impl EngineCalls for OpenAiEngineClient {
    fn name(&self) -> &str {
        self.http.name()
    }

    fn kind(&self) -> EngineKind {
        EngineKind::OpenAi
    }

    fn vouched(&self) -> bool {
        self.names.are_given()
    }

    async fn prep_recv(&self, _: &CallContext, _: &PrepRecvRequest) -> Result<PrepRecvResponse, ClientError> {
        Err(unsupported(self.name(), "prep_recv"))
    }

    async fn remote_send(
        &self,
        _: &CallContext,
        _: &RemoteSendRequest,
    ) -> Result<RemoteSendResponse, ClientError> {
        Err(unsupported(self.name(), "remote_send"))
    }

    async fn start_generate(
        &self,
        _: &CallContext,
        _: &StartGenerateRequest,
    ) -> Result<ChunkStream, ClientError> {
        Err(unsupported(self.name(), "start_generate"))
    }

    async fn generate(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
        written: Option<&Written>,
    ) -> Result<ChunkStream, ClientError> {
        match written {
            // Whoever resumes says so in token ids, which are not this server's.
            _ if request.generated_from.is_some()
                || request.choice_index.is_some()
                || request.resume_from.is_some() =>
            {
                Err(unsupported(self.name(), "resume"))
            }
            Some(Written::Completion(completion)) => self.complete(cx, completion).await,
            Some(Written::Chat(chat)) => self.chat(cx, chat).await,
            None => Err(unsupported(self.name(), "start_generate")),
        }
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
        self.complete(cx, request).await
    }

    async fn models(&self, cx: &CallContext) -> Result<ModelList, ClientError> {
        let models = self.http.models(&bare(cx)).await?;
        self.names.learn(models).map_err(|reason| self.http.malformed(reason))
    }

    async fn state(&self, _: &CallContext) -> Result<StateView, ClientError> {
        Err(unsupported(self.name(), "state"))
    }

    /// Most servers have `/health`; one that has not is asked for its models.
    async fn ready(&self, cx: &CallContext) -> Result<(), ClientError> {
        let cx = bare(cx);
        match self.http.healthy(&cx, "/health").await {
            Err(ClientError::Refused { error, .. }) if matches!(error.status, 404 | 405 | 501) => {
                self.http.models(&cx).await.map(|_| ())
            }
            answer => answer,
        }
    }

    async fn tokenizer(&self, _: &CallContext) -> Result<Value, ClientError> {
        Err(unsupported(self.name(), "tokenizer"))
    }
}
