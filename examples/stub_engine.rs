//! An engine that computes nothing: it answers every call of a router at once, with the same few tokens.
//!
//! ```sh
//! cargo run --release --example stub_engine -- --listen 127.0.0.1:8001
//! cargo run --release --example stub_engine -- --listen 127.0.0.1:8002 --token-milliseconds 20
//! target/release/routerd --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002
//! ```
//!
//! With `--features grpc` it takes the calls over gRPC too, as engines do.
//!
//! For whoever works on a router or a program: what is left of a request's time is the router's own, which is what
//! `cargo xtask bench router` measures, and a slow answer can be had without a model (`--token-milliseconds`).
//! Positions are checked and the answers have the form of a real engine's, usage included. Text and sampling are canned, so
//! parameters that choose tokens change nothing; the tokenizer is the toy model's, a byte a token.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "examples talk on stdout")]

use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderValue, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt as _;
use axum::{Json, Router};
use clap::Parser;
use futures::StreamExt as _;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use microserving_examples::write_port_file;
use microserving_protocol::{
    AbortResponse, ApiError, CompletionChoice, CompletionResponse, EngineId, FinishReason, ModelCard,
    ModelList, PagesView, PrepRecvResponse, RELAY_HEADER, RelayUsage, RemoteSendResponse, SSE_DONE,
    StateView, TokenId, Usage, normalise_begin, normalise_prep_end, normalise_send_range, relay_end_mark,
    relay_mark, sse_event,
};
use microserving_text::TextBundle;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use tokio::task::JoinSet;

#[cfg(feature = "grpc")]
#[path = "stub_engine/grpc.rs"]
mod grpc;

/// Without the feature `grpc` there is REST only.
#[cfg(not(feature = "grpc"))]
mod grpc {
    pub(super) fn routes(_stub: std::sync::Arc<super::Stub>) -> axum::Router {
        axum::Router::new()
    }
}

const MODEL: &str = "stub";
const MAX_CONTEXT: u32 = 1 << 17;
const MAX_BODY_BYTES: usize = 16 << 20;
/// What every token says, and its id in the toy vocabulary.
const TEXT: &str = "k";
const TOKEN: TokenId = TokenId(b'k' as u32);

/// Answers the calls of a router without computing anything.
#[derive(Debug, Parser)]
struct Options {
    /// Address to serve on; port 0 takes a free one.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8001")]
    listen: String,
    /// File to write the bound address to.
    #[arg(long, value_name = "PATH")]
    port_file: Option<PathBuf>,
    /// Tokens of an answer whose request does not say `max_tokens`.
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Time before each token.
    #[arg(long, value_name = "N", default_value = "0")]
    token_milliseconds: u64,
}

// One thread: there is nothing to compute, and the router under test needs the other cores.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let options = Options::parse();
    let listener = tokio::net::TcpListener::bind(&options.listen)
        .await
        .with_context(|| format!("cannot listen on {}", options.listen))?;
    let address = listener.local_addr()?;
    if let Some(path) = &options.port_file {
        write_port_file(path, address)
            .with_context(|| format!("cannot write the port file {}", path.display()))?;
    }
    println!("a stub engine listens on http://{address}");
    let stub = Arc::new(Stub::new(&options, address)?);
    let routes = routes(stub.clone());
    if cfg!(feature = "grpc") {
        // HTTP/2 comes with axum's own loop, which is slower.
        let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
        let all = routes.fallback(move |request| answer(stub.clone(), request));
        axum::serve(listener, all).await?;
        return Ok(());
    }
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await?;
        // Tokens are small packets, and each must leave when it is written.
        stream.set_nodelay(true)?;
        let (stub, routes) = (stub.clone(), TowerToHyperService::new(routes.clone()));
        connections.spawn(async move {
            let service = service_fn(move |request| serve(stub.clone(), routes.clone(), request));
            // A client that goes away ends its connection, and that is all.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

/// The paths of the calls that are made for every request.
const HOT: [&str; 5] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/microserving/start_generate",
    "/microserving/prep_recv",
    "/microserving/remote_send",
];

/// Serves the calls that are made for every request without looking for their routes: what an engine costs here is taken from the
/// router that is measured.
async fn serve(
    stub: Arc<Stub>,
    routes: TowerToHyperService<Router>,
    request: Request<Incoming>,
) -> Result<Response, Infallible> {
    if HOT.contains(&request.uri().path()) {
        return Ok(answer(stub, request.map(Body::new)).await);
    }
    routes.call(request).await
}

/// Answers one of those calls.
async fn answer(stub: Arc<Stub>, request: Request<Body>) -> Response {
    let (head, body) = request.into_parts();
    let marked = head.headers.contains_key(RELAY_HEADER);
    let Ok(body) = axum::body::to_bytes(body, MAX_BODY_BYTES).await else {
        return Refused(ApiError::too_large(MAX_BODY_BYTES)).into_response();
    };
    let answer = match head.uri.path() {
        "/microserving/prep_recv" => prep_recv(&stub, &body).map(IntoResponse::into_response),
        "/microserving/remote_send" => remote_send(&body).map(IntoResponse::into_response),
        path if HOT.contains(&path) => generate(&stub, &body, marked).await,
        _ => Err(Refused(ApiError::not_found("no such path"))),
    };
    answer.unwrap_or_else(IntoResponse::into_response)
}

fn routes(stub: Arc<Stub>) -> Router {
    let beside = grpc::routes(Arc::clone(&stub));
    Router::new()
        .route("/health", get(|| async {}))
        .route("/health/live", get(|| async {}))
        .route("/health/ready", get(|| async {}))
        .route("/v1/models", get(models))
        .route("/microserving/state", get(state))
        .route("/microserving/tokenizer", get(tokenizer))
        .route("/microserving/abort", post(|| async { Json(AbortResponse { aborted: false }) }))
        .with_state(stub)
        .merge(beside)
}

/// What does not change from answer to answer, made once.
struct Stub {
    engine_id: EngineId,
    /// Boots must differ, and this one has no secrets to keep: the time will do.
    incarnation: String,
    created: u64,
    num_tokens: u32,
    pause: Duration,
    /// The event of a token, and that of the last one, for requests with and without token ids, with and without marks.
    events: [[[Bytes; 2]; 2]; 2],
    tokenizer: Bytes,
}

impl Stub {
    fn new(options: &Options, address: SocketAddr) -> Result<Self> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
        let created = since.as_secs();
        let event = |marked: bool, ids: bool, last: bool| {
            let mark = if marked { relay_mark(&[TOKEN]) } else { String::new() };
            Bytes::from(mark + &sse_event(&chunk(created, 1, ids, last)))
        };
        Ok(Self {
            engine_id: EngineId::new(format!("stub-{}", address.port())),
            incarnation: format!("{:016x}", since.as_nanos() as u64),
            created,
            num_tokens: options.tokens,
            pause: Duration::from_millis(options.token_milliseconds),
            events: [false, true]
                .map(|marked| [false, true].map(|ids| [false, true].map(|last| event(marked, ids, last)))),
            tokenizer: TextBundle::toy(MODEL).to_json().into(),
        })
    }
}

/// An answer of so many tokens, or the chunk of one.
fn chunk(created: u64, num_tokens: u32, ids: bool, last: bool) -> CompletionResponse {
    let num_tokens = num_tokens as usize;
    let choice = CompletionChoice {
        text: TEXT.repeat(num_tokens),
        token_ids: ids.then(|| vec![TOKEN; num_tokens]),
        finish_reason: last.then_some(FinishReason::Length),
        ..CompletionChoice::default()
    };
    CompletionResponse::new("cmpl-stub", created, MODEL, vec![choice])
}

/// What of a request makes a difference here. The real types check and keep far more, which would be the larger part of this
/// engine's work.
#[derive(Deserialize)]
struct Ask {
    #[serde(alias = "messages")]
    prompt: Length,
    begin: Option<i64>,
    end: Option<i64>,
    commit: Option<bool>,
    max_tokens: Option<u32>,
    n: Option<u32>,
    return_token_ids: Option<bool>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

impl Ask {
    fn read(body: &[u8]) -> Result<Self, Refused> {
        let ask: Self =
            serde_json::from_slice(body).map_err(|error| ApiError::unprocessable(error.to_string()))?;
        if ask.prompt.0 == 0 {
            return Err(ApiError::bad_request("prompt", "prompt is empty").into());
        }
        Ok(ask)
    }
}

/// The number of tokens in a prompt.
struct Length(usize);

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LengthVisitor)
    }
}

struct LengthVisitor;

impl<'de> Visitor<'de> for LengthVisitor {
    type Value = Length;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of token ids")
    }

    fn visit_str<E>(self, text: &str) -> Result<Length, E> {
        Ok(Length(text.len()))
    }

    /// Of a message only the text counts.
    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Length, A::Error> {
        let mut num_tokens = 0;
        while let Some(name) = fields.next_key::<&str>()? {
            if name == "content" {
                num_tokens += fields.next_value::<Length>()?.0;
            } else {
                fields.next_value::<IgnoredAny>()?;
            }
        }
        Ok(Length(num_tokens))
    }

    fn visit_u64<E>(self, _token: u64) -> Result<Length, E> {
        Ok(Length(1))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Length, A::Error> {
        let mut num_tokens = 0;
        while let Some(item) = items.next_element::<Length>()? {
            num_tokens += item.0;
        }
        Ok(Length(num_tokens))
    }
}

async fn models(State(stub): State<Arc<Stub>>) -> Json<ModelList> {
    Json(ModelList::new(vec![ModelCard::new(MODEL, stub.created, MAX_CONTEXT)]))
}

async fn tokenizer(State(stub): State<Arc<Stub>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], stub.tokenizer.clone())
}

/// Nothing is ever held, so there is always room.
async fn state(State(stub): State<Arc<Stub>>) -> Json<StateView> {
    Json(view(&stub))
}

fn view(stub: &Stub) -> StateView {
    const NUM_PAGES: u32 = 1 << 16;
    StateView {
        engine_id: stub.engine_id.clone(),
        incarnation: stub.incarnation.clone(),
        model: MODEL.into(),
        max_context: MAX_CONTEXT,
        page_size: 16,
        layout_fingerprint: format!("{:016x}", 0),
        pages: PagesView { free: NUM_PAGES, total: NUM_PAGES, ..PagesView::default() },
        waiting: 0,
        running: 0,
        receiving: 0,
        sending: 0,
        queued_prefill_tokens: 0,
        draining: false,
        counters: Default::default(),
        grpc: cfg!(feature = "grpc"),
        marks: true,
    }
}

/// Matches nothing, so that everything is to be sent.
fn prep_recv(stub: &Stub, body: &[u8]) -> Result<Json<PrepRecvResponse>, Refused> {
    let ask = Ask::read(body)?;
    let end = ask.end.ok_or_else(|| missing("end"))?;
    let end = normalise_prep_end(end, ask.prompt.0, ask.commit.unwrap_or(false))?;
    Ok(Json(PrepRecvResponse {
        // Opaque to routers; nobody reads it here either.
        kv_addr_info: if end == 0 { String::new() } else { "c3R1".repeat(64) },
        prefix_matched_length: 0,
        lease_seconds: Some(30.0),
        seq_id: None,
        engine_id: Some(stub.engine_id.clone()),
    }))
}

fn remote_send(body: &[u8]) -> Result<Json<RemoteSendResponse>, Refused> {
    let ask = Ask::read(body)?;
    let (begin, end) = (ask.begin.ok_or_else(|| missing("begin"))?, ask.end.ok_or_else(|| missing("end"))?);
    let range = normalise_send_range(begin, end, ask.prompt.0, true)?;
    Ok(Json(RemoteSendResponse {
        sent_tokens: range.num_tokens(),
        computed_tokens: range.end(),
        ..RemoteSendResponse::default()
    }))
}

/// `start_generate`, which has a `begin`, and OpenAI's completions, which have none.
async fn generate(stub: &Stub, body: &[u8], marked: bool) -> Result<Response, Refused> {
    let ask = Ask::read(body)?;
    if let Some(begin) = ask.begin {
        normalise_begin(begin, ask.prompt.0)?;
    }
    if let Some(n) = ask.n.filter(|&n| n != 1) {
        return Err(ApiError::bad_request("n", format!("n is {n}, a stub answers one choice")).into());
    }
    let num_tokens = ask.max_tokens.unwrap_or(stub.num_tokens);
    if !(1..=MAX_CONTEXT).contains(&num_tokens) {
        let message = format!("max_tokens is {num_tokens}, must be in [1, {MAX_CONTEXT}]");
        return Err(ApiError::bad_request("max_tokens", message).into());
    }
    let ids = ask.return_token_ids.unwrap_or(false);
    let usage = Usage::new(u32::try_from(ask.prompt.0).unwrap_or(u32::MAX), num_tokens, 0);
    if ask.stream.unwrap_or(false) {
        let include_usage = ask.stream_options.unwrap_or_default().include_usage.unwrap_or(false);
        return Ok(stream(stub, num_tokens, ids, marked, (usage, include_usage)));
    }
    if !stub.pause.is_zero() {
        tokio::time::sleep(stub.pause * num_tokens).await;
    }
    let mut whole = chunk(stub.created, num_tokens, ids, true);
    whole.usage = Some(usage);
    let mut response = Json(whole).into_response();
    if marked && let Ok(mark) = HeaderValue::try_from(took(usage).to_string()) {
        response.headers_mut().insert(RELAY_HEADER, mark);
    }
    Ok(response)
}

/// What a router that passes the answer on is told.
fn took(usage: Usage) -> RelayUsage {
    let Usage { prompt_tokens, completion_tokens, .. } = usage;
    RelayUsage { prompt_tokens, completion_tokens, cached_tokens: 0, first_token_micros: 0 }
}

fn stream(stub: &Stub, num_tokens: u32, ids: bool, marked: bool, usage: (Usage, bool)) -> Response {
    let [token, last] = stub.events[usize::from(marked)][usize::from(ids)].clone();
    let (usage, include_usage) = usage;
    let pause = stub.pause;
    let mut end = Vec::new();
    if include_usage {
        let mut chunk = CompletionResponse::new("cmpl-stub", stub.created, MODEL, Vec::new());
        chunk.usage = Some(usage);
        let mark = if marked { relay_mark(&[]) } else { String::new() };
        end.push(Bytes::from(mark + &sse_event(&chunk)));
    }
    end.push(if marked {
        Bytes::from(relay_end_mark(&took(usage)) + SSE_DONE)
    } else {
        Bytes::from_static(SSE_DONE.as_bytes())
    });
    let event = move |number| if number == num_tokens { last.clone() } else { token.clone() };
    let tokens = futures::stream::iter(1..=num_tokens).map(event);
    let end = futures::stream::iter(end);
    let body = if pause.is_zero() {
        Body::from_stream(tokens.chain(end).map(Ok::<_, Infallible>))
    } else {
        let slowly = tokens.then(move |event| async move {
            tokio::time::sleep(pause).await;
            event
        });
        Body::from_stream(slowly.chain(end).map(Ok::<_, Infallible>))
    };
    let mut response = ([(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")], body).into_response();
    if marked {
        response.headers_mut().insert(RELAY_HEADER, HeaderValue::from_static("1"));
    }
    response
}

/// An error on its way out.
struct Refused(ApiError);

impl From<ApiError> for Refused {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, [(header::CONTENT_TYPE, "application/json")], self.0.to_json()).into_response()
    }
}

fn missing(name: &str) -> Refused {
    ApiError::unprocessable(format!("{name} is missing")).with_param(name).into()
}
