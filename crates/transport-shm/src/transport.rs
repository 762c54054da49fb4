//! The transport as its caller sees it.

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory};
use microserving_transport::one_sided::{MAX_RUNS, Stopping, own_start_time};
use microserving_transport::{
    Admission, ChannelId, Claim, Grant, KvTransport, PeerAddress, PutRun, Telemetry, TransportError,
    TransportEvent, check_source_runs,
};

use crate::address::{Address, Place};
use crate::io::Io;
use crate::memory::Region;
use crate::shared::{Command, Shared};
use crate::{NAME, ShmConfig, link, writer};

/// A [`KvTransport`] between the processes of one user on one host.
///
/// Dropping it ends its claims in order: the slice being copied is finished, receivers are told that nothing follows, and
/// both threads are joined.
pub struct ShmTransport {
    shared: Arc<Shared>,
    address: Address,
    io: Option<JoinHandle<()>>,
    writer: Option<JoinHandle<()>>,
}

impl fmt::Debug for ShmTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShmTransport").field("socket", &self.address.socket_name()).finish_non_exhaustive()
    }
}

impl ShmTransport {
    /// Binds a socket that peers can find by [`peer_address`](KvTransport::peer_address), and starts the two threads.
    ///
    /// # Errors
    /// [`TransportError::System`] if the system refuses one of them, or `/proc` is not there.
    pub fn new(config: ShmConfig) -> Result<Self, TransportError> {
        let place = Place::here().map_err(system("find out where this process runs"))?;
        let address = Address::new(place).map_err(system("draw a random name"))?;
        let start_time = own_start_time().map_err(system("read the start time of this process"))?;
        let listener = link::listen(&address.socket_name()).map_err(system("bind the socket"))?;
        let shared = Arc::new(Shared::new(config).map_err(system("make an eventfd"))?);
        let io = Io::new(shared.clone(), listener, start_time).map_err(system("watch the socket"))?;
        let mut transport = Self { shared, address, io: None, writer: None };
        transport.io = Some(spawn("shm-io", move || io.run())?);
        let shared = transport.shared.clone();
        transport.writer = Some(spawn("shm-writer", move || writer::run(&shared))?);
        Ok(transport)
    }

    fn region_bytes(&self) -> usize {
        self.shared.region.get().map_or(0, |region| region.num_bytes())
    }
}

impl Drop for ShmTransport {
    fn drop(&mut self) {
        let notices = {
            let mut channels = self.shared.channels();
            channels.shut_down();
            channels.stop_all(Stopping::Cancelled)
        };
        self.shared.work.notify_one();
        self.shared.command(notices.into_iter().map(Command::Notice));
        // The writer first: what it says last must reach the IO thread before the order to end.
        for (thread, command) in [(self.writer.take(), None), (self.io.take(), Some(Command::ShutDown))] {
            self.shared.command(command);
            if thread.is_some_and(|thread| thread.join().is_err()) {
                tracing::error!("a thread of the shm transport panicked");
            }
        }
    }
}

impl KvTransport for ShmTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn peer_address(&self) -> PeerAddress {
        self.address.encode()
    }

    fn allocate_region(&mut self, num_bytes: usize) -> Result<Arc<dyn KvMemory>, TransportError> {
        if self.shared.region.get().is_some() {
            return Err(misuse("the region has been allocated already"));
        }
        let region = Arc::new(Region::allocate(num_bytes).map_err(system("allocate the KV region"))?);
        self.shared.receiving().book.set_region_bytes(num_bytes);
        let region = self.shared.region.get_or_init(|| region);
        Ok(region.clone())
    }

    fn set_admission(&mut self, admission: Arc<dyn Admission>) {
        self.shared.receiving().admission = Some(admission);
    }

    fn set_waker(&mut self, waker: Arc<dyn Fn() + Send + Sync>) {
        self.shared.set_waker(waker);
        // What came before there was anyone to wake.
        self.shared.wake_caller();
    }

    fn grant(&mut self, grant: Grant) -> Result<(), TransportError> {
        if grant.runs.len() > MAX_RUNS {
            return Err(misuse(format!("a grant may have {MAX_RUNS} runs, not {}", grant.runs.len())));
        }
        self.shared.receiving().book.grant(grant).map_err(misuse)?;
        self.shared.wake_caller();
        Ok(())
    }

    fn arrived_bytes(&self, generation: Generation) -> u64 {
        self.shared.receiving().arrived_bytes(generation)
    }

    fn revoke(&mut self, generation: Generation) {
        let writers = {
            let mut receiving = self.shared.receiving();
            receiving.arrived_bytes(generation);
            receiving.book.revoke(generation)
        };
        let stop =
            |writer: crate::shared::ClaimWriter| Command::Stop { conn: writer.conn, channel: writer.channel };
        self.shared.command(writers.into_iter().map(|(_, writer)| stop(writer)));
        self.shared.wake_caller();
    }

    fn open(&mut self, claim: Claim) -> Result<ChannelId, TransportError> {
        let unreachable = |reason| TransportError::Unreachable { transport: NAME, reason };
        let address = Address::reachable_from(&self.address.place, &claim.peer).map_err(unreachable)?;
        if self.shared.region.get().is_none() {
            return Err(misuse("there is no region to send from"));
        }
        let channel = self.shared.channels().open();
        let Claim { credential, range, .. } = claim;
        self.shared.command([Command::Open { channel, address, credential, range }]);
        Ok(channel)
    }

    fn put(&mut self, channel: ChannelId, runs: &[PutRun]) -> Result<(), TransportError> {
        check_source_runs(NAME, runs, self.region_bytes())?;
        let max = self.shared.config.max_queued_runs;
        let queued = self.shared.channels().put(channel, runs, max);
        if queued.map_err(|error| misuse(error.to_string()))? {
            self.shared.work.notify_one();
        }
        Ok(())
    }

    fn finish(&mut self, channel: ChannelId) {
        let notice = self.shared.channels().finish(channel);
        self.shared.command(notice.map(Command::Notice));
    }

    fn cancel(&mut self, channel: ChannelId) {
        let notice = self.shared.channels().stop(channel, Stopping::Cancelled);
        self.shared.command(notice.map(Command::Notice));
    }

    fn poll(&mut self, _now: Duration, events: &mut Vec<TransportEvent>) {
        self.shared.channels().drain_events(events);
        self.shared.receiving().book.drain_events(events);
    }

    fn telemetry(&self) -> Telemetry {
        let mut telemetry = Telemetry::default();
        self.shared.receiving().book.count_into(&mut telemetry);
        self.shared.channels().count_into(&mut telemetry);
        telemetry
    }
}

fn misuse(reason: impl Into<String>) -> TransportError {
    TransportError::Misuse { transport: NAME, reason: reason.into() }
}

/// Wraps what the system answered to `operation`.
fn system<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    operation: &'static str,
) -> impl FnOnce(E) -> TransportError {
    move |error| TransportError::System { transport: NAME, operation, source: error.into() }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, TransportError> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run).map_err(system("start a thread"))
}
