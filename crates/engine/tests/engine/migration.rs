//! Contexts and running requests that move from one engine to another.

use std::time::Duration;

use microserving_engine::{Call, Commit, EngineError, Pause, PauseReply, PrepRecv, Reply, StartGenerate};
use microserving_protocol::TokenId;
use microserving_transport::{LoopbackFaults, LoopbackHub};

use crate::support::{Rig, again, attempt, config, key, prep, prompt, reference, send, start, toy};

fn commit(rig: &mut Rig, engine: usize, seq_id: &str) -> Result<u32, EngineError> {
    let id = rig.call(engine, Call::Commit(Commit { seq_id: seq_id.into(), attempt: None }));
    rig.settle();
    rig.answer(id).map(|reply| match reply {
        Reply::Committed(reply) => reply.committed_tokens,
        other => panic!("{other:?}"),
    })
}

fn pause(rig: &mut Rig, engine: usize, seq_id: &str) -> Result<PauseReply, EngineError> {
    let id = rig.call(engine, Call::Pause(Pause { seq_id: seq_id.into(), attempt: None }));
    rig.step(engine);
    rig.answer(id).map(|reply| match reply {
        Reply::Paused(reply) => reply,
        other => panic!("{other:?}"),
    })
}

#[test]
fn a_context_moves_without_being_computed_again() {
    for len in [16, 40, 96] {
        let mut rig = Rig::new(2);
        rig.start(0, start(None, &prompt(len), 0, 1)).expect("the context is cached on the first engine");
        let computed = rig.engines[0].counters().prefill_tokens;
        let call = PrepRecv { commit: true, ..prep(key("m"), &prompt(len), len) };
        let address = rig.prep(1, call).expect("prepared").kv_addr_info.expect("one");
        let sent = rig.send(0, send(key("m"), &prompt(len), (0, len), &address)).expect("sent");
        assert_eq!(sent.cached_tokens, len / 16 * 16);
        assert_eq!(rig.engines[0].counters().prefill_tokens - computed, u64::from(len % 16));
        assert_eq!(commit(&mut rig, 1, "m"), Ok(len / 16 * 16));
        assert_eq!(commit(&mut rig, 1, "m"), Ok(len / 16 * 16), "again is the same");
        rig.assert_idle();

        let mut longer = prompt(len).to_vec();
        longer.extend_from_slice(&prompt(9));
        let call = start(None, &longer.into(), 0, 8);
        let output = rig.start(1, again(&call)).expect("started");
        assert_eq!(output.usage.expect("done").cached_tokens, len / 16 * 16);
        assert_eq!(output.tokens, reference(&call).tokens);
        rig.assert_idle();
    }
}

#[test]
fn nothing_received_can_be_matched_before_it_is_committed() {
    let mut rig = Rig::new(2);
    let call = PrepRecv { commit: true, ..prep(key("m"), &prompt(48), 48) };
    let address = rig.prep(1, call).expect("prepared").kv_addr_info.expect("one");
    rig.send(0, send(key("m"), &prompt(48), (0, 48), &address)).expect("sent");
    assert_eq!(rig.engines[1].cache().peek_prefix("", &prompt(48)), 0);
    commit(&mut rig, 1, "m").expect("committed");
    assert_eq!(rig.engines[1].cache().peek_prefix("", &prompt(48)), 48);
    rig.assert_idle();
}

#[test]
fn commit_waits_for_the_data_or_says_that_it_is_lost() {
    let delay = Duration::from_millis(5);
    let faults = LoopbackFaults { min_delay: delay, max_delay: delay, ..LoopbackFaults::default() };
    for corrupt in [0.0, 1.0] {
        let hub = LoopbackHub::with(LoopbackFaults { corrupt, ..faults.clone() }, true);
        let mut rig = Rig::with(hub, [(config("p", 64), toy()), (config("d", 64), toy())]);
        let call = PrepRecv { commit: true, ..prep(key("m"), &prompt(48), 48) };
        let address = rig.prep(1, call).expect("prepared").kv_addr_info.expect("one");
        rig.call(0, Call::RemoteSend(send(key("m"), &prompt(48), (0, 48), &address)));
        let committed = commit(&mut rig, 1, "m");
        if corrupt == 0.0 {
            assert_eq!(committed, Ok(48));
        } else {
            assert_eq!(committed, Err(EngineError::TransferLost { seq_id: "m".into() }));
        }
        rig.assert_idle();
    }
}

#[test]
fn commit_and_pause_want_something_that_lives() {
    let mut rig = Rig::new(1);
    let unknown = || EngineError::UnknownSequence { seq_id: "x".into() };
    assert_eq!(commit(&mut rig, 0, "x"), Err(unknown()));
    assert_eq!(pause(&mut rig, 0, "x"), Err(unknown()));
    rig.start(0, start(Some(key("x")), &prompt(20), 0, 4)).expect("started");
    assert_eq!(commit(&mut rig, 0, "x"), Err(unknown()), "there is no reservation");
    let paused = pause(&mut rig, 0, "x").expect("it is finished, and that is all there is");
    assert_eq!(paused.tokens[0].len(), 4);
    rig.abort(0, &key("x"));
    assert_eq!(pause(&mut rig, 0, "x"), Err(EngineError::Aborted { seq_id: "x".into() }));
    rig.prep(0, prep(key("y"), &prompt(20), 0)).expect("prepared");
    let gone = EngineError::LeaseExpired { seq_id: "y".into() };
    rig.advance(Duration::from_secs(1));
    assert_eq!(commit(&mut rig, 0, "y"), Err(gone));
    rig.assert_idle();
}

#[test]
fn a_running_request_moves_and_its_text_goes_on() {
    let call = start(Some(attempt("a", 0)), &prompt(37), 0, 60);
    let alone = reference(&call);
    let mut rig = Rig::new(2);
    let stream = rig.call(0, Call::StartGenerate(Box::new(again(&call))));
    while rig.events(stream).len() < 30 {
        rig.step(0);
    }
    // First, while it goes on, the pages that are full.
    let so_far: Vec<TokenId> = rig.output(stream).only().to_vec();
    let mut context = call.prompt.to_vec();
    context.extend_from_slice(&so_far);
    context.truncate(64);
    let mut prompt_now: std::sync::Arc<[TokenId]> = context.into();
    let first = PrepRecv { commit: true, ..prep(key("copy"), &prompt_now, 64) };
    let address = rig.prep(1, first).expect("prepared").kv_addr_info.expect("one");
    let copy = rig.call(0, Call::RemoteSend(send(key("copy"), &prompt_now, (0, 64), &address)));
    for _ in 0..4 {
        rig.tick();
    }
    let Reply::RemoteSend(sent) = rig.answer(copy).expect("sent") else { panic!() };
    assert_eq!(
        (sent.cached_tokens, sent.computed_tokens),
        (64, 0),
        "a running sequence's full pages can be sent"
    );
    let id = rig.call(1, Call::Commit(Commit { seq_id: "copy".into(), attempt: None }));
    rig.step(1);
    rig.answer(id).expect("committed");

    // Then it stops, and the rest follows.
    let paused = pause(&mut rig, 0, "a").expect("paused");
    let tokens = &paused.tokens[0];
    assert_eq!(tokens[..], alone.only()[..tokens.len()]);
    assert_eq!(rig.output(stream).only(), &tokens[..], "the stream has just as many");
    let mut context = call.prompt.to_vec();
    context.extend_from_slice(tokens);
    prompt_now = context.into();
    let len = u32::try_from(prompt_now.len()).expect("short");
    let moved = StartGenerate {
        key: Some(attempt("a", 1)),
        prompt: prompt_now.clone(),
        begin: len - 1,
        generated_from: 37,
        ..again(&call)
    };
    let prepared = rig.prep(1, prep(attempt("a", 1), &prompt_now, len - 1)).expect("prepared");
    assert_eq!(prepared.prefix_matched_length, 64);
    let rest = send(attempt("a", 1), &prompt_now, (64, len - 1), &prepared.kv_addr_info.expect("one"));
    // The higher attempt ends the paused one here; what it had computed is still cached.
    let sent = rig.send(0, rest).expect("sent");
    assert!(sent.cached_tokens >= 64);
    let output = rig.start(1, moved).expect("started");
    let mut whole = tokens.clone();
    whole.extend_from_slice(output.only());
    assert_eq!(whole, alone.only());
    rig.abort(0, &attempt("a", 1));
    rig.assert_idle();
}

#[test]
fn a_paused_sequence_keeps_its_pages_until_it_is_aborted() {
    let mut rig = Rig::new(1);
    let stream = rig.call(0, Call::StartGenerate(Box::new(start(Some(key("a")), &prompt(37), 0, 60))));
    for steps in 0..10 {
        rig.step(0);
        if steps == 5 {
            pause(&mut rig, 0, "a").expect("paused");
        }
    }
    let paused = pause(&mut rig, 0, "a").expect("again is the same");
    let held = rig.engines[0].page_counts().owned;
    assert!(held >= 3);
    rig.advance(Duration::from_secs(3600));
    assert_eq!(rig.engines[0].page_counts().owned, held);
    assert_eq!(rig.output(stream).tokens, paused.tokens);
    assert!(rig.abort(0, &key("a")));
    assert_eq!(rig.output(stream).error, Some(EngineError::Aborted { seq_id: "a".into() }));
    rig.assert_idle();
}

#[test]
fn a_pause_comes_before_the_first_token_too() {
    let mut rig = Rig::new(1);
    rig.prep(0, prep(key("a"), &prompt(40), 39)).expect("prepared");
    let stream = rig.call(0, Call::StartGenerate(Box::new(start(Some(key("a")), &prompt(40), 39, 9))));
    rig.step(0);
    assert_eq!(pause(&mut rig, 0, "a").expect("paused").tokens, [Vec::new()]);
    rig.settle();
    assert!(rig.events(stream).is_empty());
    rig.abort(0, &key("a"));
    rig.assert_idle();
}
