//! Engines that a launcher starts together, as the elements of one OpenSHMEM world.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::{Daemon, binary_dir, http};

/// Returns a launcher of worlds with so much symmetric memory an element, to be told what to start: `-np 1 PROGRAM ARGS : -np 1 …`.
#[must_use]
pub fn launcher(heap_bytes: u64) -> Command {
    let mut command = Command::new("oshrun");
    // The component `uct` crashes at the end of every program in Open MPI 4.1.
    // With recovery, the launcher leaves the others to themselves when one dies: they end what runs.
    command.args(["--enable-recovery", "--oversubscribe", "--mca", "btl", "^uct"]);
    command.args(["-x", "SHMEM_SYMMETRIC_HEAP_SIZE"]);
    command.env("SHMEM_SYMMETRIC_HEAP_SIZE", heap_bytes.to_string());
    // Containers' only user.
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    command
}

/// A running world and a router for it. The launcher is asked to stop when it is dropped, and killed if it does not.
#[derive(Debug)]
pub struct World {
    router: Daemon,
    launcher: Child,
    urls: Vec<String>,
    /// Holds the port files and the log.
    dir: TempDir,
}

impl World {
    /// Says whether the launcher is installed.
    #[must_use]
    pub fn can_start() -> bool {
        Command::new("oshrun").arg("--version").output().is_ok_and(|output| output.status.success())
    }

    /// Starts an engine for each list of arguments, in one world of so much symmetric memory each, and a router that knows their ranks.
    ///
    /// # Errors
    /// If a process does not come up; the log is in the message.
    pub fn start(
        binaries: Option<PathBuf>,
        engines: &[Vec<String>],
        heap_bytes: u64,
        router_args: &[&str],
        timeout: Duration,
    ) -> Result<Self> {
        let binaries = binaries.map_or_else(binary_dir, Ok)?;
        let dir = tempfile::Builder::new()
            .prefix("microserving-world-")
            .tempdir()
            .context("no temporary folder")?;
        let sink = File::create(dir.path().join("log")).context("cannot create the log")?;
        let mut command = launcher(heap_bytes);
        for (rank, args) in engines.iter().enumerate() {
            if rank > 0 {
                command.arg(":");
            }
            command.args(["-np", "1"]).arg(binaries.join("engined")).args(args);
            command.args([
                "--engine-id",
                &format!("engine-{rank}"),
                "--listen",
                "127.0.0.1:0",
                "--port-file",
            ]);
            command.arg(dir.path().join(format!("port-{rank}")));
        }
        let launcher = command
            .stdin(Stdio::null())
            .stdout(sink.try_clone().context("cannot share the log")?)
            .stderr(sink)
            .spawn()
            .context("cannot start oshrun")?;
        let mut starting = Starting { launcher: Some(launcher), dir: Some(dir) };
        let deadline = Instant::now() + timeout;
        let urls = (0..engines.len()).map(|rank| starting.url(rank, deadline)).collect::<Result<Vec<_>>>()?;
        for url in &urls {
            starting.wait_ready(url, deadline)?;
        }
        let mut args: Vec<String> = router_args.iter().map(|&arg| arg.to_owned()).collect();
        for (rank, url) in urls.iter().enumerate() {
            args.extend(["--engine".to_owned(), format!("{url}#recv_rank={rank}")]);
        }
        let mut router = Daemon::spawn("router", &binaries.join("routerd"), &args, Duration::from_secs(20))?;
        router.wait_ready(Duration::from_secs(30))?;
        let (launcher, dir) = starting.finish().context("the launcher is gone")?;
        Ok(Self { router, launcher, urls, dir })
    }

    /// Returns the router.
    #[must_use]
    pub fn router(&self) -> &Daemon {
        &self.router
    }

    /// Returns the engines' addresses, in the order of their ranks.
    #[must_use]
    pub fn engines(&self) -> &[String] {
        &self.urls
    }

    /// Sends a signal to one engine's process.
    ///
    /// # Errors
    /// If the launcher has no such process.
    pub fn signal_engine(&self, rank: usize, signal: Signal) -> Result<()> {
        let process = self.engine_process(rank).with_context(|| format!("there is no engine {rank}"))?;
        Ok(kill_process(process, signal)?)
    }

    /// Finds an engine among the launcher's children: the port file's path is in its arguments.
    fn engine_process(&self, rank: usize) -> Option<Pid> {
        let port_file = self.dir.path().join(format!("port-{rank}")).display().to_string();
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.launcher.id())).ok()?;
        let children = threads.flatten().flat_map(|thread| {
            let children = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            children.split_whitespace().filter_map(|pid| pid.parse::<i32>().ok()).collect::<Vec<_>>()
        });
        let is_it = |pid: &i32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).any(|argument| argument == port_file.as_bytes())
        };
        children.into_iter().find(is_it).and_then(Pid::from_raw)
    }

    /// Asks all engines to stop and waits for the launcher.
    ///
    /// # Errors
    /// If it cannot be waited for, or has to be killed.
    pub fn stop(&mut self, timeout: Duration) -> Result<ExitStatus> {
        // The launcher asked to stop would not let them leave their world in order.
        for rank in 0..self.urls.len() {
            // One that is gone needs no signal.
            let _ = self.signal_engine(rank, Signal::TERM);
        }
        self.wait(timeout)
    }

    /// Waits for the launcher to end.
    ///
    /// # Errors
    /// If it does not within `timeout`, and has to be killed.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.launcher.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                self.launcher.kill().context("cannot kill the launcher")?;
                self.launcher.wait().context("cannot wait for the launcher")?;
                bail!("the launcher did not end within {timeout:?}:\n{}", self.log());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns what the engines and the launcher printed.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Nothing can be done about a failure here.
        let _ = self.stop(Duration::from_secs(10));
    }
}

fn signal(child: &Child, signal: Signal) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// A launcher whose engines are coming up; ended if they do not.
struct Starting {
    launcher: Option<Child>,
    dir: Option<TempDir>,
}

impl Starting {
    fn url(&mut self, rank: usize, deadline: Instant) -> Result<String> {
        loop {
            let file = self.dir.as_ref().map(|dir| dir.path().join(format!("port-{rank}")));
            if let Some(Ok(address)) = file.map(std::fs::read_to_string)
                && let Some(port) = address.trim().rsplit(':').next().filter(|port| !port.is_empty())
            {
                return Ok(format!("http://127.0.0.1:{port}"));
            }
            self.check(&format!("engine {rank} does not listen"), deadline)?;
        }
    }

    fn wait_ready(&mut self, url: &str, deadline: Instant) -> Result<()> {
        while !http::status(&format!("{url}/health/ready")).is_ok_and(|status| status == 200) {
            self.check("an engine is not ready", deadline)?;
        }
        Ok(())
    }

    /// Fails if the launcher has ended or time is over; sleeps a moment otherwise.
    fn check(&mut self, what: &str, deadline: Instant) -> Result<()> {
        let ended = self.launcher.as_mut().map(Child::try_wait).transpose()?.flatten();
        if ended.is_some() || Instant::now() > deadline {
            let log = self.dir.as_ref().map(|dir| std::fs::read_to_string(dir.path().join("log")));
            bail!("{what} ({ended:?}):\n{}", log.and_then(Result::ok).unwrap_or_default());
        }
        std::thread::sleep(Duration::from_millis(10));
        Ok(())
    }

    fn finish(mut self) -> Option<(Child, TempDir)> {
        Some((self.launcher.take()?, self.dir.take()?))
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(launcher) = &mut self.launcher {
            signal(launcher, Signal::TERM);
            for _ in 0..500 {
                if !matches!(launcher.try_wait(), Ok(None)) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = launcher.kill();
            let _ = launcher.wait();
        }
    }
}
