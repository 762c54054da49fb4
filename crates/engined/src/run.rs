//! From options to a running engine, and back to nothing.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use microserving_daemon::{ByteSize, Health, HttpServer, Refused, Shutdown};
use microserving_engine::{Engine, EngineConfig, EngineHandle, EngineThread, Entropy};
use microserving_executor::{Executor, ExecutorInfo};
use microserving_protocol::{ClusterKey, Incarnation, KvGeometry};
use microserving_server::{EngineService, ModelText, ServerConfig};
use microserving_transport::KvTransport;
use microserving_transport_pgas::WorldWatch;
use microserving_worker::{LostWorker, Worker};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tracing::{info, warn};

use crate::device::Chosen;
use crate::fronted::{Keeper, Up, Workers};
use crate::model::{self, LoadedModel};
use crate::options::{Options, WorkerPlace};
use crate::transport::Opened;
use crate::{calibrate, profile, transport};

/// The KV cache's size where nothing is said.
const USUAL_KV_BYTES: ByteSize = ByteSize::new(1 << 30);
/// Full-length sequences beyond which more pages are of little use.
const USUAL_SEQUENCES: u64 = 32;
/// How often the engine's thread is looked after.
const WATCH: Duration = Duration::from_millis(250);

/// Runs the daemon until it is told to stop.
pub(crate) async fn run(options: Options, shutdown: Shutdown) -> Result<()> {
    let half = check(&options)?;
    if options.calibrate {
        let Half::Within(device) = half else { unreachable!("it was refused") };
        return run_calibration(options, device).await;
    }
    let health = Health::new();
    let server = HttpServer::bind(&options.listen, &options.daemon, health.clone(), shutdown.clone()).await?;
    let started = tokio::select! {
        started = start(&options, half, &health) => started?,
        // A load cannot be interrupted; the process ends without it.
        () = shutdown.begun() => return Ok(()),
    };
    server.install(started.routes);
    health.ready_with(started.transport);
    info!(address = %server.address(), engine_id = %started.engine.info().engine_id, "ready");

    let mut lost = None;
    tokio::select! {
        () = shutdown.begun() => {}
        () = died(&started.engine) => {
            health.failed("the engine's thread has ended");
            bail!("the engine's thread has ended; see the log");
        }
        reason = world_lost(started.world.as_ref()) => {
            // What runs here is computed here to its end; only a new process can be part of a new world.
            health.failed(format!("the world is lost: {reason}"));
            lost = Some(reason);
            shutdown.begin();
        }
    }
    health.draining();
    tokio::select! {
        // The engine refuses what is new from now on; what runs ends by itself, or when the drain is over.
        () = server.finished() => {}
        () = refuse_new_work(&started.engine) => {}
    }
    drop(started.engine);
    if let Some(keeper) = &started.keeper {
        keeper.stop();
    }
    let thread = started.thread;
    let is_whole =
        spawn_blocking(move || thread.join()).await.context("the engine's thread cannot be joined")?;
    if let Some(keeper) = started.keeper {
        keeper.finish().await;
    }
    if !is_whole {
        bail!("the engine's thread has panicked; see the log");
    }
    if let Some(reason) = lost {
        bail!("the world is lost: {reason}; start all of its engines anew");
    }
    info!("stopped");
    Ok(())
}

struct Started {
    engine: EngineHandle,
    thread: EngineThread,
    routes: axum::Router,
    /// What is to be told of the transport.
    transport: String,
    world: Option<WorldWatch>,
    keeper: Option<Keeper>,
}

/// The parts that an engine is made of.
struct Parts {
    executor: Box<dyn Executor>,
    text: ModelText,
    num_pages: u32,
    transport: Box<dyn KvTransport>,
    report: String,
    world: Option<WorldWatch>,
    /// Where the next device half comes from, and who tells that this one is gone.
    workers: Option<(Workers, LostWorker, watch::Sender<bool>)>,
}

/// Loads and opens everything here.
async fn parts_within(options: &Options, engine_id: &str, device: Chosen, health: &Health) -> Result<Parts> {
    let (for_load, progress) = (options.clone(), health.clone());
    let model = spawn_blocking(move || model::load(&for_load, &device, &|text| progress.starting(text)))
        .await
        .context("loading panicked")??;
    let LoadedModel { executor, text } = model;
    let info = executor.info();
    let num_pages = num_pages(options, info)?;
    health.starting("opening and testing the transport");
    let (for_transport, id) = (options.clone(), engine_id.to_owned());
    let region_bytes = KvGeometry { layout: info.layout.clone(), num_pages }.region_bytes();
    let opened = spawn_blocking(move || transport::open(&for_transport, &id, region_bytes));
    let Opened { transport, report, world } = opened.await.context("opening the transport panicked")??;
    Ok(Parts { executor, text, num_pages, transport, report, world, workers: None })
}

/// Loads the text side, and waits for a worker that has the rest.
async fn parts_apart(options: &Options, mut workers: Workers, health: &Health) -> Result<Parts> {
    let (for_load, told) = (options.clone(), health.clone());
    // Dropped with this future, it says that no worker is wanted any more.
    let (stop, stopped) = watch::channel(false);
    let stop = StopOnDrop(Some(stop));
    let work = move || -> Result<_> {
        let text = model::load_text(&for_load, &|text| told.starting(text))?;
        let up = workers.next(&told, &stopped)?;
        Ok((text, workers, up.context("no worker is wanted any more")?))
    };
    let (text, workers, up) = spawn_blocking(work).await.context("waiting for a worker panicked")??;
    let Up { worker, report } = up;
    let Worker { executor, transport, lost, .. } = worker;
    let (executor, transport) = (Box::new(executor), Box::new(transport));
    let text =
        text.named(&executor.info().model).with_context(|| format!("cannot load {}", options.model))?;
    let num_pages = num_pages(options, executor.info())?;
    let stop = stop.keep();
    let workers = stop.map(|stop| (workers, lost, stop));
    Ok(Parts { executor, text, num_pages, transport, report, world: None, workers })
}

struct StopOnDrop(Option<watch::Sender<bool>>);

impl StopOnDrop {
    fn keep(mut self) -> Option<watch::Sender<bool>> {
        self.0.take()
    }
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        if let Some(stop) = &self.0 {
            // Whoever waited may have come to an end by itself.
            let _ = stop.send(true);
        }
    }
}

async fn start(options: &Options, half: Half, health: &Health) -> Result<Started> {
    let engine_id = engine_id(options)?;
    let parts = match half {
        Half::Within(device) => parts_within(options, &engine_id, device, health).await?,
        Half::Apart(workers) => parts_apart(options, *workers, health).await?,
    };
    let Parts { executor, text, num_pages, transport, report, world, workers } = parts;
    let info = executor.info().clone();
    info!("{report}");

    health.starting("starting the engine");
    let profile = profile::load(options, &info)?;
    let engine = build(options, engine_id, num_pages, executor, transport)?;
    let (engine, thread) = EngineHandle::spawn(engine).context("the engine's thread cannot start")?;
    let keeper = workers
        .map(|(workers, lost, stop)| Keeper::start(workers, lost, engine.clone(), health.clone(), stop));

    let mut server = ServerConfig::new(served_name(options, &info));
    server.default_timeout = Some(options.timeout_seconds).filter(|timeout| !timeout.is_zero());
    server.profile = profile.map(|profile| profile.to_json().into());
    server.max_body_bytes = usize::try_from(options.daemon.max_body_bytes.num_bytes()).unwrap_or(usize::MAX);
    info!(
        model = server.served_model_name,
        num_pages = engine.info().num_pages,
        page_size = info.layout.page_size,
        layout = format!("{:016x}", info.layout.fingerprint()),
        numeric_mode = info.layout.numeric_mode,
        transport = engine.info().transport,
        "engine started"
    );
    server.grpc = !options.no_grpc;
    let service = EngineService::new(engine.clone(), text, server);
    let beside =
        if options.no_grpc { axum::Router::new() } else { microserving_grpc_server::routes(&service) };
    let routes = service.router(beside);
    Ok(Started { engine, thread, routes, transport: report, world, keeper })
}

/// Makes the engine that the options ask for.
fn build(
    options: &Options,
    engine_id: String,
    num_pages: u32,
    executor: Box<dyn Executor>,
    transport: Box<dyn KvTransport>,
) -> Result<Engine> {
    let mut config = EngineConfig::new(engine_id, num_pages);
    config.max_batch_tokens = options.max_batch_tokens;
    config.max_step = model::max_step(options);
    config.max_running = options.max_running;
    config.max_waiting = options.max_waiting;
    config.lease = options.lease_seconds;
    let entropy = entropy(options)?;
    Engine::new(config, executor, transport, entropy).context("the engine cannot start")
}

/// Measures the engine instead of serving it.
async fn run_calibration(options: Options, device: Chosen) -> Result<()> {
    let work = move || {
        let LoadedModel { executor, .. } = model::load(&options, &device, &|_| {})?;
        let info = executor.info().clone();
        let about = profile::about(&options, &info);
        let file = profile::file(&options, &info, &about)?;
        let engine_id = engine_id(&options)?;
        let num_pages = num_pages(&options, &info)?;
        let region_bytes = KvGeometry { layout: info.layout.clone(), num_pages }.region_bytes();
        let transport = transport::open(&options, &engine_id, region_bytes)?.transport;
        let link = transport.name();
        let engine = build(&options, engine_id, num_pages, executor, transport)?;
        info!(model = info.model, file = %file.display(), "measuring, for about 20 seconds");
        let profile = calibrate::measure(engine, about, link, options.checksum)?;
        profile::save(&profile, &file)?;
        let text = format!("{}profile: {}\n", calibrate::describe(&profile), file.display());
        std::io::stdout().write_all(text.as_bytes()).context("cannot print the profile")
    };
    spawn_blocking(work).await.context("the calibration panicked")?
}

/// The device half of the engine that is to be.
enum Half {
    /// In this process, on this device.
    Within(Chosen),
    /// In others.
    Apart(Box<Workers>),
}

/// Refuses what cannot be, before anything is bound or loaded; returns what is to compute.
fn check(options: &Options) -> Result<Half> {
    if options.num_pages.is_some() && options.kv_bytes.is_some() {
        return Err(Refused("num_pages and kv_bytes exclude each other: give one".into()).into());
    }
    if options.cluster_key.is_some() && options.cluster_key_file.is_some() {
        return Err(Refused("cluster_key and cluster_key_file exclude each other: give one".into()).into());
    }
    transport::check(options)?;
    if options.worker == WorkerPlace::Within {
        return model::check(options).map(Half::Within);
    }
    if options.calibrate {
        return Err(Refused("calibrate: it measures one process; leave worker out".into()).into());
    }
    model::check_source(options)?;
    Ok(Half::Apart(Box::new(Workers::new(options)?)))
}

fn served_name(options: &Options, info: &ExecutorInfo) -> String {
    options.served_model_name.clone().unwrap_or_else(|| info.model.clone())
}

fn engine_id(options: &Options) -> Result<String> {
    match &options.engine_id {
        Some(id) => Ok(id.clone()),
        None => Ok(format!("engine-{:08x}", random()? >> 32)),
    }
}

/// Returns the pages of the KV cache, as options and layout say.
pub(crate) fn num_pages(options: &Options, info: &ExecutorInfo) -> Result<u32> {
    if let Some(num_pages) = options.num_pages {
        return Ok(num_pages.get());
    }
    let layout = &info.layout;
    let page_bytes = layout.page_bytes() as u64 * u64::from(layout.num_layers);
    let asked = options.kv_bytes.unwrap_or(USUAL_KV_BYTES).num_bytes();
    let mut pages = asked / page_bytes;
    if options.kv_bytes.is_none() {
        pages = pages.min(USUAL_SEQUENCES * u64::from(layout.pages_for(info.max_context)));
    }
    if pages == 0 {
        let size = ByteSize::new(page_bytes);
        return Err(Refused(format!("kv_bytes: {asked} bytes hold no page; one page takes {size}")).into());
    }
    let whole = u64::from(layout.pages_for(info.max_context));
    if pages < whole {
        warn!(
            pages,
            max_context = info.max_context,
            "the KV cache holds less than one sequence of full length; longer requests will be refused"
        );
    }
    u32::try_from(pages).context("kv_bytes: more pages than can be numbered")
}

fn entropy(options: &Options) -> Result<Entropy> {
    let text = match (&options.cluster_key, &options.cluster_key_file) {
        (Some(key), _) => Some(key.clone()),
        (None, Some(path)) => Some(
            std::fs::read_to_string(path)
                .with_context(|| format!("cluster_key_file: cannot read {}", path.display()))?,
        ),
        (None, None) => None,
    };
    let cluster_key = match &text {
        Some(text) => {
            ClusterKey::from_text(text).map_err(|error| Refused(format!("cluster_key: {error}")))?
        }
        None => {
            let mut bytes = [0; 32];
            getrandom::fill(&mut bytes).context("the system has no random numbers")?;
            ClusterKey::from_random(bytes)
        }
    };
    Ok(Entropy {
        incarnation: Incarnation(random()?),
        cluster_key,
        key_is_shared: text.is_some(),
        mint_seed: random()?,
    })
}

fn random() -> Result<u64> {
    getrandom::u64().context("the system has no random numbers")
}

/// Returns when the engine's thread is no more.
async fn died(engine: &EngineHandle) {
    while engine.is_alive() {
        tokio::time::sleep(WATCH).await;
    }
}

/// Returns why the transport's world is no more, once it is not.
async fn world_lost(world: Option<&WorldWatch>) -> String {
    loop {
        if let Some(reason) = world.and_then(WorldWatch::lost) {
            return reason;
        }
        tokio::time::sleep(WATCH).await;
    }
}

/// Tells the engine to take nothing new, and never returns: what is in flight decides when the daemon may end.
async fn refuse_new_work(engine: &EngineHandle) {
    if let Err(error) = engine.drain().await {
        warn!(%error, "the engine does not drain");
    }
    std::future::pending::<()>().await;
}
