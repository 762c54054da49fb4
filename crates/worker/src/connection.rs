//! The worker's way to its front.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use microserving_executor::Executor;
use microserving_transport::KvTransport;

use crate::hello::{
    FAILED, HELLO, JOIN, Order, PROGRESS, Ready, TURNED_AWAY, WELCOME, check_version, first_frame,
};
use crate::serve::{self, Ended};
use crate::wire::{Frames, Out};
use crate::{WorkerError, serve::WorldEnd};

/// Between two tries to find the front.
const RETRY: Duration = Duration::from_millis(50);

/// A worker's two streams to its front, and what that one has asked for.
#[derive(Debug)]
pub struct Connection {
    steps: Frames,
    transfers: Frames,
    order: Order,
}

impl Connection {
    /// Finds the front at its socket and hears what it wants. A front that is not there yet is waited for as long as `patience`; one that
    /// has a worker already lets others wait until it needs one.
    ///
    /// # Errors
    /// [`WorkerError::System`] if nobody is there in time, [`WorkerError::Version`] or [`WorkerError::Protocol`] if whoever is there is no
    /// front of this build.
    pub fn to_front(path: &Path, patience: Duration) -> Result<Self, WorkerError> {
        let mut steps = Frames::new(connect(path, patience)?);
        let system = WorkerError::system("speaking with the front");
        let greet =
            |frames: &Frames, kind, number| first_frame(kind, number).send(&mut frames.stream()).map(drop);
        greet(&steps, HELLO, std::process::id().into()).map_err(system)?;
        let (kind, mut body) = steps.next().map_err(WorkerError::system("hearing the front"))?;
        let (session, order) = match kind {
            WELCOME => Order::read(&mut body)?,
            TURNED_AWAY => {
                let theirs = body.u32().map_err(|error| WorkerError::protocol(error.0))?;
                check_version(theirs)?;
                return Err(WorkerError::protocol("it turns us away"));
            }
            kind => return Err(WorkerError::protocol(format!("frame {kind} comes first"))),
        };
        let transfers = Frames::new(connect(path, Duration::ZERO)?);
        greet(&transfers, JOIN, session).map_err(WorkerError::system("joining the front"))?;
        Ok(Self { steps, transfers, order })
    }

    /// Returns what the front wants.
    #[must_use]
    pub fn order(&self) -> &Order {
        &self.order
    }

    /// Tells the front what the start is at. A front that is gone is noticed when the worker is up.
    pub fn progress(&self, text: &str) {
        let mut out = Out::new(PROGRESS);
        out.text(text);
        let _ = out.send(&mut self.steps.stream());
    }

    /// Returns something to tell progress by, from anywhere.
    ///
    /// # Errors
    /// [`WorkerError::System`] if there are no more file descriptors.
    pub fn teller(&self) -> Result<impl Fn(&str) + Send + Sync + use<>, WorkerError> {
        let stream =
            self.steps.stream().try_clone().map_err(WorkerError::system("sharing the front's stream"))?;
        Ok(move |text: &str| {
            let mut out = Out::new(PROGRESS);
            out.text(text);
            let _ = out.send(&mut &stream);
        })
    }

    /// Tells the front that nothing comes of it: `is_refused` if another try would come to the same.
    pub fn fail(self, is_refused: bool, reason: &str) {
        let mut out = Out::new(FAILED);
        out.flag(is_refused).text(reason);
        let _ = out.send(&mut self.steps.stream());
        let _ = self.steps.stream().shutdown(Shutdown::Write);
    }

    /// Computes and transfers for the front until that ends, or the transport's world does. Returns which, after executor and
    /// transport are dropped.
    ///
    /// # Errors
    /// [`WorkerError::System`] if there is no thread to be had or the front is gone already; [`WorkerError::Protocol`] if it does not
    /// speak as it should.
    pub fn serve(
        self,
        executor: Box<dyn Executor>,
        transport: Box<dyn KvTransport>,
        report: &str,
        world_end: Option<WorldEnd>,
    ) -> Result<Ended, WorkerError> {
        let ready = Ready {
            info: executor.info().clone(),
            name: transport.name().to_owned(),
            address: transport.peer_address(),
            report: report.to_owned(),
        };
        ready
            .frame()
            .send(&mut self.steps.stream())
            .map_err(WorkerError::system("telling the front that we are ready"))?;
        serve::serve(self.steps, self.transfers, executor, transport, world_end)
    }
}

fn connect(path: &Path, patience: Duration) -> Result<UnixStream, WorkerError> {
    let mut waited = Duration::ZERO;
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(error) => {
                let may_come =
                    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
                if !may_come || waited >= patience {
                    return Err(WorkerError::system("finding the front")(error));
                }
            }
        }
        std::thread::sleep(RETRY);
        waited += RETRY;
    }
}
