//! Knowing a peer's process well enough to be sure of its exit.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

/// A process that may write to us, held by a pidfd: readable once the process has exited, and never another process.
#[derive(Debug)]
pub struct Writer {
    pid: Pid,
    pidfd: OwnedFd,
}

impl Writer {
    /// Takes hold of the process that a peer runs in.
    ///
    /// The kernel tells the process that connected, or the peer itself where there is no connection (`pid`). Should it have exited and its number been given away since, the
    /// pidfd would be of a stranger: the start time that the peer stated must be that of the process held, looked up while
    /// the pidfd says that it lives.
    ///
    /// # Errors
    /// If the process cannot be seen (another PID namespace), has exited, or is another one.
    pub fn identify(pid: Pid, stated_start_time: u64) -> io::Result<Self> {
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let start_time = start_time_of(&pid.as_raw_nonzero().to_string())?;
        if has_exited(pidfd.as_fd())? || start_time != stated_start_time {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the process that connected is gone"));
        }
        Ok(Self { pid, pidfd })
    }

    /// Returns its number.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Returns what becomes readable at its exit.
    #[must_use]
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Says whether the process has exited: no instruction of it runs any more, in whatever thread.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn has_exited(&self) -> io::Result<bool> {
        has_exited(self.pidfd.as_fd())
    }
}

fn has_exited(pidfd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now))?;
    Ok(fds[0].revents().contains(PollFlags::IN))
}

/// Returns when this process started, to state it to a peer.
///
/// # Errors
/// If `/proc` is not there.
pub fn own_start_time() -> io::Result<u64> {
    start_time_of(&getpid().as_raw_nonzero().to_string())
}

/// Reads the start time, in ticks since boot: field 22 of `/proc/<pid>/stat`, counted behind the name, which may hold
/// anything.
fn start_time_of(pid: &str) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let behind_name = stat.rsplit_once(')').map(|(_, rest)| rest);
    behind_name
        .and_then(|rest| rest.split_whitespace().nth(19)?.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "/proc/<pid>/stat has no start time"))
}

/// Returns the memory that the host, and our control group if it is limited, can still give; nothing if it is not known.
#[must_use]
pub fn available_bytes() -> Option<u64> {
    let number = |path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let host = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    let group = number("/sys/fs/cgroup/memory.max")
        .map(|max| max.saturating_sub(number("/sys/fs/cgroup/memory.current").unwrap_or(0)));
    host.into_iter().chain(group).min()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_is_held_until_it_exits() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
        let start_time = start_time_of(&child.id().to_string()).unwrap();
        assert!(Writer::identify(pid, start_time + 1).is_err(), "a stranger with the same number");
        let writer = Writer::identify(pid, start_time).unwrap();
        assert_eq!(writer.pid(), child.id().cast_signed());
        assert!(!writer.has_exited().unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(writer.has_exited().unwrap());
        assert!(Writer::identify(pid, start_time).is_err());
    }

    #[test]
    fn we_are_who_we_say() {
        assert!(Writer::identify(getpid(), own_start_time().unwrap()).is_ok());
    }
}
