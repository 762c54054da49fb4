//! A pattern of your own: short prompts stay on one engine, long ones are prefilled elsewhere.
//!
//! ```sh
//! cargo run --example custom_program
//! ```
//!
//! Beside the program itself there is nothing to register but its value: the router calls it by its name, from configuration, from
//! the header `x-microserving-pattern`, or from `PUT /admin/v1/pattern`.

#![allow(clippy::print_stdout, reason = "examples talk on stdout")]

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use async_trait::async_trait;
use microserving_client::HttpEngineClient;
use microserving_examples::{ask, serve, toy_engine};
use microserving_router::{
    Ctx, EngineSpec, Error, Program, Request, Role, RouterConfig, RouterService, TokenStream,
};
use microserving_transport::LoopbackHub;

/// Prompts longer than the threshold are disaggregated.
#[derive(Debug)]
struct ByLength {
    threshold: u32,
}

#[async_trait]
impl Program for ByLength {
    fn name(&self) -> &str {
        "by_length"
    }

    async fn serve(&self, ctx: &Ctx, request: &Request) -> Result<TokenStream, Error> {
        let mut d = ctx.decoder(request)?;
        if request.len() <= self.threshold {
            return d.start_generate(request, 0).await;
        }
        // One engine only: nobody to prefill elsewhere.
        let Some(mut p) = ctx.prefiller(request, &d) else {
            return d.start_generate(request, 0).await;
        };
        let end = request.len() - 1;
        let prepared = d.prep_recv(request, end).await?;
        if prepared.matched < end {
            p.remote_send(request, &prepared, prepared.matched, end).await?;
        }
        d.start_generate(request, end).await
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let hub = LoopbackHub::new();
    let mut engines = Vec::new();
    let mut threads = Vec::new();
    for name in ["engine-0", "engine-1"] {
        let (engine, thread) = toy_engine(name, &hub, Duration::from_millis(5))?;
        let url = format!("http://{}", serve(engine).await?);
        engines.push(EngineSpec::new(Arc::new(HttpEngineClient::new(&url)?), Role::Any));
        threads.push(thread);
    }
    let mut config = RouterConfig::new(engines);
    config.programs = vec![Arc::new(ByLength { threshold: 40 })];
    let (router, tasks) = RouterService::start(config)?;
    router.wait_ready(2, Duration::from_secs(10)).await?;
    let routes = router.http();

    let (_, short) = ask(&routes, "by_length", "a short prompt: ").await?;
    let (_, long) =
        ask(&routes, "by_length", "a prompt that is longer than forty tokens, and worth a second engine: ")
            .await?;
    println!("short: {} tokens sent; long: {} tokens sent", short["sent_tokens"], long["sent_tokens"]);
    ensure!(short["sent_tokens"] == 0 && long["sent_tokens"].as_u64() > Some(40), "{short} {long}");
    tasks.stop().await;
    Ok(())
}
