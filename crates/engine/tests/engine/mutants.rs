//! Each deliberately wrong rule is noticed: by a wrong text, a broken invariant, or a call answered that must not be.

use std::time::Duration;

use microserving_engine::{Call, EngineError, Mutant, StartGenerate};
use microserving_transport::{LoopbackFaults, LoopbackHub};

use crate::support::{
    Rig, again, attempt, config, key, prep, prompt, prompt_of, reference, send, start, toy,
};

const MS: Duration = Duration::from_millis(1);

/// Says whether a scenario notices `mutant`, having seen that it passes without.
fn is_noticed(mutant: Mutant, scenario: impl Fn(Option<Mutant>) -> bool) {
    assert!(scenario(None), "the right rules pass");
    assert!(!scenario(Some(mutant)), "{mutant:?} lives");
}

fn pair(mutant: Option<Mutant>, pages: u32) -> Rig {
    let faults = LoopbackFaults { min_delay: MS, max_delay: 3 * MS, ..LoopbackFaults::default() };
    // Steps take time, so that messages arrive between them.
    let timed = microserving_executor::ToyConfig { step_time: MS, ..toy() };
    let configs = [(config("p", 64), timed.clone()), (config("d", pages), timed)];
    let mut rig = Rig::with(LoopbackHub::with(faults, true), configs);
    for engine in &mut rig.engines {
        engine.set_mutant(mutant);
    }
    rig
}

/// A transfer is aborted while its writer is stopped; the writer wakes up when its pages serve another text.
fn late_write_is_harmless(mutant: Option<Mutant>, wait: Duration) -> bool {
    (0..8).all(|steps| {
        let mut rig = pair(mutant, 12);
        let address =
            rig.prep(1, prep(key("a"), &prompt(100), 99)).expect("prepared").kv_addr_info.expect("one");
        rig.call(0, Call::RemoteSend(send(key("a"), &prompt(100), (0, 99), &address)));
        for _ in 0..steps {
            rig.tick();
            rig.now += MS;
        }
        rig.hub.pause("p");
        rig.abort(1, &key("a"));
        rig.now += wait;
        rig.step(1);
        let call = start(Some(key("b")), &prompt_of(60, 3), 0, 60);
        let running = rig.call(1, Call::StartGenerate(Box::new(again(&call))));
        for _ in 0..10 {
            rig.step(1);
        }
        rig.hub.resume("p");
        rig.settle();
        rig.output(running).tokens == reference(&call).tokens
    })
}

#[test]
fn free_at_once() {
    is_noticed(Mutant::FreeAtOnce, |mutant| late_write_is_harmless(mutant, Duration::ZERO));
}

#[test]
fn free_after_ttl() {
    is_noticed(Mutant::FreeAfterTtl, |mutant| late_write_is_harmless(mutant, 2000 * MS));
}

#[test]
fn no_attempt_check() {
    is_noticed(Mutant::NoAttemptCheck, |mutant| {
        let mut rig = pair(mutant, 64);
        rig.prep(1, prep(attempt("a", 1), &prompt(40), 39)).expect("prepared");
        let stale = rig.prep(1, prep(attempt("a", 0), &prompt(40), 39));
        matches!(stale, Err(EngineError::StaleAttempt { .. }))
    });
}

#[test]
fn missing_abort() {
    is_noticed(Mutant::MissingAbort, |mutant| {
        let mut rig = pair(mutant, 64);
        let call = rig.call(1, Call::StartGenerate(Box::new(start(Some(key("a")), &prompt(40), 0, 400))));
        rig.step(1);
        rig.cancel(1, call);
        rig.step(1);
        rig.engines[1].is_idle()
    });
}

#[test]
fn off_by_one_page() {
    is_noticed(Mutant::OffByOnePage, |mutant| {
        let mut rig = pair(mutant, 64);
        rig.start(1, start(None, &prompt(40), 0, 8)).expect("started");
        let mut longer = prompt(40).to_vec();
        longer.extend_from_slice(&prompt_of(40, 5));
        let call: StartGenerate = start(None, &longer.into(), 0, 8);
        rig.start(1, again(&call)).expect("started").tokens == reference(&call).tokens
    });
}
