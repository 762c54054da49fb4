//! The async face: the same calls from several tasks, callers that are slow or gone, and an orderly end.

use std::time::Duration;

use futures::StreamExt;
use microserving_engine::{
    Abort, Commit, EngineConfig, EngineError, EngineHandle, EngineThread, GenerateEvent, GenerateStream,
    Pause, PrepRecv, StartGenerate,
};
use microserving_executor::ToyConfig;
use microserving_protocol::SamplingParams;
use microserving_transport::LoopbackHub;
use tokio::time::{Instant, timeout};

use crate::support::{
    Output, again, config, engine, key, prep, prompt, prompt_of, reference, send, start, toy,
};

/// Longer than anything here takes; a hang is a failure and not a wait for the test runner.
const LONG: Duration = Duration::from_secs(20);

fn spawn(hub: &LoopbackHub, name: &str, seed: u64) -> (EngineHandle, EngineThread) {
    spawn_with(hub, config(name, 64), toy(), seed)
}

fn spawn_with(
    hub: &LoopbackHub,
    config: EngineConfig,
    toy: ToyConfig,
    seed: u64,
) -> (EngineHandle, EngineThread) {
    EngineHandle::spawn(engine(hub, config, toy, seed)).expect("a thread")
}

async fn collect(stream: GenerateStream) -> Output {
    collect_after(Vec::new(), stream).await
}

async fn collect_after(mut events: Vec<GenerateEvent>, mut stream: GenerateStream) -> Output {
    while let Some(event) = timeout(LONG, stream.next()).await.expect("no hang") {
        events.push(event);
    }
    Output::from_events(&events, 0)
}

async fn wait_until_idle(handle: &EngineHandle) {
    let began = Instant::now();
    loop {
        let state = handle.state().await.expect("a state");
        let pages = state.pages;
        let live = state.waiting + state.running + state.receiving + state.sending;
        if live == 0 && pages.free + pages.cached == pages.total {
            return;
        }
        assert!(began.elapsed() < LONG, "not idle: {state:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// The three calls as a router makes them.
async fn disaggregate(p: &EngineHandle, d: &EngineHandle, end: u32, call: StartGenerate) -> Output {
    let id = call.key.clone().expect("a key");
    let prepared = d.prep_recv(prep(id.clone(), &call.prompt, end)).await.expect("prepared");
    if let Some(address) = prepared.kv_addr_info {
        let range = (prepared.prefix_matched_length, end);
        let sent = p.remote_send(send(id, &call.prompt, range, &address)).await.expect("sent");
        assert_eq!(sent.sent_tokens, range.1 - range.0);
    }
    collect(d.start_generate(StartGenerate { begin: end, ..call }).await.expect("started")).await
}

#[tokio::test]
async fn every_pattern_equals_one_engine() {
    let hub = LoopbackHub::with_checksums();
    let (p, p_thread) = spawn(&hub, "p", 1);
    let (d, d_thread) = spawn(&hub, "d", 2);
    let began = Instant::now();
    let mut number = 0;
    for len in [1, 15, 16, 17, 100] {
        for sampling in [
            SamplingParams::greedy(),
            SamplingParams { temperature: 0.8, seed: 9, ..SamplingParams::default() },
        ] {
            for end in [len - 1, len * 3 / 4, len / 2] {
                number += 1;
                let id = key(&format!("r{number}"));
                // Another prompt each time, so that every round has its transfer.
                let call = StartGenerate {
                    sampling: sampling.clone(),
                    n: 2,
                    ..start(Some(id), &prompt_of(len, number), 0, 12)
                };
                let alone = reference(&call);
                let output = disaggregate(&p, &d, end.min(len - 1), again(&call)).await;
                assert_eq!(output.tokens, alone.tokens, "length {len}, end {end}");
                let plain = p.start_generate(StartGenerate { key: None, ..call }).await.expect("started");
                assert_eq!(collect(plain).await.tokens, alone.tokens);
            }
        }
    }
    // A missed wake-up costs half a second each.
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}: somebody slept through news", began.elapsed());
    wait_until_idle(&p).await;
    wait_until_idle(&d).await;
    assert!(p_thread.join() && d_thread.join());
}

#[tokio::test]
async fn eight_at_once_equal_each_alone() {
    let hub = LoopbackHub::new();
    let (p, _p) = spawn(&hub, "p", 1);
    let (d, _d) = spawn(&hub, "d", 2);
    let runs = (0..8).map(|number| {
        let (p, d) = (p.clone(), d.clone());
        async move {
            let len = 20 + 9 * number;
            let call = start(Some(key(&format!("r{number}"))), &prompt_of(len, number), 0, 16);
            let alone = reference(&call);
            assert_eq!(disaggregate(&p, &d, len - 1, call).await.tokens, alone.tokens);
        }
    });
    futures::future::join_all(runs).await;
    wait_until_idle(&p).await;
    wait_until_idle(&d).await;
}

#[tokio::test]
async fn a_dropped_stream_is_given_up_within_a_step() {
    let hub = LoopbackHub::new();
    // A step takes 2 ms, so the whole answer would take most of a second.
    let slow = ToyConfig { step_time: Duration::from_millis(2), ..toy() };
    let (engine, _thread) = spawn_with(&hub, config("e", 64), slow, 1);
    let mut stream = engine.start_generate(start(None, &prompt(20), 0, 400)).await.expect("started");
    assert!(matches!(stream.next_event().await, Some(GenerateEvent::Token { .. })));
    drop(stream);
    wait_until_idle(&engine).await;
    let counters = engine.state().await.expect("a state").counters;
    assert_eq!(counters.aborted, 1);
    assert!(counters.decode_tokens < 200, "it went on for {} tokens", counters.decode_tokens);
}

#[tokio::test]
async fn a_dropped_call_is_given_up() {
    let hub = LoopbackHub::new();
    let (p, _p) = spawn(&hub, "p", 1);
    let (d, _d) = spawn(&hub, "d", 2);
    hub.cut("p", "d");
    let prompt = prompt(40);
    let address =
        d.prep_recv(prep(key("a"), &prompt, 39)).await.expect("prepared").kv_addr_info.expect("one");
    let sending = p.remote_send(send(key("a"), &prompt, (0, 39), &address));
    timeout(Duration::from_millis(20), sending).await.expect_err("the link is cut");
    let began = Instant::now();
    while p.state().await.expect("a state").sending > 0 {
        assert!(began.elapsed() < LONG);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    hub.heal();
    d.abort(Abort { seq_id: "a".into(), attempt: None }).await.expect("aborted");
    wait_until_idle(&p).await;
    wait_until_idle(&d).await;
}

#[tokio::test]
async fn a_reader_that_does_not_read_holds_nobody_up() {
    let hub = LoopbackHub::new();
    let (engine, _thread) = spawn(&hub, "e", 1);
    let call = start(None, &prompt(20), 0, 300);
    let alone = reference(&call);
    let unread = engine.start_generate(again(&call)).await.expect("started");
    for _ in 0..3 {
        let read = engine.start_generate(again(&call)).await.expect("started");
        assert_eq!(collect(read).await.tokens, alone.tokens);
    }
    assert_eq!(collect(unread).await.tokens, alone.tokens, "and nothing of it was lost");
}

#[tokio::test]
async fn a_full_queue_says_so() {
    let hub = LoopbackHub::new();
    let slow = ToyConfig { step_time: Duration::from_millis(50), ..toy() };
    let config = EngineConfig { command_queue: 2, ..config("e", 64) };
    let (engine, _thread) = spawn_with(&hub, config, slow, 1);
    let mut stream = engine.start_generate(start(None, &prompt(4), 0, 100)).await.expect("started");
    stream.next_event().await;
    let asked = (0..8).map(|_| engine.state());
    let answers = futures::future::join_all(asked).await;
    let refused = answers.iter().filter(|a| matches!(a, Err(EngineError::NoRoom { .. }))).count();
    assert!((1..8).contains(&refused), "{refused} of 8 were refused");
}

#[tokio::test]
async fn modelled_time_is_waited_for() {
    let hub = LoopbackHub::new();
    let slow = ToyConfig { step_time: Duration::from_millis(5), ..toy() };
    let (engine, _thread) = spawn_with(&hub, config("e", 64), slow, 1);
    let began = Instant::now();
    collect(engine.start_generate(start(None, &prompt(4), 0, 20)).await.expect("started")).await;
    assert!(began.elapsed() >= Duration::from_millis(100), "20 steps in {:?}", began.elapsed());
}

#[tokio::test]
async fn draining_finishes_what_was_begun_and_takes_nothing_new() {
    let hub = LoopbackHub::new();
    let slow = ToyConfig { step_time: Duration::from_millis(1), ..toy() };
    let (engine, thread) = spawn_with(&hub, config("e", 64), slow, 1);
    let call = start(None, &prompt(20), 0, 40);
    let alone = reference(&call);
    let begun = engine.start_generate(again(&call)).await.expect("started");
    let prepared = PrepRecv { end: 0, ..prep(key("p"), &call.prompt, 0) };
    engine.prep_recv(prepared).await.expect("prepared");
    let drain = tokio::spawn({
        let engine = engine.clone();
        async move { engine.drain().await }
    });
    while engine.start_generate(again(&call)).await.is_ok() {}
    assert_eq!(engine.start_generate(again(&call)).await.expect_err("refused"), EngineError::Draining);
    assert_eq!(engine.prep_recv(prep(key("b"), &call.prompt, 19)).await, Err(EngineError::Draining));
    let prepared = StartGenerate { key: Some(key("p")), ..again(&call) };
    let prepared = engine.start_generate(prepared).await.expect("what was prepared may still start");
    assert_eq!(collect(begun).await.tokens, alone.tokens);
    assert_eq!(collect(prepared).await.tokens, alone.tokens);
    timeout(LONG, drain).await.expect("drained").expect("no panic").expect("answered");
    assert!(thread.join());
    assert!(!engine.is_alive());
    assert_eq!(engine.state().await, Err(EngineError::Draining));
}

#[tokio::test]
async fn stopping_ends_open_streams_with_an_error() {
    let hub = LoopbackHub::new();
    let slow = ToyConfig { step_time: Duration::from_millis(5), ..toy() };
    let (engine, thread) = spawn_with(&hub, config("e", 64), slow, 1);
    let stream = engine.start_generate(start(None, &prompt(20), 0, 400)).await.expect("started");
    assert!(thread.join());
    assert_eq!(collect(stream).await.error, Some(EngineError::Draining));
}

#[tokio::test]
async fn cache_events_can_be_followed_from_any_point() {
    let hub = LoopbackHub::new();
    let (engine, _thread) = spawn(&hub, "e", 1);
    let mut from_start = engine.kv_events(0);
    assert!(from_start.next_batch().await.expect("a batch").events.is_empty());
    let call = start(None, &prompt(40), 0, 4);
    collect(engine.start_generate(call).await.expect("started")).await;
    let batch = timeout(LONG, from_start.next_batch()).await.expect("no hang").expect("a batch");
    assert_eq!(batch.events.first().map(|event| event.seq), Some(0));
    assert_eq!(batch.incarnation, engine.info().incarnation);
    // The future is another boot's: such a follower gets a snapshot.
    let lost = engine.kv_events(1_000_000).next_batch().await.expect("a batch");
    let snapshot = lost.snapshot.expect("a snapshot");
    assert_eq!(snapshot.pages.len(), 2);
    assert_eq!(lost.next, snapshot.next_seq);
}

#[tokio::test]
async fn commit_and_pause_by_handle() {
    let hub = LoopbackHub::new();
    let (p, _p) = spawn(&hub, "p", 1);
    let (d, _d) = spawn(&hub, "d", 2);
    let context = prompt(48);
    let call = PrepRecv { commit: true, ..prep(key("m"), &context, 48) };
    let prepared = d.prep_recv(call).await.expect("prepared");
    let address = prepared.kv_addr_info.expect("an address");
    p.remote_send(send(key("m"), &context, (0, 48), &address)).await.expect("sent");
    let committed = d.commit(Commit { seq_id: "m".into(), attempt: None }).await.expect("committed");
    assert_eq!(committed.committed_tokens, 48);

    let missing = d.pause(Pause { seq_id: "m".into(), attempt: None }).await;
    assert_eq!(missing, Err(EngineError::UnknownSequence { seq_id: "m".into() }));
    let mut stream = d.start_generate(start(Some(key("g")), &context, 0, 400)).await.expect("started");
    let first = stream.next_event().await.expect("a token");
    let paused = d.pause(Pause { seq_id: "g".into(), attempt: None }).await.expect("paused");
    assert_eq!(paused.tokens.len(), 1);
    assert_eq!(d.sequence("g".into()).await.expect("it lives").state, "paused");
    assert!(d.abort(Abort { seq_id: "g".into(), attempt: None }).await.expect("answered"));
    let output = collect_after(vec![first], stream).await;
    assert_eq!(output.tokens, paused.tokens);
    assert_eq!(output.error, Some(EngineError::Aborted { seq_id: "g".into() }));
    wait_until_idle(&d).await;
    wait_until_idle(&p).await;
}
