//! What is refused at the door, and why.

use microserving_engine::{CallOptions, EngineConfig, EngineError, PrepRecv, StartGenerate};
use microserving_protocol::{ClusterKey, EngineId, Incarnation, KvAddrInfo, SamplingParams, TokenId};
use microserving_transport::{LoopbackHub, Refusal};

use crate::support::{Rig, again, config, entropy, key, prep, prompt, reference, send, start, toy};

fn invalid(error: &EngineError) -> &str {
    match error {
        EngineError::InvalidField { field, .. } | EngineError::TooLong { field, .. } => field,
        other => panic!("{other:?}"),
    }
}

#[test]
fn prep_recv_names_the_field() {
    let mut rig = Rig::new(1);
    let mut check = |call: PrepRecv, field: &str| {
        let error = rig.prep(0, call).expect_err(field);
        assert_eq!(invalid(&error), field);
    };
    check(prep(key("a"), &prompt(0), 0), "prompt");
    check(prep(key("a"), &prompt(40), 40), "end");
    check(prep(key("a"), &prompt(40), u32::MAX), "end");
    check(PrepRecv { commit: true, ..prep(key("a"), &prompt(40), 41) }, "end");
    check(prep(key("a"), &prompt(513), 0), "prompt");
    check(prep(key("a"), &prompt(512), 0), "prompt");
    check(PrepRecv { reserve_tokens: 500, ..prep(key("a"), &prompt(40), 39) }, "reserve_tokens");
    check(PrepRecv { reserve_tokens: u32::MAX, ..prep(key("a"), &prompt(40), 39) }, "reserve_tokens");
    check(prep(key("a"), &vec![TokenId(259)].into(), 0), "prompt");
    rig.prep(0, PrepRecv { commit: true, ..prep(key("a"), &prompt(512), 512) }).expect("it fits");
    rig.abort(0, &key("a"));
    rig.assert_idle();
}

#[test]
fn start_generate_names_the_field() {
    let mut rig = Rig::new(1);
    let base = || start(None, &prompt(40), 0, 4);
    let mut check = |call: StartGenerate, field: &str| {
        let error = rig.start(0, call).expect_err(field);
        assert_eq!(invalid(&error), field);
    };
    check(StartGenerate { prompt: prompt(0), ..base() }, "prompt");
    check(StartGenerate { prompt: prompt(513), ..base() }, "prompt");
    check(StartGenerate { prompt: prompt(512), max_tokens: None, generated_from: 512, ..base() }, "prompt");
    check(StartGenerate { prompt: vec![TokenId(400)].into(), ..base() }, "prompt");
    check(StartGenerate { begin: 40, ..base() }, "begin");
    check(StartGenerate { n: 0, ..base() }, "n");
    check(StartGenerate { n: 17, ..base() }, "n");
    check(StartGenerate { n: 2, generated_from: 39, ..base() }, "n");
    check(StartGenerate { first_choice: 16, ..base() }, "choice_index");
    check(StartGenerate { n: 2, first_choice: 15, ..base() }, "choice_index");
    check(StartGenerate { first_choice: u32::MAX, ..base() }, "choice_index");
    check(StartGenerate { generated_from: 0, ..base() }, "generated_from");
    check(StartGenerate { generated_from: 41, ..base() }, "generated_from");
    check(StartGenerate { max_tokens: Some(0), ..base() }, "max_tokens");
    check(StartGenerate { max_tokens: Some(5), generated_from: 35, ..base() }, "max_tokens");
    check(StartGenerate { max_tokens: Some(473), ..base() }, "max_tokens");
    check(StartGenerate { max_tokens: Some(u32::MAX), ..base() }, "max_tokens");
    rig.assert_idle();
}

#[test]
fn a_sampling_parameter_out_of_bounds_ends_its_own_request() {
    let mut rig = Rig::new(1);
    let sampling = SamplingParams { temperature: f32::NAN, ..SamplingParams::default() };
    let bad = StartGenerate { sampling, ..start(None, &prompt(40), 0, 4) };
    let bad = rig.call(0, microserving_engine::Call::StartGenerate(Box::new(bad)));
    let good = start(None, &prompt(20), 0, 4);
    let output = rig.start(0, again(&good)).expect("started");
    assert_eq!(output.tokens, reference(&good).tokens);
    let error = rig.output(bad).error.expect("it failed");
    assert_eq!(invalid(&error), "temperature");
    rig.assert_idle();
}

#[test]
fn output_ends_where_the_context_ends() {
    let mut rig = Rig::new(1);
    let call = StartGenerate { max_tokens: None, ..start(None, &prompt(500), 0, 1) };
    let output = rig.start(0, call).expect("started");
    assert_eq!(output.only().len(), 12);
    assert_eq!(output.finish, [Some(microserving_protocol::FinishReason::Length)]);
    rig.assert_idle();
}

#[test]
fn what_can_never_fit_is_refused_and_what_just_fits_is_served() {
    let hub = LoopbackHub::new();
    let mut rig = Rig::with(hub, [(config("small", 4), toy())]);
    let too_long = EngineError::TooLong { field: "max_tokens", needed: 65, limit: 64 };
    assert_eq!(rig.start(0, start(None, &prompt(40), 0, 25)), Err(too_long));
    let call = start(None, &prompt(40), 0, 24);
    assert_eq!(rig.start(0, again(&call)).expect("started").tokens, reference(&call).tokens);
    let error = rig.prep(0, prep(key("a"), &prompt(64), 1)).expect_err("no room for one output token");
    assert_eq!(error, EngineError::TooLong { field: "prompt", needed: 65, limit: 64 });
    rig.assert_idle();
}

#[test]
fn prep_recv_never_waits_for_room() {
    let mut rig = Rig::with(LoopbackHub::new(), [(config("small", 4), toy())]);
    rig.prep(0, prep(key("a"), &prompt(40), 39)).expect("3 of 4 pages");
    let error = rig.prep(0, prep(key("b"), &prompt(40), 39)).expect_err("no room");
    assert!(matches!(error, EngineError::NoRoom { .. }), "{error:?}");
    assert!(rig.abort(0, &key("a")));
    rig.settle();
    rig.prep(0, prep(key("b"), &prompt(40), 39)).expect("a refusal leaves nothing behind, not even its key");
    rig.abort(0, &key("b"));
    rig.assert_idle();
}

#[test]
fn reservations_without_pages_are_counted_too() {
    let limits = EngineConfig { max_waiting: 2, ..config("e", 8) };
    let mut rig = Rig::with(LoopbackHub::new(), [(limits, toy())]);
    for (name, fits) in [("a", true), ("b", true), ("c", false)] {
        let prepared = rig.prep(0, prep(key(name), &prompt(40), 0));
        assert_eq!(prepared.is_ok(), fits, "{name}: {prepared:?}");
    }
    rig.abort(0, &key("a"));
    rig.prep(0, prep(key("c"), &prompt(40), 0)).expect("there is room again");
    for name in ["b", "c"] {
        rig.abort(0, &key(name));
    }
    rig.assert_idle();
}

#[test]
fn a_context_that_nobody_uses_makes_room() {
    let mut rig = Rig::with(LoopbackHub::new(), [(config("small", 4), toy())]);
    rig.start(0, start(None, &prompt(48), 0, 16)).expect("started");
    assert_eq!(rig.engines[0].page_counts().cached, 3);
    let other = crate::support::prompt_of(60, 3);
    rig.prep(0, prep(key("a"), &other, 59)).expect("all four pages");
    assert_eq!(rig.engines[0].page_counts().cached, 0);
    assert_eq!(rig.engines[0].counters().evicted_pages, 3);
    rig.abort(0, &key("a"));
    rig.assert_idle();
}

#[test]
fn too_many_waiting_are_refused_and_so_is_waiting_too_long() {
    let limits = EngineConfig { max_waiting: 2, max_running: 1, ..config("e", 8) };
    let mut rig = Rig::with(LoopbackHub::new(), [(limits, toy())]);
    let blocker = rig.prep(0, prep(key("blocker"), &prompt(120), 119)).expect("all 8 pages");
    assert!(blocker.kv_addr_info.is_some());
    let waiting: Vec<_> = (0..3)
        .map(|_| {
            rig.call(0, microserving_engine::Call::StartGenerate(Box::new(start(None, &prompt(4), 0, 4))))
        })
        .collect();
    rig.settle();
    rig.answer(waiting[0]).expect("it may wait");
    rig.answer(waiting[1]).expect("it may wait");
    assert!(matches!(rig.answer(waiting[2]), Err(EngineError::NoRoom { .. })));
    for _ in 0..130 {
        // The sender of the blocker is alive and slow.
        rig.prep(0, prep(key("blocker"), &prompt(120), 119)).expect("renewed");
        rig.advance(std::time::Duration::from_millis(950));
    }
    for id in &waiting[..2] {
        let error = rig.output(*id).error.expect("it waited too long");
        assert!(matches!(error, EngineError::NoRoom { .. }), "{error:?}");
    }
    rig.abort(0, &key("blocker"));
    rig.assert_idle();
}

#[test]
fn a_grammar_per_choice_or_none() {
    #[derive(Debug)]
    struct Never;
    impl microserving_executor::TokenConstraint for Never {
        fn mask(
            &mut self,
        ) -> Result<microserving_executor::TokenMask, microserving_executor::ConstraintError> {
            Err(microserving_executor::ConstraintError { reason: "gave up".into() })
        }
        fn accept(&mut self, _: TokenId) -> Result<(), microserving_executor::ConstraintError> {
            Ok(())
        }
        fn is_complete(&self) -> bool {
            false
        }
    }
    let mut rig = Rig::new(1);
    let one_of_two =
        StartGenerate { n: 2, constraints: vec![Box::new(Never)], ..start(None, &prompt(4), 0, 4) };
    assert_eq!(invalid(&rig.start(0, one_of_two).expect_err("refused")), "response_format");
    let failing = StartGenerate { constraints: vec![Box::new(Never)], ..start(None, &prompt(4), 0, 4) };
    let output = rig.start(0, failing).expect("started");
    assert!(matches!(output.error, Some(EngineError::Executor { .. })), "{output:?}");
    rig.assert_idle();
}

#[test]
fn min_tokens_and_stop_tokens() {
    let mut rig = Rig::new(1);
    let free = rig.start(0, start(None, &prompt(30), 0, 30)).expect("started");
    let stop = free.only()[5];
    let first = free.only().iter().position(|token| *token == stop).expect("there");
    let stopped = StartGenerate { stop_tokens: vec![stop], ..start(None, &prompt(30), 0, 30) };
    let output = rig.start(0, stopped).expect("started");
    assert_eq!(output.only(), &free.only()[..=first], "the stop token is the last one");
    assert_eq!(output.finish, [Some(microserving_protocol::FinishReason::Stop)]);
    let later = StartGenerate { stop_tokens: vec![stop], min_tokens: 12, ..start(None, &prompt(30), 0, 30) };
    let output = rig.start(0, later).expect("started");
    assert!(output.only().len() >= 12 && !output.only()[..12].contains(&stop), "{output:?}");
    rig.assert_idle();
}

#[test]
fn end_of_text_ends_unless_ignored() {
    let often = microserving_executor::ToyConfig { eos_one_in: 8, ..toy() };
    let mut rig = Rig::with(LoopbackHub::new(), [(config("e", 64), often)]);
    let ended = StartGenerate { ignore_eos: false, ..start(None, &prompt(30), 0, 200) };
    let output = rig.start(0, ended).expect("started");
    assert_eq!(output.finish, [Some(microserving_protocol::FinishReason::Stop)]);
    assert_eq!(output.only().last(), Some(&microserving_executor::ToyExecutor::EOS));
    let ignored = rig.start(0, start(None, &prompt(30), 0, 200)).expect("started");
    assert_eq!(ignored.only().len(), 200);
    rig.assert_idle();
}

/// Decodes an address, changes it, and signs it again with `signer`.
fn forge(address: &[u8], signer: &ClusterKey, change: impl Fn(&mut KvAddrInfo)) -> Vec<u8> {
    let mut decoded = KvAddrInfo::decode(address).expect("ours");
    change(&mut decoded);
    decoded.encode(signer)
}

#[test]
fn addresses_are_judged() {
    let mut rig = Rig::new(2);
    let address = rig.prep(1, prep(key("a"), &prompt(40), 39)).expect("prepared").kv_addr_info.expect("one");
    let receivers = entropy(2).cluster_key;
    let foreign = ClusterKey::from_random([99; 32]);
    let mut try_send =
        |address: &[u8]| rig.send(0, send(key("a"), &prompt(40), (0, 39), address)).expect_err("refused");
    let bad = Refusal::BadCredential;
    assert!(matches!(try_send(b""), EngineError::BadAddress { .. }));
    assert!(matches!(
        try_send(b"garbage that is long enough to hold a signature, or so"),
        EngineError::BadAddress { .. }
    ));
    assert!(matches!(try_send(&address[..address.len() - 1]), EngineError::BadAddress { .. }));
    assert_eq!(try_send(&forge(&address, &foreign, |_| {})), EngineError::Refused { refusal: bad });
    let mut flipped = address.clone();
    *flipped.last_mut().expect("not empty") ^= 1;
    assert_eq!(try_send(&flipped), EngineError::Refused { refusal: bad });
    let layout = try_send(&forge(&address, &receivers, |a| a.layout_fingerprint ^= 1));
    assert!(matches!(layout, EngineError::LayoutMismatch { .. }));
    let old = try_send(&forge(&address, &receivers, |a| a.incarnation = Incarnation(77)));
    assert!(matches!(old, EngineError::AddressExpired { .. }), "{old:?}");
    let unknown = try_send(&forge(&address, &receivers, |a| a.generation.0 += 5));
    assert!(matches!(unknown, EngineError::AddressExpired { .. }), "{unknown:?}");
    let other = try_send(&forge(&address, &receivers, |a| a.engine_id = EngineId::new("e7")));
    assert_eq!(other, EngineError::Refused { refusal: bad });
    let far = try_send(&forge(&address, &receivers, |a| a.transport = "carrier-pigeon".into()));
    let EngineError::Unreachable { reason } = far else { panic!("{far:?}") };
    assert!(reason.contains("carrier-pigeon") && reason.contains("same transport"), "{reason}");
    for range in [(0, 40), (0, 39)] {
        let salted = CallOptions::default();
        let call = microserving_engine::RemoteSend {
            options: salted,
            ..send(
                key("a"),
                &prompt(40),
                range,
                &forge(&address, &receivers, |a| {
                    a.range = microserving_protocol::KvRange::new(16, 39).expect("ordered");
                    a.pages.remove(0);
                }),
            )
        };
        let error = rig.send(0, call).expect_err("refused");
        assert!(matches!(invalid(&error), "begin" | "end"), "{error:?}");
    }
    let empty = send(key("a"), &prompt(40), (39, 39), &address);
    assert_eq!(invalid(&rig.send(0, empty).expect_err("refused")), "begin");
    rig.send(0, send(key("a"), &prompt(40), (0, 39), &address)).expect("the true one still works");
    let again =
        rig.send(0, send(key("a"), &prompt(40), (0, 20), &address)).expect_err("it is filled already");
    assert!(matches!(again, EngineError::AddressExpired { .. }), "{again:?}");
    rig.abort(1, &key("a"));
    rig.assert_idle();
}

#[test]
fn a_shared_key_is_checked_before_anything_is_asked() {
    let hub = LoopbackHub::new();
    let shared = || {
        let mut entropy = entropy(9);
        entropy.cluster_key = ClusterKey::from_text("the cluster's key").expect("long enough");
        entropy.key_is_shared = true;
        entropy
    };
    let make = |name: &str| {
        let executor = Box::new(microserving_executor::ToyExecutor::new(toy()).expect("sound"));
        microserving_engine::Engine::new(config(name, 64), executor, Box::new(hub.transport(name)), shared())
            .expect("sound")
    };
    let mut rig = Rig::new(2);
    rig.engines = vec![make("e0"), make("e1")];
    rig.hub = hub.clone();
    let address = rig.prep(1, prep(key("a"), &prompt(40), 39)).expect("prepared").kv_addr_info.expect("one");
    let forged = forge(&address, &ClusterKey::from_random([1; 32]), |_| {});
    // Though the receiver cannot be heard.
    hub.cut("e0", "e1");
    let error = rig.send(0, send(key("a"), &prompt(40), (0, 39), &forged)).expect_err("refused");
    assert_eq!(error, EngineError::Refused { refusal: Refusal::BadCredential });
    hub.heal();
    rig.send(0, send(key("a"), &prompt(40), (0, 39), &address)).expect("sent");
    rig.abort(1, &key("a"));
    rig.assert_idle();
}

#[test]
fn a_configuration_is_checked() {
    let check = |change: fn(&mut EngineConfig), expected: &str| {
        let mut config = config("e", 4);
        change(&mut config);
        let error = config.validate().expect_err(expected);
        assert_eq!(invalid(&error), expected);
    };
    check(|c| c.engine_id = EngineId::new(""), "engine_id");
    check(|c| c.num_pages = 0, "num_pages");
    check(|c| c.max_batch_tokens = 0, "max_batch_tokens");
    check(|c| c.max_running = 0, "max_running");
    check(|c| c.quarantine_cap = f32::NAN, "quarantine_cap");
    check(|c| c.lease = std::time::Duration::ZERO, "lease");
    check(|c| c.max_choices = 0, "max_choices");
    assert_eq!(config("e", 4).validate(), Ok(()));
}
