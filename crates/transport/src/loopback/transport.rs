//! One peer's face of the hub.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory};

use super::channel::{Channel, Stopping};
use super::hub::LoopbackHub;
use super::memory::LoopbackMemory;
use super::state::{Kind, Peer, PeerId};
use crate::{
    Admission, ChannelId, Claim, Grant, KvTransport, PeerAddress, PutRun, Telemetry, TransportError,
    TransportEvent,
};

const NAME: &str = "loopback";

/// A peer of a [`LoopbackHub`]. Dropping it leaves in order: it stops writing and says so.
pub struct LoopbackTransport {
    hub: LoopbackHub,
    peer: PeerId,
}

impl fmt::Debug for LoopbackTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.hub.lock();
        let name = state.peer(self.peer).map(|peer| peer.name.as_str());
        f.debug_struct("LoopbackTransport")
            .field("hub", &self.hub.id())
            .field("name", &name)
            .finish_non_exhaustive()
    }
}

impl LoopbackTransport {
    pub(super) fn new(hub: LoopbackHub, peer: PeerId) -> Self {
        Self { hub, peer }
    }

    /// Runs `action` on this peer, if it has not been crashed.
    fn with<R>(
        &self,
        action: impl FnOnce(&mut Peer) -> Result<R, TransportError>,
    ) -> Result<R, TransportError> {
        match self.hub.lock().peer_mut(self.peer) {
            Some(peer) => action(peer),
            None => Err(misuse("this peer has crashed")),
        }
    }
}

impl Drop for LoopbackTransport {
    fn drop(&mut self) {
        self.hub.lock().leave(self.peer);
        self.hub.deliver();
    }
}

impl KvTransport for LoopbackTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn peer_address(&self) -> PeerAddress {
        let mut bytes = self.hub.id().to_le_bytes().to_vec();
        bytes.extend(self.peer.0.to_le_bytes());
        PeerAddress { transport: NAME.to_owned(), bytes }
    }

    fn allocate_region(&mut self, num_bytes: usize) -> Result<Arc<dyn KvMemory>, TransportError> {
        self.with(|peer| {
            if peer.region.is_some() {
                return Err(misuse("the region has been allocated already"));
            }
            let region = Arc::new(LoopbackMemory::new(num_bytes));
            peer.region = Some(region.clone());
            peer.book.set_region_bytes(num_bytes);
            Ok(region as Arc<dyn KvMemory>)
        })
    }

    fn set_admission(&mut self, admission: Arc<dyn Admission>) {
        if let Some(peer) = self.hub.lock().peer_mut(self.peer) {
            peer.admission = Some(admission);
        }
    }

    fn set_waker(&mut self, waker: Arc<dyn Fn() + Send + Sync>) {
        if let Some(peer) = self.hub.lock().peer_mut(self.peer) {
            peer.waker = Some(waker);
        }
    }

    fn grant(&mut self, grant: Grant) -> Result<(), TransportError> {
        self.with(|peer| peer.book.grant(grant).map_err(misuse))
    }

    fn arrived_bytes(&self, generation: Generation) -> u64 {
        self.hub.lock().peer(self.peer).map_or(0, |peer| peer.book.arrived_bytes(generation))
    }

    fn revoke(&mut self, generation: Generation) {
        {
            let mut state = self.hub.lock();
            let Some(peer) = state.peer_mut(self.peer) else { return };
            for (_, (writer, channel)) in peer.book.revoke(generation) {
                state.send(self.peer, writer, Kind::Stop { channel });
            }
        }
        self.hub.deliver();
    }

    fn open(&mut self, claim: Claim) -> Result<ChannelId, TransportError> {
        let remote = peer_of(&claim.peer, self.hub.id())?;
        let channel = {
            let mut state = self.hub.lock();
            let channel = ChannelId(state.next_id());
            let peer = state.peer_mut(self.peer).ok_or_else(|| misuse("this peer has crashed"))?;
            if peer.region.is_none() {
                return Err(misuse("there is no region to send from"));
            }
            peer.channels.insert(channel, Channel::new(remote));
            let kind = Kind::Open { channel, credential: claim.credential, range: claim.range };
            state.send(self.peer, remote, kind);
            channel
        };
        self.hub.deliver();
        Ok(channel)
    }

    fn put(&mut self, channel: ChannelId, runs: &[PutRun]) -> Result<(), TransportError> {
        {
            let mut state = self.hub.lock();
            let peer = state.peer_mut(self.peer).ok_or_else(|| misuse("this peer has crashed"))?;
            let region_bytes = peer.region.as_ref().map_or(0, |region| region.num_bytes());
            crate::check_source_runs(NAME, runs, region_bytes)?;
            let closed = peer.closed_unseen(channel);
            match peer.channels.get_mut(&channel) {
                Some(open) if open.finishing => return Err(misuse("the channel was finished")),
                Some(open) if open.stopping.is_some() => return Ok(()),
                Some(open) => open.pending.extend(runs.iter().filter(|run| run.num_bytes > 0)),
                None if closed => return Ok(()),
                None => return Err(misuse(format!("channel {} is not open", channel.0))),
            }
            state.pump(self.peer, channel);
        }
        self.hub.deliver();
        Ok(())
    }

    fn finish(&mut self, channel: ChannelId) {
        {
            let mut state = self.hub.lock();
            let open = state.peer_mut(self.peer).and_then(|peer| peer.channels.get_mut(&channel));
            let Some(open) = open else { return };
            open.finishing = true;
            state.pump(self.peer, channel);
        }
        self.hub.deliver();
    }

    fn cancel(&mut self, channel: ChannelId) {
        self.hub.lock().stop(self.peer, channel, Stopping::Cancelled);
        self.hub.deliver();
    }

    fn poll(&mut self, now: Duration, events: &mut Vec<TransportEvent>) {
        {
            let mut state = self.hub.lock();
            state.now = state.now.max(now);
        }
        self.hub.deliver();
        if let Some(peer) = self.hub.lock().peer_mut(self.peer) {
            peer.take_events(events);
        }
    }

    fn telemetry(&self) -> Telemetry {
        self.hub.lock().peer(self.peer).map(Peer::telemetry).unwrap_or_default()
    }
}

fn misuse(reason: impl Into<String>) -> TransportError {
    TransportError::Misuse { transport: NAME, reason: reason.into() }
}

/// Reads the peer out of an address of this hub.
fn peer_of(address: &PeerAddress, hub: u64) -> Result<PeerId, TransportError> {
    let unreachable = |reason: String| TransportError::Unreachable { transport: NAME, reason };
    if address.transport != NAME {
        return Err(unreachable(format!(
            "the peer is reached by `{}`; configure the same transport on both engines",
            address.transport
        )));
    }
    let Ok(bytes) = <[u8; 16]>::try_from(address.bytes.as_slice()) else {
        return Err(unreachable(format!("an address has 16 bytes, not {}", address.bytes.len())));
    };
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 of 16 bytes"));
    if word(0) != hub {
        return Err(unreachable(
            "the peer is of another hub or process; configure a transport between processes".into(),
        ));
    }
    Ok(PeerId(word(8)))
}
