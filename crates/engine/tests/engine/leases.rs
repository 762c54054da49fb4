//! Leases and deadlines, in virtual time.

use std::time::Duration;

use microserving_engine::{Call, CallOptions, EngineError, PrepRecv, StartGenerate};
use microserving_transport::{LoopbackFaults, LoopbackHub};

use crate::support::{Rig, attempt, config, key, prep, prompt, reference, send, start, toy};

const MS: Duration = Duration::from_millis(1);

fn expired(seq_id: &str) -> EngineError {
    EngineError::LeaseExpired { seq_id: seq_id.into() }
}

#[test]
fn a_forgotten_reservation_ends_with_its_lease() {
    let mut rig = Rig::new(1);
    let prepared = rig.prep(0, prep(key("a"), &prompt(40), 39)).expect("prepared");
    assert_eq!(prepared.lease, 1000 * MS);
    assert_eq!(rig.engines[0].next_wakeup(), Some(1000 * MS));
    rig.advance(999 * MS);
    assert_eq!(rig.engines[0].state().receiving, 1);
    rig.advance(MS);
    assert_eq!(rig.engines[0].counters().leases_expired, 1);
    assert_eq!(rig.prep(0, prep(key("a"), &prompt(40), 39)), Err(expired("a")));
    assert_eq!(rig.start(0, start(Some(key("a")), &prompt(40), 39, 4)), Err(expired("a")));
    rig.prep(0, prep(attempt("a", 1), &prompt(40), 39)).expect("a later attempt may try");
    rig.advance(1000 * MS);
    rig.assert_idle();
}

#[test]
fn a_late_sender_is_told() {
    let mut rig = Rig::new(2);
    let address = rig.prep(1, prep(key("a"), &prompt(40), 39)).expect("prepared").kv_addr_info.expect("one");
    rig.advance(1000 * MS);
    let error = rig.send(0, send(key("a"), &prompt(40), (0, 39), &address)).expect_err("too late");
    assert!(matches!(error, EngineError::AddressExpired { .. }), "{error:?}");
    rig.assert_idle();
}

#[test]
fn start_generate_waits_for_the_data_but_no_longer_than_the_lease() {
    let mut rig = Rig::new(1);
    rig.prep(0, prep(key("a"), &prompt(40), 39)).expect("prepared");
    rig.advance(500 * MS);
    let waiting = rig.call(0, Call::StartGenerate(Box::new(start(Some(key("a")), &prompt(40), 39, 4))));
    rig.settle();
    rig.advance(999 * MS);
    rig.answer(waiting).expect("it was taken on");
    assert!(rig.events(waiting).is_empty(), "and renewed the lease");
    rig.advance(MS);
    assert_eq!(rig.output(waiting).error, Some(expired("a")));
    rig.assert_idle();
}

#[test]
fn arriving_data_renews_the_lease() {
    // Each run takes up to 0.6 s, so the whole transfer takes longer than a lease.
    let faults =
        LoopbackFaults { max_delay: 600 * MS, min_delay: 100 * MS, seed: 5, ..LoopbackFaults::default() };
    let slow = microserving_executor::ToyConfig { step_time: 400 * MS, ..toy() };
    let hub = LoopbackHub::with(faults, true);
    let mut rig = Rig::with(hub, [(config("p", 64), slow), (config("d", 64), toy())]);
    let call = start(Some(key("a")), &prompt(300), 299, 6);
    let alone = reference(&call);
    let address =
        rig.prep(1, prep(key("a"), &call.prompt, 299)).expect("prepared").kv_addr_info.expect("one");
    rig.call(0, Call::RemoteSend(send(key("a"), &call.prompt, (0, 299), &address)));
    let output = rig.start(1, call).expect("started");
    assert!(rig.now > 2000 * MS, "it took {:?}", rig.now);
    assert_eq!(rig.engines[1].counters().leases_expired, 0);
    assert_eq!(output.tokens, alone.tokens);
    rig.assert_idle();
}

#[test]
fn a_sender_that_has_not_begun_yet_keeps_the_lease() {
    // One job at a time, and each computes for longer than a lease before its first byte.
    let slow = microserving_executor::ToyConfig { step_time: 300 * MS, ..toy() };
    let narrow =
        microserving_engine::EngineConfig { max_batch_tokens: 16, max_running: 1, ..config("p", 64) };
    let mut rig = Rig::with(LoopbackHub::with_checksums(), [(narrow, slow), (config("d", 64), toy())]);
    let calls: Vec<_> = (0..3)
        .map(|number| {
            let prompt = crate::support::prompt_of(120, number);
            start(Some(key(&format!("r{number}"))), &prompt, 119, 4)
        })
        .collect();
    let mut running = Vec::new();
    for call in &calls {
        let id = call.key.clone().expect("a key");
        let prepared = rig.prep(1, prep(id.clone(), &call.prompt, 119)).expect("prepared");
        let address = prepared.kv_addr_info.expect("one");
        rig.call(0, Call::RemoteSend(send(id, &call.prompt, (0, 119), &address)));
        running.push(rig.call(1, Call::StartGenerate(Box::new(crate::support::again(call)))));
    }
    rig.settle();
    assert!(rig.now > 7000 * MS, "it took {:?}", rig.now);
    assert_eq!(rig.engines[1].counters().leases_expired, 0);
    for (call, id) in calls.iter().zip(running) {
        assert_eq!(rig.output(id).tokens, reference(call).tokens);
        assert_eq!(rig.output(id).usage.expect("done").received_tokens, 119);
    }
    rig.assert_idle();
}

#[test]
fn a_received_but_unclaimed_transfer_ends_too() {
    let mut rig = Rig::new(2);
    let address = rig.prep(1, prep(key("a"), &prompt(40), 39)).expect("prepared").kv_addr_info.expect("one");
    rig.send(0, send(key("a"), &prompt(40), (0, 39), &address)).expect("sent");
    rig.advance(1000 * MS);
    assert_eq!(rig.engines[1].counters().leases_expired, 1);
    assert_eq!(rig.engines[1].page_counts().cached, 0, "what was not committed is not kept");
    rig.assert_idle();
}

#[test]
fn a_reservation_that_only_matched_is_leased_too() {
    let mut rig = Rig::new(1);
    rig.start(0, start(None, &prompt(33), 0, 4)).expect("started");
    let prepared = rig.prep(0, prep(key("a"), &prompt(40), 32)).expect("prepared");
    assert_eq!((prepared.kv_addr_info, prepared.prefix_matched_length), (None, 32));
    assert_eq!(rig.engines[0].page_counts().owned, 2, "the match is pinned");
    rig.advance(1000 * MS);
    assert_eq!(rig.engines[0].page_counts().owned, 0);
    rig.assert_idle();
}

#[test]
fn deadlines_end_every_kind_of_wait() {
    let options = || CallOptions { timeout: Some(300 * MS), ..CallOptions::default() };
    let exceeded = |seq_id: &str| EngineError::DeadlineExceeded { seq_id: seq_id.into() };
    let slow = microserving_executor::ToyConfig { step_time: 50 * MS, ..toy() };
    let hub = LoopbackHub::new();
    let mut rig = Rig::with(hub, [(config("p", 64), slow), (config("d", 64), toy())]);
    // A generation.
    let call = StartGenerate { options: options(), ..start(Some(key("g")), &prompt(4), 0, 100) };
    let output = rig.start(0, call).expect("started");
    assert_eq!(output.error, Some(exceeded("g")));
    assert!((5..=6).contains(&output.only().len()), "300 ms are six steps: {output:?}");
    // A reservation.
    rig.prep(1, PrepRecv { options: options(), ..prep(key("r"), &prompt(40), 39) }).expect("prepared");
    rig.advance(300 * MS);
    assert_eq!(rig.engines[1].state().receiving, 0);
    // A start_generate that waits for data, and a remote_send on a link that is cut.
    let address = rig.prep(1, prep(key("w"), &prompt(40), 39)).expect("prepared").kv_addr_info.expect("one");
    rig.hub.cut("p", "d");
    let sending = microserving_engine::RemoteSend {
        options: options(),
        ..send(key("w"), &prompt(40), (0, 39), &address)
    };
    let sending = rig.call(0, Call::RemoteSend(sending));
    let waiting = StartGenerate { options: options(), ..start(Some(key("w")), &prompt(40), 39, 4) };
    let waiting = rig.call(1, Call::StartGenerate(Box::new(waiting)));
    rig.settle();
    rig.advance(300 * MS);
    assert_eq!(rig.answer(sending), Err(exceeded("w")));
    assert_eq!(rig.output(waiting).error, Some(exceeded("w")));
    rig.hub.heal();
    rig.settle();
    rig.assert_idle();
}
