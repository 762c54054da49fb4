//! Engines and a router, on free loopback ports.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::{Daemon, binary_dir, http};

/// What to start.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// Engines to start.
    pub num_engines: usize,
    /// `--model` of every engine.
    pub model: String,
    /// More arguments for every engine.
    pub engine_args: Vec<String>,
    /// More arguments for the router.
    pub router_args: Vec<String>,
    /// Where the binaries are; found by itself if not given.
    pub binaries: Option<PathBuf>,
    /// How long loading may take.
    pub ready_timeout: Duration,
}

impl ClusterOptions {
    /// Engines with the toy executor.
    #[must_use]
    pub fn toy(num_engines: usize) -> Self {
        Self::model(num_engines, "toy")
    }

    /// Engines with the given model.
    #[must_use]
    pub fn model(num_engines: usize, model: &str) -> Self {
        Self {
            num_engines,
            model: model.to_owned(),
            engine_args: Vec::new(),
            router_args: Vec::new(),
            binaries: None,
            ready_timeout: Duration::from_secs(120),
        }
    }

    /// Adds arguments for every engine.
    #[must_use]
    pub fn engine_args<const N: usize>(mut self, args: [&str; N]) -> Self {
        self.engine_args.extend(args.map(str::to_owned));
        self
    }

    /// Fixes the wire between router and engines: `rest` or `grpc`.
    #[must_use]
    pub fn wire(self, wire: &str) -> Self {
        self.router_args(["--wire", wire])
    }

    /// Adds arguments for the router.
    #[must_use]
    pub fn router_args<const N: usize>(mut self, args: [&str; N]) -> Self {
        self.router_args.extend(args.map(str::to_owned));
        self
    }
}

/// Running engines and their router. Dropping it stops the router first.
#[derive(Debug)]
pub struct Cluster {
    router: Daemon,
    engines: Vec<Daemon>,
}

impl Cluster {
    /// Starts everything and waits until it is ready.
    ///
    /// # Errors
    /// If a process does not come up; its log is in the message.
    pub fn start(options: &ClusterOptions) -> Result<Self> {
        let binaries = options.binaries.clone().map_or_else(binary_dir, Ok)?;
        let mut engines = Vec::new();
        for index in 0..options.num_engines {
            let mut args = vec![
                "--model".into(),
                options.model.clone(),
                "--engine-id".into(),
                format!("engine-{index}"),
            ];
            args.extend(options.engine_args.iter().cloned());
            engines.push(Daemon::spawn(
                &format!("engine-{index}"),
                &binaries.join("engined"),
                &args,
                Duration::from_secs(20),
            )?);
        }
        for engine in &mut engines {
            engine.wait_ready(options.ready_timeout)?;
        }
        let mut args = Vec::new();
        for engine in &engines {
            args.extend(["--engine".to_owned(), engine.url().to_owned()]);
        }
        args.extend(options.router_args.iter().cloned());
        let mut router = Daemon::spawn("router", &binaries.join("routerd"), &args, Duration::from_secs(20))?;
        router.wait_ready(Duration::from_secs(30))?;
        Ok(Self { router, engines })
    }

    /// Returns the router.
    #[must_use]
    pub fn router(&self) -> &Daemon {
        &self.router
    }

    /// Returns the router, to stop or kill it.
    pub fn router_mut(&mut self) -> &mut Daemon {
        &mut self.router
    }

    /// Returns the engines in the order of their start.
    #[must_use]
    pub fn engines(&self) -> &[Daemon] {
        &self.engines
    }

    /// Returns the engines, to stop or kill one.
    pub fn engines_mut(&mut self) -> &mut [Daemon] {
        &mut self.engines
    }

    /// Returns one engine's `/microserving/state`.
    ///
    /// # Errors
    /// If the engine does not answer.
    pub fn engine_state(&self, index: usize) -> Result<Value> {
        http::get(&format!("{}/microserving/state", self.engines[index].url()))?.json()
    }

    /// Waits until every engine that still runs is idle: no live sequence, and free + cached pages are all there are.
    ///
    /// # Errors
    /// If that does not happen within `timeout`; the last states are in the message.
    pub fn wait_idle(&mut self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            let mut busy = None;
            for engine in &mut self.engines {
                if !engine.is_running()? {
                    continue;
                }
                let state: Value = http::get(&format!("{}/microserving/state", engine.url()))?.json()?;
                if !is_idle(&state).with_context(|| format!("state of {}", engine.name()))? {
                    busy = Some(format!("{} is not idle: {state}", engine.name()));
                }
            }
            match busy {
                None => return Ok(()),
                Some(reason) if Instant::now() > deadline => anyhow::bail!("after {timeout:?} {reason}"),
                Some(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

/// Reads a state: nothing lives, and pages balance.
fn is_idle(state: &Value) -> Result<bool> {
    let count = |pointer: &str| {
        state
            .pointer(pointer)
            .and_then(Value::as_u64)
            .with_context(|| format!("no number {pointer} in {state}"))
    };
    let mut live = 0;
    for field in ["/waiting", "/running", "/receiving", "/sending"] {
        live += count(field)?;
    }
    let held = count("/pages/owned")? + count("/pages/reserved")? + count("/pages/quarantined")?;
    let kept = count("/pages/free")? + count("/pages/cached")?;
    Ok(live == 0 && held == 0 && kept == count("/pages/total")?)
}
