//! Engines that follow a script, and a router over them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use futures::{StreamExt, stream};
use http_body_util::BodyExt;
use microserving_client::{CallContext, ChunkStream, ClientError, EngineCalls, KvEventStream};
use microserving_protocol::{
    AbortRequest, AbortResponse, ApiError, ChatMessage, CommitRequest, CommitResponse, CompletionChoice,
    CompletionRequest, CompletionResponse, FinishReason, ModelCard, ModelList, PagesView, PrepRecvRequest,
    PrepRecvResponse, Prompt, RemoteSendRequest, RemoteSendResponse, SseEvent, SseParser,
    StartGenerateRequest, StateView, TokenId, Usage,
};
use microserving_router::{
    EngineSpec, Pattern, PlacementPolicy, PromptCodec, Randomness, Role, RouterConfig, RouterService,
    RouterTasks,
};
use serde_json::Value;
use tokio::sync::Notify;
use tower::ServiceExt;

/// What a scripted engine does on one call.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    /// What it should.
    Work,
    /// Never answers.
    Hang,
    /// No connection.
    Unreachable,
    /// Says no.
    Refuse(ApiError),
    /// Streams so many chunks, then breaks.
    BreakAfter(usize),
    /// Streams so many chunks, then nothing more.
    HangAfter(usize),
    /// Streams so many chunks, then an error event.
    FailAfter(usize, ApiError),
    /// Streams so many chunks, then gives the sequence up.
    PreemptAfter(usize),
    /// Ends the stream early, without a finish reason.
    EndAfter(usize),
    /// Streams with so long a pause before each chunk.
    Slow(Duration),
}

/// One call as it arrived.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Seen {
    pub(crate) call: &'static str,
    pub(crate) body: Value,
    pub(crate) cx: CallContext,
}

#[derive(Debug, Default)]
struct Inner {
    /// Breaks the stream of cache events off; there is none without it.
    events: Option<Arc<Notify>>,
    prep: VecDeque<Act>,
    send: VecDeque<Act>,
    generate: VecDeque<Act>,
    seen: Vec<Seen>,
    ready: bool,
    /// How it stores KV.
    layout: u64,
    /// Does not answer whether it is ready.
    silent: bool,
    matched: u32,
    prefill_cached: u32,
    incarnation: u64,
    load: u32,
    first_token: Duration,
    hides_tokens: bool,
    /// What the next one of several engines does that is asked to generate.
    shared: Option<Acts>,
}

/// What engines do that share it, in the order in which they are asked.
pub(crate) type Acts = Arc<Mutex<Vec<Act>>>;

/// A scripted engine. Generates the letters a, b, c… one a chunk.
#[derive(Debug)]
pub(crate) struct Fake {
    name: String,
    inner: Mutex<Inner>,
}

pub(crate) const MODEL: &str = "toy";
pub(crate) const PAGE: u32 = 4;

impl Fake {
    pub(crate) fn new(name: &str) -> Arc<Self> {
        let inner = Inner { ready: true, ..Inner::default() };
        Arc::new(Self { name: name.to_owned(), inner: Mutex::new(inner) })
    }

    fn with<T>(&self, f: impl FnOnce(&mut Inner) -> T) -> T {
        f(&mut self.inner.lock().expect("not poisoned"))
    }

    pub(crate) fn on_prep(&self, act: Act) {
        self.with(|inner| inner.prep.push_back(act));
    }

    pub(crate) fn on_send(&self, act: Act) {
        self.with(|inner| inner.send.push_back(act));
    }

    pub(crate) fn on_generate(&self, act: Act) {
        self.with(|inner| inner.generate.push_back(act));
    }

    /// Does what comes next of what several engines share.
    pub(crate) fn on_generate_next(&self, acts: &Acts) {
        self.with(|inner| inner.shared = Some(acts.clone()));
    }

    pub(crate) fn set_ready(&self, ready: bool) {
        self.with(|inner| inner.ready = ready);
    }

    /// Has it tell cache events, none of which ever comes; what is returned breaks them off.
    pub(crate) fn tell_events(&self) -> Arc<Notify> {
        self.with(|inner| inner.events.get_or_insert_default().clone())
    }

    pub(crate) fn set_silent(&self, silent: bool) {
        self.with(|inner| inner.silent = silent);
    }

    pub(crate) fn set_matched(&self, tokens: u32) {
        self.with(|inner| inner.matched = tokens);
    }

    pub(crate) fn set_prefill_cached(&self, tokens: u32) {
        self.with(|inner| inner.prefill_cached = tokens);
    }

    pub(crate) fn set_first_token(&self, after: Duration) {
        self.with(|inner| inner.first_token = after);
    }

    /// Stores KV in a way of its own.
    pub(crate) fn set_layout(&self, layout: u64) {
        self.with(|inner| inner.layout = layout);
    }

    pub(crate) fn set_load(&self, requests: u32) {
        self.with(|inner| inner.load = requests);
    }

    /// Answers without token ids, as an engine that does not know them.
    pub(crate) fn hide_tokens(&self) {
        self.with(|inner| inner.hides_tokens = true);
    }

    pub(crate) fn reboot(&self) {
        self.with(|inner| inner.incarnation += 1);
    }

    /// The names of the calls so far, looks and reports left out.
    pub(crate) fn calls(&self) -> Vec<&'static str> {
        self.seen().iter().map(|seen| seen.call).collect()
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.with(|inner| inner.seen.clone())
    }

    pub(crate) fn last(&self, call: &str) -> Seen {
        self.seen().into_iter().rev().find(|seen| seen.call == call).expect("the call was made")
    }

    fn note(&self, call: &'static str, cx: &CallContext, body: Value) {
        self.with(|inner| inner.seen.push(Seen { call, body, cx: cx.clone() }));
    }

    async fn act(&self, cx: &CallContext, act: Option<Act>) -> Result<Act, ClientError> {
        let engine = self.name.clone();
        match act.unwrap_or(Act::Work) {
            Act::Hang => match cx.deadline {
                None => std::future::pending().await,
                Some(deadline) => {
                    tokio::time::sleep_until(deadline).await;
                    Err(ClientError::Timeout { engine })
                }
            },
            Act::Unreachable => Err(ClientError::Unreachable { engine, reason: "scripted".into() }),
            Act::Refuse(error) => Err(ClientError::Refused { engine, error: Box::new(error) }),
            act => Ok(act),
        }
    }

    /// Goes on after the letters that come with the request.
    fn chunks(
        &self,
        request: &CompletionRequest,
        generated_from: Option<u32>,
        act: &Act,
        matched: u32,
    ) -> ChunkStream {
        let engine = self.name.clone();
        let num_tokens = u32::try_from(request.max_tokens.unwrap_or(3)).expect("small");
        let prompt_len = u32::try_from(request.prompt.tokens().expect("tokens").len()).expect("small");
        let n = u32::try_from(request.n).expect("small");
        let true_len = generated_from.unwrap_or(prompt_len);
        let wants_ids = request.return_token_ids && !self.with(|inner| inner.hides_tokens);
        let chunk = |index: u32, letter: Option<char>, finish_reason| {
            let choice = CompletionChoice {
                index,
                text: letter.map(String::from).unwrap_or_default(),
                finish_reason,
                token_ids: letter.filter(|_| wants_ids).map(|letter| vec![TokenId(letter.into())]),
                ..Default::default()
            };
            CompletionResponse::new("engine-id", 1, "engine-model", vec![choice])
        };
        let mut items: Vec<Result<CompletionResponse, ClientError>> = Vec::new();
        for i in prompt_len - true_len..num_tokens {
            for index in 0..n {
                let letter = char::from(b'a' + u8::try_from(i).expect("small"));
                let last = (i + 1 == num_tokens).then_some(FinishReason::Length);
                items.push(Ok(chunk(index, Some(letter), last)));
            }
        }
        let mut usage = CompletionResponse::new("engine-id", 1, "engine-model", vec![]);
        usage.usage = Some(Usage::new(true_len, num_tokens * n, matched));
        items.push(Ok(usage));
        let mut hang = false;
        match act {
            Act::BreakAfter(k) => {
                items.truncate(*k);
                items.push(Err(ClientError::Lost { engine, reason: "scripted".into() }));
            }
            Act::FailAfter(k, error) => {
                items.truncate(*k);
                items.push(Err(ClientError::Refused { engine, error: Box::new(error.clone()) }));
            }
            Act::PreemptAfter(k) => {
                items.truncate(*k);
                items.push(Ok(chunk(0, None, Some(FinishReason::Preempt))));
            }
            Act::EndAfter(k) => items.truncate(*k),
            Act::HangAfter(k) => {
                items.truncate(*k);
                hang = true;
            }
            _ => {}
        }
        if let Act::Slow(pause) = *act {
            let paced = stream::iter(items).then(move |item| async move {
                tokio::time::sleep(pause).await;
                item
            });
            return Box::pin(paced);
        }
        let items = stream::iter(items);
        if hang { Box::pin(items.chain(stream::pending())) } else { Box::pin(items) }
    }
}

#[async_trait]
impl EngineCalls for Fake {
    fn name(&self) -> &str {
        &self.name
    }

    async fn prep_recv(
        &self,
        cx: &CallContext,
        request: &PrepRecvRequest,
    ) -> Result<PrepRecvResponse, ClientError> {
        self.note("prep_recv", cx, serde_json::to_value(request).expect("serialises"));
        let (act, matched) = self.with(|inner| (inner.prep.pop_front(), inner.matched));
        self.act(cx, act).await?;
        let matched = matched.min(u32::try_from(request.end).expect("not negative"));
        Ok(PrepRecvResponse {
            kv_addr_info: format!("addr-of-{}", self.name),
            prefix_matched_length: matched,
            lease_seconds: Some(30.0),
            seq_id: request.call.seq_id.clone(),
            engine_id: Some(self.name.as_str().into()),
        })
    }

    async fn remote_send(
        &self,
        cx: &CallContext,
        request: &RemoteSendRequest,
    ) -> Result<RemoteSendResponse, ClientError> {
        self.note("remote_send", cx, serde_json::to_value(request).expect("serialises"));
        let (act, cached) = self.with(|inner| (inner.send.pop_front(), inner.prefill_cached));
        self.act(cx, act).await?;
        let sent = u32::try_from(request.end - request.begin).expect("ordered");
        let end = u32::try_from(request.end).expect("not negative");
        Ok(RemoteSendResponse {
            sent_tokens: sent,
            cached_tokens: cached,
            computed_tokens: end - cached,
            bytes: u64::from(sent) * 10,
            transfer_seconds: 0.5,
            exposed_transfer_seconds: 0.25,
        })
    }

    async fn start_generate(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
    ) -> Result<ChunkStream, ClientError> {
        self.note("start_generate", cx, serde_json::to_value(request).expect("serialises"));
        let (act, matched) = self.with(|inner| {
            let shared = inner.shared.as_ref().and_then(|acts| acts.lock().expect("not poisoned").pop());
            (shared.or_else(|| inner.generate.pop_front()), inner.matched)
        });
        let act = self.act(cx, act).await?;
        let first_token = self.with(|inner| inner.first_token);
        if !first_token.is_zero() {
            tokio::time::sleep(first_token).await;
        }
        Ok(self.chunks(&request.completion, request.generated_from, &act, matched))
    }

    async fn abort(&self, cx: &CallContext, request: &AbortRequest) -> Result<AbortResponse, ClientError> {
        self.note("abort", cx, serde_json::to_value(request).expect("serialises"));
        Ok(AbortResponse { aborted: true })
    }

    async fn commit(&self, cx: &CallContext, request: &CommitRequest) -> Result<CommitResponse, ClientError> {
        self.note("commit", cx, serde_json::to_value(request).expect("serialises"));
        Ok(CommitResponse { committed_tokens: 8 })
    }

    async fn completions(
        &self,
        _: &CallContext,
        request: &CompletionRequest,
    ) -> Result<ChunkStream, ClientError> {
        Ok(self.chunks(request, None, &Act::Work, 0))
    }

    async fn models(&self, _: &CallContext) -> Result<ModelList, ClientError> {
        Ok(ModelList::new(vec![ModelCard::new(MODEL, 1, 1000)]))
    }

    async fn state(&self, _: &CallContext) -> Result<StateView, ClientError> {
        let (incarnation, running, layout) = self.with(|inner| (inner.incarnation, inner.load, inner.layout));
        Ok(StateView {
            engine_id: self.name.as_str().into(),
            incarnation: format!("{incarnation:016x}"),
            model: MODEL.into(),
            max_context: 1000,
            page_size: PAGE,
            layout_fingerprint: format!("{layout:016x}"),
            pages: PagesView::default(),
            waiting: 0,
            running,
            receiving: 0,
            sending: 0,
            queued_prefill_tokens: 0,
            draining: false,
            counters: Default::default(),
            grpc: false,
            marks: false,
        })
    }

    async fn kv_events(&self, _: &CallContext, _: u64) -> Result<KvEventStream, ClientError> {
        let engine = self.name.clone();
        let Some(broken) = self.with(|inner| inner.events.clone()) else {
            return Err(ClientError::Refused { engine, error: Box::new(ApiError::new(404, "no events")) });
        };
        let end = async move {
            broken.notified().await;
            Err(ClientError::Lost { engine, reason: "scripted".into() })
        };
        Ok(Box::pin(stream::once(end)))
    }

    async fn ready(&self, cx: &CallContext) -> Result<(), ClientError> {
        if self.with(|inner| inner.silent) {
            self.act(cx, Some(Act::Hang)).await?;
        }
        if self.with(|inner| inner.ready) {
            return Ok(());
        }
        Err(ClientError::Unreachable { engine: self.name.clone(), reason: "scripted".into() })
    }

    async fn tokenizer(&self, _: &CallContext) -> Result<Value, ClientError> {
        serde_json::to_value(microserving_text::TextBundle::toy(MODEL))
            .map_err(|error| ClientError::Malformed { engine: self.name.clone(), reason: error.to_string() })
    }
}

/// Letters are tokens.
#[derive(Debug)]
struct Letters;

impl PromptCodec for Letters {
    fn encode(&self, text: &str, _special: bool) -> Result<Vec<TokenId>, ApiError> {
        Ok(text.chars().map(|letter| TokenId(letter.into())).collect())
    }

    fn encode_chat(&self, messages: &[ChatMessage]) -> Result<Vec<TokenId>, ApiError> {
        let text: String =
            messages.iter().map(|message| format!("<{}>{}", message.role, message.content)).collect();
        self.encode(&text, false)
    }

    fn decode(&self, tokens: &[TokenId]) -> Result<String, ApiError> {
        let letter = |token: &TokenId| char::from_u32(token.0);
        let text: Option<String> = tokens.iter().map(letter).collect();
        text.ok_or_else(|| ApiError::bad_request("tokens", "no letter"))
    }
}

/// A router over scripted engines, driven through its HTTP surface without a socket.
pub(crate) struct World {
    pub(crate) service: Arc<RouterService>,
    tasks: RouterTasks,
    app: Router,
}

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).expect("JSON")
    }

    pub(crate) fn text(&self) -> String {
        self.json()["choices"][0]["text"].as_str().expect("a text").to_owned()
    }

    /// The events of a stream, without `[DONE]`, which must be the last one unless an error is.
    pub(crate) fn events(&self) -> Vec<Value> {
        let events = SseParser::new().push(self.body.as_bytes()).expect("a stream");
        let mut values: Vec<Value> = Vec::new();
        let mut done = false;
        for event in events {
            assert!(!done, "nothing follows [DONE]");
            match event {
                SseEvent::Data(data) => values.push(serde_json::from_str(&data).expect("JSON")),
                SseEvent::Done => done = true,
            }
        }
        assert_ne!(done, values.last().is_some_and(|last| last.get("error").is_some()));
        values
    }

    pub(crate) fn streamed_text(&self) -> String {
        self.events().iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect()
    }
}

/// Changes a configuration before its router starts.
pub(crate) type Tweak = fn(&mut RouterConfig);

impl World {
    pub(crate) async fn new(engines: &[(&Arc<Fake>, Role)], pattern: &str) -> Self {
        Self::with(engines, pattern, |_| {}).await
    }

    pub(crate) async fn with(engines: &[(&Arc<Fake>, Role)], pattern: &str, tweak: Tweak) -> Self {
        let specs = engines.iter().map(|(fake, role)| EngineSpec::new((*fake).clone(), *role)).collect();
        let ready = engines.iter().filter(|(fake, _)| fake.with(|inner| inner.ready)).count();
        Self::over(specs, ready, pattern, tweak).await
    }

    /// A router over any engines, of which so many become ready.
    pub(crate) async fn over(specs: Vec<EngineSpec>, ready: usize, pattern: &str, tweak: Tweak) -> Self {
        let mut config = RouterConfig::new(specs);
        config.pattern = pattern.parse::<Pattern>().expect("a pattern");
        config.placement = PlacementPolicy::Prefix;
        config.codec = Some(Arc::new(Letters));
        config.randomness = Randomness::seeded(1);
        config.request_timeout = Duration::from_secs(5);
        tweak(&mut config);
        let (service, tasks) = RouterService::start(config).expect("a pattern that exists");
        let world = Self { app: service.http(), service, tasks };
        world.service.wait_ready(ready, Duration::from_secs(5)).await.expect("engines are ready");
        world
    }

    /// Waits until `condition` holds, giving other tasks their turn.
    pub(crate) async fn until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        for _ in 0..2000 {
            if condition() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("never: {what}");
    }

    pub(crate) async fn call(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Answer {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body.to_owned())).expect("a request");
        let response = self.app.clone().oneshot(request).await.expect("infallible");
        let (parts, body) = response.into_parts();
        let body = body.collect().await.expect("a whole body").to_bytes();
        let body = String::from_utf8(body.to_vec()).expect("UTF-8");
        Answer { status: parts.status, headers: parts.headers, body }
    }

    pub(crate) async fn complete(&self, body: &str) -> Answer {
        self.call("POST", "/v1/completions", &[], body).await
    }

    pub(crate) fn app(&self) -> Router {
        self.app.clone()
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, &[], "").await
    }

    /// Ends the router: nothing may be in flight, and all aborts go out.
    pub(crate) async fn end(self) {
        self.until("idle", || self.service.cluster().in_flight() == 0).await;
        for engine in self.service.cluster().engines().iter() {
            assert_eq!(engine.queued_tokens(), 0, "{}", engine.name());
        }
        let metrics = self.get("/metrics").await.body;
        assert!(metrics.contains("microserving_router_requests_in_flight 0"), "{metrics}");
        self.tasks.stop().await;
    }
}

/// A prompt of `len` tokens as JSON.
pub(crate) fn tokens(len: u32) -> String {
    let tokens: Vec<u32> = (1..=len).collect();
    serde_json::to_string(&tokens).expect("serialises")
}

pub(crate) fn prompt_of(seen: &Seen) -> Prompt {
    Prompt::from_value(seen.body["prompt"].clone()).expect("a prompt")
}
