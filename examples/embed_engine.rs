//! An engine inside a tokio service of your own: no HTTP between you and it, and its OpenAI surface beside your routes.
//!
//! ```sh
//! cargo run --example embed_engine            # asks the engine in process, then over its surface, and ends
//! cargo run --example embed_engine -- --serve # keeps serving
//! ```

#![allow(clippy::print_stdout, reason = "examples talk on stdout")]

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use axum::Json;
use axum::extract::State;
use axum::routing::get;
use futures::StreamExt as _;
use microserving_engine::{CallOptions, EngineHandle, GenerateEvent, StartGenerate};
use microserving_examples::toy_engine;
use microserving_protocol::{SamplingParams, TokenId};
use microserving_server::{ModelText, ServerConfig};
use microserving_transport::LoopbackHub;

/// Generates from token ids; the toy model's tokens are bytes.
async fn generate(engine: &EngineHandle, prompt: &str, max_tokens: u32) -> Result<String> {
    let prompt: Arc<[TokenId]> = prompt.bytes().map(|byte| TokenId(u32::from(byte))).collect();
    let call = StartGenerate {
        key: None,
        generated_from: u32::try_from(prompt.len())?,
        prompt,
        begin: 0,
        n: 1,
        first_choice: 0,
        sampling: SamplingParams::greedy(),
        max_tokens: Some(max_tokens),
        min_tokens: 0,
        stop_tokens: Vec::new(),
        ignore_eos: false,
        constraints: Vec::new(),
        resume_from: None,
        options: CallOptions { timeout: Some(Duration::from_secs(10)), ..CallOptions::default() },
    };
    let mut events = engine.start_generate(call).await?;
    let mut bytes = Vec::new();
    while let Some(event) = events.next().await {
        match event {
            GenerateEvent::Token { token, .. } => bytes.extend(u8::try_from(token.0)),
            GenerateEvent::Failed { error } => bail!(error),
            GenerateEvent::Done { .. } => break,
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[tokio::main]
async fn main() -> Result<()> {
    let hub = LoopbackHub::new();
    let (engine, thread) = toy_engine("embedded", &hub, Duration::ZERO)?;
    println!("in process: {}", generate(&engine, "hello", 40).await?);

    // A route of our own, with the engine as its state, and the engine's own surface beside it.
    let ours = axum::Router::new()
        .route(
            "/shout",
            get(|State(engine): State<EngineHandle>| async move {
                match generate(&engine, "shout", 20).await {
                    Ok(text) => Json(serde_json::json!({"text": text.to_uppercase()})),
                    Err(error) => Json(serde_json::json!({"error": error.to_string()})),
                }
            }),
        )
        .with_state(engine.clone());
    let routes =
        ours.merge(microserving_server::router(engine.clone(), ModelText::toy(), ServerConfig::new("toy")));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    println!("serving at http://{address}: try `curl http://{address}/shout`");
    let server = tokio::spawn(async move { axum::serve(listener, routes).await });
    if std::env::args().any(|arg| arg == "--serve") {
        server.await.context("the server panicked")??;
        return Ok(());
    }
    server.abort();
    drop(engine);
    thread.join();
    Ok(())
}
