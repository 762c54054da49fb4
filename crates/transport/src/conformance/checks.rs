//! Claims that are served, and claims that are refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::rig::{Factory, Options, REGION_BYTES, Rig, TOKEN_BYTES, good, range, source_byte};
use crate::{ByteRun, Claim, Grant, PeerAddress, Refusal, TransportError, TransportEvent};

const CHECKED: Options = Options { num_senders: 1, checksum: true };

fn closed(channel: crate::ChannelId, refusal: Refusal) -> TransportEvent {
    TransportEvent::Closed { channel, refusal: Some(refusal) }
}

/// Bytes put before and after `Opened` arrive, no others do, and both sides hear of it once, in order.
pub fn bytes_arrive_and_complete(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 1);
    let generation = rig.grant(8192, 16);
    let channel = rig.open(0, generation, 0, 16);
    rig.put(0, channel, 0, 8192, 512);
    rig.until_sent(0, &TransportEvent::Opened { channel });
    // Odd places and lengths.
    rig.put(0, channel, 4097, 8192 + 512, 1);
    rig.put(0, channel, 4099, 8192 + 513, 511);
    rig.put(0, channel, 70, 70, 0);
    rig.finish(0, channel);
    rig.until_received(&TransportEvent::Complete { generation });
    rig.assert_copied(0, 0, 8192, 512);
    rig.assert_copied(0, 4097, 8192 + 512, 1);
    rig.assert_copied(0, 4099, 8192 + 513, 511);
    rig.assert_untouched(0, 8192);
    rig.assert_untouched(8192 + 1024, 8192);
    rig.drive_until("Finished", |rig| rig.senders[0].finished(channel) == Some(1024));
    rig.barrier(0);
    rig.assert_received(generation, &[TransportEvent::Complete { generation }]);
    assert_eq!(rig.receiver.transport.arrived_bytes(generation), 1024, "the count does not go down");
    let of_channel: Vec<_> = rig.senders[0]
        .events
        .iter()
        .map(|event| match event {
            TransportEvent::Opened { channel: c } if *c == channel => "opened",
            TransportEvent::Finished { channel: c, .. } if *c == channel => "finished",
            TransportEvent::Closed { .. } => "closed",
            _ => "of the barrier",
        })
        .collect();
    assert_eq!(of_channel[..2], ["opened", "finished"]);
    assert!(!of_channel[2..].iter().any(|what| matches!(*what, "opened" | "finished" | "closed")));
    let (sent, received) = (rig.senders[0].transport.telemetry(), rig.receiver.transport.telemetry());
    assert_eq!(
        (sent.bytes_sent, received.bytes_received),
        (1024 + 64, 1024 + 64),
        "the barrier's 64 included"
    );
    assert_eq!((received.claims_refused, received.fences), (0, 0));
}

/// The arrival counter never falls and never runs ahead of the bytes.
pub fn what_arrived_can_be_read(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 1);
    let (pieces, piece) = (64usize, 4 * TOKEN_BYTES);
    let generation = rig.grant(0, (pieces * 4) as u32);
    let channel = rig.open(0, generation, 0, (pieces * 4) as u32);
    assert_eq!(rig.receiver.transport.arrived_bytes(generation), 0);
    let mut last = 0;
    for at in 0..pieces {
        rig.put(0, channel, at * piece, at * piece, piece);
        let put = ((at + 1) * piece) as u64;
        rig.drive_until("the counter covers what was put", |rig| {
            let arrived = rig.receiver.transport.arrived_bytes(generation);
            assert!((last..=put).contains(&arrived), "{arrived} after {last}, with {put} put");
            last = arrived;
            arrived == put
        });
        rig.assert_copied(0, at * piece, at * piece, piece);
    }
    rig.assert_received(generation, &[]);
    rig.finish(0, channel);
    rig.until_received(&TransportEvent::Complete { generation });
}

/// Several claims, of several senders and in any order, fill one grant; only the last completes it.
pub fn claims_of_several_senders_fill_a_grant(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 2);
    let generation = rig.grant(0, 30);
    let parts = [(1, 20, 30), (0, 0, 10), (1, 10, 20)];
    let channels: Vec<_> =
        parts.iter().map(|&(sender, begin, end)| rig.open(sender, generation, begin, end)).collect();
    for (at, (&(sender, begin, _), &channel)) in parts.iter().zip(&channels).enumerate() {
        let offset = begin as usize * TOKEN_BYTES;
        rig.put(sender, channel, offset, offset, 10 * TOKEN_BYTES);
        rig.finish(sender, channel);
        rig.drive_until("Finished", |rig| rig.senders[sender].finished(channel).is_some());
        if at < 2 {
            rig.assert_received(generation, &[]);
        }
    }
    rig.until_received(&TransportEvent::Complete { generation });
    for (sender, begin, _) in parts {
        let offset = begin as usize * TOKEN_BYTES;
        rig.assert_copied(sender, offset, offset, 10 * TOKEN_BYTES);
    }
    rig.assert_received(generation, &[TransportEvent::Complete { generation }]);
}

/// A range is claimed once, inside its grant, while the grant is open.
pub fn overlapping_claims_are_refused(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 2);
    let generation = rig.grant(0, 20);
    let first = rig.open(0, generation, 5, 15);
    rig.until_sent(0, &TransportEvent::Opened { channel: first });
    for (sender, begin, end) in [(1, 0, 6), (1, 14, 20), (0, 7, 8), (1, 15, 21), (1, 30, 40)] {
        let channel = rig.open(sender, generation, begin, end);
        rig.until_sent(sender, &closed(channel, Refusal::RangeTaken));
    }
    for (begin, end) in [(0, 5), (15, 20)] {
        let channel = rig.open(1, generation, begin, end);
        let (offset, len) = (begin as usize * TOKEN_BYTES, 5 * TOKEN_BYTES);
        rig.put(1, channel, offset, offset, len);
        rig.finish(1, channel);
    }
    rig.put(0, first, 5 * TOKEN_BYTES, 5 * TOKEN_BYTES, 10 * TOKEN_BYTES);
    rig.finish(0, first);
    rig.until_received(&TransportEvent::Complete { generation });
    rig.assert_copied(0, 5 * TOKEN_BYTES, 5 * TOKEN_BYTES, 10 * TOKEN_BYTES);
    let late = rig.open(1, generation, 0, 5);
    rig.until_sent(1, &closed(late, Refusal::Stale));
    assert_eq!(rig.receiver.transport.telemetry().claims_refused, 6);
}

/// A forged, foreign or stale credential writes nothing, whatever was put.
pub fn a_bad_credential_writes_nothing(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 1);
    let generation = rig.grant(0, 16);
    let unknown = good(microserving_protocol::Generation(1 << 40));
    let cases = [
        (Vec::new(), Refusal::BadCredential),
        (b"forged".to_vec(), Refusal::BadCredential),
        (vec![0; 5000], Refusal::BadCredential),
        (b"late".to_vec(), Refusal::Stale),
        (unknown, Refusal::Stale),
    ];
    let num_cases = cases.len() as u64;
    for (credential, refusal) in cases {
        let channel = rig.open_with(0, credential, range(0, 16));
        rig.put(0, channel, 0, 0, 16 * TOKEN_BYTES);
        rig.finish(0, channel);
        rig.until_sent(0, &closed(channel, refusal));
    }
    rig.barrier(0);
    rig.assert_untouched(0, REGION_BYTES / 2);
    rig.assert_received(generation, &[]);
    assert_eq!(rig.receiver.transport.telemetry().claims_refused, num_cases);
}

/// Before an admission is set, every claim is refused.
pub fn without_admission_nobody_is_let_in(factory: &dyn Factory) {
    let mut cluster = factory.cluster(Options { num_senders: 1, checksum: false });
    let memory = cluster.receiver.allocate_region(4096).expect("a small region");
    let sender = &mut cluster.senders[0];
    sender.allocate_region(4096).expect("a small region").write(0, &[1; 4096]);
    let generation = microserving_protocol::Generation(1);
    let runs = vec![ByteRun { offset: 0, num_bytes: 4096 }];
    let grant = Grant { generation, range: range(0, 64), token_bytes: TOKEN_BYTES, runs };
    cluster.receiver.grant(grant).expect("a good grant");
    let peer = cluster.receiver.peer_address();
    let claim = Claim { peer, credential: good(generation), range: range(0, 64) };
    let channel = sender.open(claim).expect("the receiver's own address");
    let run = crate::PutRun { local_offset: 0, remote_offset: 0, num_bytes: 4096 };
    sender.put(channel, &[run]).expect("queued, or dropped as already refused");
    let mut events = Vec::new();
    for step in 0..100_000 {
        sender.poll(std::time::Duration::from_millis(step), &mut events);
        if !events.is_empty() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    assert_eq!(events, [closed(channel, Refusal::BadCredential)]);
    let mut bytes = [1; 4096];
    memory.read(0, &mut bytes);
    assert_eq!(bytes, [0; 4096], "a fresh region is zero, and nobody wrote");
}

/// A run that leaves the grant is not written and ends the claim: the range is lost, the sender is told.
pub fn runs_outside_the_grant_end_the_claim(factory: &dyn Factory) {
    for (remote, num_bytes) in
        [(0, 64), (4096 - 1, 64), (4096 + 1024 - 63, 64), (REGION_BYTES, 64), (usize::MAX - 64, 64)]
    {
        let mut rig = Rig::new(factory, 1);
        let generation = rig.grant(4096, 16);
        let channel = rig.open(0, generation, 0, 16);
        rig.until_sent(0, &TransportEvent::Opened { channel });
        rig.put(0, channel, 0, remote, num_bytes);
        rig.finish(0, channel);
        rig.until_sent(0, &closed(channel, Refusal::Revoked));
        let lost = TransportEvent::Lost { generation, range: range(0, 16), corrupt: false };
        rig.until_received(&lost);
        rig.barrier(0);
        rig.assert_untouched(0, REGION_BYTES / 2);
        rig.assert_received(generation, &[lost]);
    }
}

/// A claim delivers as many bytes as its range has, neither more nor fewer.
pub fn wrong_totals_end_the_claim(factory: &dyn Factory) {
    for num_bytes in [16 * TOKEN_BYTES - 1, 16 * TOKEN_BYTES + 1, 0] {
        let mut rig = Rig::new(factory, 1);
        let generation = rig.grant(4096, 32);
        let channel = rig.open(0, generation, 0, 16);
        rig.put(0, channel, 0, 4096, num_bytes);
        rig.finish(0, channel);
        rig.until_sent(0, &closed(channel, Refusal::Revoked));
        let lost = TransportEvent::Lost { generation, range: range(0, 16), corrupt: false };
        rig.until_received(&lost);
        rig.receiver.transport.revoke(generation);
        let released = TransportEvent::Released { generation, fenced: false };
        rig.until_received(&released);
        rig.assert_received(generation, &[lost, released]);
        rig.assert_untouched(4096 + 16 * TOKEN_BYTES, 16 * TOKEN_BYTES);
    }
}

/// With checksums, bytes that changed on the way are never reported complete; good ones are.
pub fn checksums_find_damage(factory: &dyn Factory) {
    let mut rig = Rig::with(factory, CHECKED, REGION_BYTES);
    let good = rig.grant(0, 64);
    let channel = rig.open(0, good, 0, 64);
    for at in 0..64 {
        rig.put(0, channel, (at * 7 % 64) * TOKEN_BYTES, at * TOKEN_BYTES, TOKEN_BYTES);
    }
    rig.finish(0, channel);
    rig.until_received(&TransportEvent::Complete { generation: good });
    rig.drive_until("Finished", |rig| rig.senders[0].finished(channel) == Some(4096));

    let bad = rig.grant(0, 64);
    let channel = rig.open(0, bad, 0, 64);
    rig.put(0, channel, 0, 0, 32 * TOKEN_BYTES);
    rig.drive_until("the first half", |rig| {
        rig.receiver.transport.arrived_bytes(bad) == 32 * TOKEN_BYTES as u64
    });
    let byte = rig.receiver.bytes(1000, 1)[0];
    rig.receiver.memory.write(1000, &[byte ^ 0x10]);
    rig.put(0, channel, 32 * TOKEN_BYTES, 32 * TOKEN_BYTES, 32 * TOKEN_BYTES);
    rig.finish(0, channel);
    let lost = TransportEvent::Lost { generation: bad, range: range(0, 64), corrupt: true };
    rig.until_received(&lost);
    rig.until_sent(0, &closed(channel, Refusal::Revoked));
    rig.barrier(0);
    rig.assert_received(bad, &[lost]);
    assert_eq!(rig.receiver.transport.telemetry().checksum_failures, 1);
}

/// A grant of no tokens is complete at once; a claim of none opens and finishes.
pub fn ranges_of_no_tokens_work(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 1);
    let nothing = rig.grant(0, 0);
    rig.until_received(&TransportEvent::Complete { generation: nothing });
    let generation = rig.grant(0, 4);
    let empty = rig.open(0, generation, 2, 2);
    rig.finish(0, empty);
    rig.drive_until("Finished", |rig| rig.senders[0].finished(empty) == Some(0));
    rig.assert_received(generation, &[]);
    let whole = rig.open(0, generation, 0, 4);
    rig.put(0, whole, 0, 0, 4 * TOKEN_BYTES);
    rig.finish(0, whole);
    rig.until_received(&TransportEvent::Complete { generation });
    rig.assert_received(generation, &[TransportEvent::Complete { generation }]);
}

/// An engine may be both ends: its pages are sent to other pages of its own.
pub fn a_transport_sends_to_itself(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 1);
    let (source, num_bytes) = (REGION_BYTES / 2, 64 * TOKEN_BYTES);
    let bytes: Vec<u8> = (0..num_bytes).map(|offset| source_byte(7, offset)).collect();
    rig.receiver.memory.write(source, &bytes);
    let generation = rig.grant(0, 64);
    let peer = rig.receiver.transport.peer_address();
    let claim = Claim { peer, credential: good(generation), range: range(0, 64) };
    let channel = rig.receiver.transport.open(claim).expect("its own address");
    let run = crate::PutRun { local_offset: source, remote_offset: 0, num_bytes };
    rig.receiver.transport.put(channel, &[run]).expect("a good run");
    rig.receiver.transport.finish(channel);
    rig.until_received(&TransportEvent::Complete { generation });
    rig.drive_until("Finished", |rig| rig.receiver.finished(channel) == Some(num_bytes as u64));
    assert!(rig.receiver.bytes(0, num_bytes) == bytes);
    assert!(rig.receiver.has(&TransportEvent::Opened { channel }));
    rig.assert_untouched(num_bytes, REGION_BYTES / 2 - num_bytes);
}

/// Megabytes in long and short runs arrive whole.
pub fn large_transfers_arrive(factory: &dyn Factory) {
    let region_bytes = 9 << 20;
    let mut rig = Rig::with(factory, Options { num_senders: 1, checksum: false }, region_bytes);
    let num_bytes = 8 << 20;
    let generation = rig.grant(0, (num_bytes / TOKEN_BYTES) as u32);
    let channel = rig.open(0, generation, 0, (num_bytes / TOKEN_BYTES) as u32);
    rig.put(0, channel, 4096, 0, 4 << 20);
    let piece = 8 << 10;
    for at in (4 << 20..num_bytes).step_by(piece) {
        rig.put(0, channel, at + 4096, at, piece);
    }
    rig.finish(0, channel);
    rig.until_received(&TransportEvent::Complete { generation });
    rig.assert_copied(0, 4096, 0, num_bytes);
    rig.drive_until("Finished", |rig| rig.senders[0].finished(channel) == Some(num_bytes as u64));
}

/// The same pages serve one generation after the other, each with its own bytes.
pub fn many_generations_follow_each_other(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 1);
    for round in 0..200 {
        let generation = rig.grant(0, 8);
        let channel = rig.open(0, generation, 0, 8);
        let local = round * 8;
        rig.put(0, channel, local, 0, 8 * TOKEN_BYTES);
        rig.finish(0, channel);
        rig.until_received(&TransportEvent::Complete { generation });
        rig.assert_copied(0, local, 0, 8 * TOKEN_BYTES);
        rig.drive_until("Finished", |rig| rig.senders[0].finished(channel).is_some());
        rig.receiver.events.clear();
        rig.senders[0].events.clear();
    }
}

/// Calls that break the contract are errors of the caller, named, and change nothing.
pub fn misuse_is_named(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 1);
    let misuse = |result: Result<(), TransportError>| {
        assert!(matches!(result, Err(TransportError::Misuse { .. })), "{result:?}");
    };
    let generation = rig.grant(0, 4);
    let again = |offset| Grant {
        generation,
        range: range(0, 4),
        token_bytes: TOKEN_BYTES,
        runs: vec![ByteRun { offset, num_bytes: 4 * TOKEN_BYTES }],
    };
    misuse(rig.receiver.transport.grant(again(0)));
    for offset in [REGION_BYTES - 1, REGION_BYTES, usize::MAX] {
        let generation = rig.new_generation();
        misuse(rig.receiver.transport.grant(Grant { generation, ..again(offset) }));
    }
    misuse(rig.receiver.transport.allocate_region(4096).map(drop));
    let channel = rig.open(0, generation, 0, 4);
    misuse(rig.try_put(0, channel, REGION_BYTES - 10, 0, 11));
    misuse(rig.try_put(0, channel, usize::MAX, 0, 2));
    misuse(rig.try_put(0, channel, 0, usize::MAX, 2));
    let nobody = crate::ChannelId(u64::MAX);
    misuse(rig.try_put(0, nobody, 0, 0, 1));
    rig.finish(0, nobody);
    rig.senders[0].transport.cancel(nobody);
    rig.put(0, channel, 0, 0, 4 * TOKEN_BYTES);
    rig.finish(0, channel);
    misuse(rig.try_put(0, channel, 0, 0, 1));
    rig.until_received(&TransportEvent::Complete { generation });
    rig.drive_until("Finished", |rig| rig.senders[0].finished(channel).is_some());
    misuse(rig.try_put(0, channel, 0, 0, 1));
}

/// An address that another transport made is refused in the call, saying what to configure.
pub fn addresses_of_other_transports_are_refused(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 1);
    let own = rig.receiver.transport.peer_address();
    assert_eq!(own.transport, rig.receiver.transport.name());
    let foreign = [
        PeerAddress { transport: "pigeon".into(), ..own.clone() },
        PeerAddress { bytes: Vec::new(), ..own.clone() },
        PeerAddress { bytes: vec![0xff; 40], ..own.clone() },
        PeerAddress { bytes: own.bytes[..own.bytes.len() - 1].to_vec(), ..own },
    ];
    for peer in foreign {
        let claim = Claim { peer, credential: Vec::new(), range: range(0, 1) };
        let error = rig.senders[0].transport.open(claim).expect_err("a foreign address");
        assert!(matches!(error, TransportError::Unreachable { .. }), "{error}");
    }
}

/// The waker is called for news on either side.
pub fn news_wakes(factory: &dyn Factory) {
    let mut rig = Rig::new(factory, 1);
    let counters = [Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0))];
    for (counter, node) in counters.iter().zip([&mut rig.receiver, &mut rig.senders[0]]) {
        let counter = counter.clone();
        node.transport.set_waker(Arc::new(move || {
            counter.fetch_add(1, Ordering::SeqCst);
        }));
    }
    let woken = |at: usize| counters[at].load(Ordering::SeqCst);
    // Without polling: the caller sleeps until it is woken.
    let sleep_until = |what: &str, awake: &dyn Fn() -> bool| {
        for _ in 0..100_000 {
            if awake() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
        panic!("nobody was woken by {what}");
    };
    let generation = rig.grant(0, 4);
    let channel = rig.open(0, generation, 0, 4);
    sleep_until("Opened", &|| woken(1) > 0);
    rig.until_sent(0, &TransportEvent::Opened { channel });
    let before = woken(1);
    rig.put(0, channel, 0, 0, 4 * TOKEN_BYTES);
    rig.finish(0, channel);
    sleep_until("Complete and Finished", &|| woken(0) > 0 && woken(1) > before);
    rig.until_received(&TransportEvent::Complete { generation });
    rig.drive_until("Finished", |rig| rig.senders[0].finished(channel).is_some());
}
