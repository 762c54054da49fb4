//! How a grant ends early: nothing may be reported released while a write can still land.

use super::rig::{Factory, REGION_BYTES, Rig, TOKEN_BYTES, range};
use crate::{ChannelId, Refusal, TransportEvent};
use microserving_protocol::Generation;

fn released(generation: Generation, fenced: bool) -> TransportEvent {
    TransportEvent::Released { generation, fenced }
}

fn lost(generation: Generation, num_tokens: u32) -> TransportEvent {
    TransportEvent::Lost { generation, range: range(0, num_tokens), corrupt: false }
}

fn closed(channel: ChannelId, refusal: Option<Refusal>) -> TransportEvent {
    TransportEvent::Closed { channel, refusal }
}

/// A claim of `[0, 64)` at the start of the region, half of it written.
fn half_written(rig: &mut Rig) -> (Generation, ChannelId) {
    let generation = rig.grant(0, 64);
    let channel = rig.open(0, generation, 0, 64);
    rig.put(0, channel, 0, 0, 32 * TOKEN_BYTES);
    rig.drive_until("half has arrived", |rig| {
        rig.receiver.transport.arrived_bytes(generation) == 32 * TOKEN_BYTES as u64
    });
    (generation, channel)
}

/// Revoking what nobody writes, or what nobody knows, is answered at once; the grant is gone.
pub fn an_idle_grant_is_released_at_once(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 1);
    let generation = rig.grant(0, 64);
    let unknown = Generation(1 << 40);
    for generation in [generation, unknown] {
        rig.receiver.transport.revoke(generation);
        rig.until_received(&released(generation, false));
    }
    let channel = rig.open(0, generation, 0, 64);
    rig.put(0, channel, 0, 0, 64 * TOKEN_BYTES);
    rig.until_sent(0, &closed(channel, Some(Refusal::Stale)));
    rig.barrier(0);
    rig.assert_untouched(0, REGION_BYTES / 2);
    rig.assert_received(generation, &[released(generation, false)]);
    assert_eq!(rig.receiver.transport.arrived_bytes(generation), 0);
}

/// A revoke stops the writer first and is answered after: from `Released` on not a byte changes.
pub fn a_revoke_stops_the_writer(factory: &dyn Factory) {
    let mut rig = Rig::with(factory, super::Options { num_senders: 1, checksum: false }, 5 << 20);
    let num_bytes = 4 << 20;
    let num_tokens = (num_bytes / TOKEN_BYTES) as u32;
    for round in 0..5 {
        let generation = rig.grant(0, num_tokens);
        let channel = rig.open(0, generation, 0, num_tokens);
        rig.until_sent(0, &TransportEvent::Opened { channel });
        for at in (0..num_bytes - 4096).step_by(4096) {
            rig.put(0, channel, at + round * 64, at, 4096);
        }
        rig.receiver.transport.revoke(generation);
        rig.until_received(&released(generation, false));
        rig.receiver.memory.write(0, &vec![super::rig::UNTOUCHED; num_bytes]);
        rig.until_sent(0, &closed(channel, Some(Refusal::Revoked)));
        assert!(rig.try_put(0, channel, 0, 0, 64).is_err(), "the sender has seen the channel close");
        rig.barrier(0);
        rig.assert_untouched(0, num_bytes);
        rig.assert_received(generation, &[released(generation, false)]);
        let late = rig.open(0, generation, 0, 1);
        rig.until_sent(0, &closed(late, Some(Refusal::Stale)));
    }
}

/// A sender that cancels is answered when it writes no more; the receiver has lost the range and can release it.
pub fn a_cancelled_claim_is_lost(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 1);
    let (generation, channel) = half_written(&mut rig);
    rig.senders[0].transport.cancel(channel);
    rig.until_sent(0, &closed(channel, None));
    rig.until_received(&lost(generation, 64));
    assert_eq!(rig.receiver.transport.arrived_bytes(generation), 32 * TOKEN_BYTES as u64);
    rig.receiver.transport.revoke(generation);
    rig.until_received(&released(generation, false));
    rig.assert_received(generation, &[lost(generation, 64), released(generation, false)]);

    // Before it was opened, too.
    let generation = rig.grant(0, 64);
    let channel = rig.open(0, generation, 0, 64);
    rig.senders[0].transport.cancel(channel);
    rig.until_sent(0, &closed(channel, None));
    rig.barrier(0);
    rig.receiver.transport.revoke(generation);
    rig.until_received(&released(generation, false));
}

/// A sender that is dropped stops and says so: no fence is needed.
pub fn a_sender_that_leaves_gives_its_claims_up(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 1);
    let (generation, _) = half_written(&mut rig);
    rig.senders.clear();
    rig.until_received(&lost(generation, 64));
    rig.receiver.transport.revoke(generation);
    rig.until_received(&released(generation, false));
    rig.assert_received(generation, &[lost(generation, 64), released(generation, false)]);
}

/// A sender that dies is lost, and its grant is released behind the fence. Factories that cannot kill skip this.
pub fn a_killed_sender_is_fenced(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 1);
    let Some(mut kill) = rig.kill_sender.take() else { return };
    let (generation, _) = half_written(&mut rig);
    kill(0);
    rig.until_received(&lost(generation, 64));
    rig.receiver.transport.revoke(generation);
    rig.until_received(&released(generation, true));
    rig.assert_received(generation, &[lost(generation, 64), released(generation, true)]);
    assert_eq!(rig.receiver.transport.telemetry().fences, 1);
}

/// A receiver that leaves ends the claims on it, and later ones: its address was good, so it is lost, not unreachable.
pub fn senders_notice_that_the_receiver_left(factory: &dyn Factory) {
    let mut cluster = factory.cluster(super::Options { num_senders: 2, checksum: false });
    // The second sender plays the receiver, so that it can be dropped while the rig stays whole.
    let mut leaver = cluster.senders.pop().expect("two senders");
    let sender = &mut cluster.senders[0];
    sender.allocate_region(4096).expect("a small region");
    leaver.allocate_region(4096).expect("a small region");
    leaver.set_admission(std::sync::Arc::new(Any));
    let runs = vec![crate::ByteRun { offset: 0, num_bytes: 4096 }];
    let grant =
        crate::Grant { generation: Generation(7), range: range(0, 64), token_bytes: TOKEN_BYTES, runs };
    leaver.grant(grant).expect("a good grant");
    let peer = leaver.peer_address();
    let claim = crate::Claim { peer, credential: Vec::new(), range: range(0, 64) };
    let channel = sender.open(claim.clone()).expect("a good address");
    let mut events = Vec::new();
    let mut wait_for = |sender: &mut Box<dyn crate::KvTransport>, event: &TransportEvent| {
        for step in 0..100_000 {
            sender.poll(std::time::Duration::from_millis(step), &mut events);
            if events.contains(event) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
        panic!("{event:?} did not happen, but {events:?}");
    };
    wait_for(sender, &TransportEvent::Opened { channel });
    drop(leaver);
    wait_for(sender, &closed(channel, Some(Refusal::PeerLost)));
    let late = sender.open(claim).expect("the address is of this transport");
    wait_for(sender, &closed(late, Some(Refusal::PeerLost)));
}

#[derive(Debug)]
struct Any;

impl crate::Admission for Any {
    fn admit(&self, _: &[u8]) -> Result<Generation, Refusal> {
        Ok(Generation(7))
    }
}
