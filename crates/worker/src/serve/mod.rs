//! The worker at work: a thread that computes, one that transfers, and one that hears what is to be transferred.
//!
//! ```text
//!  steps ◀──▶ computing: Executor        blocks in a step; tells layers on the way
//!  transfers ──▶ hearing ──▶ transferring: KvTransport ──▶ transfers
//!                    └─ Admitted ──▶ whoever waits for it, on any thread of the transport
//! ```
//!
//! Computing and transferring are apart because the puts of a layer come while the next one is computed. Hearing and
//! transferring are apart because a transport may ask whom to admit from within a call, and the answer has to be heard then.

mod computing;
mod transferring;

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread;

use microserving_executor::Executor;
use microserving_protocol::KvMemory;
use microserving_transport::KvTransport;

use crate::WorkerError;
use crate::wire::Frames;

/// Returns why the transport's world has ended, once it has.
pub type WorldEnd = Box<dyn Fn() -> Option<String> + Send>;

/// Why a worker has nothing more to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Its front ended or let go of it.
    FrontLeft,
    /// The transport's world is no more; only a new process can be part of a new one.
    WorldLost(String),
    /// A thread of the worker has panicked; the log says why.
    Broken(&'static str),
}

/// The region, once the front has had it allocated: the executor is to compute in it.
type Region = Arc<OnceLock<Arc<dyn KvMemory>>>;

/// Says that a thread is over, also when it unwinds.
struct TellEnd {
    ended: Sender<Result<Ended, WorkerError>>,
    name: &'static str,
    told: bool,
}

impl TellEnd {
    fn tell(mut self, ended: Result<Ended, WorkerError>) {
        self.told = true;
        let _ = self.ended.send(ended);
    }
}

impl Drop for TellEnd {
    fn drop(&mut self) {
        if !self.told {
            let _ = self.ended.send(Ok(Ended::Broken(self.name)));
        }
    }
}

/// Works until the first of the threads ends, and then sees to it that all do.
pub(crate) fn serve(
    steps: Frames,
    transfers: Frames,
    executor: Box<dyn Executor>,
    transport: Box<dyn KvTransport>,
    world_end: Option<WorldEnd>,
) -> Result<Ended, WorkerError> {
    let share =
        |stream: &UnixStream| stream.try_clone().map_err(WorkerError::system("sharing the front's streams"));
    let streams = [share(steps.stream())?, share(transfers.stream())?];
    let writer = share(transfers.stream())?;
    let region = Region::default();
    let (ended, first) = channel();
    let end = |name| TellEnd { ended: ended.clone(), name, told: false };

    let (requests, inbox) = channel();
    let waiting = Arc::default();
    let desk = transferring::Desk::new(
        transport,
        writer,
        requests.clone(),
        Arc::clone(&waiting),
        Arc::clone(&region),
        world_end,
    );
    let (compute_end, transfer_end, hear_end) = (end("computing"), end("transferring"), end("hearing"));
    let spawn = |name: &str| thread::Builder::new().name(name.to_owned());
    let no_thread = || WorkerError::system("starting the worker's threads");
    let computing = spawn("compute")
        .spawn(move || compute_end.tell(computing::run(steps, executor, &region)))
        .map_err(no_thread())?;
    let transferring = spawn("transfer")
        .spawn(move || {
            let (transport, why) = desk.run(&inbox);
            transfer_end.tell(why);
            transport
        })
        .map_err(no_thread())?;
    let hearing = spawn("hear")
        .spawn(move || hear_end.tell(transferring::hear(transfers, &requests, &waiting)))
        .map_err(no_thread())?;

    let why = first.recv().unwrap_or(Ok(Ended::Broken("all")));
    for stream in &streams {
        // One that is closed already is as good.
        let _ = stream.shutdown(Shutdown::Both);
    }
    // The executor first: a step that is under way computes in the transport's memory.
    let _ = computing.join();
    let _ = hearing.join();
    drop(transferring.join());
    why
}
