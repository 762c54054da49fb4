//! The front of an engine whose device half is another process: waits for workers, and starts them if it is to.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{ArgAction, CommandFactory};
use microserving_daemon::{Health, Refused, values};
use microserving_engine::{Device, EngineHandle};
use microserving_worker::{FrontSocket, LostWorker, Order, Worker, WorkerError};
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::Instant;
use tracing::{error, info, warn};

use crate::options::{Options, WorkerPlace};
use crate::worker::SUBCOMMAND;

/// Options that are the front's alone: what it serves, and what no other process is to know.
const OURS: [&str; 8] = [
    "calibrate",
    "cluster_key",
    "cluster_key_file",
    "listen",
    "port_file",
    "profile",
    "served_model_name",
    "worker",
];
/// Between the end of a worker that did not last and the next one; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A worker that lived so long was up to its work.
const LASTED: Duration = Duration::from_secs(60);
/// How long a worker that has been let go of may take to leave its world in order.
const LEAVE_WITHIN: Duration = Duration::from_secs(15);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// Says to all who wait for workers that none is wanted any more.
pub(crate) type Stop = watch::Receiver<bool>;

/// Where workers come from.
#[derive(Debug)]
pub(crate) struct Workers {
    socket: FrontSocket,
    order: Order,
    source: Source,
    pause: Duration,
    /// When the last one came up.
    since: Option<Instant>,
}

#[derive(Debug)]
enum Source {
    /// We start them.
    Ours(Box<Spawned>),
    /// Somebody starts them, and they find us.
    Others,
}

#[derive(Debug)]
struct Spawned {
    child: Option<Child>,
    /// The child has been part of an engine, and ends by itself when it is let go of.
    is_up: bool,
    log: [OsString; 4],
    /// Goes with us, after the socket in it.
    _folder: PrivateFolder,
}

/// A worker that is part of an engine, or is to be.
#[derive(Debug)]
pub(crate) struct Up {
    pub(crate) worker: Worker,
    /// What is to be told of it.
    pub(crate) report: String,
}

impl Workers {
    /// Opens the door, and refuses what cannot be before anything is loaded.
    pub(crate) fn new(options: &Options) -> Result<Self> {
        let arguments: Vec<OsString> = std::env::args_os().collect();
        let order = order_of(&arguments)?;
        let (socket, source) = match &options.worker {
            WorkerPlace::Within => bail!("the device is in this process"),
            WorkerPlace::At(path) => (FrontSocket::bind(path).map_err(refuse)?, Source::Others),
            WorkerPlace::Spawned => {
                let folder = PrivateFolder::new()?;
                let socket = FrontSocket::bind(&folder.0.join("front.sock")).map_err(refuse)?;
                let format = if options.daemon.log_format == microserving_daemon::LogFormat::Json {
                    "json"
                } else {
                    "text"
                };
                let log = ["--log", &options.daemon.log, "--log-format", format].map(OsString::from);
                (socket, Source::Ours(Box::new(Spawned { child: None, is_up: false, log, _folder: folder })))
            }
        };
        Ok(Self { socket, order, source, pause: FIRST_PAUSE, since: None })
    }

    /// Waits for the next worker; `None` once `stop` says so. Blocks.
    ///
    /// # Errors
    /// If there was none yet and the first one does not come up: what it says would be said by the next, too. Later ones are waited
    /// for until they do.
    pub(crate) fn next(&mut self, health: &Health, stop: &Stop) -> Result<Option<Up>> {
        loop {
            if self.since.is_some() && !self.pause_between(stop) {
                return Ok(None);
            }
            match self.try_next(health, stop) {
                Ok(Some(worker)) => {
                    self.since = Some(Instant::now());
                    info!(pid = worker.pid, "the worker is up");
                    let report = format!("{}; worker {}", worker.report, worker.pid);
                    return Ok(Some(Up { worker, report }));
                }
                Ok(None) => return Ok(None),
                Err(error) if self.since.is_none() && matches!(self.source, Source::Ours(_)) => {
                    return Err(error);
                }
                Err(error) => {
                    warn!("no worker: {error:#}");
                    health.waiting(format!("no worker: {error:#}"));
                }
            }
        }
    }

    /// Lets some time pass after a worker that did not last. Says whether another is still wanted.
    fn pause_between(&mut self, stop: &Stop) -> bool {
        if self.since.is_some_and(|since| since.elapsed() >= LASTED) {
            self.pause = FIRST_PAUSE;
        }
        let over = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        while Instant::now() < over && !*stop.borrow() {
            std::thread::sleep(LOOK);
        }
        !*stop.borrow()
    }

    fn try_next(&mut self, health: &Health, stop: &Stop) -> Result<Option<Worker>> {
        let path = self.socket.path().to_owned();
        match &mut self.source {
            Source::Ours(spawned) => {
                health.waiting("starting the worker");
                spawned.start(&path)?;
            }
            Source::Others => {
                info!(path = %path.display(), "waiting for a worker");
                health.waiting(format!("waiting for a worker at {}", path.display()));
            }
        }
        let source = &mut self.source;
        let mut ended = None;
        let still = || {
            if let Source::Ours(spawned) = source {
                ended = spawned.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            }
            ended.is_none() && !*stop.borrow()
        };
        let accepted = self.socket.accept(&self.order, still, |text| health.waiting(text));
        match accepted {
            Ok(Some(worker)) => {
                if let Source::Ours(spawned) = &mut self.source {
                    spawned.is_up = true;
                }
                Ok(Some(worker))
            }
            Ok(None) => match ended {
                Some(status) => bail!("the worker has ended ({status}); see the log"),
                None => Ok(None),
            },
            Err(WorkerError::Refused { reason }) => Err(Refused(reason).into()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Spawned {
    /// Starts a worker, and sees to it that there is no other.
    fn start(&mut self, path: &Path) -> Result<()> {
        self.end(Duration::from_secs(1));
        self.is_up = false;
        let program = std::env::current_exe().context("the path of this program is not known")?;
        let child = Command::new(program)
            .arg(SUBCOMMAND)
            .arg("--front")
            .arg(path)
            .args(&self.log)
            .stdin(Stdio::null())
            // A terminal's Ctrl-C is for the front, which lets its requests finish.
            .process_group(0)
            .spawn()
            .context("the worker cannot be started")?;
        info!(pid = child.id(), "worker started");
        self.child = Some(child);
        Ok(())
    }

    /// Waits for the worker's end, and helps it along when the time is over.
    fn end(&mut self, patience: Duration) {
        let Some(mut child) = self.child.take() else { return };
        let over = Instant::now() + patience;
        while Instant::now() < over {
            if !matches!(child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(LOOK);
        }
        warn!(pid = child.id(), "the worker does not end; it is killed");
        // One that is gone meanwhile is as good.
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Drop for Spawned {
    fn drop(&mut self) {
        // Its streams are closed by now, and it leaves its world in order. One that is still loading would notice late.
        self.end(if self.is_up { LEAVE_WITHIN } else { Duration::ZERO });
    }
}

/// Keeps an engine's device half alive.
#[derive(Debug)]
pub(crate) struct Keeper {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Keeper {
    /// Watches over a worker that is part of `engine` from now on.
    pub(crate) fn start(
        workers: Workers,
        lost: LostWorker,
        engine: EngineHandle,
        health: Health,
        stop: watch::Sender<bool>,
    ) -> Self {
        let stopped = stop.subscribe();
        Self { stop, task: tokio::spawn(keep(workers, lost, engine, health, stopped)) }
    }

    /// Says that the engine is about to end, and its worker with it.
    pub(crate) fn stop(&self) {
        // The task may have ended.
        let _ = self.stop.send(true);
    }

    /// Waits for the worker to leave. To be called when the engine that it is part of is no more.
    pub(crate) async fn finish(self) {
        self.stop();
        if let Err(error) = self.task.await {
            error!(%error, "whoever looked after the worker has panicked");
        }
    }
}

async fn keep(
    mut workers: Workers,
    mut lost: LostWorker,
    engine: EngineHandle,
    health: Health,
    mut stop: Stop,
) {
    loop {
        let reason = tokio::select! {
            reason = lost.wait() => reason,
            _ = stop.wait_for(|stopped| *stopped) => break,
        };
        if *stop.borrow() {
            break;
        }
        warn!(reason, "the worker is gone");
        health.waiting(format!("the worker is gone: {reason}"));
        let num_pages = engine.info().num_pages;
        let (told, stopped) = (health.clone(), stop.clone());
        let work = spawn_blocking(move || {
            let device =
                workers.next(&told, &stopped).and_then(|up| up.map(|up| join(up, num_pages)).transpose());
            (workers, device)
        });
        let device = match work.await {
            Ok((back, device)) => {
                workers = back;
                device
            }
            Err(error) => {
                error!(%error, "waiting for a worker has panicked");
                health.failed("whoever looks after the worker has panicked");
                return;
            }
        };
        match device {
            Ok(None) => break,
            Ok(Some((device, next, report))) => match engine.replace_device(device).await {
                Ok(()) => {
                    info!("{report}");
                    health.ready_with(report);
                    lost = next;
                }
                // It was dropped, so its end is what comes next.
                Err(error) => {
                    error!(%error, "the new worker does not fit");
                    lost = next;
                }
            },
            Err(error) => {
                error!("the new worker cannot be used: {error:#}");
                health.waiting(format!("the new worker cannot be used: {error:#}"));
            }
        }
    }
    // A worker of ours is waited for, which may take a while.
    let _ = spawn_blocking(move || drop(workers)).await;
}

fn join(up: Up, num_pages: u32) -> Result<(Device, LostWorker, String)> {
    let Up { worker, report } = up;
    let Worker { executor, transport, lost, .. } = worker;
    let device = Device::join(Box::new(executor), Box::new(transport), num_pages)?;
    Ok((device, lost, report))
}

fn refuse(error: WorkerError) -> anyhow::Error {
    match error {
        WorkerError::Taken { .. } => Refused(format!("worker: {error}")).into(),
        other => anyhow::Error::from(other).context("worker: the socket cannot be made"),
    }
}

/// Makes the order for a worker of what holds here: from the command line, the environment and the file.
pub(crate) fn order_of(arguments: &[OsString]) -> Result<Order> {
    let in_force = values::<Options>(arguments.iter().cloned())?;
    let command = Options::command();
    let mut told = Vec::new();
    for (key, values) in in_force {
        if OURS.contains(&key.as_str()) {
            continue;
        }
        let flag = key.replace('_', "-");
        let is_switch = command.get_arguments().any(|arg| {
            arg.get_long() == Some(flag.as_str()) && matches!(arg.get_action(), ArgAction::SetTrue)
        });
        for value in values {
            if is_switch && value != "true" {
                continue;
            }
            told.push(OsString::from(format!("--{flag}")));
            if !is_switch {
                told.push(value);
            }
        }
    }
    let folder = std::env::current_dir().context("the folder that this process works in is not known")?;
    Ok(Order { folder, arguments: told })
}

/// A folder of this user's alone, which goes with the value.
#[derive(Debug)]
struct PrivateFolder(PathBuf);

impl PrivateFolder {
    fn new() -> Result<Self> {
        let name =
            format!("microserving-{:016x}", getrandom::u64().context("the system has no random numbers")?);
        let path = std::env::temp_dir().join(name);
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot make the folder {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        // What is left over is empty, and in a folder that is cleaned.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
