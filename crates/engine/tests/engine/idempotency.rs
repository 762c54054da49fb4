//! The same call twice, an older or a newer attempt, and an abort that comes first.

use std::sync::Arc;
use std::time::Duration;

use microserving_engine::{
    Abort, Call, CallOptions, EngineError, GenerateEvent, PrepRecv, Reply, StartGenerate,
};
use microserving_protocol::{Attempt, SamplingParams, TokenId};

use crate::support::{Output, Rig, again, attempt, key, prep, prompt, prompt_of, reference, send, start};

fn stale(seq_id: &str, of: u32) -> EngineError {
    EngineError::StaleAttempt { seq_id: seq_id.into(), attempt: Attempt(of) }
}

fn aborted(seq_id: &str) -> EngineError {
    EngineError::Aborted { seq_id: seq_id.into() }
}

#[test]
fn prep_recv_again_answers_the_same() {
    let mut rig = Rig::new(1);
    let first = rig.prep(0, prep(key("a"), &prompt(40), 39)).expect("prepared");
    let second = rig.prep(0, prep(key("a"), &prompt(40), 39)).expect("prepared");
    assert_eq!(first, second, "the same address, so the same generation");
    assert_eq!(rig.engines[0].state().receiving, 1);
    for other in [prep(key("a"), &prompt(40), 38), prep(key("a"), &prompt_of(40, 1), 39)] {
        assert!(matches!(rig.prep(0, other), Err(EngineError::Conflict { .. })));
    }
    let salted = CallOptions { cache_salt: "tenant".into(), ..CallOptions::default() };
    let other = PrepRecv { options: salted, ..prep(key("a"), &prompt(40), 39) };
    assert!(matches!(rig.prep(0, other), Err(EngineError::Conflict { .. })));
    assert!(rig.abort(0, &key("a")));
    rig.assert_idle();
}

#[test]
fn prep_recv_of_another_attempt() {
    let mut rig = Rig::new(1);
    let first = rig.prep(0, prep(attempt("a", 1), &prompt(40), 39)).expect("prepared");
    assert_eq!(rig.prep(0, prep(attempt("a", 0), &prompt(40), 39)), Err(stale("a", 0)));
    let second = rig.prep(0, prep(attempt("a", 2), &prompt(40), 39)).expect("prepared");
    assert_ne!(first.kv_addr_info, second.kv_addr_info);
    assert_eq!(rig.engines[0].state().receiving, 1, "the older one is gone");
    assert_eq!(rig.prep(0, prep(attempt("a", 1), &prompt(40), 39)), Err(stale("a", 1)));
    assert!(rig.abort(0, &attempt("a", 2)));
    rig.assert_idle();
}

#[test]
fn remote_send_again_joins_the_job_or_gets_its_answer() {
    let mut rig = Rig::new(2);
    let address = rig.prep(1, prep(key("a"), &prompt(100), 99)).expect("prepared").kv_addr_info.expect("one");
    let call = || send(key("a"), &prompt(100), (0, 99), &address);
    let first = rig.call(0, Call::RemoteSend(call()));
    rig.step(0);
    let joined = rig.call(0, Call::RemoteSend(call()));
    rig.settle();
    let later = rig.call(0, Call::RemoteSend(call()));
    rig.settle();
    let answer = rig.answer(first).expect("sent");
    assert_eq!(rig.answer(joined).expect("sent"), answer);
    assert_eq!(rig.answer(later).expect("sent"), answer);
    assert_eq!(rig.engines[0].counters().prefill_tokens, 99, "it was computed once");
    let other = rig.send(0, send(key("a"), &prompt_of(100, 1), (0, 99), &address));
    assert!(matches!(other, Err(EngineError::Conflict { .. })));
    rig.abort(1, &key("a"));
    rig.assert_idle();
}

#[test]
fn a_sender_with_another_prompt_is_refused_before_it_writes() {
    let mut rig = Rig::new(2);
    let address = rig.prep(1, prep(key("a"), &prompt(100), 96)).expect("prepared").kv_addr_info.expect("one");
    let mut other = prompt(100).to_vec();
    other[0] = TokenId(other[0].0 ^ 1);
    let short: Arc<[TokenId]> = prompt(100)[..50].into();
    for (wrong, end) in [(Arc::from(other), 96), (short, 49)] {
        let error = rig.send(0, send(key("a"), &wrong, (0, end), &address)).expect_err("another prompt");
        assert!(matches!(error, EngineError::Conflict { field: "prompt", .. }), "{error:?}");
    }
    // What comes after the reserved range is the sender's own affair.
    let mut tail = prompt(100).to_vec();
    tail[98] = TokenId(tail[98].0 ^ 1);
    rig.send(0, send(key("a"), &Arc::from(tail), (0, 96), &address)).expect("the same first 96 tokens");
    rig.abort(1, &key("a"));
    rig.assert_idle();
}

#[test]
fn remote_send_of_another_attempt() {
    let mut rig = Rig::new(2);
    let old =
        rig.prep(1, prep(attempt("a", 0), &prompt(200), 199)).expect("prepared").kv_addr_info.expect("one");
    let old_send = rig.call(0, Call::RemoteSend(send(attempt("a", 0), &prompt(200), (0, 199), &old)));
    rig.step(0);
    let new =
        rig.prep(1, prep(attempt("a", 1), &prompt(200), 199)).expect("prepared").kv_addr_info.expect("one");
    let new_send = rig.call(0, Call::RemoteSend(send(attempt("a", 1), &prompt(200), (0, 199), &new)));
    rig.settle();
    rig.answer(old_send).expect_err("it was replaced");
    rig.answer(new_send).expect("sent");
    assert_eq!(rig.send(0, send(attempt("a", 0), &prompt(200), (0, 199), &old)), Err(stale("a", 0)));
    // The address decides which attempt it is.
    assert_eq!(rig.send(0, send(attempt("a", 0), &prompt(200), (0, 199), &new)), Err(stale("a", 0)));
    let wrong = rig.send(0, send(attempt("a", 2), &prompt(200), (0, 199), &new));
    assert!(matches!(wrong, Err(EngineError::Conflict { field: "attempt", .. })));
    let wrong = rig.send(0, send(key("b"), &prompt(200), (0, 199), &new));
    assert!(matches!(wrong, Err(EngineError::Conflict { field: "seq_id", .. })));
    rig.abort(1, &attempt("a", 1));
    rig.assert_idle();
}

#[test]
fn start_generate_again_attaches_and_replays() {
    let mut rig = Rig::new(1);
    let sampling =
        SamplingParams { temperature: 0.8, seed: 3, logprobs: Some(2), ..SamplingParams::default() };
    let call = StartGenerate { sampling, n: 2, ..start(Some(key("a")), &prompt(20), 0, 10) };
    let first = rig.call(0, Call::StartGenerate(Box::new(again(&call))));
    for _ in 0..5 {
        rig.step(0);
    }
    let from_start = rig.call(0, Call::StartGenerate(Box::new(again(&call))));
    let resumed = StartGenerate { resume_from: Some(3), ..again(&call) };
    let resumed = rig.call(0, Call::StartGenerate(Box::new(resumed)));
    rig.settle();
    let late = rig.call(0, Call::StartGenerate(Box::new(again(&call))));
    rig.settle();
    let all = rig.output(first);
    assert_eq!(all.tokens.iter().map(Vec::len).collect::<Vec<_>>(), [10, 10]);
    assert_eq!(rig.output(from_start).tokens, all.tokens);
    assert_eq!(rig.output(late), all, "from the log, with the same usage");
    let rest = Output::from_events(rig.events(resumed), 3);
    assert_eq!(rest.tokens, [&all.tokens[0][3..], &all.tokens[1][3..]]);
    assert!(rig.events(late).iter().all(|event| match event {
        GenerateEvent::Token { logprob, .. } => logprob.is_some(),
        _ => true,
    }));
    assert_eq!(rig.engines[0].counters().decode_tokens, 20, "nothing was computed twice");

    let other = StartGenerate { max_tokens: Some(11), ..again(&call) };
    assert!(matches!(rig.start(0, other), Err(EngineError::Conflict { .. })));
    let nowhere = StartGenerate { resume_from: Some(3), ..start(Some(key("b")), &prompt(20), 0, 10) };
    assert_eq!(rig.start(0, nowhere), Err(EngineError::UnknownSequence { seq_id: "b".into() }));
    rig.assert_idle();
}

#[test]
fn start_generate_of_another_attempt() {
    let mut rig = Rig::new(1);
    let old = rig.call(0, Call::StartGenerate(Box::new(start(Some(attempt("a", 1)), &prompt(20), 0, 50))));
    rig.step(0);
    let lower = rig.call(0, Call::StartGenerate(Box::new(start(Some(attempt("a", 0)), &prompt(20), 0, 50))));
    rig.step(0);
    assert_eq!(rig.answer(lower), Err(stale("a", 0)));
    let new = rig.start(0, start(Some(attempt("a", 2)), &prompt(20), 0, 50)).expect("started");
    assert_eq!(rig.output(old).error, Some(stale("a", 1)));
    assert_eq!(new.only().len(), 50);
    rig.assert_idle();
}

#[test]
fn an_abort_ends_whatever_lives_and_stays_in_force() {
    let mut rig = Rig::new(2);
    let address =
        rig.prep(1, prep(key("a"), &prompt(200), 199)).expect("prepared").kv_addr_info.expect("one");
    let sending = rig.call(0, Call::RemoteSend(send(key("a"), &prompt(200), (0, 199), &address)));
    let waiting = rig.call(1, Call::StartGenerate(Box::new(start(Some(key("a")), &prompt(200), 199, 5))));
    rig.tick();
    assert!(rig.abort(0, &key("a")));
    assert!(rig.abort(1, &key("a")));
    assert!(!rig.abort(0, &key("a")), "there is nothing more to do");
    assert_eq!(rig.answer(sending), Err(aborted("a")));
    assert_eq!(rig.output(waiting).error, Some(aborted("a")));
    assert_eq!(rig.prep(1, prep(key("a"), &prompt(200), 199)), Err(aborted("a")));
    assert_eq!(rig.send(0, send(key("a"), &prompt(200), (0, 199), &address)), Err(aborted("a")));
    assert_eq!(rig.start(1, start(Some(key("a")), &prompt(200), 199, 5)), Err(aborted("a")));
    rig.prep(1, prep(attempt("a", 1), &prompt(200), 199)).expect("another attempt may try");
    assert!(rig.abort(1, &attempt("a", 1)));
    rig.assert_idle();
}

#[test]
fn an_abort_that_overtakes_its_call_wins() {
    let mut rig = Rig::new(1);
    assert!(!rig.abort(0, &attempt("a", 1)), "nothing lives yet");
    assert_eq!(rig.prep(0, prep(attempt("a", 1), &prompt(40), 39)), Err(aborted("a")));
    assert_eq!(rig.prep(0, prep(attempt("a", 0), &prompt(40), 39)), Err(stale("a", 0)));
    assert_eq!(rig.start(0, start(Some(attempt("a", 1)), &prompt(40), 0, 5)), Err(aborted("a")));
    rig.advance(Duration::from_secs(61));
    rig.prep(0, prep(attempt("a", 1), &prompt(40), 39)).expect("the tombstone has fallen");
    rig.abort(0, &attempt("a", 1));
    rig.assert_idle();
}

#[test]
fn an_abort_of_another_attempt() {
    let mut rig = Rig::new(1);
    rig.prep(0, prep(attempt("a", 5), &prompt(40), 39)).expect("prepared");
    assert!(!rig.abort(0, &attempt("a", 4)), "a later attempt lives on");
    assert_eq!(rig.engines[0].state().receiving, 1);
    assert!(rig.abort(0, &attempt("a", 6)), "all attempts up to this one");
    assert_eq!(rig.engines[0].state().receiving, 0);
    assert_eq!(rig.prep(0, prep(attempt("a", 6), &prompt(40), 39)), Err(aborted("a")));
    assert_eq!(rig.prep(0, prep(attempt("a", 5), &prompt(40), 39)), Err(stale("a", 5)));

    rig.prep(0, prep(attempt("b", 5), &prompt(40), 39)).expect("prepared");
    let call = rig.call(0, Call::Abort(Abort { seq_id: "b".into(), attempt: None }));
    rig.settle();
    assert_eq!(rig.answer(call), Ok(Reply::Aborted(true)), "without an attempt, the one that is known");
    rig.assert_idle();
}

#[test]
fn without_a_key_the_one_fitting_reservation_is_adopted() {
    let mut rig = Rig::new(2);
    let keyless = PrepRecv { key: None, ..prep(key("-"), &prompt(40), 39) };
    let prepared = rig.prep(1, keyless.clone()).expect("prepared");
    let address = prepared.kv_addr_info.expect("one");
    let sent =
        microserving_engine::RemoteSend { key: None, ..send(key("-"), &prompt(40), (0, 39), &address) };
    rig.send(0, sent).expect("the address names the request");
    let call = start(None, &prompt(40), 39, 8);
    let output = rig.start(1, again(&call)).expect("started");
    assert_eq!(output.tokens, reference(&call).tokens);
    assert_eq!(output.usage.expect("done").received_tokens, 39);

    // With two that fit, or with none, it is a plain generation.
    rig.prep(1, keyless.clone()).expect("prepared");
    let second = rig.prep(1, keyless).expect("prepared");
    assert_eq!(second.prefix_matched_length, 32);
    let output = rig.start(1, again(&call)).expect("started");
    assert_eq!(output.usage.expect("done").received_tokens, 0);
    let other_end = rig.start(1, StartGenerate { begin: 38, ..again(&call) }).expect("started");
    assert_eq!(other_end.tokens, output.tokens);
    assert_eq!(rig.engines[1].state().receiving, 2, "both are left alone");
    rig.advance(Duration::from_secs(2));
    rig.assert_idle();
}

#[test]
fn a_named_reservation_is_not_adopted() {
    let mut rig = Rig::new(1);
    rig.prep(0, prep(key("mine"), &prompt(40), 39)).expect("prepared");
    rig.start(0, start(None, &prompt(40), 39, 4)).expect("started");
    assert_eq!(rig.engines[0].state().receiving, 1);
    rig.abort(0, &key("mine"));
    rig.assert_idle();
}

#[test]
fn tombstones_and_logs_fall() {
    let mut rig = Rig::new(1);
    let call = start(Some(key("a")), &prompt(20), 0, 5);
    let first = rig.start(0, again(&call)).expect("started");
    rig.advance(Duration::from_secs(59));
    assert_eq!(rig.start(0, again(&call)).expect("attached"), first);
    assert_eq!(rig.engines[0].counters().decode_tokens, 5);
    rig.advance(Duration::from_secs(2));
    let second = rig.start(0, call).expect("started anew");
    assert_eq!(second.tokens, first.tokens);
    assert_eq!(rig.engines[0].counters().decode_tokens, 10);
    rig.advance(Duration::from_secs(61));
    assert_eq!(rig.engines[0].next_wakeup(), None, "nothing is kept and nothing waits");
    rig.assert_idle();
}

#[test]
fn the_salt_separates_tenants() {
    let mut rig = Rig::new(1);
    let salted = |salt: &str| StartGenerate {
        options: CallOptions { cache_salt: salt.into(), ..CallOptions::default() },
        ..start(None, &prompt(40), 0, 4)
    };
    let mut cached = |salt| rig.start(0, salted(salt)).expect("started").usage.expect("done").cached_tokens;
    assert_eq!([cached("a"), cached("b"), cached("a"), cached("")], [0, 0, 32, 0]);
    rig.assert_idle();
}

#[test]
fn a_prepared_key_wants_what_was_prepared() {
    let mut rig = Rig::new(1);
    rig.prep(0, prep(key("a"), &prompt(40), 0)).expect("prepared");
    let mut refuse = |call| rig.start(0, call).expect_err("refused");
    assert!(matches!(
        refuse(start(Some(key("a")), &prompt(40), 1, 4)),
        EngineError::InvalidField { field: "begin", .. }
    ));
    let mut other: Vec<TokenId> = prompt(40).to_vec();
    other[39] = TokenId(0);
    assert!(matches!(
        refuse(start(Some(key("a")), &other.into(), 0, 4)),
        EngineError::Conflict { field: "prompt", .. }
    ));
    let salted = CallOptions { cache_salt: "x".into(), ..CallOptions::default() };
    let salted = StartGenerate { options: salted, ..start(Some(key("a")), &prompt(40), 0, 4) };
    assert!(matches!(refuse(salted), EngineError::Conflict { field: "cache_salt", .. }));
    let right = start(Some(key("a")), &prompt(40), 0, 4);
    assert_eq!(rig.start(0, again(&right)).expect("started").tokens, reference(&right).tokens);
    rig.assert_idle();
}

#[test]
fn a_key_that_generates_cannot_be_prepared_for_something_else() {
    for prepared in [false, true] {
        let mut rig = Rig::new(2);
        let end = if prepared { 39 } else { 0 };
        let call = start(Some(key("a")), &prompt(40), end, 30);
        if prepared {
            let reply = rig.prep(0, prep(key("a"), &prompt(40), end)).expect("prepared");
            let address = reply.kv_addr_info.expect("one");
            rig.send(1, send(key("a"), &prompt(40), (0, end), &address)).expect("sent");
        }
        let stream = rig.call(0, Call::StartGenerate(Box::new(again(&call))));
        for _ in 0..4 {
            rig.step(0);
        }
        for other in [prep(key("a"), &prompt_of(40, 1), 39), prep(key("a"), &prompt(40), 20)] {
            let refused = rig.prep(0, other);
            assert!(matches!(refused, Err(EngineError::Conflict { .. })), "{refused:?}");
        }
        assert!(!rig.events(stream).is_empty(), "it has begun");
        rig.settle();
        let output = rig.output(stream);
        assert_eq!((output.error.clone(), output.only()), (None, reference(&call).only()), "{prepared}");
        rig.assert_idle();
    }
}

#[test]
fn the_three_calls_again_after_the_end_replay_the_answer() {
    let mut rig = Rig::new(2);
    let call = start(Some(key("a")), &prompt(100), 99, 12);
    let (sent, first) = rig.disaggregate(0, 1, 99, again(&call));
    let computed = [0, 1].map(|engine| rig.engines[engine].counters());
    let (sent_again, second) = rig.disaggregate(0, 1, 99, again(&call));
    assert_eq!((sent, &first), (sent_again, &second));
    assert_eq!(first.tokens, reference(&call).tokens);
    for (engine, before) in computed.into_iter().enumerate() {
        let now = rig.engines[engine].counters();
        assert_eq!(
            (now.prefill_tokens, now.decode_tokens),
            (before.prefill_tokens, before.decode_tokens),
            "nothing was computed twice"
        );
    }
    rig.assert_idle();
}

#[test]
fn a_key_that_generated_unprepared_is_prepared_anew_after_its_end() {
    let mut rig = Rig::new(2);
    let plain = start(Some(key("a")), &prompt(100), 0, 12);
    let whole = rig.start(1, again(&plain)).expect("started");
    let call = start(Some(key("a")), &prompt_of(100, 1), 99, 12);
    let (sent, output) = rig.disaggregate(0, 1, 99, again(&call));
    assert!(sent.is_some(), "another prompt has to be sent");
    assert_eq!(output.tokens, reference(&call).tokens);
    assert_ne!(output.tokens, whole.tokens);
    rig.assert_idle();
}

#[test]
fn a_reservation_that_ended_is_prepared_and_sent_again_under_the_same_attempt() {
    let mut rig = Rig::new(2);
    let short = CallOptions { timeout: Some(Duration::from_millis(100)), ..CallOptions::default() };
    let call = PrepRecv { options: short, ..prep(key("a"), &prompt(100), 99) };
    let first = rig.prep(1, call).expect("prepared").kv_addr_info.expect("one");
    rig.send(0, send(key("a"), &prompt(100), (0, 99), &first)).expect("sent");
    rig.advance(Duration::from_millis(200));
    assert_eq!(rig.engines[1].state().receiving, 0, "its deadline has passed");
    let second = rig.prep(1, prep(key("a"), &prompt(100), 99)).expect("prepared").kv_addr_info.expect("one");
    assert_ne!(first, second);
    rig.send(0, send(key("a"), &prompt(100), (0, 99), &second)).expect("sent under the new grant");
    let late = rig.send(0, send(key("a"), &prompt(100), (0, 99), &first));
    assert!(matches!(late, Err(EngineError::Conflict { .. })), "an echo of the older grant: {late:?}");
    let call = start(Some(key("a")), &prompt(100), 99, 8);
    let output = rig.start(1, again(&call)).expect("started");
    assert_eq!(output.tokens, reference(&call).tokens);
    assert_eq!(output.usage.expect("done").received_tokens, 99);
    rig.assert_idle();
}

#[test]
fn a_prepared_generation_gives_way_to_a_later_attempt_and_not_to_an_earlier_one() {
    let mut rig = Rig::new(2);
    let call = |number| start(Some(attempt("a", number)), &prompt(100), 99, 40);
    let prepare = |rig: &mut Rig, number| {
        let reply = rig.prep(1, prep(attempt("a", number), &prompt(100), 99)).expect("prepared");
        let address = reply.kv_addr_info.expect("one");
        let range = (reply.prefix_matched_length, 99);
        rig.send(0, send(attempt("a", number), &prompt(100), range, &address)).expect("sent");
    };
    prepare(&mut rig, 3);
    let old = rig.call(1, Call::StartGenerate(Box::new(call(3))));
    for _ in 0..4 {
        rig.step(1);
    }
    assert_eq!(rig.prep(1, prep(attempt("a", 2), &prompt(100), 99)), Err(stale("a", 2)));
    assert!(!rig.abort(1, &attempt("a", 2)), "it lives on");
    let begun = rig.events(old).len();
    assert!(begun > 0, "it has begun");
    prepare(&mut rig, 4);
    assert_eq!(rig.output(old).error, Some(stale("a", 3)), "it gave way when it was prepared");
    let new = rig.start(1, call(4)).expect("started");
    assert_eq!(new.tokens, reference(&call(4)).tokens);
    rig.assert_idle();
}

#[test]
fn an_abort_that_overtakes_its_remote_send_wins() {
    let mut rig = Rig::new(2);
    let address = rig.prep(1, prep(key("a"), &prompt(40), 39)).expect("prepared").kv_addr_info.expect("one");
    assert!(!rig.abort(0, &key("a")), "the sender has not heard of it");
    assert_eq!(rig.send(0, send(key("a"), &prompt(40), (0, 39), &address)), Err(aborted("a")));
    assert_eq!(rig.engines[0].counters().prefill_tokens, 0, "nothing was computed");
    assert!(rig.abort(1, &key("a")));
    assert_eq!(rig.start(1, start(Some(key("a")), &prompt(40), 39, 5)), Err(aborted("a")));
    rig.assert_idle();
}
