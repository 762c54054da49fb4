//! What the examples share: toy engines that serve, and asking a router.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "examples talk on stdout")]

use std::io::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use axum::body::Body;
use axum::http::{Request, header};
use http_body_util::BodyExt as _;
use microserving_engine::{Engine, EngineConfig, EngineHandle, EngineThread, Entropy};
use microserving_executor::{ToyConfig, ToyExecutor};
use microserving_protocol::{ClusterKey, Incarnation, SseEvent, SseParser};
use microserving_server::{ModelText, ServerConfig};
use microserving_transport::LoopbackHub;
use serde_json::Value;
use tower::ServiceExt as _;

/// Returns what an engine cannot make up itself.
///
/// # Errors
/// If the operating system has no random numbers.
pub fn entropy() -> Result<Entropy> {
    let mut key = [0; 32];
    getrandom::fill(&mut key).context("no random numbers")?;
    Ok(Entropy {
        incarnation: Incarnation(getrandom::u64().context("no random numbers")?),
        cluster_key: ClusterKey::from_random(key),
        key_is_shared: false,
        mint_seed: getrandom::u64().context("no random numbers")?,
    })
}

/// Makes an engine of the toy model; engines of one hub can send each other KV.
///
/// # Errors
/// If the engine cannot be made or its thread cannot start.
pub fn toy_engine(
    name: &str,
    hub: &LoopbackHub,
    step_time: Duration,
) -> Result<(EngineHandle, EngineThread)> {
    let toy = ToyExecutor::new(ToyConfig { step_time, ..ToyConfig::default() })?;
    let engine =
        Engine::new(EngineConfig::new(name, 512), Box::new(toy), Box::new(hub.transport(name)), entropy()?)?;
    Ok(EngineHandle::spawn(engine)?)
}

/// Serves an engine on a free loopback port, until the process ends.
///
/// # Errors
/// If no port is to be had.
pub async fn serve(engine: EngineHandle) -> Result<SocketAddr> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    // Health belongs to the process around an engine: it is about more than the engine. Routers ask for it.
    let routes = microserving_server::router(engine, ModelText::toy(), ServerConfig::new("toy"))
        .route("/health/ready", axum::routing::get(|| async {}));
    tokio::spawn(async move { axum::serve(listener, routes).await });
    Ok(address)
}

/// Asks a router, in process, for a completion by a pattern, prints the text as it comes, and returns it with the last
/// event's statistics.
///
/// # Errors
/// If the answer is an error.
pub async fn ask(router: &axum::Router, pattern: &str, prompt: &str) -> Result<(String, Value)> {
    let body = serde_json::json!({
        "prompt": prompt, "max_tokens": 60, "temperature": 0, "stream": true, "cache_salt": pattern,
        "stream_options": {"include_usage": true},
    });
    let request = Request::post("/v1/completions")
        .header(header::CONTENT_TYPE, "application/json")
        .header("x-microserving-pattern", pattern)
        .header("x-microserving-stats", "1")
        .body(Body::from(body.to_string()))?;
    let response = router.clone().oneshot(request).await?;
    if !response.status().is_success() {
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        bail!("status {status}: {}", String::from_utf8_lossy(&body));
    }
    let mut body = response.into_body();
    let mut parser = SseParser::new();
    let mut text = String::new();
    let mut stats = Value::Null;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        for event in parser.push(&data)? {
            let SseEvent::Data(json) = event else { continue };
            let event: Value = serde_json::from_str(&json)?;
            if let Some(error) = event.get("error") {
                bail!("the stream carries an error: {error}");
            }
            if let Some(piece) = event.pointer("/choices/0/text").and_then(Value::as_str) {
                print!("{piece}");
                std::io::stdout().flush()?;
                text.push_str(piece);
            }
            if let Some(found) = event.get("microserving").filter(|found| !found.is_null()) {
                stats = found.clone();
            }
        }
    }
    println!();
    Ok((text, stats))
}

/// Writes the address that a server is bound to. Writes beside the file and renames, so that a reader sees all of it or nothing.
///
/// # Errors
/// If the file cannot be written.
pub fn write_port_file(path: &std::path::Path, address: SocketAddr) -> std::io::Result<()> {
    let beside = path.with_extension(std::process::id().to_string());
    std::fs::write(&beside, format!("{address}\n"))?;
    std::fs::rename(&beside, path)
}
