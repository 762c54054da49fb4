//! The short way, on which bodies and answers are passed on as they are, and that it answers as the long one does.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::body::Bytes;
use futures::StreamExt as _;
use microserving_client::{CallContext, ChunkStream, ClientError, Door, EngineCalls, RelayStream, Relayed};
use microserving_protocol::{
    AbortRequest, AbortResponse, ApiError, CallOptions, ChatCompletionRequest, ChatStream, CommitRequest,
    CommitResponse, CompletionAssembler, CompletionRequest, CompletionResponse, FinishReason, ModelList,
    PrepRecvRequest, PrepRecvResponse, Prompt, RelayPart, RelayUsage, RemoteSendRequest, RemoteSendResponse,
    StartGenerateRequest, StateView, TokenId, chat_response, sse_event,
};
use microserving_router::{Pattern, Role, RouterConfig, Rule};
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::fake::{Act, Answer, Fake, MODEL, Tweak, World};

/// A scripted engine whose doors for clients can be relayed: they answer by the script of `start_generate`.
#[derive(Debug)]
struct Relaying {
    engine: Arc<dyn EngineCalls>,
    /// It marks the answers of `start_generate`, too.
    marks: bool,
}

/// An engine of an older version: it knows the doors and not the marks.
#[derive(Debug)]
struct Unmarked(Arc<dyn EngineCalls>);

fn relaying(config: &mut RouterConfig) {
    for spec in &mut config.engines {
        spec.calls = Arc::new(Relaying { engine: spec.calls.clone(), marks: false });
    }
}

fn marking(config: &mut RouterConfig) {
    for spec in &mut config.engines {
        spec.calls = Arc::new(Relaying { engine: spec.calls.clone(), marks: true });
    }
}

fn tokens(text: &str) -> Prompt {
    Prompt::Tokens(text.chars().map(|letter| TokenId(letter.into())).collect::<Vec<_>>().into())
}

/// Reads a body as an engine does.
fn read(door: Door, body: &[u8]) -> Result<CompletionRequest, ApiError> {
    let mut completion = match door {
        Door::Completions => CompletionRequest::from_json(body)?,
        Door::Chats => {
            let chat = ChatCompletionRequest::from_json(body)?;
            let text = |message: &microserving_protocol::ChatMessage| {
                format!("<{}>{}", message.role, message.content)
            };
            let prompt = tokens(&chat.messages.iter().map(text).collect::<String>());
            chat.into_completion(prompt)
        }
    };
    if let Prompt::Text(text) = &completion.prompt {
        completion.prompt = tokens(text);
    }
    completion.generation(0)?;
    Ok(completion)
}

fn generate(completion: CompletionRequest) -> StartGenerateRequest {
    let call = CallOptions::default();
    StartGenerateRequest { completion, call, begin: 0, ..StartGenerateRequest::default() }
}

fn usage(chunk: &CompletionResponse) -> Option<RelayUsage> {
    let usage = chunk.usage?;
    Some(RelayUsage {
        prompt_tokens: usage.prompt_tokens,
        completion_tokens: usage.completion_tokens,
        cached_tokens: usage.cached_tokens(),
        first_token_micros: 1000,
    })
}

fn named(mut chunk: CompletionResponse) -> CompletionResponse {
    chunk.id = "cmpl-of-the-engine".into();
    chunk.model = Some(MODEL.into());
    chunk
}

fn events(chunks: ChunkStream, door: Door, include_usage: bool) -> RelayStream {
    let mut chat = (door == Door::Chats).then(ChatStream::new);
    let parts = chunks.map(move |chunk| {
        let chunk = named(chunk?);
        let mut part = RelayPart { usage: usage(&chunk), ..RelayPart::default() };
        if chunk.choices.iter().any(|choice| choice.finish_reason == Some(FinishReason::Preempt)) {
            return Ok(RelayPart { fault: Some(sse_event(&chunk).into()), ..RelayPart::default() });
        }
        if let [choice] = &chunk.choices[..] {
            part.tokens = choice.text.chars().map(|letter| TokenId(letter.into())).collect();
        }
        let mut shown = chunk.clone();
        if !include_usage {
            shown.usage = None;
        }
        let mut text = String::new();
        if !shown.choices.is_empty() || shown.usage.is_some() {
            text = match &mut chat {
                Some(chat) => sse_event(&chat.convert(shown)),
                None => sse_event(&shown),
            };
        }
        if part.usage.is_some() {
            text.push_str(microserving_protocol::SSE_DONE);
        }
        part.events = text.into();
        Ok(part)
    });
    Box::pin(parts)
}

#[async_trait]
impl EngineCalls for Relaying {
    fn name(&self) -> &str {
        self.engine.name()
    }
    async fn prep_recv(
        &self,
        cx: &CallContext,
        request: &PrepRecvRequest,
    ) -> Result<PrepRecvResponse, ClientError> {
        self.engine.prep_recv(cx, request).await
    }
    async fn remote_send(
        &self,
        cx: &CallContext,
        request: &RemoteSendRequest,
    ) -> Result<RemoteSendResponse, ClientError> {
        self.engine.remote_send(cx, request).await
    }
    async fn start_generate(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
    ) -> Result<ChunkStream, ClientError> {
        self.engine.start_generate(cx, request).await
    }
    async fn abort(&self, cx: &CallContext, request: &AbortRequest) -> Result<AbortResponse, ClientError> {
        self.engine.abort(cx, request).await
    }
    async fn commit(&self, cx: &CallContext, request: &CommitRequest) -> Result<CommitResponse, ClientError> {
        self.engine.commit(cx, request).await
    }
    async fn completions(
        &self,
        cx: &CallContext,
        request: &CompletionRequest,
    ) -> Result<ChunkStream, ClientError> {
        self.engine.completions(cx, request).await
    }
    async fn models(&self, cx: &CallContext) -> Result<ModelList, ClientError> {
        self.engine.models(cx).await
    }
    async fn state(&self, cx: &CallContext) -> Result<StateView, ClientError> {
        Ok(StateView { marks: self.marks, ..self.engine.state(cx).await? })
    }
    async fn ready(&self, cx: &CallContext) -> Result<(), ClientError> {
        self.engine.ready(cx).await
    }
    async fn tokenizer(&self, cx: &CallContext) -> Result<Value, ClientError> {
        self.engine.tokenizer(cx).await
    }
    fn may_relay(&self) -> bool {
        true
    }
    async fn start_relayed(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
        door: Door,
    ) -> Result<Option<Relayed>, ClientError> {
        let chunks = self.engine.start_generate(cx, request).await?;
        Ok(Some(Relayed::Stream(events(chunks, door, false))))
    }
    async fn relay(
        &self,
        cx: &CallContext,
        door: Door,
        body: &[Bytes],
    ) -> Result<Option<Relayed>, ClientError> {
        let refused = |error| ClientError::Refused { engine: self.name().to_owned(), error: Box::new(error) };
        let completion = read(door, &body.concat()).map_err(refused)?;
        let (stream, options) = (completion.stream, completion.stream_options.unwrap_or_default());
        let mut chunks = self.engine.start_generate(cx, &generate(completion)).await?;
        if stream {
            return Ok(Some(Relayed::Stream(events(chunks, door, options.include_usage))));
        }
        let mut whole = CompletionAssembler::new();
        while let Some(chunk) = chunks.next().await {
            whole.push(named(chunk?));
        }
        let whole = whole.finish().expect("chunks came");
        let took = usage(&whole).expect("usage came");
        let body = match door {
            Door::Chats => serde_json::to_vec(&chat_response(whole)),
            Door::Completions => serde_json::to_vec(&whole),
        };
        Ok(Some(Relayed::Whole { body: body.expect("JSON").into(), usage: took }))
    }
}

#[async_trait]
impl EngineCalls for Unmarked {
    fn name(&self) -> &str {
        self.0.name()
    }
    async fn prep_recv(
        &self,
        cx: &CallContext,
        request: &PrepRecvRequest,
    ) -> Result<PrepRecvResponse, ClientError> {
        self.0.prep_recv(cx, request).await
    }
    async fn remote_send(
        &self,
        cx: &CallContext,
        request: &RemoteSendRequest,
    ) -> Result<RemoteSendResponse, ClientError> {
        self.0.remote_send(cx, request).await
    }
    async fn start_generate(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
    ) -> Result<ChunkStream, ClientError> {
        self.0.start_generate(cx, request).await
    }
    async fn abort(&self, cx: &CallContext, request: &AbortRequest) -> Result<AbortResponse, ClientError> {
        self.0.abort(cx, request).await
    }
    async fn commit(&self, cx: &CallContext, request: &CommitRequest) -> Result<CommitResponse, ClientError> {
        self.0.commit(cx, request).await
    }
    async fn completions(
        &self,
        cx: &CallContext,
        request: &CompletionRequest,
    ) -> Result<ChunkStream, ClientError> {
        self.0.completions(cx, request).await
    }
    async fn models(&self, cx: &CallContext) -> Result<ModelList, ClientError> {
        self.0.models(cx).await
    }
    async fn state(&self, cx: &CallContext) -> Result<StateView, ClientError> {
        self.0.state(cx).await
    }
    async fn ready(&self, cx: &CallContext) -> Result<(), ClientError> {
        self.0.ready(cx).await
    }
    async fn tokenizer(&self, cx: &CallContext) -> Result<Value, ClientError> {
        self.0.tokenizer(cx).await
    }
    fn may_relay(&self) -> bool {
        true
    }
    async fn relay(
        &self,
        cx: &CallContext,
        door: Door,
        body: &[Bytes],
    ) -> Result<Option<Relayed>, ClientError> {
        let completion = read(door, &body.concat()).expect("a request");
        drop(self.0.start_generate(cx, &generate(completion)).await?);
        Ok(None)
    }
}

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// What may differ between answers to the same request.
fn values(answer: &Answer) -> Vec<Value> {
    let values = if answer.body.starts_with("data:") { answer.events() } else { vec![answer.json()] };
    let without_names = |mut value: Value| {
        if value.get("id").is_some() {
            value["id"] = json!("id");
            value["created"] = json!(0);
        }
        value
    };
    values.into_iter().map(without_names).collect()
}

fn num_calls(world_metrics: &str, call: &str) -> u64 {
    let name = format!("microserving_router_engine_calls_total{{call=\"{call}\",");
    let line = world_metrics.lines().filter(|line| line.starts_with(&name));
    line.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

#[tokio::test(start_paused = true)]
async fn both_ways_answer_alike() {
    let bodies = [
        (COMPLETIONS, r#"{"prompt":"hello","max_tokens":4}"#),
        (COMPLETIONS, r#"{"model":"toy","prompt":[104,105],"max_tokens":2,"seed":7}"#),
        (COMPLETIONS, r#"{"prompt":"hello","max_tokens":4,"n":2}"#),
        (COMPLETIONS, r#"{"prompt":"hello","max_tokens":4,"stream":true}"#),
        (
            COMPLETIONS,
            r#"{"prompt":"h","max_tokens":4,"n":2,"stream":true,"stream_options":{"include_usage":true}}"#,
        ),
        (CHAT, r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":3}"#),
        (CHAT, r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":3,"stream":true}"#),
        // Refused, each in its own words.
        (COMPLETIONS, r#"{"prompt":"hello","top_p":2}"#),
        (COMPLETIONS, r#"{"prompt":"hello","suffix":"x"}"#),
        (COMPLETIONS, r#"{"prompt":""}"#),
        (COMPLETIONS, r#"{"prompt":"hello","model":"other"}"#),
        (COMPLETIONS, r#"{"prompt":["a","b"]}"#),
        (COMPLETIONS, "{"),
        (CHAT, r#"{"messages":[]}"#),
        (CHAT, r#"{"messages":[{"role":"tool","content":"x"}]}"#),
    ];
    let mut answers = Vec::new();
    for tweak in [relaying as Tweak, |_| {}] {
        let engine = Fake::new("e");
        let world = World::with(&[(&engine, Role::Any)], "data_parallel", tweak).await;
        let mut seen = Vec::new();
        for (path, body) in bodies {
            let answer = world.call("POST", path, &[("x-request-id", "r-1")], body).await;
            // Names have lengths.
            let counts = |name: &str| name != "content-length";
            let headers = answer.headers.iter().map(|(name, value)| (name.to_string(), value.clone()));
            let mut headers: Vec<_> = headers.filter(|(name, _)| counts(name)).collect();
            headers.sort_by(|a, b| a.0.cmp(&b.0));
            seen.push((answer.status, headers, values(&answer)));
        }
        let metrics = world.get("/metrics").await.body;
        let counts = |line: &&str| {
            // What the index promised is on record only for requests that were placed by it.
            line.starts_with("microserving_router_requests_total")
                || (line.contains("_tokens_total") && !line.contains("index_hint"))
        };
        let mut counted: Vec<_> = metrics.lines().filter(counts).map(str::to_owned).collect();
        counted.sort();
        assert_eq!(num_calls(&metrics, "relay") > 0, answers.is_empty(), "{metrics}");
        answers.push((seen, counted));
        world.end().await;
    }
    for (i, (path, body)) in bodies.iter().enumerate() {
        assert_eq!(answers[0].0[i], answers[1].0[i], "{path} {body}");
    }
    assert_eq!(answers[0].1, answers[1].1);
}

#[tokio::test(start_paused = true)]
async fn a_prepared_answer_is_passed_on_as_it_would_be_written() {
    let bodies = [
        (true, COMPLETIONS, r#"{"prompt":"hello","max_tokens":4,"stream":true}"#),
        (
            true,
            COMPLETIONS,
            r#"{"prompt":"hello","max_tokens":4,"stream":true,"stream_options":{"include_usage":true}}"#,
        ),
        (true, COMPLETIONS, r#"{"prompt":"hello","max_tokens":4}"#),
        (true, CHAT, r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":3}"#),
        (true, CHAT, r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":3,"stream":true}"#),
        (false, COMPLETIONS, r#"{"prompt":"hello","max_tokens":4,"n":2,"stream":true}"#),
        (false, COMPLETIONS, r#"{"prompt":"hello","max_tokens":4,"echo":true}"#),
        (
            false,
            COMPLETIONS,
            r#"{"prompt":"hello","stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#,
        ),
    ];
    let mut answers = Vec::new();
    for (marks, tweak) in [(true, marking as Tweak), (false, relaying)] {
        let (p, d) = (Fake::new("p"), Fake::new("d"));
        p.set_prefill_cached(2);
        let world = World::with(&[(&p, Role::Prefill), (&d, Role::Decode)], "prefill_decode", tweak).await;
        let mut seen = Vec::new();
        for (passes, path, body) in bodies {
            let answer = world.call("POST", path, &[], body).await;
            assert_eq!(answer.status, 200, "{body}: {}", answer.body);
            // Who passes the answer on asks for no more than its client.
            let asked = d.last("start_generate").body;
            assert_eq!(asked.get("return_token_ids").is_none(), marks && passes, "{body}: {asked}");
            seen.push(values(&answer));
        }
        let metrics = world.get("/metrics").await.body;
        let mut counted: Vec<_> =
            metrics.lines().filter(|line| line.contains("_tokens_total")).map(str::to_owned).collect();
        counted.sort();
        answers.push((seen, counted));
        world.end().await;
    }
    for (i, (_, path, body)) in bodies.iter().enumerate() {
        assert_eq!(answers[0].0[i], answers[1].0[i], "{path} {body}");
    }
    assert_eq!(answers[0].1, answers[1].1);
}

#[tokio::test(start_paused = true)]
async fn a_passed_on_answer_that_loses_its_engine_goes_on() {
    let mut num_lost = 0;
    for stream in [false, true] {
        for k in 0..=4 {
            let failed = ApiError::internal("boom");
            for act in [Act::BreakAfter(k), Act::FailAfter(k, failed), Act::PreemptAfter(k), Act::EndAfter(k)]
            {
                let (a, b) = (Fake::new("a"), Fake::new("b"));
                a.on_generate(act.clone());
                let world = World::with(&[(&a, Role::Any), (&b, Role::Any)], "prefill_decode", marking).await;
                let body = format!(
                    r#"{{"prompt":"hello","max_tokens":4,"stream":{stream},"stream_options":{{"include_usage":true}}}}"#
                );
                let answer = world.complete(&body).await;
                assert_eq!(answer.status, 200, "{act:?}: {}", answer.body);
                let text = if stream { answer.streamed_text() } else { answer.text() };
                assert_eq!(text, "abcd", "{act:?} {stream}: {}", answer.body);
                let (last, created): (Value, Vec<Value>) = match stream {
                    false => (answer.json(), Vec::new()),
                    true => {
                        let events = answer.events();
                        let created = events.iter().map(|event| event["created"].clone()).collect();
                        (events.last().expect("an event").clone(), created)
                    }
                };
                assert_eq!(last["usage"]["completion_tokens"], 4, "{act:?} {stream}: {}", answer.body);
                assert!(created.windows(2).all(|two| two[0] == two[1]), "{act:?}: {created:?}");
                num_lost += usize::from(a.calls().contains(&"start_generate"));
                world.end().await;
            }
        }
    }
    assert!(num_lost > 20, "{num_lost}");
}

#[tokio::test(start_paused = true)]
async fn a_plain_request_is_relayed_with_a_seed_and_others_are_not() {
    let engine = Fake::new("e");
    let world = World::with(&[(&engine, Role::Any)], "data_parallel", relaying).await;
    let relayed = async || num_calls(&world.get("/metrics").await.body, "relay");
    let answer = world.complete(r#"{"prompt":"hello","max_tokens":2}"#).await;
    assert_eq!((answer.text().as_str(), relayed().await), ("ab", 1));
    assert!(answer.headers["x-request-id"].to_str().is_ok_and(|id| id.starts_with("req-")));
    assert!(engine.last("start_generate").body["seed"].is_i64(), "{:?}", engine.last("start_generate").body);
    for (headers, body) in [
        (&[("x-microserving-stats", "1")][..], r#"{"prompt":"hello"}"#),
        (&[("x-microserving-pattern", "balanced")], r#"{"prompt":"hello"}"#),
        (&[], r#"{"prompt":"hello","echo":true}"#),
        (&[], r#"{"prompt":"hello","timeout_seconds":3}"#),
        (&[], r#"{"prompt":"hello","stream":"false"}"#),
    ] {
        let answer = world.call("POST", COMPLETIONS, headers, body).await;
        assert_eq!((answer.status.as_u16(), relayed().await), (200, 1), "{body}");
    }
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn without_the_option_nothing_is_relayed() {
    let engine = Fake::new("e");
    let tweak: Tweak = |config| {
        relaying(config);
        config.relay = false;
    };
    let world = World::with(&[(&engine, Role::Any)], "data_parallel", tweak).await;
    assert_eq!(world.complete(r#"{"prompt":"hello"}"#).await.text(), "abc");
    assert_eq!(num_calls(&world.get("/metrics").await.body, "relay"), 0);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_fails_before_the_first_token_is_served_elsewhere() {
    let full = || ApiError::unavailable("no room", Duration::from_secs(1));
    for stream in [false, true] {
        for act in [
            Act::Unreachable,
            Act::Refuse(full()),
            Act::BreakAfter(0),
            Act::FailAfter(0, full()),
            Act::EndAfter(0),
        ] {
            // An answer in one piece may break off anywhere.
            if matches!(act, Act::EndAfter(_)) && !stream {
                continue;
            }
            let (a, b) = (Fake::new("a"), Fake::new("b"));
            a.on_generate(act.clone());
            let world = World::with(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel", relaying).await;
            let answer = world.complete(&format!(r#"{{"prompt":"hello","stream":{stream}}}"#)).await;
            assert_eq!(answer.status, 200, "{act:?}: {}", answer.body);
            let text = if stream { answer.streamed_text() } else { answer.text() };
            assert_eq!(text, "abc", "{act:?}");
            assert!(a.calls().contains(&"start_generate"), "{act:?}");
            world.end().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_breaks_off_ends_cleanly() {
    let failed = || ApiError::new(500, "boom");
    for (act, status) in
        [(Act::BreakAfter(2), 503), (Act::FailAfter(2, failed()), 500), (Act::HangAfter(2), 504)]
    {
        let engine = Fake::new("e");
        engine.on_generate(act.clone());
        let world = World::with(&[(&engine, Role::Any)], "data_parallel", relaying).await;
        let answer = world.complete(r#"{"prompt":"hello","max_tokens":4,"stream":true}"#).await;
        assert_eq!(answer.streamed_text(), "ab", "{act:?}");
        let events = answer.events();
        assert_eq!(events.last().expect("an event")["error"]["status"], status, "{act:?}");
        let metrics = world.get("/metrics").await.body;
        let counted = format!("requests_total{{pattern=\"data_parallel\",status=\"{status}\"}} 1");
        assert!(metrics.contains(&counted), "{metrics}");
        world.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn at_every_point_another_engine_takes_a_stream_over() {
    let bodies = [
        (COMPLETIONS, r#"{"prompt":"hello","max_tokens":5,"stream":true}"#),
        (
            COMPLETIONS,
            r#"{"prompt":"hello","max_tokens":5,"stream":true,"stream_options":{"include_usage":true}}"#,
        ),
        (
            CHAT,
            r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":5,"stream":true,"stream_options":{"include_usage":true}}"#,
        ),
    ];
    for (path, body) in bodies {
        let engine = Fake::new("e");
        let world = World::with(&[(&engine, Role::Any)], "data_parallel", relaying).await;
        let calm = world.call("POST", path, &[], body).await;
        world.end().await;
        for k in 1..=6 {
            for act in [
                Act::BreakAfter(k),
                Act::EndAfter(k),
                Act::PreemptAfter(k),
                Act::FailAfter(k, ApiError::internal("boom")),
                Act::FailAfter(k, ApiError::gone("aborted")),
            ] {
                let (a, b) = (Fake::new("a"), Fake::new("b"));
                a.on_generate(act.clone());
                let world = World::with(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel", relaying).await;
                let answer = world.call("POST", path, &[], body).await;
                assert!(a.calls().contains(&"start_generate"), "it began on a");
                assert_eq!(answer.body, calm.body, "{path} {act:?}");
                let continued = b.seen().into_iter().find(|seen| seen.call == "start_generate");
                assert_eq!(continued.is_some(), k < 5, "{path} {act:?}");
                if let Some(seen) = continued {
                    let prompt = seen.body["prompt"].as_array().expect("tokens").len();
                    assert_eq!(seen.body["generated_from"], json!(prompt - k), "{path} {act:?}");
                    assert_eq!((&seen.body["attempt"], seen.body["seed"].is_i64()), (&json!(1), true));
                }
                let metrics = world.get("/metrics").await.body;
                let counted = r#"requests_total{pattern="data_parallel",status="200"} 1"#;
                assert!(metrics.contains(counted), "{path} {act:?}: {metrics}");
                world.end().await;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_whose_relayed_streams_deliver_is_alive() {
    let a = Fake::new("a");
    a.on_generate(Act::Slow(Duration::from_millis(400)));
    let world = World::with(&[(&a, Role::Any)], "data_parallel", |config| {
        relaying(config);
        config.request_timeout = Duration::from_secs(60);
    })
    .await;
    a.set_silent(true);
    let answer = world.complete(r#"{"prompt":"hello","max_tokens":20,"stream":true}"#).await;
    assert_eq!(answer.streamed_text().len(), 20, "{}", answer.body);
    assert_eq!(num_calls(&world.get("/metrics").await.body, "relay"), 1);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn rules_that_are_not_about_lengths_let_requests_be_relayed() {
    for (min_tokens, tenant, expected) in
        [(None, "acme", 2), (Some(1), "acme", 1), (None, "blue", 1), (Some(1), "blue", 1)]
    {
        let engine = Fake::new("e");
        let world = World::with(&[(&engine, Role::Any)], "data_parallel", relaying).await;
        let pattern = if tenant == "acme" { "data_parallel" } else { "balanced" };
        let rule =
            Rule { min_tokens, tenant: Some(tenant.to_owned()), ..Rule::always(Pattern::named(pattern)) };
        let first = Pattern::named("data_parallel");
        world.service.patterns().set_all(&first, &[rule]).expect("they exist");
        for tenant in [tenant, "nobody"] {
            let headers = [("x-microserving-tenant", tenant)];
            let answer = world.call("POST", COMPLETIONS, &headers, r#"{"prompt":"hello"}"#).await;
            assert_eq!(answer.status, 200, "{}", answer.body);
            let expected = if tenant == "blue" { "balanced" } else { "data_parallel" };
            let served = answer.headers["x-microserving-pattern"].to_str().expect("text");
            assert!(served.starts_with(expected), "{served}");
        }
        assert_eq!(
            num_calls(&world.get("/metrics").await.body, "relay"),
            expected,
            "{min_tokens:?} {tenant}"
        );
        world.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn several_choices_of_a_relayed_stream_end_with_their_engine() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    a.on_generate(Act::BreakAfter(3));
    let world = World::with(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel", relaying).await;
    let answer = world.complete(r#"{"prompt":"hello","max_tokens":4,"stream":true,"n":2}"#).await;
    assert_eq!(answer.events().last().expect("an event")["error"]["status"], 503);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_first_event_that_takes_too_long_is_had_elsewhere() {
    for act in [Act::HangAfter(0), Act::Hang] {
        let (a, b) = (Fake::new("a"), Fake::new("b"));
        a.on_generate(act.clone());
        let world = World::with(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel", |config| {
            relaying(config);
            config.step_timeout = Duration::from_millis(700);
        })
        .await;
        let begun = tokio::time::Instant::now();
        let answer = world.complete(r#"{"prompt":"hello","stream":true}"#).await;
        assert_eq!(answer.streamed_text(), "abc", "{act:?}: {}", answer.body);
        assert!(begun.elapsed() < Duration::from_secs(3), "{act:?}: {:?}", begun.elapsed());
        world.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_goes_away_leaves_nothing_behind() {
    let engine = Fake::new("e");
    engine.on_generate(Act::HangAfter(1));
    engine.on_generate(Act::Hang);
    let world = World::with(&[(&engine, Role::Any)], "data_parallel", relaying).await;
    let ask = |stream: bool| {
        let body = format!(r#"{{"prompt":"hello","stream":{stream}}}"#);
        axum::http::Request::post(COMPLETIONS).body(axum::body::Body::from(body)).expect("a request")
    };
    let response = world.app().oneshot(ask(true)).await.expect("infallible");
    assert_eq!(world.service.cluster().in_flight(), 1);
    drop(response);
    assert_eq!(world.service.cluster().in_flight(), 0);
    let waiting = tokio::time::timeout(Duration::from_millis(10), world.app().oneshot(ask(false))).await;
    assert!(waiting.is_err());
    assert_eq!(world.service.cluster().in_flight(), 0);
    let metrics = world.get("/metrics").await.body;
    assert!(metrics.contains("requests_total{pattern=\"data_parallel\",status=\"499\"} 2"), "{metrics}");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn texts_that_begin_alike_go_to_one_engine_and_others_take_turns() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let world = World::with(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel", relaying).await;
    let ask = async |text: &str| {
        let answer = world.complete(&format!(r#"{{"prompt":"{text}"}}"#)).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
    };
    for topic in ["x", "y"] {
        for turn in 0..3 {
            ask(&(topic.repeat(400) + &"z".repeat(turn * 50))).await;
        }
    }
    assert_eq!((a.calls().len(), b.calls().len()), (3, 3), "each has a topic");
    for number in 0..6 {
        ask(&format!("{number}")).await;
    }
    assert_eq!((a.calls().len(), b.calls().len()), (6, 6));
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_marks_nothing_is_asked_once() {
    let engine = Fake::new("e");
    let tweak: Tweak = |config| {
        for spec in &mut config.engines {
            spec.calls = Arc::new(Unmarked(spec.calls.clone()));
        }
    };
    let world = World::with(&[(&engine, Role::Any)], "data_parallel", tweak).await;
    for _ in 0..3 {
        assert_eq!(world.complete(r#"{"prompt":"hello"}"#).await.text(), "abc");
    }
    assert_eq!(engine.calls().len(), 4, "one more than the answers");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_gets_no_requests_does_not_keep_others_from_relaying() {
    let (old, new) = (Fake::new("old"), Fake::new("new"));
    let tweak: Tweak = |config| {
        relaying(config);
        let spec = &mut config.engines[0];
        spec.calls = Arc::new(Unmarked(spec.calls.clone()));
    };
    let world = World::with(&[(&old, Role::Any), (&new, Role::Any)], "data_parallel", tweak).await;
    let serve_four = async || {
        for _ in 0..4 {
            assert_eq!(world.complete(r#"{"prompt":"hello"}"#).await.text(), "abc");
        }
    };
    let relayed = async || {
        let metrics = world.get("/metrics").await.body;
        let call = r#"engine_calls_total{call="relay",outcome="ok"} "#;
        let count = metrics.lines().find_map(|line| line.split_once(call)?.1.parse::<u32>().ok());
        count.unwrap_or(0)
    };
    while old.calls().is_empty() {
        serve_four().await;
    }
    // It marks nothing, and so beside it all are read.
    let before = relayed().await;
    serve_four().await;
    assert_eq!(relayed().await, before);
    assert_eq!(world.call("POST", "/admin/v1/engines/0/drain", &[], "").await.status, 200);
    serve_four().await;
    assert_eq!(relayed().await, before + 4);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_shortcut_answers_as_the_routes_do() {
    let engine = Fake::new("e");
    let world = World::with(&[(&engine, Role::Any)], "data_parallel", relaying).await;
    let post = |body: &str| {
        axum::http::Request::post(COMPLETIONS)
            .body(axum::body::Body::from(body.to_owned()))
            .expect("a request")
    };
    for body in [r#"{"prompt":"hello"}"#, r#"{"prompt":"hello","n":0}"#, "x"] {
        let short = world.service.shortcut(post(body), 1000).expect("its door").await;
        let routed = world.app().oneshot(post(body)).await.expect("infallible");
        assert_eq!(short.status(), routed.status());
        let names = |response: &axum::response::Response| {
            let names = response.headers().keys().map(ToString::to_string);
            // Without a connection only the routes say how long a body is.
            let mut names: Vec<_> = names.filter(|name| name != "content-length").collect();
            names.sort();
            names
        };
        assert_eq!(names(&short), names(&routed), "{body}");
    }
    let large = world.service.shortcut(post(&" ".repeat(1001)), 1000).expect("its door").await;
    assert_eq!(large.status(), 413);
    for (method, path) in [("GET", COMPLETIONS), ("POST", "/tokenize"), ("GET", "/health")] {
        let request = axum::http::Request::builder().method(method).uri(path);
        let request = request.body(axum::body::Body::empty()).expect("a request");
        assert!(world.service.shortcut(request, 1000).is_err(), "{method} {path}");
    }
    world.end().await;
}
