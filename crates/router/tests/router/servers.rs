//! Scripted servers of other makes: one of MLC-LLM, as strict as its request types are written, and one that knows only OpenAI's API.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::StreamExt;
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;

/// What a server does instead of answering as it should.
#[derive(Clone, Debug)]
pub(crate) enum Turn {
    /// Answers a status with a body.
    Status(u16, &'static str),
    /// Sends so many chunks, then closes the connection.
    BreakAfter(usize),
    /// Sends so many chunks, then gives the request up as MLC-LLM does.
    PreemptAfter(usize),
}

/// One request as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Arrived {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
}

#[derive(Debug, Default)]
struct Script {
    turns: VecDeque<Turn>,
    arrived: Vec<Arrived>,
    /// Keys prepared for and not yet generated.
    prepared: Vec<String>,
    /// Streams whose client went away.
    closed: usize,
}

/// A running server. Stops when dropped.
pub(crate) struct Foreign {
    pub(crate) address: String,
    script: Arc<Mutex<Script>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Foreign {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Clone)]
struct Shared {
    script: Arc<Mutex<Script>>,
    model: &'static str,
    health: bool,
}

impl Foreign {
    /// A server of MLC-LLM: it lists its models and has no path for health.
    pub(crate) async fn mlc(model: &'static str) -> Self {
        let app = Router::new()
            .route("/v1/models", get(models))
            .route("/v1/completions", post(mlc_completions))
            .route("/v1/chat/completions", post(mlc_chat))
            .route("/microserving/prep_recv", post(mlc_prep))
            .route("/microserving/remote_send", post(mlc_send))
            .route("/microserving/start_generate", post(mlc_start));
        Self::serve(app, model, false).await
    }

    /// A server of OpenAI's API, with or without `/health`.
    pub(crate) async fn openai(model: &'static str, health: bool) -> Self {
        let app = Router::new()
            .route("/v1/models", get(models))
            .route("/health", get(healthy))
            .route("/v1/completions", post(openai))
            .route("/v1/chat/completions", post(openai));
        Self::serve(app, model, health).await
    }

    async fn serve(app: Router<Shared>, model: &'static str, health: bool) -> Self {
        let script = Arc::new(Mutex::new(Script::default()));
        let app = app.with_state(Shared { script: script.clone(), model, health });
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = format!("http://{}", listener.local_addr().expect("bound"));
        let task =
            tokio::spawn(async move { axum::serve(listener, app).await.expect("serves until aborted") });
        Self { address, script, task }
    }

    pub(crate) fn then(&self, turn: Turn) {
        self.script.lock().expect("not poisoned").turns.push_back(turn);
    }

    pub(crate) fn arrived(&self) -> Vec<Arrived> {
        self.script.lock().expect("not poisoned").arrived.clone()
    }

    pub(crate) fn paths(&self) -> Vec<String> {
        self.arrived().into_iter().map(|arrived| arrived.path).collect()
    }

    pub(crate) fn closed(&self) -> usize {
        self.script.lock().expect("not poisoned").closed
    }
}

async fn models(State(shared): State<Shared>) -> Response {
    axum::Json(json!({"object": "list", "data": [{"id": shared.model, "created": 1, "object": "model", "owned_by": "x"}]}))
        .into_response()
}

async fn healthy(State(shared): State<Shared>) -> StatusCode {
    if shared.health { StatusCode::OK } else { StatusCode::NOT_FOUND }
}

/// Notes a request and returns what is to happen to it.
fn arrive(shared: &Shared, uri: &Uri, headers: HeaderMap, body: &Bytes) -> (Value, Option<Turn>) {
    let body: Value = serde_json::from_slice(body).expect("JSON");
    let mut script = shared.script.lock().expect("not poisoned");
    script.arrived.push(Arrived { path: uri.path().to_owned(), headers, body: body.clone() });
    let turn = script.turns.pop_front();
    (body, turn)
}

/// What a field of a request may be.
enum Kind {
    Int,
    Float,
    Bool,
    Text,
    Object,
    Any,
}

/// Name, kind, may be null, must be there.
type Field = (&'static str, Kind, bool, bool);

fn common() -> Vec<Field> {
    use Kind::{Any, Bool, Float, Int, Object, Text};
    vec![
        ("model", Text, true, true),
        ("frequency_penalty", Float, true, true),
        ("presence_penalty", Float, true, true),
        ("logit_bias", Object, true, true),
        ("max_tokens", Int, true, true),
        ("n", Int, false, true),
        ("seed", Int, true, true),
        ("stop", Any, true, true),
        ("stream", Bool, false, true),
        ("stream_options", Object, true, true),
        ("temperature", Float, true, true),
        ("top_p", Float, true, true),
        ("user", Text, true, true),
        ("response_format", Object, true, true),
        ("debug_config", Object, false, true),
    ]
}

fn completion() -> Vec<Field> {
    use Kind::{Any, Bool, Int, Text};
    let own = [
        ("prompt", Any, false, true),
        ("best_of", Int, false, true),
        ("echo", Bool, false, true),
        ("logprobs", Int, true, true),
        ("suffix", Text, true, true),
    ];
    common().into_iter().chain(own).collect()
}

/// Checks a body as MLC-LLM's types are written, and more strictly: what they would ignore is an error here.
fn check(body: &Value, fields: &[Field]) -> Result<(), String> {
    let body = body.as_object().ok_or("no object")?;
    if let Some(unknown) = body.keys().find(|name| fields.iter().all(|field| field.0 != name.as_str())) {
        return Err(format!("{unknown} is not known"));
    }
    for (name, kind, nullable, required) in fields {
        let fits = match body.get(*name) {
            None => !required,
            Some(Value::Null) => *nullable,
            Some(value) => match kind {
                Kind::Int => value.is_i64() || value.is_u64(),
                Kind::Float => value.is_number(),
                Kind::Bool => value.is_boolean(),
                Kind::Text => value.is_string(),
                Kind::Object => value.is_object(),
                Kind::Any => true,
            },
        };
        if !fits {
            return Err(format!("{name} is {:?}", body.get(*name)));
        }
    }
    check_inner(body)
}

fn check_inner(body: &Map<String, Value>) -> Result<(), String> {
    let only = |field: &str, known: &[&str]| match body.get(field).and_then(Value::as_object) {
        Some(inner) => match inner.keys().find(|name| !known.contains(&name.as_str())) {
            Some(name) => Err(format!("{field}.{name} is not known")),
            None => Ok(()),
        },
        None => Ok(()),
    };
    only("stream_options", &["include_usage"])?;
    only("response_format", &["type", "schema"])?;
    let debug =
        ["ignore_eos", "pinned_system_prompt", "special_request", "grammar_execution_mode", "disagg_config"];
    only("debug_config", &debug)?;
    if let Some(kind) = body.get("response_format").and_then(|format| format.get("type"))
        && kind != "text"
        && kind != "json_object"
    {
        return Err(format!("response_format.type is {kind}"));
    }
    if body.get("logprobs").and_then(Value::as_i64).is_some_and(|logprobs| logprobs > 5) {
        return Err("logprobs is above 5".into());
    }
    Ok(())
}

/// As FastAPI says it.
fn unprocessable(message: &str) -> Response {
    let body = json!({"detail": [{"type": "value_error", "loc": ["body"], "msg": message}]});
    (StatusCode::UNPROCESSABLE_ENTITY, axum::Json(body)).into_response()
}

fn key(body: &Value) -> String {
    body["user"].as_str().expect("a unique user").to_owned()
}

async fn mlc_prep(State(shared): State<Shared>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let (body, turn) = arrive(&shared, &uri, headers, &body);
    let mut fields = completion();
    fields.push(("end", Kind::Int, false, true));
    if let Err(message) = check(&body, &fields) {
        return unprocessable(&message);
    }
    if let Some(Turn::Status(status, text)) = turn {
        return (StatusCode::from_u16(status).expect("a status"), text).into_response();
    }
    let len = body["prompt"].as_array().expect("token ids").len();
    let end = body["end"].as_u64().expect("not negative");
    assert!(end > 0 && (end as usize) < len, "a window of {len} tokens ends at {end}");
    let mut script = shared.script.lock().expect("not poisoned");
    let key = key(&body);
    assert!(!script.prepared.contains(&key), "{key} is prepared twice");
    script.prepared.push(key);
    axum::Json(json!({"kv_append_metadata": "AAAA", "prefix_matched_length": 0})).into_response()
}

async fn mlc_send(State(shared): State<Shared>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let (body, turn) = arrive(&shared, &uri, headers, &body);
    let mut fields = completion();
    fields.extend([
        ("begin", Kind::Int, false, true),
        ("end", Kind::Int, false, true),
        ("kv_addr_info", Kind::Text, false, true),
        ("recv_rank", Kind::Int, false, true),
    ]);
    if let Err(message) = check(&body, &fields) {
        return unprocessable(&message);
    }
    if let Some(Turn::Status(status, text)) = turn {
        return (StatusCode::from_u16(status).expect("a status"), text).into_response();
    }
    axum::Json(json!({})).into_response()
}

async fn mlc_start(State(shared): State<Shared>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let (body, turn) = arrive(&shared, &uri, headers, &body);
    let mut fields = completion();
    fields.push(("begin", Kind::Int, false, true));
    if let Err(message) = check(&body, &fields) {
        return unprocessable(&message);
    }
    let key = key(&body);
    {
        let mut script = shared.script.lock().expect("not poisoned");
        let at = script
            .prepared
            .iter()
            .position(|prepared| *prepared == key)
            .expect("was prepared under this key");
        script.prepared.remove(at);
    }
    generate(&shared, &body, turn, false)
}

async fn mlc_completions(
    State(shared): State<Shared>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let (body, turn) = arrive(&shared, &uri, headers, &body);
    match check(&body, &completion()) {
        Ok(()) => generate(&shared, &body, turn, false),
        Err(message) => unprocessable(&message),
    }
}

async fn mlc_chat(State(shared): State<Shared>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let (body, turn) = arrive(&shared, &uri, headers, &body);
    let mut fields = common();
    fields.extend([
        ("messages", Kind::Any, false, true),
        ("logprobs", Kind::Bool, false, true),
        ("top_logprobs", Kind::Int, false, true),
    ]);
    match check(&body, &fields) {
        Ok(()) => generate(&shared, &body, turn, true),
        Err(message) => unprocessable(&message),
    }
}

/// Refuses every word that OpenAI's API does not have.
async fn openai(State(shared): State<Shared>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let chat = uri.path().contains("chat");
    let (body, turn) = arrive(&shared, &uri, headers, &body);
    let prompt = if chat { "messages" } else { "prompt" };
    let known = [
        prompt,
        "model",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "max_tokens",
        "n",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "user",
        "response_format",
        "logprobs",
        "top_logprobs",
        "echo",
    ];
    let fields = body.as_object().expect("an object");
    if let Some(unknown) = fields.keys().find(|name| !known.contains(&name.as_str())) {
        return unprocessable(&format!("{unknown} is not known"));
    }
    if body["model"] != shared.model {
        let error = json!({"object": "error", "message": format!("no model {}", body["model"]), "type": "NotFoundError", "param": null, "code": 404});
        return (StatusCode::NOT_FOUND, axum::Json(error)).into_response();
    }
    generate(&shared, &body, turn, chat)
}

/// Says that its stream was dropped before its end.
struct Closing(Arc<Mutex<Script>>, bool);

impl Drop for Closing {
    fn drop(&mut self) {
        if !self.1 {
            self.0.lock().expect("not poisoned").closed += 1;
        }
    }
}

/// Generates the letters a, b, c… one a chunk, the same for each choice.
fn generate(shared: &Shared, body: &Value, turn: Option<Turn>, chat: bool) -> Response {
    if let Some(Turn::Status(status, text)) = turn {
        return (StatusCode::from_u16(status).expect("a status"), text.to_owned()).into_response();
    }
    assert_eq!(body["stream"], true);
    let num_tokens = body["max_tokens"].as_u64().unwrap_or(3);
    let choice = |text: Option<&str>, reason: Value| {
        let one = |index| {
            let mut choice = json!({"index": index, "logprobs": null, "finish_reason": reason});
            match (chat, text) {
                (true, Some(text)) => choice["delta"] = json!({"content": text}),
                (true, None) => choice["delta"] = json!({"role": "assistant", "content": ""}),
                (false, text) => choice["text"] = text.unwrap_or_default().into(),
            }
            choice
        };
        let choices: Vec<Value> = (0..body["n"].as_u64().unwrap_or(1)).map(one).collect();
        json!({"id": "theirs", "created": 1, "model": null, "choices": choices, "usage": null})
    };
    let mut chunks = Vec::new();
    if chat {
        chunks.push(choice(None, Value::Null));
    }
    for i in 0..num_tokens {
        let letter = char::from(b'a' + u8::try_from(i % 26).expect("small")).to_string();
        let reason = if i + 1 == num_tokens { json!("length") } else { Value::Null };
        chunks.push(choice(Some(&letter), reason));
    }
    if body["stream_options"]["include_usage"] == true {
        chunks.push(json!({"id": "theirs", "choices": [],
            "usage": {"prompt_tokens": 7, "completion_tokens": num_tokens, "total_tokens": 7 + num_tokens, "extra": null}}));
    }
    let mut events: Vec<Result<Bytes, &'static str>> = Vec::new();
    let whole = chunks.len();
    let keep = match turn {
        Some(Turn::BreakAfter(count) | Turn::PreemptAfter(count)) => count + usize::from(chat),
        _ => whole,
    };
    events.extend(chunks.iter().take(keep).map(|chunk| Ok(Bytes::from(format!("data: {chunk}\n\n")))));
    match turn {
        Some(Turn::BreakAfter(_)) => events.push(Err("scripted")),
        Some(Turn::PreemptAfter(_)) => {
            events.push(Ok(Bytes::from(format!("data: {}\n\n", choice(Some(""), json!("preempt"))))));
            events.push(Ok(Bytes::from_static(b"data: [DONE]\n\n")));
        }
        _ => events.push(Ok(Bytes::from_static(b"data: [DONE]\n\n"))),
    }
    let closing = Closing(shared.script.clone(), false);
    let events = futures::stream::iter(events).chain(futures::stream::once(async { Ok(Bytes::new()) }));
    let events =
        futures::stream::unfold((Box::pin(events), closing), |(mut events, mut closing)| async move {
            // One event at a time, so that a client sees them as they are made.
            tokio::task::yield_now().await;
            match events.next().await {
                Some(event) => {
                    if event.as_ref().is_ok_and(Bytes::is_empty) || event.is_err() {
                        closing.1 = true;
                    }
                    Some((event, (events, closing)))
                }
                None => None,
            }
        });
    let events = events.map(|event: Result<Bytes, &'static str>| event.map_err(std::io::Error::other));
    ([(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")], Body::from_stream(events)).into_response()
}
