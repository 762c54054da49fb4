//! From options to a running router, and back to nothing.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use microserving_client::{BadUrl, EngineAddress, EngineCalls, EngineKind};
use microserving_daemon::{Health, HttpServer, Refused, Shutdown};
use microserving_grpc::{AnyWireClient, WirePolicy};
use microserving_router::{EngineSpec, PromptCodec, Role, RouterConfig, RouterService};
use microserving_script::{Limits, ScriptLoader};
use microserving_text::TextBundle;
use tokio::task::spawn_blocking;
use tracing::{info, warn};

use crate::options::Options;

/// Between two lines of the log that say what is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks at whether there is an engine.
const WATCH: Duration = Duration::from_millis(250);

/// Runs the daemon until it is told to stop.
pub(crate) async fn run(options: Options, shutdown: Shutdown) -> Result<()> {
    let engines = engines(&options)?;
    let mut config = RouterConfig::new(engines);
    config.pattern = options.pattern.clone();
    config.placement = options.placement;
    config.request_timeout = options.request_timeout_seconds;
    config.max_in_flight = options.max_in_flight as usize;
    config.relay = options.relay;
    config.codec = codec(&options).await?;
    config.scripts = scripts(&options)?;
    let limits = Limits { concurrent_runs: options.script_runs as usize, ..Limits::default() };
    config.loader = Some(Arc::new(ScriptLoader::new(limits)));
    let num_engines = config.engines.len();

    let (service, tasks) = RouterService::start(config).map_err(|error| Refused(error.to_string()))?;
    let health = Health::new();
    let server = HttpServer::bind(&options.listen, &options.daemon, health.clone(), shutdown.clone()).await?;
    let doors = service.clone();
    server.install_with(service.http(), Box::new(move |request, max| doors.shortcut(request, max)));
    info!(address = %server.address(), num_engines, pattern = %service.patterns().current(), "routing");

    tokio::select! {
        () = keep_health(&service, options.min_engines as usize, &health) => {}
        () = shutdown.begun() => {}
    }
    health.draining();
    service.drain();
    server.finished().await;
    // Streams that the drain cut off have put their aborts into the queue by now.
    tasks.stop().await;
    info!("stopped");
    Ok(())
}

/// Says that the router is ready while there are engines, and else what it waits for. Never returns.
async fn keep_health(service: &RouterService, min_engines: usize, health: &Health) {
    let mut wanted = min_engines;
    loop {
        wait_ready(service, wanted, health).await;
        health.ready();
        info!(num_engines = service.cluster().num_ready(), "ready");
        while service.cluster().num_ready() > 0 {
            tokio::time::sleep(WATCH).await;
        }
        warn!("no engine is ready any more");
        // `min_engines` is for the start; one engine is enough to go on.
        wanted = 1;
    }
}

/// Waits until engines and tokenizers are there, however long that takes: engines may well start after their router.
async fn wait_ready(service: &RouterService, min_engines: usize, health: &Health) {
    health.waiting(format!("waiting for {min_engines} engine(s)"));
    while let Err(error) = service.wait_ready(min_engines, PATIENCE).await {
        let mut reason = error.to_string();
        if let Some(source) = std::error::Error::source(&error) {
            reason = format!("{reason}: {source}");
        }
        info!(min_engines, reason, "still waiting for engines");
        health.waiting(format!("waiting for {min_engines} engine(s): {reason}"));
    }
}

fn engines(options: &Options) -> Result<Vec<EngineSpec>> {
    let roles =
        [(&options.engine, Role::Any), (&options.prefill, Role::Prefill), (&options.decode, Role::Decode)];
    let mut specs: Vec<EngineSpec> = Vec::new();
    for (urls, role) in roles {
        for url in urls {
            let address: EngineAddress = url.parse().map_err(|error: BadUrl| Refused(error.to_string()))?;
            if role == Role::Prefill && !address.kind.moves_kv() {
                let message =
                    format!("the engine {url} cannot prefill for others: it is of the kind {}", address.kind);
                return Err(Refused(message).into());
            }
            let calls = connect(&address, options.wire).map_err(|error| Refused(error.to_string()))?;
            let spec = EngineSpec { recv_rank: address.recv_rank, ..EngineSpec::new(calls, role) };
            if specs.iter().any(|known| known.calls.name() == spec.calls.name()) {
                return Err(Refused(format!("the engine {url} is given twice")).into());
            }
            specs.push(spec);
        }
    }
    if specs.is_empty() {
        return Err(Refused("no engines: give --engine, or --prefill and --decode".into()).into());
    }
    if specs.iter().all(|spec| spec.role == Role::Prefill) {
        return Err(Refused("no engine may decode: give --decode or --engine beside --prefill".into()).into());
    }
    if (options.min_engines as usize) > specs.len() {
        let message = format!("min_engines is {}, only {} are given", options.min_engines, specs.len());
        return Err(Refused(message).into());
    }
    Ok(specs)
}

/// Makes the client of an engine; one of ours takes the wire that it offers.
fn connect(address: &EngineAddress, wire: WirePolicy) -> Result<Arc<dyn EngineCalls>, BadUrl> {
    match address.kind {
        EngineKind::Microserving => Ok(Arc::new(AnyWireClient::new(&address.url, wire)?)),
        EngineKind::Mlc | EngineKind::OpenAi => address.connect(),
    }
}

/// Reads the scripts to begin with: names and texts.
fn scripts(options: &Options) -> Result<Vec<(String, String)>> {
    let read = |given: &String| {
        let Some((name, path)) = given.split_once('=') else {
            return Err(Refused(format!("the script {given:?} must be written NAME=PATH")).into());
        };
        let source =
            std::fs::read_to_string(path).with_context(|| format!("cannot read the script {path}"))?;
        Ok((name.to_owned(), source))
    };
    options.script.iter().map(read).collect()
}

async fn codec(options: &Options) -> Result<Option<Arc<dyn PromptCodec>>> {
    let Some(path) = options.tokenizer.clone() else { return Ok(None) };
    let shown = path.display().to_string();
    let load = move || TextBundle::load(&path, "any").and_then(|bundle| bundle.build());
    let model = spawn_blocking(load).await.context("loading the tokenizer panicked")?;
    let model = model.with_context(|| format!("the tokenizer {shown} cannot be used"))?;
    Ok(Some(Arc::new(model)))
}
