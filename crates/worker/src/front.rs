//! The front's door: a socket at which its worker finds it.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;

use crate::executor::RemoteExecutor;
use crate::hello::{FAILED, HELLO, JOIN, Order, PROGRESS, READY, Ready, TURNED_AWAY, VERSION, take_first};
use crate::link::Link;
use crate::lost::LostWorker;
use crate::transport::RemoteTransport;
use crate::wire::{Frames, Out};
use crate::{WorkerError, names};

/// How long whoever has come may take to say who it is.
const MANNERS: Duration = Duration::from_secs(5);
/// Between two looks at the door.
const LOOK: Duration = Duration::from_millis(10);

/// Where a front waits for its worker: a socket that this user alone may connect to. The file goes with the value.
#[derive(Debug)]
pub struct FrontSocket {
    listener: UnixListener,
    path: PathBuf,
}

/// A worker that is up.
#[derive(Debug)]
pub struct Worker {
    /// Computes in the worker.
    pub executor: RemoteExecutor,
    /// Transfers from and to the worker's pages. Dropping it ends the worker.
    pub transport: RemoteTransport,
    /// What the worker says of its transport.
    pub report: String,
    /// Its process.
    pub pid: u32,
    /// Tells of its end.
    pub lost: LostWorker,
}

impl FrontSocket {
    /// Opens the door. A socket that nobody listens at any more is replaced.
    ///
    /// # Errors
    /// [`WorkerError::Taken`] if something else is at `path`, or another front listens there; [`WorkerError::System`].
    pub fn bind(path: &Path) -> Result<Self, WorkerError> {
        let taken = |reason| WorkerError::Taken { path: path.display().to_string(), reason };
        match fs::symlink_metadata(path) {
            Ok(there) if !there.file_type().is_socket() => return Err(taken("there is something else")),
            Ok(_) if UnixStream::connect(path).is_ok() => return Err(taken("another front waits there")),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(WorkerError::system("looking at the socket's path")(error)),
        }
        // Made under another name, so that there is never a socket at the path that others may connect to.
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}", std::process::id()));
        let made = PathBuf::from(name);
        let bind = || {
            let listener = UnixListener::bind(&made)?;
            fs::set_permissions(&made, fs::Permissions::from_mode(0o600))?;
            listener.set_nonblocking(true)?;
            fs::rename(&made, path)?;
            Ok(listener)
        };
        let listener = bind().inspect_err(|_| drop(fs::remove_file(&made)));
        let listener = listener.map_err(WorkerError::system("opening the front's socket"))?;
        Ok(Self { listener, path: path.to_owned() })
    }

    /// Returns where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for a worker, has it do what `order` says, and hears from it how far it has come. Looks at `still` again and again while
    /// nobody has come, and returns `None` once that says no. Blocks.
    ///
    /// # Errors
    /// [`WorkerError::Refused`] or [`WorkerError::Failed`] with the worker's own words; else what went wrong between the two. Another
    /// worker may be waited for after any of them.
    pub fn accept(
        &self,
        order: &Order,
        mut still: impl FnMut() -> bool,
        mut progress: impl FnMut(&str),
    ) -> Result<Option<Worker>, WorkerError> {
        let Some(stream) = self.next(&mut still)? else { return Ok(None) };
        let mut steps = Frames::new(stream);
        let pid = greet(&mut steps, HELLO)?;
        let session = getrandom::u64()
            .map_err(|error| WorkerError::system("drawing a session's number")(io::Error::other(error)))?;
        order
            .welcome(session)
            .send(&mut steps.stream())
            .map_err(WorkerError::system("welcoming the worker"))?;
        let transfers = loop {
            let Some(stream) = self.next(&mut still)? else { return Ok(None) };
            let mut frames = Frames::new(stream);
            // Anybody else has come too early, and comes again.
            if greet(&mut frames, JOIN).is_ok_and(|number| number == session) {
                break frames;
            }
        };
        let ready = hear(&mut steps, &mut progress)?;
        let Ready { info, name, address, report } = ready;
        let lost = LostWorker::new();
        let name = names::keep(&name);
        let link = Link::start(transfers, name, lost.clone())?;
        Ok(Some(Worker {
            executor: RemoteExecutor::new(steps, info, lost.clone()),
            transport: RemoteTransport::new(link, address),
            report,
            pid: u32::try_from(pid).unwrap_or(0),
            lost,
        }))
    }

    /// Waits for a stream of this user's.
    fn next(&self, still: &mut dyn FnMut() -> bool) -> Result<Option<UnixStream>, WorkerError> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let peer = socket_peercred(&stream)
                        .map_err(|error| WorkerError::system("asking who has come")(error.into()))?;
                    if peer.uid != rustix::process::geteuid() {
                        tracing::warn!(uid = peer.uid.as_raw(), "a worker of another user was turned away");
                        continue;
                    }
                    stream
                        .set_nonblocking(false)
                        .map_err(WorkerError::system("setting up the worker's stream"))?;
                    return Ok(Some(stream));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !still() {
                        return Ok(None);
                    }
                    std::thread::sleep(LOOK);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(WorkerError::system("waiting for a worker")(error)),
            }
        }
    }
}

impl Drop for FrontSocket {
    fn drop(&mut self) {
        // If it cannot be removed, the next front finds it without a listener.
        let _ = fs::remove_file(&self.path);
    }
}

/// Hears who has come.
fn greet(frames: &mut Frames, expected: u8) -> Result<u64, WorkerError> {
    let system = |error| WorkerError::system("hearing who has come")(error);
    frames.stream().set_read_timeout(Some(MANNERS)).map_err(system)?;
    let (kind, mut body) = frames.next().map_err(system)?;
    let number = take_first(&mut body);
    if let Err(WorkerError::Version { .. }) = &number {
        let mut out = Out::new(TURNED_AWAY);
        out.u32(VERSION);
        // It goes either way.
        let _ = out.send(&mut frames.stream());
    }
    let number = number?;
    if kind != expected {
        return Err(WorkerError::protocol(format!("frame {kind} comes first")));
    }
    frames.stream().set_read_timeout(None).map_err(system)?;
    Ok(number)
}

/// Hears how the worker comes up.
fn hear(steps: &mut Frames, progress: &mut dyn FnMut(&str)) -> Result<Ready, WorkerError> {
    loop {
        let (kind, mut body) = steps.next().map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => WorkerError::Failed { reason: "its process ended".into() },
            _ => WorkerError::system("hearing how the worker comes up")(error),
        })?;
        let malformed = |error: crate::wire::Malformed| WorkerError::protocol(error.0);
        match kind {
            PROGRESS => progress(&body.text().map_err(malformed)?),
            READY => return Ready::read(&mut body).map_err(malformed),
            FAILED => {
                let (is_refused, reason) = (body.flag().map_err(malformed)?, body.text().map_err(malformed)?);
                return Err(match is_refused {
                    true => WorkerError::Refused { reason },
                    false => WorkerError::Failed { reason },
                });
            }
            kind => return Err(WorkerError::protocol(format!("frame {kind} comes while it starts"))),
        }
    }
}
