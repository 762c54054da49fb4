//! Choosing and testing a transport.

use anyhow::{Context, Result};
use microserving_transport::{KvTransport, LoopbackHub};
use microserving_transport_shm::{ShmConfig, ShmTransport};
use tracing::warn;

use crate::options::TransportName;

/// Makes the transport that `name` asks for.
pub(crate) fn open(name: TransportName, checksum: bool, engine_id: &str) -> Result<Box<dyn KvTransport>> {
    match name {
        TransportName::Shm => shm(checksum).context("the transport shm cannot be used"),
        TransportName::Loopback => Ok(loopback(checksum, engine_id)),
        TransportName::Auto => match shm(checksum) {
            Ok(transport) => Ok(transport),
            Err(error) => {
                warn!(
                    error = format!("{error:#}"),
                    "no shared memory: KV can be exchanged within this process only"
                );
                Ok(loopback(checksum, engine_id))
            }
        },
    }
}

fn loopback(checksum: bool, engine_id: &str) -> Box<dyn KvTransport> {
    let hub = if checksum { LoopbackHub::with_checksums() } else { LoopbackHub::new() };
    Box::new(hub.transport(engine_id))
}

/// Makes a transport between the processes of this host.
pub(crate) fn shm(checksum: bool) -> Result<Box<dyn KvTransport>> {
    Ok(Box::new(ShmTransport::new(ShmConfig::default().with_checksum(checksum))?))
}
