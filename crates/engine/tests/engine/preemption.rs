//! Pools too small for what runs: everyone finishes, nobody's text changes, no token is sent twice.

use microserving_engine::{Call, CallOptions, EngineConfig, StartGenerate};
use microserving_protocol::SamplingParams;
use microserving_transport::LoopbackHub;

use crate::support::{Rig, again, config, key, prep, prompt_of, reference, send, start, toy};

fn sampled(number: u32, len: u32, max_tokens: u32) -> StartGenerate {
    let sampling = SamplingParams { temperature: 0.8, seed: number.into(), ..SamplingParams::default() };
    StartGenerate {
        sampling,
        ..start(Some(key(&format!("r{number}"))), &prompt_of(len, number), 0, max_tokens)
    }
}

fn small(num_pages: u32) -> Rig {
    Rig::with(LoopbackHub::new(), [(config("small", num_pages), toy())])
}

#[test]
fn everyone_finishes_in_a_pool_where_every_request_preempts() {
    for num_pages in [6, 7, 9, 13] {
        let mut rig = small(num_pages);
        let calls: Vec<_> = (0..8).map(|number| sampled(number, 5 + 7 * (number % 4), 60)).collect();
        let ids: Vec<_> =
            calls.iter().map(|call| rig.call(0, Call::StartGenerate(Box::new(again(call))))).collect();
        rig.settle();
        for (call, id) in calls.iter().zip(ids) {
            let output = rig.output(id);
            assert_eq!(output.error, None, "{num_pages} pages");
            assert_eq!(output.tokens, reference(call).tokens, "{num_pages} pages, {:?}", call.key);
        }
        assert!(rig.engines[0].counters().preemptions > 0, "{num_pages} pages: the test tests nothing");
        rig.assert_idle();
    }
}

#[test]
fn choices_of_one_request_preempt_each_other_and_finish() {
    let mut rig = small(8);
    let call = StartGenerate { n: 4, ..sampled(0, 40, 70) };
    let output = rig.start(0, again(&call)).expect("started");
    assert_eq!(output.tokens, reference(&call).tokens);
    assert!(rig.engines[0].counters().preemptions > 0);
    rig.assert_idle();
}

#[test]
fn two_prepared_sequences_that_hold_everything_do_not_wait_for_each_other() {
    let tiny = EngineConfig { max_running: 4, ..config("d", 8) };
    let mut rig = Rig::with(LoopbackHub::new(), [(config("p", 64), toy()), (tiny, toy())]);
    let calls: Vec<_> = (0..2).map(|number| sampled(number, 80, 30)).collect();
    for call in &calls {
        let id = call.key.clone().expect("a key");
        let address =
            rig.prep(1, prep(id.clone(), &call.prompt, 64)).expect("prepared").kv_addr_info.expect("one");
        rig.send(0, send(id, &call.prompt, (0, 64), &address)).expect("sent");
    }
    assert_eq!(rig.engines[1].page_counts().free, 0, "each holds half of the pool");
    let ids: Vec<_> = calls
        .iter()
        .map(|call| rig.call(1, Call::StartGenerate(Box::new(StartGenerate { begin: 64, ..again(call) }))))
        .collect();
    rig.settle();
    for (call, id) in calls.iter().zip(ids) {
        assert_eq!(rig.output(id).tokens, reference(call).tokens);
    }
    rig.assert_idle();
}

#[test]
fn the_first_in_the_order_is_never_the_victim() {
    let mut rig = small(8);
    let calls: Vec<_> = (0..3).map(|number| sampled(number, 30, 60)).collect();
    let ids: Vec<_> =
        calls.iter().map(|call| rig.call(0, Call::StartGenerate(Box::new(again(call))))).collect();
    let mut finished = Vec::new();
    for _ in 0..10_000 {
        rig.step(0);
        for (number, id) in ids.iter().enumerate() {
            if rig.output(*id).usage.is_some() && !finished.contains(&number) {
                finished.push(number);
            }
        }
        if finished.len() == 3 {
            break;
        }
    }
    assert_eq!(finished, [0, 1, 2]);
    rig.assert_idle();
}

#[test]
fn priority_goes_first_but_not_for_ever() {
    let one_at_a_time = EngineConfig { max_running: 1, ..config("e", 16) };
    let mut rig = Rig::with(LoopbackHub::new(), [(one_at_a_time, toy())]);
    let ask = |rig: &mut Rig, number: u32, priority: i32| {
        let options = CallOptions { priority, ..CallOptions::default() };
        rig.call(0, Call::StartGenerate(Box::new(StartGenerate { options, ..sampled(number, 20, 4) })))
    };
    let blocker = ask(&mut rig, 0, 0);
    rig.step(0);
    let low = ask(&mut rig, 1, 0);
    let high = ask(&mut rig, 2, 1);
    let mut order = Vec::new();
    for _ in 0..50 {
        rig.step(0);
        for id in [blocker, low, high] {
            if rig.output(id).usage.is_some() && !order.contains(&id) {
                order.push(id);
            }
        }
    }
    assert_eq!(order, [blocker, high, low]);
    // A level is worth five seconds of waiting.
    let blocker = ask(&mut rig, 3, 0);
    rig.step(0);
    let early = ask(&mut rig, 4, 0);
    rig.step(0);
    rig.now += std::time::Duration::from_secs(6);
    let late = ask(&mut rig, 5, 1);
    let mut order = Vec::new();
    for _ in 0..50 {
        rig.step(0);
        for id in [blocker, early, late] {
            if rig.output(id).usage.is_some() && !order.contains(&id) {
                order.push(id);
            }
        }
    }
    assert_eq!(order, [blocker, early, late]);
    rig.assert_idle();
}

#[test]
fn decodes_go_on_beside_a_long_prefill_and_the_other_way_round() {
    let narrow = EngineConfig { max_batch_tokens: 16, ..config("e", 64) };
    let mut rig = Rig::with(LoopbackHub::new(), [(narrow, toy())]);
    let decoding = rig.call(0, Call::StartGenerate(Box::new(sampled(0, 10, 200))));
    for _ in 0..4 {
        rig.step(0);
    }
    let before = rig.events(decoding).len();
    let prefilling = rig.call(0, Call::StartGenerate(Box::new(sampled(1, 150, 4))));
    for _ in 0..10 {
        rig.step(0);
    }
    assert_eq!(rig.events(decoding).len(), before + 10, "a token each step");
    assert!(!rig.events(prefilling).is_empty(), "15 tokens a step are enough for 150 in ten");
    rig.settle();
    rig.assert_idle();
}

#[test]
fn a_send_and_a_generation_share_the_budget_in_order() {
    let mut rig = Rig::new(2);
    let address =
        rig.prep(1, prep(key("s"), &prompt_of(200, 7), 199)).expect("prepared").kv_addr_info.expect("one");
    let sending = rig.call(0, Call::RemoteSend(send(key("s"), &prompt_of(200, 7), (0, 199), &address)));
    let generating = rig.call(0, Call::StartGenerate(Box::new(sampled(1, 100, 4))));
    let mut steps_until = (None, None);
    for step in 0..20 {
        rig.step(0);
        if rig.engines[0].counters().bytes_sent > 0 {
            steps_until.0.get_or_insert(step);
        }
        if !rig.events(generating).is_empty() {
            steps_until.1.get_or_insert(step);
        }
    }
    rig.settle();
    rig.answer(sending).expect("sent");
    assert!(steps_until.0 <= steps_until.1, "first come, first computed: {steps_until:?}");
    rig.abort(1, &key("s"));
    rig.assert_idle();
}

#[test]
fn two_engines_full_of_reservations_for_each_other_do_not_wait_for_ever() {
    let mut rig = Rig::with(LoopbackHub::new(), [(config("e0", 8), toy()), (config("e1", 8), toy())]);
    let calls: Vec<_> = (0..2).map(|number| sampled(number, 100, 8)).collect();
    let mut addresses = Vec::new();
    for (receiver, call) in calls.iter().enumerate() {
        let prepared = rig.prep(receiver, prep(call.key.clone().expect("a key"), &call.prompt, 99));
        addresses.push(prepared.expect("7 of 8 pages").kv_addr_info.expect("one"));
    }
    let mut sends = Vec::new();
    let mut starts = Vec::new();
    for (receiver, call) in calls.iter().enumerate() {
        let id = call.key.clone().expect("a key");
        let sending = send(id, &call.prompt, (0, 99), &addresses[receiver]);
        sends.push(rig.call(1 - receiver, Call::RemoteSend(sending)));
        let call = StartGenerate { begin: 99, ..again(call) };
        starts.push(rig.call(receiver, Call::StartGenerate(Box::new(call))));
    }
    for _ in 0..10 {
        rig.advance(std::time::Duration::from_millis(100));
    }
    for id in sends {
        let refused = rig.answer(id).expect_err("there is no room");
        assert!(matches!(refused, microserving_engine::EngineError::NoRoom { .. }), "{refused:?}");
    }
    for (call, id) in calls.iter().zip(starts) {
        assert_eq!(rig.output(id).tokens, reference(call).tokens, "what does not come is computed here");
    }
    rig.assert_idle();
}
