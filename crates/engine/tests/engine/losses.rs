//! Peers that die, stop or lie: time may be lost, tokens and pages never.

use std::time::Duration;

use microserving_engine::{Call, EngineError, StartGenerate};
use microserving_transport::{LoopbackFaults, LoopbackHub};

use crate::support::{Rig, again, config, key, prep, prompt, reference, send, start, toy};

const MS: Duration = Duration::from_millis(1);

fn pair(faults: LoopbackFaults) -> Rig {
    Rig::with(LoopbackHub::with(faults, true), [(config("p", 64), toy()), (config("d", 64), toy())])
}

fn lagging() -> LoopbackFaults {
    LoopbackFaults {
        seed: 1,
        min_delay: MS,
        max_delay: 5 * MS,
        max_fence_delay: 20 * MS,
        ..LoopbackFaults::default()
    }
}

#[test]
fn a_corrupt_transfer_costs_time_and_nothing_else() {
    for seed in 0..20 {
        let mut rig = pair(LoopbackFaults { seed, corrupt: 0.5, ..lagging() });
        let call = start(Some(key("a")), &prompt(100), 0, 12);
        let alone = reference(&call);
        let address =
            rig.prep(1, prep(key("a"), &call.prompt, 99)).expect("prepared").kv_addr_info.expect("one");
        let sent = rig.send(0, send(key("a"), &call.prompt, (0, 99), &address));
        let output = rig.start(1, StartGenerate { begin: 99, ..again(&call) }).expect("started");
        assert_eq!(output.tokens, alone.tokens, "seed {seed}");
        let usage = output.usage.expect("done");
        if sent.is_ok() {
            assert_eq!((usage.received_tokens, usage.computed_tokens), (99, 1), "seed {seed}");
        } else {
            assert_eq!(
                (usage.received_tokens, usage.computed_tokens),
                (0, 100),
                "seed {seed}: computed here"
            );
            assert!(rig.engines[1].counters().transfers_lost > 0);
        }
        rig.assert_idle();
    }
}

#[test]
fn a_lost_writer_is_replaced_by_computing_here() {
    let mut lost = 0;
    for seed in 0..20 {
        let mut rig = pair(LoopbackFaults { seed, lose_writer: 0.2, ..lagging() });
        let call = start(Some(key("a")), &prompt(100), 0, 12);
        let alone = reference(&call);
        let address =
            rig.prep(1, prep(key("a"), &call.prompt, 99)).expect("prepared").kv_addr_info.expect("one");
        let sending = rig.call(0, Call::RemoteSend(send(key("a"), &call.prompt, (0, 99), &address)));
        // The receiver is asked at once and waits.
        let output = rig.start(1, StartGenerate { begin: 99, ..again(&call) }).expect("started");
        assert_eq!(output.tokens, alone.tokens, "seed {seed}");
        lost += u32::from(rig.answer(sending).is_err());
        rig.assert_idle();
    }
    assert!((1..20).contains(&lost), "{lost} of 20 transfers were lost");
}

#[test]
fn a_sender_that_dies_is_fenced_before_its_pages_serve_again() {
    for steps in [0, 1, 2, 3, 5] {
        let mut rig = pair(lagging());
        let call = start(Some(key("a")), &prompt(200), 0, 12);
        let alone = reference(&call);
        let address =
            rig.prep(1, prep(key("a"), &call.prompt, 199)).expect("prepared").kv_addr_info.expect("one");
        rig.call(0, Call::RemoteSend(send(key("a"), &call.prompt, (0, 199), &address)));
        for _ in 0..steps {
            rig.step(0);
            rig.step(1);
            rig.now += MS;
        }
        rig.hub.crash("p");
        let waiting = StartGenerate { begin: 199, ..again(&call) };
        let waiting = rig.call(1, Call::StartGenerate(Box::new(waiting)));
        // Only the receiver goes on.
        for _ in 0..400 {
            rig.step(1);
            rig.now += 5 * MS;
        }
        let output = rig.output(waiting);
        match output.error {
            // Nobody had begun to write, so there was nobody to be lost: the lease ended the wait.
            Some(error) => {
                assert_eq!(error, EngineError::LeaseExpired { seq_id: "a".into() }, "{steps} steps");
            }
            None => assert_eq!(output.tokens, alone.tokens, "{steps} steps"),
        }
        let pages = rig.engines[1].page_counts();
        assert_eq!(pages.free + pages.cached, pages.total, "{steps} steps: {pages:?}");
    }
}

#[test]
fn a_stopped_sender_keeps_its_pages_quarantined_however_long() {
    let mut rig = pair(lagging());
    let address = rig.prep(1, prep(key("a"), &prompt(100), 99)).expect("prepared").kv_addr_info.expect("one");
    rig.call(0, Call::RemoteSend(send(key("a"), &prompt(100), (0, 99), &address)));
    for _ in 0..6 {
        rig.step(0);
        rig.step(1);
        rig.now += MS;
    }
    rig.hub.pause("p");
    assert!(rig.abort(1, &key("a")));
    for _ in 0..100 {
        rig.step(1);
        rig.now += 100 * MS;
    }
    assert_eq!(rig.engines[1].page_counts().quarantined, 7, "ten leases prove nothing");
    assert!(rig.engines[1].is_idle());
    // What it wakes up to write lands in pages that serve nobody.
    let call = start(None, &prompt(100), 0, 12);
    let output = rig.call(1, Call::StartGenerate(Box::new(again(&call))));
    for _ in 0..30 {
        rig.step(1);
    }
    rig.hub.resume("p");
    rig.settle();
    assert_eq!(rig.output(output).tokens, reference(&call).tokens);
    assert_eq!(rig.engines[1].page_counts().quarantined, 0);
    rig.assert_idle();
}

#[test]
fn a_full_quarantine_refuses_new_reservations() {
    let small = microserving_engine::EngineConfig { quarantine_cap: 0.05, ..config("d", 40) };
    let mut rig = Rig::with(LoopbackHub::with(lagging(), true), [(config("p", 64), toy()), (small, toy())]);
    rig.hub.pause("p");
    let mut refused = None;
    for number in 0..12 {
        rig.hub.resume("p");
        let id = key(&format!("r{number}"));
        let prompt = crate::support::prompt_of(48, number);
        match rig.prep(1, prep(id.clone(), &prompt, 47)) {
            Ok(prepared) => {
                let address = prepared.kv_addr_info.expect("one");
                rig.call(0, Call::RemoteSend(send(id.clone(), &prompt, (0, 47), &address)));
                for _ in 0..20 {
                    rig.tick();
                    if rig.engines[0].state().sending > 0 && rig.engines[1].page_counts().reserved > 0 {
                        rig.now += MS;
                    }
                }
                rig.hub.pause("p");
                rig.abort(1, &id);
                rig.step(1);
            }
            Err(error) => {
                refused = Some((number, error));
                break;
            }
        }
    }
    if let Some((number, error)) = refused {
        assert!(matches!(error, EngineError::NoRoom { .. }), "{error:?}");
        assert!(rig.engines[1].page_counts().quarantined > 16, "after {number}");
    }
    rig.hub.heal();
    rig.settle();
    rig.advance(Duration::from_secs(3));
    rig.assert_idle();
}

#[test]
fn a_receiver_that_dies_ends_the_send() {
    let mut rig = pair(lagging());
    let address =
        rig.prep(1, prep(key("a"), &prompt(200), 199)).expect("prepared").kv_addr_info.expect("one");
    let sending = rig.call(0, Call::RemoteSend(send(key("a"), &prompt(200), (0, 199), &address)));
    rig.step(0);
    rig.step(1);
    rig.hub.crash("d");
    for _ in 0..400 {
        rig.step(0);
        rig.now += 10 * MS;
    }
    let error = rig.answer(sending).expect_err("nobody can read it");
    assert!(matches!(error, EngineError::Refused { .. } | EngineError::TransferLost { .. }), "{error:?}");
    let pages = rig.engines[0].page_counts();
    assert_eq!(pages.free + pages.cached, pages.total, "{pages:?}");
    assert!(pages.cached > 0, "what was computed is kept");
}
