//! Every orchestration yields the same tokens as one engine alone, and moves exactly what it should.

use microserving_engine::{GenerateUsage, StartGenerate};
use microserving_protocol::{FinishReason, SamplingParams};

use crate::support::{PAGE, Rig, again, key, prompt, reference, start};

const LENGTHS: [u32; 6] = [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 100];

fn seeded() -> SamplingParams {
    SamplingParams { temperature: 0.8, top_p: 0.95, seed: 42, ..SamplingParams::default() }
}

/// Runs one call by splitting its prompt at `end` between two engines and checks tokens, transfer and usage.
fn check_split(call: &StartGenerate, end: u32) {
    let len = u32::try_from(call.prompt.len()).expect("short");
    let alone = reference(call);
    let mut rig = Rig::new(2);
    let (sent, output) = rig.disaggregate(0, 1, end, again(call));
    assert_eq!(output.tokens, alone.tokens, "length {len}, end {end}");
    assert_eq!(output.finish, alone.finish);
    assert_eq!(sent.is_some(), end > 0);
    if let Some(sent) = sent {
        assert_eq!((sent.sent_tokens, sent.cached_tokens, sent.computed_tokens), (end, 0, end));
        assert_eq!(sent.bytes, u64::from(end) * rig.engines[0].info().executor.layout.token_bytes() as u64);
    }
    let usage = output.usage.expect("done");
    assert_eq!(
        (usage.cached_tokens, usage.received_tokens, usage.computed_tokens),
        (0, end, len - end),
        "the receiver computes what it did not receive and nothing else"
    );
    let sender = rig.engines[0].counters();
    let receiver = rig.engines[1].counters();
    assert_eq!((sender.prefill_tokens, sender.decode_tokens), (u64::from(end), 0));
    assert_eq!(sender.bytes_sent, receiver.bytes_received);
    rig.assert_idle();
}

#[test]
fn prefill_and_decode_on_two_engines_equal_one() {
    for len in LENGTHS {
        check_split(&start(Some(key("a")), &prompt(len), 0, 20), len - 1);
    }
}

#[test]
fn any_split_equals_one_engine() {
    for len in LENGTHS {
        for ninths in [0, 1, 5, 8] {
            check_split(&start(Some(key("a")), &prompt(len), 0, 12), (len - 1) * ninths / 9);
        }
    }
}

#[test]
fn seeded_sampling_does_not_depend_on_the_engine() {
    for len in LENGTHS {
        let call = StartGenerate { sampling: seeded(), ..start(Some(key("a")), &prompt(len), 0, 20) };
        check_split(&call, len - 1);
        check_split(&call, (len - 1) / 2);
    }
}

#[test]
fn choices_equal_separate_runs() {
    for len in LENGTHS {
        let call = StartGenerate { sampling: seeded(), n: 3, ..start(Some(key("a")), &prompt(len), 0, 20) };
        let mut rig = Rig::new(2);
        let plain = rig.start(0, again(&call)).expect("started");
        assert_eq!(plain.tokens.len(), 3);
        assert_ne!(plain.tokens[0], plain.tokens[1], "choices differ by their index");
        let first = reference(&StartGenerate { n: 1, ..again(&call) });
        assert_eq!(plain.tokens[0], first.only());
        let prefilled = rig.engines[0].counters().prefill_tokens;
        assert!(
            prefilled <= u64::from(len + 2 * PAGE),
            "{prefilled} tokens were computed: followers compute a page at most"
        );
        let usage = plain.usage.expect("done");
        assert_eq!((usage.completion_tokens, usage.computed_tokens), (60, len));

        rig.assert_idle();
        let mut rig = Rig::new(2);
        let (_, split) = rig.disaggregate(0, 1, len - 1, call);
        assert_eq!(split.tokens, plain.tokens, "length {len}");
        rig.assert_idle();
    }
}

#[test]
fn a_second_turn_sends_only_what_is_new() {
    let mut rig = Rig::new(2);
    let first = start(Some(key("first")), &prompt(100), 0, 20);
    let (_, output) = rig.disaggregate(0, 1, 99, first);
    let mut longer = prompt(100).to_vec();
    longer.extend_from_slice(output.only());
    longer.extend_from_slice(&prompt(30));
    let second = start(Some(key("second")), &longer.into(), 0, 20);
    let alone = reference(&second);
    let (sent, output) = rig.disaggregate(0, 1, 149, second);
    assert_eq!(output.tokens, alone.tokens);
    let sent = sent.expect("something was sent");
    // The receiver has the 119 tokens whose KV it computed or received, in full pages; the sender has its 99.
    assert_eq!((sent.sent_tokens, sent.cached_tokens, sent.computed_tokens), (149 - 112, 96, 149 - 96));
    let usage = output.usage.expect("done");
    assert_eq!(
        usage,
        GenerateUsage {
            prompt_tokens: 150,
            completion_tokens: 20,
            cached_tokens: 112,
            received_tokens: 37,
            computed_tokens: 1
        }
    );
    rig.assert_idle();
}

#[test]
fn what_the_receiver_has_is_not_sent_at_all() {
    let mut rig = Rig::new(2);
    rig.start(1, start(None, &prompt(65), 0, 4)).expect("started");
    let call = start(Some(key("a")), &prompt(65), 0, 20);
    let alone = reference(&call);
    let (sent, output) = rig.disaggregate(0, 1, 64, call);
    assert_eq!(sent, None);
    assert_eq!(output.tokens, alone.tokens);
    rig.assert_idle();
}

#[test]
fn two_senders_fill_one_reservation() {
    let call = start(Some(key("a")), &prompt(100), 0, 20);
    let alone = reference(&call);
    for middle in [1, 16, 40, 98] {
        let mut rig = Rig::new(3);
        let prepared = rig.prep(2, crate::support::prep(key("a"), &call.prompt, 99)).expect("prepared");
        let address = prepared.kv_addr_info.expect("an address");
        for (sender, range) in [(1, (middle, 99)), (0, (0, middle))] {
            let sent = rig.send(sender, crate::support::send(key("a"), &call.prompt, range, &address));
            assert_eq!(sent.expect("sent").sent_tokens, range.1 - range.0);
        }
        let output = rig.start(2, StartGenerate { begin: 99, ..again(&call) }).expect("started");
        assert_eq!(output.tokens, alone.tokens, "split at {middle}");
        rig.assert_idle();
    }
}

#[test]
fn an_engine_may_send_to_itself() {
    let call = start(Some(key("a")), &prompt(40), 0, 8);
    let alone = reference(&call);
    let mut rig = Rig::new(1);
    let (sent, output) = rig.disaggregate(0, 0, 39, call);
    assert_eq!(sent.map(|sent| sent.sent_tokens), Some(39));
    assert_eq!(output.tokens, alone.tokens);
    rig.assert_idle();
}

#[test]
fn many_at_once_equal_each_alone() {
    let mut rig = Rig::new(2);
    let mut running = Vec::new();
    for number in 0..8 {
        let prompt = crate::support::prompt_of(20 + 9 * number, number);
        let id = key(&format!("r{number}"));
        let len = u32::try_from(prompt.len()).expect("short");
        let end = if number % 2 == 0 { len - 1 } else { len / 2 };
        let reply = rig.prep(1, crate::support::prep(id.clone(), &prompt, end)).expect("prepared");
        let address = reply.kv_addr_info.expect("nothing is cached");
        rig.call(
            0,
            microserving_engine::Call::RemoteSend(crate::support::send(
                id.clone(),
                &prompt,
                (0, end),
                &address,
            )),
        );
        let call = start(Some(id), &prompt, end, 16);
        let started = rig.call(1, microserving_engine::Call::StartGenerate(Box::new(again(&call))));
        running.push((call, started));
    }
    rig.settle();
    for (call, started) in running {
        assert_eq!(rig.output(started).tokens, reference(&call).tokens, "{:?}", call.key);
    }
    rig.assert_idle();
}

#[test]
fn replayed_output_continues_where_it_stopped() {
    for sampling in [SamplingParams::greedy(), SamplingParams { frequency_penalty: 0.7, ..seeded() }] {
        let call = StartGenerate { sampling, ..start(Some(key("a")), &prompt(37), 0, 24) };
        let alone = reference(&call);
        for replayed in [1, 10, 23] {
            let mut longer = call.prompt.to_vec();
            longer.extend_from_slice(&alone.only()[..replayed]);
            let resumed = StartGenerate { prompt: longer.into(), generated_from: 37, ..again(&call) };
            let mut rig = Rig::new(1);
            let output = rig.start(0, resumed).expect("started");
            assert_eq!(output.only(), &alone.only()[replayed..], "after {replayed}");
            let usage = output.usage.expect("done");
            assert_eq!((usage.prompt_tokens, usage.completion_tokens), (37, 24));
            rig.assert_idle();
        }
    }
}

#[test]
fn one_choice_of_several_continues_with_its_own_draws() {
    let call = StartGenerate { sampling: seeded(), n: 3, ..start(Some(key("a")), &prompt(37), 0, 24) };
    let together = reference(&call);
    for (choice, wanted) in (0..).zip(&together.tokens) {
        for replayed in [0, 1, 23] {
            let mut longer = call.prompt.to_vec();
            longer.extend_from_slice(&wanted[..replayed]);
            let resumed = StartGenerate {
                n: 1,
                first_choice: choice,
                prompt: longer.into(),
                generated_from: 37,
                ..again(&call)
            };
            let mut rig = Rig::new(1);
            let output = rig.start(0, resumed).expect("started");
            assert_eq!(output.only(), &wanted[replayed..], "choice {choice} after {replayed}");
            rig.assert_idle();
        }
    }
    assert_ne!(together.tokens[0], together.tokens[1], "or the test says nothing");
}

#[test]
fn what_is_computed_stays_cached_prompt_and_output() {
    let mut rig = Rig::new(1);
    let call = start(None, &prompt(40), 0, 30);
    let first = rig.start(0, again(&call)).expect("started");
    assert_eq!(first.finish, [Some(FinishReason::Length)]);
    // 69 tokens have KV, the last one was never read.
    assert_eq!(rig.engines[0].page_counts().cached, 69 / PAGE);
    let second = rig.start(0, call).expect("started");
    assert_eq!(second.tokens, first.tokens);
    assert_eq!(second.usage.expect("done").cached_tokens, 32);
    rig.assert_idle();
}

#[test]
fn chunks_do_not_change_the_tokens() {
    let call = start(None, &prompt(100), 0, 10);
    let alone = reference(&call);
    for max_batch_tokens in [1, 7, 16, 99, 100, 512] {
        let config =
            microserving_engine::EngineConfig { max_batch_tokens, ..crate::support::config("e0", 64) };
        let hub = microserving_transport::LoopbackHub::new();
        let mut rig = Rig::with(hub, [(config, crate::support::toy())]);
        assert_eq!(rig.start(0, again(&call)).expect("started").tokens, alone.tokens);
        rig.assert_idle();
    }
}
