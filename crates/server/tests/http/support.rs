//! Engines served over real TCP, and a client for them.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use bytes::Bytes;
use clap::Parser;
use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use microserving_daemon::{DaemonOptions, Health, HttpServer, Shutdown};
use microserving_engine::{Engine, EngineConfig, EngineHandle, EngineState, EngineThread, Entropy};
use microserving_executor::{ToyConfig, ToyExecutor};
use microserving_protocol::{ClusterKey, Incarnation};
use microserving_server::{EngineService, ModelText, ServerConfig};
use microserving_transport::LoopbackHub;
use serde_json::{Value, json};

use crate::wires::{GrpcCaller, Wire};

/// What tests vary.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) num_pages: u32,
    pub(crate) page_size: u32,
    pub(crate) max_context: u32,
    pub(crate) lease: Duration,
    pub(crate) step_time: Duration,
    pub(crate) max_body_bytes: usize,
    pub(crate) eos_one_in: u64,
    pub(crate) wire: Wire,
    pub(crate) offers_grpc: bool,
    /// What it says of that, if not the truth.
    pub(crate) claims_grpc: Option<bool>,
}

/// The usual, over a wire.
pub(crate) fn over(wire: Wire) -> Settings {
    Settings { wire, ..Settings::default() }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            num_pages: 256,
            page_size: 16,
            max_context: 2048,
            lease: Duration::from_secs(30),
            step_time: Duration::ZERO,
            max_body_bytes: 1 << 20,
            eos_one_in: 0,
            wire: Wire::Rest,
            offers_grpc: true,
            claims_grpc: None,
        }
    }
}

/// One engine behind a port.
pub(crate) struct Node {
    pub(crate) address: SocketAddr,
    pub(crate) engine: EngineHandle,
    pub(crate) wire: Wire,
    pub(crate) grpc: GrpcCaller,
    _server: HttpServer,
    _thread: EngineThread,
    client: HyperClient<HttpConnector, Full<Bytes>>,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// The events of a stream, `[DONE]` checked and left out; panics if a byte is out of place.
    pub(crate) fn events(&self) -> Vec<Value> {
        let (events, done) = self.events_and_done();
        assert!(done, "no [DONE]: {}", self.body);
        events
    }

    pub(crate) fn events_and_done(&self) -> (Vec<Value>, bool) {
        assert_eq!(self.header("content-type"), "text/event-stream; charset=utf-8", "{}", self.body);
        let mut blocks: Vec<&str> = self.body.split("\n\n").collect();
        assert_eq!(blocks.pop(), Some(""), "the stream ends with a blank line: {}", self.body);
        let done = blocks.last() == Some(&"data: [DONE]");
        if done {
            blocks.pop();
        }
        let events = blocks.iter().map(|block| {
            let json = block.strip_prefix("data: ").unwrap_or_else(|| panic!("not a data line: {block:?}"));
            assert!(!json.contains('\n'), "{json:?}");
            serde_json::from_str(json).unwrap()
        });
        (events.collect(), done)
    }

    /// The text of one choice of a stream of completions.
    pub(crate) fn streamed_text(&self, index: u64) -> String {
        let events = self.events();
        let choices = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
        choices
            .filter(|choice| choice["index"] == index)
            .map(|choice| choice["text"].as_str().unwrap())
            .collect()
    }
}

impl Node {
    pub(crate) async fn start(name: &str, hub: &LoopbackHub, settings: &Settings) -> Self {
        let executor = ToyExecutor::new(ToyConfig {
            page_size: settings.page_size,
            max_context: settings.max_context,
            step_time: settings.step_time,
            eos_one_in: settings.eos_one_in,
            ..ToyConfig::default()
        })
        .unwrap();
        let mut config = EngineConfig::new(name, settings.num_pages);
        config.lease = settings.lease;
        let entropy = Entropy {
            incarnation: Incarnation(u64::from(name.as_bytes()[0])),
            cluster_key: ClusterKey::from_text("a key of tests").unwrap(),
            key_is_shared: true,
            mint_seed: u64::from(name.as_bytes()[0]),
        };
        let engine = Engine::new(config, Box::new(executor), Box::new(hub.transport(name)), entropy).unwrap();
        let (engine, thread) = EngineHandle::spawn(engine).unwrap();
        let mut config = ServerConfig::new("toy");
        config.max_body_bytes = settings.max_body_bytes;
        config.default_timeout = Some(Duration::from_secs(60));
        config.grpc = settings.claims_grpc.unwrap_or(settings.offers_grpc);
        let service = EngineService::new(engine.clone(), ModelText::toy(), config);
        let (options, health) = daemon_options();
        let shutdown = Shutdown::manual(Duration::ZERO);
        let server = HttpServer::bind("127.0.0.1:0", &options, health.clone(), shutdown).await.unwrap();
        let grpc =
            if settings.offers_grpc { microserving_grpc_server::routes(&service) } else { Router::new() };
        server.install(service.router(grpc));
        health.ready();
        let address = server.address();
        let client = HyperClient::builder(TokioExecutor::new()).build_http();
        let grpc = GrpcCaller::new(&format!("http://{address}"));
        Self { address, engine, wire: settings.wire, grpc, _server: server, _thread: thread, client }
    }

    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> Answer {
        let answer = async {
            let response = self.client.request(request).await.unwrap();
            let (head, body) = response.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            Answer {
                status: head.status.as_u16(),
                headers: head.headers,
                body: String::from_utf8(body.to_vec()).unwrap(),
            }
        };
        in_time(answer).await
    }

    pub(crate) fn request(&self, method: Method, path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
        let builder = Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        builder.body(Full::new(body.into())).unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        if self.wire == Wire::Grpc
            && let Some(answer) = in_time(self.grpc.get(path)).await
        {
            return answer;
        }
        self.send(self.request(Method::GET, path, "")).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        if self.wire == Wire::Grpc
            && let Some(answer) = in_time(self.grpc.post(path, body)).await
        {
            return answer;
        }
        self.send(self.request(Method::POST, path, body.to_string())).await
    }

    /// Posts and wants 200 with JSON.
    pub(crate) async fn call(&self, path: &str, body: &Value) -> Value {
        let answer = self.post(path, body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        assert_eq!(answer.header("content-type"), "application/json");
        answer.json()
    }

    pub(crate) async fn state(&self) -> EngineState {
        self.engine.state().await.unwrap()
    }

    /// Waits until nothing is held that should not be.
    pub(crate) async fn wait_idle(&self) {
        let idle = async {
            loop {
                let state = self.state().await;
                let pages = &state.pages;
                if pages.owned + pages.reserved + pages.quarantined == 0
                    && state.waiting + state.running + state.receiving + state.sending == 0
                {
                    assert_eq!(pages.free + pages.cached, pages.total);
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(20), idle).await.is_err() {
            panic!("not idle: {:?} {:?}", self.state().await, self.engine.sequences().await);
        }
    }
}

async fn in_time<T>(answer: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), answer).await.expect("an answer within a minute")
}

#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    daemon: DaemonOptions,
}

/// Options of a server around an engine, and what it says of its health.
pub(crate) fn daemon_options() -> (DaemonOptions, Health) {
    (Options::parse_from(["test"]).daemon, Health::new())
}

/// One engine.
pub(crate) async fn one(settings: &Settings) -> Node {
    Node::start("d", &LoopbackHub::new(), settings).await
}

/// A prefill and a decode engine.
pub(crate) async fn two(settings: &Settings) -> (Node, Node) {
    let hub = LoopbackHub::new();
    (Node::start("p", &hub, settings).await, Node::start("d", &hub, settings).await)
}

/// A prompt of `len` tokens that differs from those of other seeds.
pub(crate) fn prompt(len: u32, seed: u32) -> Vec<u32> {
    (0..len).map(|at| (at * 7 + seed * 13 + at * at % 11) % 256).collect()
}

/// A completion body with its prompt, greedy.
pub(crate) fn completion(prompt: &[u32], max_tokens: u32) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true})
}

/// Adds fields to a body.
pub(crate) fn with(mut body: Value, fields: Value) -> Value {
    let Value::Object(fields) = fields else { panic!("fields are an object") };
    body.as_object_mut().unwrap().extend(fields);
    body
}
