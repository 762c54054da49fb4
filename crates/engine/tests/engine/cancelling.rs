//! Callers that go away, at each point between the three calls, and what that leaves behind: nothing.

use std::time::Duration;

use microserving_engine::{Call, CallId, StartGenerate};
use microserving_transport::{LoopbackFaults, LoopbackHub};

use crate::support::{Rig, again, config, key, prep, prompt, reference, send, start, toy};

/// Where the caller is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Point {
    BeforePrepIsHeard,
    AfterPrep,
    SendQueued,
    SendComputing,
    SendUnderWay,
    AfterSend,
    StartQueued,
    FirstToken,
    MidStream,
}

const POINTS: [Point; 9] = [
    Point::BeforePrepIsHeard,
    Point::AfterPrep,
    Point::SendQueued,
    Point::SendComputing,
    Point::SendUnderWay,
    Point::AfterSend,
    Point::StartQueued,
    Point::FirstToken,
    Point::MidStream,
];

fn slow_hub() -> LoopbackHub {
    let delay = Duration::from_millis(3);
    LoopbackHub::with(
        LoopbackFaults { min_delay: delay, max_delay: delay, ..LoopbackFaults::default() },
        true,
    )
}

/// Runs the three calls up to `point` and drops the caller of the one that is open, if any is. Returns how many pages the
/// receiver holds one step later.
fn lose_caller_at(rig: &mut Rig, point: Point) -> (Option<CallId>, u32) {
    let (id, prompt) = (key("a"), prompt(200));
    let call = rig.call(1, Call::PrepRecv(prep(id.clone(), &prompt, 199)));
    if point == Point::BeforePrepIsHeard {
        return lose(rig, 1, call);
    }
    rig.step(1);
    let microserving_engine::Reply::PrepRecv(prepared) = rig.answer(call).expect("prepared") else {
        panic!()
    };
    let address = prepared.kv_addr_info.expect("an address");
    if point == Point::AfterPrep {
        return (None, 0);
    }
    let call = rig.call(0, Call::RemoteSend(send(id.clone(), &prompt, (0, 199), &address)));
    match point {
        Point::SendQueued => return lose(rig, 0, call),
        Point::SendComputing => {
            rig.step(0);
            rig.step(0);
            assert_eq!(rig.engines[0].state().sending, 1);
            return lose(rig, 0, call);
        }
        Point::SendUnderWay => {
            while rig.engines[0].state().queued_prefill_tokens > 0 || rig.engines[0].state().sending == 0 {
                rig.step(0);
            }
            assert!(!rig.is_answered(call));
            return lose(rig, 0, call);
        }
        _ => {}
    }
    rig.settle();
    rig.answer(call).expect("sent");
    if point == Point::AfterSend {
        return (None, 0);
    }
    let call = rig.call(1, Call::StartGenerate(Box::new(start(Some(id), &prompt, 199, 100))));
    match point {
        Point::FirstToken => {
            while rig.events(call).is_empty() {
                rig.step(1);
            }
        }
        Point::MidStream => {
            while rig.events(call).len() < 50 {
                rig.step(1);
            }
        }
        _ => {}
    }
    lose(rig, 1, call)
}

fn lose(rig: &mut Rig, engine: usize, call: CallId) -> (Option<CallId>, u32) {
    rig.cancel(engine, call);
    rig.step(engine);
    (Some(call), rig.engines[1].page_counts().owned)
}

#[test]
fn a_lost_caller_leaves_nothing_at_any_point() {
    for point in POINTS {
        let hub = slow_hub();
        let mut rig = Rig::with(hub, [(config("p", 64), toy()), (config("d", 64), toy())]);
        let (_, owned) = lose_caller_at(&mut rig, point);
        if point >= Point::StartQueued {
            assert_eq!(owned, 0, "{point:?}: pages come back within the step");
            assert_eq!(rig.engines[1].state().running, 0);
        }
        rig.settle();
        rig.advance(Duration::from_secs(2));
        rig.assert_idle();
    }
}

#[test]
fn an_abort_leaves_nothing_at_any_point() {
    for point in POINTS {
        let hub = slow_hub();
        let mut rig = Rig::with(hub, [(config("p", 64), toy()), (config("d", 64), toy())]);
        lose_caller_at(&mut rig, point);
        for engine in 0..2 {
            rig.abort(engine, &key("a"));
        }
        // No lease is needed.
        rig.assert_idle();
    }
}

#[test]
fn a_prep_recv_that_nobody_heard_may_come_again() {
    let mut rig = Rig::new(1);
    let call = rig.call(0, Call::PrepRecv(prep(key("a"), &prompt(40), 39)));
    rig.step(0);
    rig.cancel(0, call);
    rig.step(0);
    assert_eq!(rig.engines[0].state().receiving, 0);
    rig.prep(0, prep(key("a"), &prompt(40), 39)).expect("a retry is no repetition of something aborted");
    rig.abort(0, &key("a"));
    rig.assert_idle();
}

#[test]
fn a_prep_recv_that_was_heard_the_second_time_stays() {
    let mut rig = Rig::new(1);
    let lost = rig.call(0, Call::PrepRecv(prep(key("a"), &prompt(40), 39)));
    let heard = rig.call(0, Call::PrepRecv(prep(key("a"), &prompt(40), 39)));
    rig.cancel(0, lost);
    rig.step(0);
    rig.answer(heard).expect("prepared");
    assert_eq!(rig.engines[0].state().receiving, 1);
    rig.abort(0, &key("a"));
    rig.assert_idle();
}

#[test]
fn only_the_last_listener_counts() {
    let mut rig = Rig::new(1);
    let call = start(Some(key("a")), &prompt(20), 0, 60);
    let first = rig.call(0, Call::StartGenerate(Box::new(again(&call))));
    rig.step(0);
    let second = rig.call(0, Call::StartGenerate(Box::new(again(&call))));
    rig.step(0);
    rig.cancel(0, first);
    rig.settle();
    assert_eq!(rig.output(second).tokens, reference(&call).tokens);
    rig.assert_idle();
}

#[test]
fn a_lost_caller_takes_all_choices_along() {
    let mut rig = Rig::new(1);
    let call = StartGenerate { n: 4, ..start(None, &prompt(100), 0, 60) };
    for steps in [1, 2, 3, 6, 20] {
        let id = rig.call(0, Call::StartGenerate(Box::new(again(&call))));
        for _ in 0..steps {
            rig.step(0);
        }
        rig.cancel(0, id);
        rig.step(0);
        assert!(rig.engines[0].is_idle(), "after {steps} steps");
    }
    rig.assert_idle();
}

#[test]
fn a_joined_send_goes_on_for_who_is_left() {
    let mut rig = Rig::new(2);
    let address =
        rig.prep(1, prep(key("a"), &prompt(200), 199)).expect("prepared").kv_addr_info.expect("one");
    let call = || Call::RemoteSend(send(key("a"), &prompt(200), (0, 199), &address));
    let first = rig.call(0, call());
    let second = rig.call(0, call());
    rig.step(0);
    rig.cancel(0, first);
    rig.settle();
    rig.answer(second).expect("sent");
    rig.abort(1, &key("a"));
    rig.assert_idle();
}

#[test]
fn pages_being_read_by_a_transfer_are_not_reused() {
    let delay = Duration::from_millis(50);
    let hub = LoopbackHub::with(
        LoopbackFaults { min_delay: delay, max_delay: delay, ..LoopbackFaults::default() },
        true,
    );
    let mut rig = Rig::with(hub, [(config("p", 8), toy()), (config("d", 64), toy())]);
    let address =
        rig.prep(1, prep(key("a"), &prompt(120), 119)).expect("prepared").kv_addr_info.expect("one");
    let call = rig.call(0, Call::RemoteSend(send(key("a"), &prompt(120), (0, 119), &address)));
    for _ in 0..4 {
        rig.step(0);
    }
    rig.cancel(0, call);
    rig.step(0);
    let state = rig.engines[0].state();
    assert_eq!(state.sending, 0);
    if !rig.engines[0].is_idle() {
        assert_eq!(state.pages.owned, 8, "all are still being read: {state:?}");
    }
    rig.abort(1, &key("a"));
    rig.settle();
    rig.assert_idle();
}
