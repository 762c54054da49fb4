//! A daemon as a child process.

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::http;

/// A running daemon; asked to stop when dropped, and killed if it does not within five seconds.
#[derive(Debug)]
pub struct Daemon {
    name: String,
    child: Child,
    url: String,
    /// What it was started by, to start it again; servers of other makes are not.
    command: Option<(PathBuf, Vec<String>)>,
    log: PathBuf,
    /// Holds the port file and the log; goes with the daemon.
    _dir: TempDir,
}

impl Daemon {
    /// Starts `binary` with `args` on a free loopback port and waits until it listens (not until it is ready).
    ///
    /// # Errors
    /// If it cannot be started, exits, or does not listen within `timeout`; the end of its log is in the message.
    pub fn spawn(name: &str, binary: &Path, args: &[String], timeout: Duration) -> Result<Self> {
        Self::spawn_at(name, binary, args, "127.0.0.1:0", timeout)
    }

    /// Kills the process and starts it again at the same address, and waits until it is ready.
    ///
    /// # Errors
    /// As [`Daemon::spawn`] and [`Daemon::wait_ready`], or if it was adopted.
    pub fn restart(&mut self, timeout: Duration) -> Result<()> {
        let (binary, args) = self.command.clone().context("a server of another make is not restarted")?;
        self.kill()?;
        let address = self.url.trim_start_matches("http://").to_owned();
        *self = Self::spawn_at(&self.name, &binary, &args, &address, timeout)?;
        self.wait_ready(timeout)
    }

    fn spawn_at(
        name: &str,
        binary: &Path,
        args: &[String],
        address: &str,
        timeout: Duration,
    ) -> Result<Self> {
        let dir =
            tempfile::Builder::new().prefix("microserving-").tempdir().context("no temporary folder")?;
        let port_file = dir.path().join("port");
        let log = dir.path().join("log");
        let sink = File::create(&log).context("cannot create the log")?;
        let child = Command::new(binary)
            .args(args)
            .args(["--listen", address, "--port-file"])
            .arg(&port_file)
            .stdin(Stdio::null())
            .stdout(sink.try_clone().context("cannot share the log")?)
            .stderr(sink)
            .spawn()
            .with_context(|| format!("cannot start {}", binary.display()))?;
        let mut daemon = Self {
            name: name.to_owned(),
            child,
            url: String::new(),
            command: Some((binary.to_owned(), args.to_vec())),
            log,
            _dir: dir,
        };
        let deadline = Instant::now() + timeout;
        loop {
            if let Ok(address) = std::fs::read_to_string(&port_file)
                && let Some(port) = address.trim().rsplit(':').next().filter(|port| !port.is_empty())
            {
                daemon.url = format!("http://127.0.0.1:{port}");
                return Ok(daemon);
            }
            if let Some(status) = daemon.child.try_wait()? {
                bail!("{name} ended at start ({status}):\n{}", daemon.log_tail());
            }
            if Instant::now() > deadline {
                bail!("{name} does not listen after {timeout:?}:\n{}", daemon.log_tail());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts a server of another make, which is told by `command` to listen on `port`, and waits until `is_up` says so of its URL.
    ///
    /// # Errors
    /// If it cannot be started, exits, or is not up within `timeout`; the end of its log is in the message.
    pub fn adopt(
        name: &str,
        mut command: Command,
        port: u16,
        is_up: impl Fn(&str) -> bool,
        timeout: Duration,
    ) -> Result<Self> {
        let dir =
            tempfile::Builder::new().prefix("microserving-").tempdir().context("no temporary folder")?;
        let log = dir.path().join("log");
        let sink = File::create(&log).context("cannot create the log")?;
        let child = command
            .stdin(Stdio::null())
            .stdout(sink.try_clone().context("cannot share the log")?)
            .stderr(sink)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let url = format!("http://127.0.0.1:{port}");
        let mut daemon = Self { name: name.to_owned(), child, url, command: None, log, _dir: dir };
        let deadline = Instant::now() + timeout;
        while !is_up(&daemon.url) {
            if let Some(status) = daemon.child.try_wait()? {
                bail!("{name} ended at start ({status}):\n{}", daemon.log_tail());
            }
            if Instant::now() > deadline {
                bail!("{name} is not up after {timeout:?}:\n{}", daemon.log_tail());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(daemon)
    }

    /// Waits until `/health/ready` answers 200.
    ///
    /// # Errors
    /// If the daemon ends or is not ready within `timeout`.
    pub fn wait_ready(&mut self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            if http::status(&format!("{}/health/ready", self.url)).is_ok_and(|status| status == 200) {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended before it was ready ({status}):\n{}", self.name, self.log_tail());
            }
            if Instant::now() > deadline {
                bail!("{} is not ready after {timeout:?}:\n{}", self.name, self.log_tail());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the name given at start.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the process; a process that has ended is not an error.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, signal);
        }
    }

    /// Kills the process at once and waits for it.
    ///
    /// # Errors
    /// If the process cannot be waited for.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context("cannot kill")?;
        self.child.wait().context("cannot wait")?;
        Ok(())
    }

    /// Asks the process to stop and waits for it; kills it after `timeout`.
    ///
    /// # Errors
    /// If the process cannot be waited for.
    pub fn stop(&mut self, timeout: Duration) -> Result<ExitStatus> {
        self.signal(Signal::CONT);
        self.signal(Signal::TERM);
        self.wait(timeout)
    }

    /// Waits for the process to end, which was asked to already: a second SIGTERM would end it before it has drained. Kills it after `timeout`.
    ///
    /// # Errors
    /// If the process cannot be waited for.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                self.child.kill().context("cannot kill")?;
                return self.child.wait().context("cannot wait");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Says whether the process still runs.
    ///
    /// # Errors
    /// If the process cannot be waited for.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Returns the resident memory of the process in bytes and the largest it ever was, as the kernel counts them.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn resident_bytes(&self) -> Result<(u64, u64)> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let field = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .and_then(|rest| rest.trim().trim_end_matches(" kB").trim().parse::<u64>().ok())
                .map(|kib| kib * 1024)
        };
        Ok((field("VmRSS:").context("no VmRSS")?, field("VmHWM:").context("no VmHWM")?))
    }

    /// Returns the CPU time that the process has used, its own and the kernel's for it, in steps of 10 ms.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn cpu_time(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        cpu_time(&stat).with_context(|| format!("unexpected process state: {stat}"))
    }

    /// Returns the last 4 KiB of what the daemon printed.
    #[must_use]
    pub fn log_tail(&self) -> String {
        let read = || -> std::io::Result<String> {
            let mut file = File::open(&self.log)?;
            let len = file.metadata()?.len();
            file.seek(std::io::SeekFrom::Start(len.saturating_sub(4096)))?;
            let mut tail = Vec::new();
            file.read_to_end(&mut tail)?;
            Ok(String::from_utf8_lossy(&tail).into_owned())
        };
        read().unwrap_or_default()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Nothing can be done about a failure here, and the child is a direct one: the kernel reaps it with us.
        let _ = self.stop(Duration::from_secs(5));
    }
}

/// Reads `utime` and `stime`, fields 14 and 15. Fields are counted from the last parenthesis, since the name before it may hold anything.
fn cpu_time(stat: &str) -> Option<Duration> {
    /// Of a tick as `/proc` shows it: 100 a second on every architecture that we run on, whatever the kernel's own clock.
    const TICK: Duration = Duration::from_millis(10);
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u32>().ok();
    Some(TICK * ticks()?.saturating_add(ticks()?))
}

/// Returns the folder that holds `engined` and `routerd`: `MICROSERVING_BIN_DIR`, or the one that this program was built into.
///
/// # Errors
/// If neither holds them.
pub fn binary_dir() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("MICROSERVING_BIN_DIR") {
        return Ok(PathBuf::from(dir));
    }
    let exe = std::env::current_exe().context("no path of the running program")?;
    exe.ancestors()
        .skip(1)
        .find(|dir| dir.join("engined").is_file() && dir.join("routerd").is_file())
        .map(Path::to_path_buf)
        .context("engined and routerd are not built: run `cargo build -p microserving-engined -p microserving-routerd`, or set MICROSERVING_BIN_DIR")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_behind_any_name() {
        let stat = "7 (a) 1 (b) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 9 9 20 0 4 0 5 1000 10";
        assert_eq!(cpu_time(stat), Some(Duration::from_secs(3)));
        assert_eq!(cpu_time("7 (a) S 1 7"), None);
        assert_eq!(cpu_time(""), None);
    }
}
