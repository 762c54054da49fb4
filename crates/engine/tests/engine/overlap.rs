//! Sending while computing: what a transfer takes, and what of it nobody's computing hides.

use std::time::Duration;

use microserving_executor::ToyConfig;
use microserving_transport::{LoopbackFaults, LoopbackHub};

use crate::support::{Rig, config, key, prep, prompt, send, start, toy};

const MS: Duration = Duration::from_millis(1);

fn rig() -> Rig {
    let faults = LoopbackFaults { min_delay: 2 * MS, max_delay: 2 * MS, ..LoopbackFaults::default() };
    let timed = ToyConfig { step_time: 20 * MS, ..toy() };
    Rig::with(LoopbackHub::with(faults, true), [(config("p", 64), timed), (config("d", 64), toy())])
}

fn sent(rig: &mut Rig, seq_id: &str) -> microserving_engine::RemoteSendReply {
    let prepared = rig.prep(1, prep(key(seq_id), &prompt(144), 143)).expect("prepared");
    let address = prepared.kv_addr_info.expect("an address");
    let sent = rig.send(0, send(key(seq_id), &prompt(144), (0, 143), &address)).expect("sent");
    rig.abort(1, &key(seq_id));
    sent
}

#[test]
fn only_the_last_chunks_way_is_exposed() {
    let mut rig = rig();
    let began = rig.now;
    let computed = sent(&mut rig, "a");
    // Three chunks of 20 ms each; most of the data had arrived before the last of them.
    assert_eq!((computed.cached_tokens, computed.computed_tokens), (0, 143));
    assert!(rig.now - began >= 60 * MS);
    assert!(computed.exposed_transfer > Duration::ZERO, "the last layer's data has its way to go");
    assert!(computed.exposed_transfer <= 10 * MS, "{computed:?}");
    let counters = rig.engines[0].counters();
    assert_eq!(u128::from(counters.exposed_transfer_micros), computed.exposed_transfer.as_micros());
    rig.assert_idle();
}

#[test]
fn what_was_cached_is_sent_at_once_and_hidden_by_nothing() {
    let mut rig = rig();
    rig.start(0, start(None, &prompt(144), 0, 1)).expect("started");
    let steps = rig.engines[0].counters().steps;
    let cached = sent(&mut rig, "a");
    assert_eq!((cached.cached_tokens, cached.computed_tokens), (128, 15));
    assert_eq!(rig.engines[0].counters().steps - steps, 1);
    let whole = {
        let prepared = rig.prep(1, prep(key("b"), &prompt(144), 128)).expect("prepared");
        let address = prepared.kv_addr_info.expect("an address");
        rig.send(0, send(key("b"), &prompt(144), (0, 128), &address)).expect("sent")
    };
    assert_eq!((whole.cached_tokens, whole.computed_tokens), (128, 0));
    assert!(
        whole.exposed_transfer >= 4 * MS,
        "the claim, the data and the answer each have their way: {whole:?}"
    );
    rig.abort(1, &key("b"));
    rig.assert_idle();
}
