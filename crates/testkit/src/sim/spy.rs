//! A transport that lets the checks look at the memory it allocates.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory};
use microserving_transport::{
    Admission, ChannelId, Claim, Grant, KvTransport, LoopbackTransport, PeerAddress, PutRun, Telemetry,
    TransportError, TransportEvent,
};

/// Where the region is found once it has been allocated.
#[derive(Clone, Debug, Default)]
pub(crate) struct Window(Arc<Mutex<Option<Arc<dyn KvMemory>>>>);

impl Window {
    pub(crate) fn memory(&self) -> Option<Arc<dyn KvMemory>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Passes everything on.
#[derive(Debug)]
pub(crate) struct SpyTransport {
    inner: LoopbackTransport,
    window: Window,
}

impl SpyTransport {
    pub(crate) fn new(inner: LoopbackTransport, window: Window) -> Self {
        Self { inner, window }
    }
}

impl KvTransport for SpyTransport {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn peer_address(&self) -> PeerAddress {
        self.inner.peer_address()
    }

    fn allocate_region(&mut self, num_bytes: usize) -> Result<Arc<dyn KvMemory>, TransportError> {
        let memory = self.inner.allocate_region(num_bytes)?;
        *self.window.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&memory));
        Ok(memory)
    }

    fn set_admission(&mut self, admission: Arc<dyn Admission>) {
        self.inner.set_admission(admission);
    }

    fn set_waker(&mut self, waker: Arc<dyn Fn() + Send + Sync>) {
        self.inner.set_waker(waker);
    }

    fn grant(&mut self, grant: Grant) -> Result<(), TransportError> {
        self.inner.grant(grant)
    }

    fn arrived_bytes(&self, generation: Generation) -> u64 {
        self.inner.arrived_bytes(generation)
    }

    fn revoke(&mut self, generation: Generation) {
        self.inner.revoke(generation);
    }

    fn open(&mut self, claim: Claim) -> Result<ChannelId, TransportError> {
        self.inner.open(claim)
    }

    fn put(&mut self, channel: ChannelId, runs: &[PutRun]) -> Result<(), TransportError> {
        self.inner.put(channel, runs)
    }

    fn finish(&mut self, channel: ChannelId) {
        self.inner.finish(channel);
    }

    fn cancel(&mut self, channel: ChannelId) {
        self.inner.cancel(channel);
    }

    fn poll(&mut self, now: Duration, events: &mut Vec<TransportEvent>) {
        self.inner.poll(now, events);
    }

    fn telemetry(&self) -> Telemetry {
        self.inner.telemetry()
    }
}
