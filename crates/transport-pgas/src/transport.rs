//! The transport as its caller sees it.

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory, PeId};
use microserving_transport::one_sided::{MAX_RUNS, Stopping};
use microserving_transport::{
    Admission, ChannelId, Claim, Grant, KvTransport, PeerAddress, PutRun, Telemetry, TransportError,
    TransportEvent, check_source_runs,
};

use crate::PgasConfig;
use crate::address::Address;
use crate::clock::now;
use crate::pgas::{Pgas, PgasError, SymmetricMemory};
use crate::progress::Progress;
use crate::shared::{ClaimWriter, Command, Shared};
use crate::world::{FirstTransfer, Region, World};

/// A [`KvTransport`] between the elements of one world.
///
/// Dropping it ends its claims in order: the slice being put is finished, receivers are told that nothing follows, and the progress
/// thread is joined. The world itself goes on without it, unless [`PgasConfig::leave_within`] says that it is left.
pub struct PgasTransport {
    name: &'static str,
    shared: Arc<Shared>,
    address: Address,
    num_pes: u32,
    first_transfer: FirstTransfer,
    /// Taken before the world is left.
    memory: Option<Arc<dyn SymmetricMemory>>,
    region: Option<Arc<dyn KvMemory>>,
    progress: Option<JoinHandle<()>>,
}

impl fmt::Debug for PgasTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgasTransport")
            .field("name", &self.name)
            .field("pe", &self.address.pe)
            .field("num_pes", &self.num_pes)
            .finish_non_exhaustive()
    }
}

impl PgasTransport {
    /// Forms the world with all other elements, and starts the progress thread. Blocks until all of them have come here.
    ///
    /// # Errors
    /// [`PgasError`] if there is too little symmetric memory, the elements are not of one build, or the first transfer did not arrive.
    pub fn form(pgas: Box<dyn Pgas>, config: PgasConfig) -> Result<Self, PgasError> {
        let name = pgas.name();
        let world = World::form(pgas, config.region_bytes, config.checksum)?;
        let (address, num_pes) = (Address { world: world.id, pe: world.pgas.pe() }, world.pgas.num_pes());
        let (first_transfer, memory) = (world.first_transfer, Arc::clone(&world.region));
        let shared = Arc::new(Shared::new(config));
        let progress = Progress::new(world, Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("pgas".into()).spawn(move || progress.run());
        let thread = thread
            .map_err(|e| PgasError::World { name, reason: format!("no thread can be started: {e}") })?;
        Ok(Self {
            name,
            shared,
            address,
            num_pes,
            first_transfer,
            memory: Some(memory),
            region: None,
            progress: Some(thread),
        })
    }

    /// Returns which element of the world this is: what `recv_rank` says of it.
    #[must_use]
    pub fn pe(&self) -> PeId {
        self.address.pe
    }

    /// Returns how another element of the world is reached.
    #[must_use]
    pub fn address_of(&self, pe: PeId) -> PeerAddress {
        Address { pe, ..self.address }.encode(self.name)
    }

    /// Returns how the first transfer went, in which every element sent to the next.
    #[must_use]
    pub fn first_transfer(&self) -> FirstTransfer {
        self.first_transfer
    }

    /// Returns what tells whether the world is still whole.
    #[must_use]
    pub fn watch(&self) -> WorldWatch {
        WorldWatch(Arc::clone(&self.shared))
    }

    fn misuse(&self, reason: impl Into<String>) -> TransportError {
        TransportError::Misuse { transport: self.name, reason: reason.into() }
    }
}

/// Tells whether a world is still whole.
#[derive(Clone, Debug)]
pub struct WorldWatch(Arc<Shared>);

impl WorldWatch {
    /// Returns why the world is lost, if it is. Nothing can be sent in it any more, and nothing mends it: all of its processes have to
    /// start anew.
    #[must_use]
    pub fn lost(&self) -> Option<String> {
        self.0.lost()
    }
}

impl Drop for PgasTransport {
    fn drop(&mut self) {
        let notices = {
            let mut channels = self.shared.channels();
            channels.shut_down();
            channels.stop_all(Stopping::Cancelled)
        };
        (self.memory, self.region) = (None, None);
        self.shared.command(notices.into_iter().map(Command::Notice));
        let Some(progress) = self.progress.take() else { return };
        // Leaving a world waits for its other elements, in the end within the library: one that is gone by then would be waited for forever.
        let patience = self.shared.config.leave_within.map(|patience| patience * 2);
        let begin = now();
        while patience.is_some_and(|patience| now().saturating_sub(begin) < patience)
            && !progress.is_finished()
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        if patience.is_some() && !progress.is_finished() {
            tracing::warn!("the world is not left in order: other elements of it did not come to leave it");
        } else if progress.join().is_err() {
            tracing::error!("the progress thread of the transport {} panicked", self.name);
        }
    }
}

impl KvTransport for PgasTransport {
    fn name(&self) -> &'static str {
        self.name
    }

    fn peer_address(&self) -> PeerAddress {
        self.address.encode(self.name)
    }

    fn rank_of(&self, peer: &PeerAddress) -> Option<PeId> {
        Address::decode(self.name, peer).ok().map(|address| address.pe)
    }

    /// Hands out the region that was allocated when the world was formed.
    fn allocate_region(&mut self, num_bytes: usize) -> Result<Arc<dyn KvMemory>, TransportError> {
        if self.region.is_some() {
            return Err(self.misuse("the region has been allocated already"));
        }
        let memory = self.memory.take_if(|memory| num_bytes <= memory.num_bytes());
        let memory = memory.ok_or_else(|| {
            self.misuse(format!(
                "a region of {num_bytes} bytes is asked for, and the world was formed for a smaller one"
            ))
        })?;
        let region: Arc<dyn KvMemory> = Arc::new(Region::new(memory, num_bytes));
        self.shared.receiving().book.set_region_bytes(num_bytes);
        self.region = Some(Arc::clone(&region));
        Ok(region)
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
            return Err(self.misuse(format!("a grant may have {MAX_RUNS} runs, not {}", grant.runs.len())));
        }
        let granted = self.shared.receiving().book.grant(grant);
        granted.map_err(|reason| self.misuse(reason))?;
        self.shared.wake_caller();
        Ok(())
    }

    fn arrived_bytes(&self, generation: Generation) -> u64 {
        self.shared.receiving().book.arrived_bytes(generation)
    }

    fn revoke(&mut self, generation: Generation) {
        let writers = self.shared.receiving().book.revoke(generation);
        self.shared.command(writers.into_iter().map(|(_, writer): (_, ClaimWriter)| Command::Stop(writer)));
        self.shared.wake_caller();
    }

    fn open(&mut self, claim: Claim) -> Result<ChannelId, TransportError> {
        let address = Address::decode(self.name, &claim.peer).and_then(|address| {
            address.check_reachable(self.address.world, self.num_pes)?;
            Ok(address)
        });
        let address =
            address.map_err(|reason| TransportError::Unreachable { transport: self.name, reason })?;
        if self.region.is_none() {
            return Err(self.misuse("there is no region to send from"));
        }
        let channel = self.shared.channels().open();
        let Claim { credential, range, .. } = claim;
        self.shared.command([Command::Open { channel, pe: address.pe, credential, range }]);
        Ok(channel)
    }

    fn put(&mut self, channel: ChannelId, runs: &[PutRun]) -> Result<(), TransportError> {
        check_source_runs(self.name, runs, self.region.as_ref().map_or(0, |region| region.num_bytes()))?;
        let max = self.shared.config.max_queued_runs;
        let queued = self.shared.channels().put(channel, runs, max);
        if queued.map_err(|error| self.misuse(error.to_string()))? {
            self.shared.command([]);
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
