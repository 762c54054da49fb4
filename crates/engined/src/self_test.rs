//! Does the transport carry bytes at all? Asked before the engine says that it is ready.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use microserving_protocol::{Generation, KvRange};
use microserving_transport::{
    Admission, ByteRun, Claim, Grant, KvTransport, LoopbackHub, PutRun, Refusal, TransportEvent,
};
use tokio::time::Instant;

/// Bytes that are carried: a few pages of the operating system.
const NUM_BYTES: usize = 64 << 10;
/// Longer than any healthy machine takes, shorter than an operator's patience.
const PATIENCE: Duration = Duration::from_secs(5);
/// What the test's credential says.
const CREDENTIAL: &[u8] = b"self-test";

#[derive(Debug)]
struct OnlyOurs;

impl Admission for OnlyOurs {
    fn admit(&self, credential: &[u8]) -> Result<Generation, Refusal> {
        if credential == CREDENTIAL { Ok(Generation(1)) } else { Err(Refusal::BadCredential) }
    }
}

/// Sends bytes between two transports of the kind, made for the test alone, and compares them on arrival. Returns how many, and how long
/// they were under way.
///
/// # Errors
/// If they do not arrive whole and in time.
pub(crate) fn run(name: &str, checksum: bool) -> Result<(usize, Duration)> {
    carry_bytes(name, checksum, NUM_BYTES).map(|took| (NUM_BYTES, took))
}

/// As [`run`], between transports that the caller has made.
///
/// # Errors
/// As [`run`].
pub(crate) fn between(
    name: &str,
    sender: Box<dyn KvTransport>,
    receiver: Box<dyn KvTransport>,
) -> Result<(usize, Duration)> {
    let took = carry(sender, receiver, NUM_BYTES);
    let took = took.with_context(|| format!("the self-test of the transport {name} failed"))?;
    Ok((NUM_BYTES, took))
}

/// As [`run`], with so many bytes; returns how long they were under way.
///
/// # Errors
/// As [`run`].
pub(crate) fn carry_bytes(name: &str, checksum: bool, num_bytes: usize) -> Result<Duration> {
    let (sender, receiver): (Box<dyn KvTransport>, Box<dyn KvTransport>) = match name {
        "loopback" => {
            let hub = if checksum { LoopbackHub::with_checksums() } else { LoopbackHub::new() };
            (Box::new(hub.transport("sender")), Box::new(hub.transport("receiver")))
        }
        _ => (crate::transport::shm(checksum)?, crate::transport::shm(checksum)?),
    };
    carry(sender, receiver, num_bytes)
        .with_context(|| format!("the self-test of the transport {name} failed"))
}

fn carry(
    mut sender: Box<dyn KvTransport>,
    mut receiver: Box<dyn KvTransport>,
    num_bytes: usize,
) -> Result<Duration> {
    let from = sender.allocate_region(num_bytes)?;
    let to = receiver.allocate_region(num_bytes)?;
    receiver.set_admission(Arc::new(OnlyOurs));
    let sent: Vec<u8> = (0..num_bytes).map(|index| (index * 31 % 251) as u8).collect();
    from.write(0, &sent);
    let range = KvRange::new(0, 1).context("the range is ordered")?;
    let runs = vec![ByteRun { offset: 0, num_bytes }];
    receiver.grant(Grant { generation: Generation(1), range, token_bytes: num_bytes, runs })?;
    let claim = Claim { peer: receiver.peer_address(), credential: CREDENTIAL.to_vec(), range };
    let began = Instant::now();
    let channel = sender.open(claim)?;
    sender.put(channel, &[PutRun { local_offset: 0, remote_offset: 0, num_bytes }])?;
    sender.finish(channel);

    let (mut finished, mut complete) = (false, false);
    while !(finished && complete) {
        if began.elapsed() > PATIENCE {
            bail!("nothing arrived within {PATIENCE:?}");
        }
        let mut events = Vec::new();
        sender.poll(began.elapsed(), &mut events);
        receiver.poll(began.elapsed(), &mut events);
        for event in events {
            match event {
                TransportEvent::Finished { .. } => finished = true,
                TransportEvent::Complete { .. } => complete = true,
                TransportEvent::Closed { refusal, .. } => bail!("the claim was closed: {refusal:?}"),
                TransportEvent::Lost { corrupt, .. } => bail!("the bytes were lost (corrupt: {corrupt})"),
                TransportEvent::Opened { .. } | TransportEvent::Released { .. } => {}
            }
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    let took = began.elapsed();
    let mut arrived = vec![0; num_bytes];
    to.read(0, &mut arrived);
    if arrived != sent {
        bail!("what arrived is not what was sent");
    }
    Ok(took)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_transport_passes_its_own_test() {
        for checksum in [false, true] {
            run("loopback", checksum).unwrap();
            run("shm", checksum).unwrap();
        }
    }

    #[test]
    fn a_transport_that_carries_nothing_fails() {
        let hub = LoopbackHub::new();
        let (sender, receiver) = (hub.transport("sender"), hub.transport("receiver"));
        hub.crash("receiver");
        assert!(carry(Box::new(sender), Box::new(receiver), NUM_BYTES).is_err());
    }
}
