//! From options to a running router, and back to nothing.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use microserving_cost::Profile;
use microserving_daemon::{DaemonOptions, Hangups, Health, HttpServer, Refused, Shortcut, Shutdown};
use microserving_router::{PromptCodec, RouterConfig, RouterService};
use microserving_script::{Limits, ScriptLoader};
use microserving_text::TextBundle;
use tokio::task::spawn_blocking;
use tracing::{info, warn};

use crate::admin::{self, Door};
use crate::connect::ByWire;
use crate::live::{self, Reloader};
use crate::options::Options;

/// Between two lines of the log that say what is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks at whether there is an engine.
const WATCH: Duration = Duration::from_millis(250);

/// Runs the daemon until it is told to stop.
pub(crate) async fn run(options: Options, shutdown: Shutdown) -> Result<()> {
    let mut hangups = Hangups::catch()?;
    let token = admin::token(&options)?;
    let door = admin::door(&options, token.is_some()).await?;
    let connector = ByWire(options.wire);
    let specs = live::engines(&options)?.iter().map(|entry| entry.spec(&connector)).collect::<Result<_, _>>();
    let mut config = RouterConfig::new(specs.map_err(|error| Refused(error.message))?);
    config.connector = Arc::new(connector);
    config.admin_token = token;
    config.rules = options.rules.clone().map(|rules| rules.0).unwrap_or_default();
    config.thresholds = live::thresholds(&options);
    config.thresholds.check().map_err(|error| Refused(error.message))?;
    config.pattern = options.pattern.clone();
    config.placement = options.placement;
    config.index_bytes = usize::try_from(options.index_bytes.num_bytes()).unwrap_or(usize::MAX);
    config.request_timeout = options.request_timeout_seconds;
    config.step_timeout = options.step_timeout_seconds;
    config.max_in_flight = options.max_in_flight as usize;
    config.relay = options.relay;
    config.context_migration = options.context_migration;
    config.max_queued = options.max_queued as usize;
    config.codec = codec(&options).await?;
    config.scripts = scripts(&options)?;
    let limits = Limits { concurrent_runs: options.script_runs as usize, ..Limits::default() };
    config.loader = Some(Arc::new(ScriptLoader::new(limits)));
    config.profile = profile(&options)?;
    let num_engines = config.engines.len();

    let (service, tasks) = RouterService::start(config).map_err(|error| Refused(error.to_string()))?;
    let health = Health::new();
    let server = HttpServer::bind(&options.listen, &options.daemon, health.clone(), shutdown.clone()).await?;
    let doors = service.clone();
    #[allow(clippy::result_large_err, reason = "the request is given back as it came")]
    let shortcut: Box<Shortcut> = Box::new(move |request, max| doors.shortcut(request, max));
    let admin_server = match &door {
        Door::Main => {
            server.install_with(service.http(), shortcut);
            None
        }
        Door::Nowhere => {
            server.install_with(service.client_http(), shortcut);
            warn!(
                "the admin API is off: {} can be reached from elsewhere; give --admin-listen",
                options.listen
            );
            None
        }
        Door::Own(address) => {
            server.install_with(service.client_http(), shortcut);
            // There is one port file, and it names the main address.
            let own = DaemonOptions { port_file: None, ..options.daemon.clone() };
            let own = HttpServer::bind(address, &own, health.clone(), shutdown.clone()).await?;
            own.install(service.admin_http());
            info!(address = %own.address(), "the admin API has an address of its own");
            Some(own)
        }
    };
    info!(address = %server.address(), num_engines, pattern = %service.patterns().current(), "routing");

    tokio::select! {
        () = keep_health(&service, options.min_engines as usize, &health) => {}
        () = reload(&service, &mut hangups) => {}
        () = shutdown.begun() => {}
    }
    health.draining();
    service.drain();
    server.finished().await;
    if let Some(server) = admin_server {
        server.finished().await;
    }
    // Streams that the drain cut off have put their aborts into the queue by now.
    tasks.stop().await;
    info!("stopped");
    Ok(())
}

/// Reads the options again whenever a SIGHUP asks for it. Never returns.
async fn reload(service: &RouterService, hangups: &mut Hangups) {
    let mut reloader = Reloader::new();
    loop {
        hangups.next().await;
        reloader.reload(service);
    }
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

fn profile(options: &Options) -> Result<Option<Arc<Profile>>> {
    let Some(path) = &options.profile else { return Ok(None) };
    let json = std::fs::read(path).with_context(|| format!("profile: cannot read {}", path.display()))?;
    let profile =
        Profile::from_json(&json).with_context(|| format!("profile: {} cannot be used", path.display()))?;
    Ok(Some(Arc::new(profile)))
}

async fn codec(options: &Options) -> Result<Option<Arc<dyn PromptCodec>>> {
    let Some(path) = options.tokenizer.clone() else { return Ok(None) };
    let shown = path.display().to_string();
    let load = move || TextBundle::load(&path, "any").and_then(|bundle| bundle.build());
    let model = spawn_blocking(load).await.context("loading the tokenizer panicked")?;
    let model = model.with_context(|| format!("the tokenizer {shown} cannot be used"))?;
    Ok(Some(Arc::new(model)))
}
