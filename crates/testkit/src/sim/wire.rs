//! An engine of the simulation as the real router calls it: wire types in, wire types out, as `server` reads and writes them.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use microserving_client::{CallContext, ChunkStream, ClientError, EngineCalls};
use microserving_engine::{
    Abort, Call, CallKey, CallOptions, Commit, EngineError, EngineState, GenerateEvent, GenerateUsage, Pause,
    PrepRecv, RemoteSend, Reply, StartGenerate,
};
use microserving_protocol::{
    AbortRequest, AbortResponse, ApiError, Attempt, CommitRequest, CommitResponse, CompletionChoice,
    CompletionRequest, CompletionResponse, CountersView, GenerationParams, ModelCard, ModelList, PagesView,
    PauseRequest, PauseResponse, PrepRecvRequest, PrepRecvResponse, RemoteSendRequest, RemoteSendResponse,
    StartGenerateRequest, StateView, TokenId, Usage, addr_from_text, addr_to_text, normalise_begin,
    normalise_prep_end, normalise_send_range,
};
use microserving_transport::Refusal;

use super::node::MODEL;
use super::replay::profile_of;
use super::world::{CallError, Connection, World};

/// One engine, called by one router.
pub(crate) struct SimEngine {
    world: Arc<World>,
    engine: usize,
    name: String,
    /// Cleared when the router is killed: what its guards still want to send goes nowhere.
    router_lives: Arc<AtomicBool>,
}

impl fmt::Debug for SimEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimEngine").field("name", &self.name).finish_non_exhaustive()
    }
}

impl SimEngine {
    pub(crate) fn new(world: &Arc<World>, engine: usize, router_lives: &Arc<AtomicBool>) -> Self {
        Self {
            world: Arc::clone(world),
            engine,
            name: World::name_of(engine),
            router_lives: Arc::clone(router_lives),
        }
    }

    fn connect(&self, call: Call) -> Result<Connection, ClientError> {
        if !self.router_lives.load(Ordering::Relaxed) {
            return Err(self.unreachable());
        }
        Ok(self.world.send(self.engine, call))
    }

    async fn call(&self, cx: &CallContext, call: Call) -> Result<Reply, ClientError> {
        let mut connection = self.connect(call)?;
        self.in_time(cx, connection.answer()).await?.map_err(|error| self.error(error))
    }

    async fn in_time<T>(&self, cx: &CallContext, work: impl Future<Output = T>) -> Result<T, ClientError> {
        match cx.deadline {
            None => Ok(work.await),
            Some(deadline) => tokio::time::timeout_at(deadline, work)
                .await
                .map_err(|_| ClientError::Timeout { engine: self.name.clone() }),
        }
    }

    fn unreachable(&self) -> ClientError {
        ClientError::Unreachable { engine: self.name.clone(), reason: "the connection broke".into() }
    }

    fn error(&self, error: CallError) -> ClientError {
        match error {
            CallError::Broken => self.unreachable(),
            CallError::Engine(error) => self.refused(api_error(&error)),
        }
    }

    fn refused(&self, error: ApiError) -> ClientError {
        ClientError::Refused { engine: self.name.clone(), error: Box::new(error) }
    }

    fn odd(&self, reply: &Reply) -> ClientError {
        ClientError::Malformed { engine: self.name.clone(), reason: format!("{reply:?}") }
    }

    /// Returns the checked parameters and the prompt.
    fn read(&self, request: &CompletionRequest) -> Result<(GenerationParams, Arc<[TokenId]>), ClientError> {
        let params = request.generation(0).map_err(|error| self.refused(error))?;
        let tokens = request.prompt.tokens().unwrap_or_default();
        Ok((params, tokens.into()))
    }

    fn bad<T>(&self, result: Result<T, ApiError>) -> Result<T, ClientError> {
        result.map_err(|error| self.refused(error))
    }
}

#[async_trait]
impl EngineCalls for SimEngine {
    fn name(&self) -> &str {
        &self.name
    }

    async fn prep_recv(
        &self,
        cx: &CallContext,
        request: &PrepRecvRequest,
    ) -> Result<PrepRecvResponse, ClientError> {
        let (params, prompt) = self.read(&request.completion)?;
        let end = self.bad(normalise_prep_end(request.end, prompt.len(), request.commit))?;
        let call = PrepRecv {
            key: key(&request.call),
            prompt,
            end,
            reserve_tokens: request.reserve_tokens,
            commit: request.commit,
            options: options(&params, &request.call),
        };
        match self.call(cx, Call::PrepRecv(call)).await? {
            Reply::PrepRecv(reply) => {
                self.world.state().tally.matched_tokens += u64::from(reply.prefix_matched_length);
                Ok(PrepRecvResponse {
                    kv_addr_info: reply.kv_addr_info.map(|bytes| addr_to_text(&bytes)).unwrap_or_default(),
                    prefix_matched_length: reply.prefix_matched_length,
                    lease_seconds: Some(reply.lease.as_secs_f64()),
                    seq_id: Some(reply.key.seq_id),
                    engine_id: Some(reply.engine_id),
                })
            }
            other => Err(self.odd(&other)),
        }
    }

    async fn remote_send(
        &self,
        cx: &CallContext,
        request: &RemoteSendRequest,
    ) -> Result<RemoteSendResponse, ClientError> {
        let (params, prompt) = self.read(&request.completion)?;
        let range = self.bad(normalise_send_range(request.begin, request.end, prompt.len(), true))?;
        let address = addr_from_text(&request.kv_addr_info)
            .map_err(|error| self.refused(ApiError::bad_request("kv_addr_info", error.to_string())))?;
        let call = RemoteSend {
            key: key(&request.call),
            prompt,
            range,
            kv_addr_info: address,
            recv_rank: request.recv_rank,
            options: options(&params, &request.call),
        };
        match self.call(cx, Call::RemoteSend(call)).await? {
            Reply::RemoteSend(reply) => {
                self.world.state().tally.sent_tokens += u64::from(reply.sent_tokens);
                Ok(RemoteSendResponse {
                    sent_tokens: reply.sent_tokens,
                    cached_tokens: reply.cached_tokens,
                    computed_tokens: reply.computed_tokens,
                    bytes: reply.bytes,
                    transfer_seconds: reply.transfer.as_secs_f64(),
                    exposed_transfer_seconds: reply.exposed_transfer.as_secs_f64(),
                })
            }
            other => Err(self.odd(&other)),
        }
    }

    async fn start_generate(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
    ) -> Result<ChunkStream, ClientError> {
        let (params, prompt) = self.read(&request.completion)?;
        let begin = self.bad(normalise_begin(request.begin, prompt.len()))?;
        let generated_from = request.generated_from.unwrap_or(prompt.len() as u32);
        let call = StartGenerate {
            key: key(&request.call),
            begin,
            generated_from,
            n: params.n,
            first_choice: request.choice_index.unwrap_or(0),
            sampling: params.sampling.clone(),
            max_tokens: params.max_tokens,
            min_tokens: params.min_tokens,
            stop_tokens: params.stop_tokens.clone(),
            ignore_eos: params.ignore_eos,
            constraints: Vec::new(),
            resume_from: request.resume_from,
            options: options(&params, &request.call),
            prompt,
        };
        let mut connection = self.connect(Call::StartGenerate(Box::new(call)))?;
        let answer = self.in_time(cx, connection.answer()).await?;
        let reply = answer.map_err(|error| self.error(error))?;
        if reply != Reply::Started {
            return Err(self.odd(&reply));
        }
        // The head of an answer goes out with its first token: what fails before that has a status.
        let first = self.in_time(cx, connection.event()).await?;
        let first = first.map_err(|error| self.error(error))?;
        if let GenerateEvent::Failed { error } = first {
            return Err(self.refused(api_error(&error)));
        }
        let stream = Events {
            engine: self.name.clone(),
            deadline: cx.deadline,
            connection,
            next: Some(first),
            token_ids: params.return_token_ids,
        };
        Ok(stream.into_chunks())
    }

    async fn abort(&self, cx: &CallContext, request: &AbortRequest) -> Result<AbortResponse, ClientError> {
        let call = Abort { seq_id: request.seq_id.clone(), attempt: request.attempt };
        match self.call(cx, Call::Abort(call)).await? {
            Reply::Aborted(aborted) => Ok(AbortResponse { aborted }),
            other => Err(self.odd(&other)),
        }
    }

    async fn commit(&self, cx: &CallContext, request: &CommitRequest) -> Result<CommitResponse, ClientError> {
        let call = Commit { seq_id: request.seq_id.clone(), attempt: request.attempt };
        match self.call(cx, Call::Commit(call)).await? {
            Reply::Committed(reply) => Ok(CommitResponse { committed_tokens: reply.committed_tokens }),
            other => Err(self.odd(&other)),
        }
    }

    async fn pause(&self, cx: &CallContext, request: &PauseRequest) -> Result<PauseResponse, ClientError> {
        let call = Pause { seq_id: request.seq_id.clone(), attempt: request.attempt };
        match self.call(cx, Call::Pause(call)).await? {
            Reply::Paused(reply) => Ok(PauseResponse { token_ids: reply.tokens, microserving: None }),
            other => Err(self.odd(&other)),
        }
    }

    async fn completions(
        &self,
        cx: &CallContext,
        request: &CompletionRequest,
    ) -> Result<ChunkStream, ClientError> {
        let call = microserving_protocol::CallOptions::default();
        let completion = request.clone();
        let plain = StartGenerateRequest { completion, call, ..StartGenerateRequest::default() };
        self.start_generate(cx, &plain).await
    }

    async fn models(&self, cx: &CallContext) -> Result<ModelList, ClientError> {
        self.ready(cx).await?;
        Ok(ModelList::new(vec![ModelCard::new(MODEL, 0, self.world.max_context())]))
    }

    async fn state(&self, cx: &CallContext) -> Result<StateView, ClientError> {
        match self.call(cx, Call::State).await? {
            Reply::State(state) => Ok(self.view(*state)),
            other => Err(self.odd(&other)),
        }
    }

    async fn ready(&self, cx: &CallContext) -> Result<(), ClientError> {
        self.call(cx, Call::Sequences).await.map(|_| ())
    }

    async fn profile(&self, _: &CallContext) -> Result<Option<serde_json::Value>, ClientError> {
        Ok(self.world.options.hardware.as_ref().map(profile_of))
    }

    async fn tokenizer(&self, _: &CallContext) -> Result<serde_json::Value, ClientError> {
        Err(self.refused(ApiError::not_found("prompts of the simulation are tokens")))
    }
}

impl SimEngine {
    /// What a router looks at; it never decides by an engine's counters.
    fn view(&self, state: EngineState) -> StateView {
        let pages = state.pages;
        StateView {
            engine_id: state.engine_id,
            incarnation: format!("{:016x}", state.incarnation.0),
            model: MODEL.to_owned(),
            max_context: self.world.max_context(),
            page_size: state.page_size,
            layout_fingerprint: "the same everywhere".to_owned(),
            pages: PagesView {
                free: pages.free,
                reserved: pages.reserved,
                owned: pages.owned,
                cached: pages.cached,
                quarantined: pages.quarantined,
                total: pages.total,
            },
            waiting: state.waiting,
            running: state.running,
            receiving: state.receiving,
            sending: state.sending,
            queued_prefill_tokens: state.queued_prefill_tokens,
            draining: false,
            counters: CountersView::default(),
            grpc: false,
            marks: false,
        }
    }
}

/// A generation's events on their way to becoming chunks.
struct Events {
    engine: String,
    deadline: Option<tokio::time::Instant>,
    connection: Connection,
    next: Option<GenerateEvent>,
    token_ids: bool,
}

impl Events {
    fn into_chunks(self) -> ChunkStream {
        Box::pin(futures::stream::unfold(Some(self), |state| async move {
            let mut events = state?;
            match events.next().await {
                Ok(GenerateEvent::Token { choice, token, finish, .. }) => {
                    let text = u8::try_from(token.0).map(char::from).ok().map(String::from);
                    let choice = CompletionChoice {
                        index: choice,
                        text: text.unwrap_or_default(),
                        logprobs: None,
                        finish_reason: finish,
                        token_ids: events.token_ids.then(|| vec![token]),
                    };
                    Some((Ok(CompletionResponse::new("sim", 0, MODEL, vec![choice])), Some(events)))
                }
                Ok(GenerateEvent::Done { usage }) => {
                    let mut chunk = CompletionResponse::new("sim", 0, MODEL, Vec::new());
                    chunk.usage = Some(usage_of(usage));
                    Some((Ok(chunk), None))
                }
                Ok(GenerateEvent::Failed { error }) => {
                    let error = Box::new(api_error(&error));
                    Some((Err(ClientError::Refused { engine: events.engine, error }), None))
                }
                Err(error) => Some((Err(error), None)),
            }
        }))
    }

    async fn next(&mut self) -> Result<GenerateEvent, ClientError> {
        if let Some(event) = self.next.take() {
            return Ok(event);
        }
        let event = match self.deadline {
            None => self.connection.event().await,
            Some(deadline) => tokio::time::timeout_at(deadline, self.connection.event())
                .await
                .map_err(|_| ClientError::Timeout { engine: self.engine.clone() })?,
        };
        event.map_err(|_| ClientError::Lost {
            engine: self.engine.clone(),
            reason: "the connection broke".into(),
        })
    }
}

fn usage_of(usage: GenerateUsage) -> Usage {
    Usage::new(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
}

fn key(call: &microserving_protocol::CallOptions) -> Option<CallKey> {
    let seq_id = call.seq_id.clone()?;
    Some(CallKey { seq_id, attempt: call.attempt.unwrap_or(Attempt(0)) })
}

fn options(params: &GenerationParams, call: &microserving_protocol::CallOptions) -> CallOptions {
    CallOptions {
        cache_salt: Arc::clone(&params.cache_salt),
        priority: params.priority,
        timeout: call.timeout,
    }
}

/// The statuses by which a router decides whether to try again.
fn api_error(error: &EngineError) -> ApiError {
    let message = error.to_string();
    match error {
        EngineError::InvalidField { field, .. } | EngineError::TooLong { field, .. } => {
            ApiError::bad_request(*field, message)
        }
        EngineError::NoRoom { retry_after, .. } => ApiError::unavailable(message, *retry_after),
        EngineError::UnknownSequence { .. } => ApiError::not_found(message).with_param("seq_id"),
        EngineError::StaleAttempt { .. } | EngineError::Conflict { .. } => {
            ApiError::conflict(message).with_param("seq_id")
        }
        EngineError::LayoutMismatch { .. } | EngineError::Refused { refusal: Refusal::RangeTaken } => {
            ApiError::conflict(message).with_param("kv_addr_info")
        }
        EngineError::BadAddress { .. }
        | EngineError::Unreachable { .. }
        | EngineError::Refused { refusal: Refusal::Unreachable } => {
            ApiError::bad_request("kv_addr_info", message)
        }
        EngineError::Refused { refusal: Refusal::BadCredential } => {
            ApiError::forbidden(message).with_param("kv_addr_info")
        }
        EngineError::Refused { .. }
        | EngineError::AddressExpired { .. }
        | EngineError::LeaseExpired { .. }
        | EngineError::Aborted { .. }
        | EngineError::TransferLost { .. } => ApiError::gone(message).with_param("seq_id"),
        EngineError::DeadlineExceeded { .. } => ApiError::timeout(message),
        EngineError::Draining => ApiError::new(503, message),
        _ => ApiError::internal(message),
    }
}
