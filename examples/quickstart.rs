//! Two engines and a router in one process: the same prompt through every pattern, streamed.
//!
//! ```sh
//! cargo run --example quickstart
//! ```
//!
//! The model is a toy: its next token depends on every KV slot that it is told to read, so one lost or stale page would change
//! the text. No download, no GPU.

#![allow(clippy::print_stdout, reason = "examples talk on stdout")]

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use microserving_client::HttpEngineClient;
use microserving_examples::{ask, serve, toy_engine};
use microserving_router::{EngineSpec, Role, RouterConfig, RouterService};
use microserving_transport::LoopbackHub;

const PROMPT: &str = "Once upon a time there was a router that knew nothing about engines but three small calls, and it said: ";

#[tokio::main]
async fn main() -> Result<()> {
    let hub = LoopbackHub::new();
    let (first, _first_thread) = toy_engine("engine-0", &hub, Duration::from_millis(15))?;
    let (second, _second_thread) = toy_engine("engine-1", &hub, Duration::from_millis(15))?;

    let mut engines = Vec::new();
    for engine in [first, second] {
        let url = format!("http://{}", serve(engine).await?);
        engines.push(EngineSpec::new(Arc::new(HttpEngineClient::new(&url)?), Role::Any));
    }
    let (router, tasks) = RouterService::start(RouterConfig::new(engines))?;
    router.wait_ready(2, Duration::from_secs(10)).await?;
    let routes = router.http();

    println!("two toy engines and a router, in one process\n");
    let mut texts = Vec::new();
    for pattern in ["data_parallel", "prefill_decode", "balanced:0.25"] {
        println!("── {pattern} ──");
        let (text, stats) = ask(&routes, pattern, PROMPT).await?;
        println!(
            "   P computed {} and sent {} tokens ({} bytes), D computed {}\n",
            stats["prefill_computed_tokens"],
            stats["sent_tokens"],
            stats["sent_bytes"],
            stats["computed_tokens"],
        );
        texts.push(text);
    }
    ensure!(
        texts.iter().all(|text| *text == texts[0] && !text.is_empty()),
        "the patterns disagree: {texts:?}"
    );
    println!(
        "the same text from every pattern. Next: `cargo xtask demo`, with a real model and three processes."
    );
    tasks.stop().await;
    Ok(())
}
