//! The transport as its caller sees it.

use std::fmt;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory};
use microserving_transport::one_sided::{MAX_RUNS, Stopping};
use microserving_transport::{
    Admission, ChannelId, Claim, Grant, KvTransport, PeerAddress, PutRun, Telemetry, TransportError,
    TransportEvent, check_source_runs,
};

use crate::address::{Address, is_unspecified};
use crate::agent::{Agent, Part};
use crate::io::Io;
use crate::memory::Region;
use crate::nixl::Nixl;
use crate::reading::Reading;
use crate::shared::{Command, Shared};
use crate::{NAME, NixlConfig};

/// A [`KvTransport`] between processes that can reach each other over a network, or are on one host.
///
/// Dropping it ends its claims in order: what is being read from here is waited for, a second at most, receivers are told that nothing
/// follows, and its thread is joined.
pub struct NixlTransport {
    shared: Arc<Shared>,
    nixl: Nixl,
    address: Address,
    region: Option<Arc<Region>>,
    io: Option<JoinHandle<()>>,
}

impl fmt::Debug for NixlTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlTransport").field("listen", &self.address.listen).finish_non_exhaustive()
    }
}

impl NixlTransport {
    /// Loads NIXL, listens for senders, and starts the IO thread.
    ///
    /// # Errors
    /// [`TransportError::System`] if the library cannot be loaded (its source is a [`NotLoaded`](crate::NotLoaded)), or the system refuses
    /// the socket or the thread; [`TransportError::Misuse`] if the address to listen at is no place that a sender can connect to.
    pub fn new(config: NixlConfig) -> Result<Self, TransportError> {
        if is_unspecified(config.listen.ip()) {
            let ip = config.listen.ip();
            return Err(misuse(format!(
                "{ip} stands for all addresses of a host, and senders have to be told one: name the one that they reach"
            )));
        }
        let nixl = Nixl::load(config.library.as_deref()).map_err(system("load NIXL"))?;
        let listener = TcpListener::bind(config.listen).map_err(system("listen for senders"))?;
        listener.set_nonblocking(true).map_err(system("listen for senders"))?;
        let listen = listener.local_addr().map_err(system("listen for senders"))?;
        let address = Address::new(listen).map_err(system("draw a random name"))?;
        let reading = Reading::new(nixl.clone(), agent_name(&address));
        let shared = Arc::new(Shared::new(config).map_err(system("make an eventfd"))?);
        let io = Io::new(shared.clone(), address, listener, reading).map_err(system("watch the socket"))?;
        let io = std::thread::Builder::new().name("nixl-io".to_owned()).spawn(move || io.run());
        let io = Some(io.map_err(system("start a thread"))?);
        Ok(Self { shared, nixl, address, region: None, io })
    }

    /// Returns where senders connect.
    #[must_use]
    pub fn listens_at(&self) -> std::net::SocketAddr {
        self.address.listen
    }
}

fn agent_name(address: &Address) -> String {
    format!("microserving-{}", address.id_text())
}

impl Drop for NixlTransport {
    fn drop(&mut self) {
        let notices = self.shared.state().channels.stop_all(Stopping::Cancelled);
        self.shared.command(notices.into_iter().map(Command::Notice).chain([Command::ShutDown]));
        if self.io.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of the nixl transport panicked");
        }
    }
}

impl KvTransport for NixlTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn peer_address(&self) -> PeerAddress {
        self.address.encode()
    }

    fn allocate_region(&mut self, num_bytes: usize) -> Result<Arc<dyn KvMemory>, TransportError> {
        if self.region.is_some() {
            return Err(misuse("the region has been allocated already"));
        }
        let region = Arc::new(Region::allocate(num_bytes).map_err(system("allocate the KV region"))?);
        let agent = Agent::new(&self.nixl, &agent_name(&self.address), Part::Serves, region.clone());
        let agent = agent.map_err(system("register the KV region"))?;
        self.shared.state().book.set_region_bytes(num_bytes);
        self.shared.command([Command::Serve(Box::new(agent))]);
        self.region = Some(region.clone());
        Ok(region)
    }

    fn set_admission(&mut self, admission: Arc<dyn Admission>) {
        self.shared.state().admission = Some(admission);
    }

    fn set_waker(&mut self, waker: Arc<dyn Fn() + Send + Sync>) {
        self.shared.state().waker = Some(waker);
        // What came before there was anyone to wake.
        self.shared.wake_caller();
    }

    fn grant(&mut self, grant: Grant) -> Result<(), TransportError> {
        if grant.runs.len() > MAX_RUNS {
            return Err(misuse(format!("a grant may have {MAX_RUNS} runs, not {}", grant.runs.len())));
        }
        self.shared.state().book.grant(grant).map_err(misuse)?;
        self.shared.wake_caller();
        Ok(())
    }

    fn arrived_bytes(&self, generation: Generation) -> u64 {
        self.shared.state().book.arrived_bytes(generation)
    }

    fn revoke(&mut self, generation: Generation) {
        let writers = self.shared.state().book.revoke(generation);
        self.shared.command(writers.into_iter().map(|(_, writer)| Command::Stop(writer)));
        self.shared.wake_caller();
    }

    fn open(&mut self, claim: Claim) -> Result<ChannelId, TransportError> {
        let unreachable = |reason| TransportError::Unreachable { transport: NAME, reason };
        let address = Address::decode(&claim.peer).map_err(unreachable)?;
        if self.region.is_none() {
            return Err(misuse("there is no region to send from"));
        }
        let channel = self.shared.state().channels.open();
        let Claim { credential, range, .. } = claim;
        self.shared.command([Command::Open { channel, address, credential, range }]);
        Ok(channel)
    }

    fn put(&mut self, channel: ChannelId, runs: &[PutRun]) -> Result<(), TransportError> {
        check_source_runs(NAME, runs, self.region.as_ref().map_or(0, |region| region.num_bytes()))?;
        let max = self.shared.config.max_queued_runs;
        let queued = self.shared.state().channels.put(channel, runs, max);
        if queued.map_err(|error| misuse(error.to_string()))? {
            self.shared.command([Command::Work]);
        }
        Ok(())
    }

    fn finish(&mut self, channel: ChannelId) {
        let notice = self.shared.state().channels.finish(channel);
        self.shared.command(notice.map(Command::Notice));
    }

    fn cancel(&mut self, channel: ChannelId) {
        let notice = self.shared.state().channels.stop(channel, Stopping::Cancelled);
        self.shared.command(notice.map(Command::Notice));
    }

    fn poll(&mut self, _now: Duration, events: &mut Vec<TransportEvent>) {
        let state = &mut *self.shared.state();
        state.channels.drain_events(events);
        state.book.drain_events(events);
    }

    fn telemetry(&self) -> Telemetry {
        let mut telemetry = Telemetry::default();
        let state = self.shared.state();
        state.book.count_into(&mut telemetry);
        state.channels.count_into(&mut telemetry);
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
