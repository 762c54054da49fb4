//! The least that a router of JSON requests can be: parses each body, gives it to the next engine in turn, and passes the answer on.
//!
//! ```sh
//! cargo run --release --example bare_proxy -- --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002
//! ```
//!
//! A floor to measure routers by (`cargo xtask bench router`): hyper's server, hyper's pooled client, `serde_json`, and nothing else. It
//! counts nothing, retries nothing and knows nothing of the engines.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "examples talk on stdout")]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, ensure};
use axum::body::Bytes;
use clap::Parser;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use microserving_examples::write_port_file;
use tokio::task::JoinSet;

type Body = BoxBody<Bytes, hyper::Error>;

/// Passes requests on to engines in turn.
#[derive(Debug, Parser)]
struct Options {
    /// Address to serve on; port 0 takes a free one.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8000")]
    listen: String,
    /// File to write the bound address to.
    #[arg(long, value_name = "PATH")]
    port_file: Option<PathBuf>,
    /// An engine; may be given several times.
    #[arg(long, value_name = "URL", required = true)]
    engine: Vec<String>,
}

struct Proxy {
    engines: Vec<String>,
    turn: AtomicUsize,
    client: Client<HttpConnector, Full<Bytes>>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let options = Options::parse();
    let listener = tokio::net::TcpListener::bind(&options.listen)
        .await
        .with_context(|| format!("cannot listen on {}", options.listen))?;
    let address = listener.local_addr()?;
    if let Some(path) = &options.port_file {
        write_port_file(path, address).context("cannot write the port file")?;
    }
    println!("a bare proxy listens on http://{address}");
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let proxy = Arc::new(Proxy {
        engines: options.engine,
        turn: AtomicUsize::new(0),
        client: Client::builder(TokioExecutor::new()).build(connector),
    });
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let proxy = proxy.clone();
        connections.spawn(async move {
            let service = service_fn(move |request| {
                let proxy = proxy.clone();
                async move { Ok::<_, hyper::Error>(proxy.answer(request).await.unwrap_or_else(refuse)) }
            });
            // A client that goes away ends its connection, and that is all.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
        while connections.try_join_next().is_some() {}
    }
}

impl Proxy {
    async fn answer(&self, request: Request<Incoming>) -> Result<Response<Body>> {
        let (mut parts, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        if !body.is_empty() {
            let parsed: serde_json::Value = serde_json::from_slice(&body)?;
            ensure!(parsed.is_object(), "not a request");
        }
        let engine = &self.engines[self.turn.fetch_add(1, Ordering::Relaxed) % self.engines.len()];
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        parts.uri = format!("{engine}{path}").parse::<Uri>()?;
        parts.headers.remove(hyper::header::HOST);
        let answer = self.client.request(Request::from_parts(parts, Full::new(body))).await?;
        Ok(answer.map(|body| body.boxed()))
    }
}

#[allow(clippy::needless_pass_by_value, reason = "as unwrap_or_else has it")]
fn refuse(error: anyhow::Error) -> Response<Body> {
    let body = Full::new(Bytes::from(error.to_string())).map_err(|never| match never {});
    let mut response = Response::new(body.boxed());
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response
}
