//! What a worker computes for its front is what an engine in one process computes, to the last bit.

#[path = "../../../executor-candle/tests/it/noise.rs"]
mod noise;
#[path = "../../../executor-candle/examples/make_model/random_gguf.rs"]
#[allow(dead_code, reason = "the shapes that people know are for measurements")]
mod random_gguf;
#[path = "../../../executor-candle/examples/make_model/vocabulary.rs"]
mod vocabulary;

use std::fs::File;
use std::io::BufWriter;
use std::num::NonZeroUsize;
use std::path::Path;

use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::{self, Value};
use microserving_engine::{
    Call, CallOptions, ConstraintError, GenerateEvent, PrepRecv, RemoteSend, Reply, StartGenerate,
    TokenConstraint, TokenMask,
};
use microserving_executor::Executor;
use microserving_executor_candle::{CandleConfig, CandleExecutor};
use microserving_protocol::{KvRange, SamplingParams, TokenId};
use microserving_transport::LoopbackHub;
use microserving_transport_shm::{ShmConfig, ShmTransport};

use crate::support::{Rig, call, start, tokens, toy};

/// Samplers of every need, and of every thing that is told of a token.
fn samplings() -> Vec<SamplingParams> {
    let plain = || SamplingParams { temperature: 0.9, seed: 11, ..SamplingParams::default() };
    vec![
        SamplingParams::greedy(),
        plain(),
        SamplingParams { top_p: 0.8, ..plain() },
        SamplingParams { top_k: 7, ..plain() },
        SamplingParams { top_k: 12, top_p: 0.7, min_p: 0.05, ..plain() },
        SamplingParams { logprobs: Some(3), ..SamplingParams::greedy() },
        SamplingParams { repetition_penalty: 1.2, presence_penalty: 0.4, top_p: 0.9, ..plain() },
        SamplingParams { logit_bias: vec![(TokenId(3), 50.0)], ..SamplingParams::greedy() },
        // Refused by the sampler, and by nobody else.
        SamplingParams { min_p: 7.0, ..plain() },
    ]
}

/// Lets even tokens pass.
#[derive(Debug)]
struct Even {
    num_words: usize,
}

impl TokenConstraint for Even {
    fn mask(&mut self) -> Result<TokenMask, ConstraintError> {
        Ok(TokenMask::from_words(vec![0x5555_5555; self.num_words]))
    }

    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError> {
        let odd = || ConstraintError { reason: "it is odd".into() };
        if token.0.is_multiple_of(2) { Ok(()) } else { Err(odd()) }
    }

    fn is_complete(&self) -> bool {
        false
    }
}

fn calls(vocab_size: u32) -> Vec<StartGenerate> {
    let mut calls: Vec<_> = samplings()
        .into_iter()
        .zip(0_u32..)
        .map(|(sampling, number)| call(&format!("r{number}"), 5 + 9 * number, 12, sampling))
        .collect();
    let even = Even { num_words: vocab_size.div_ceil(32) as usize };
    let constrained = call("even", 30, 12, SamplingParams::greedy());
    calls.push(StartGenerate { constraints: vec![Box::new(even)], ..constrained });
    calls.push(StartGenerate { n: 3, min_tokens: 4, ..call("many", 40, 9, SamplingParams::default()) });
    calls
}

fn check(make: impl Fn() -> Box<dyn Executor>) {
    let hub = LoopbackHub::new();
    let vocab_size = make().info().vocab_size;
    let alone = Rig::new("alone", make(), Box::new(hub.transport("alone"))).generate(calls(vocab_size));
    let (worker, thread) = start(make(), Box::new(hub.transport("worker")), None);
    let mut front = Rig::new("front", Box::new(worker.executor), Box::new(worker.transport));
    let events = front.generate(calls(vocab_size));
    for (number, (events, alone)) in events.iter().zip(&alone).enumerate() {
        assert_eq!(events, alone, "call {number}");
    }
    let is_done = |events: &[GenerateEvent]| matches!(events.last(), Some(GenerateEvent::Done { .. }));
    let done = alone.iter().filter(|events| is_done(events)).count();
    assert_eq!(done, alone.len() - 1, "all but the one that is refused");
    front.assert_balanced();
    drop(front);
    thread.join().expect("no panic");
}

#[test]
fn toys_say_the_same() {
    check(|| toy());
}

fn write_model(path: &Path) {
    let shape = random_gguf::Shape {
        name: "small",
        architecture: "llama",
        pre: "llama-bpe",
        vocab: 1000,
        hidden: 128,
        intermediate: 256,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 32,
        max_context: 256,
        rope_theta: 1e4,
        rms_eps: 1e-6,
    };
    let kind = random_gguf::FileType::from_name("q8_0").expect("a type");
    let gguf = random_gguf::make(&shape, kind).expect("a model");
    let metadata: Vec<(&str, &Value)> =
        gguf.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> =
        gguf.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut file = BufWriter::new(File::create(path).expect("a file"));
    gguf_file::write(&mut file, &metadata, &tensors).expect("written");
}

#[test]
fn models_say_the_same() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    write_model(&path);
    check(|| {
        let config = CandleConfig { threads: NonZeroUsize::MIN, ..CandleConfig::new(&path) };
        Box::new(CandleExecutor::load(&config, &mut |_| ()).expect("a sound model"))
    });
}

/// Prefill and decode on two engines: both with workers, or one of them.
#[test]
fn transfers_between_workers_change_no_token() {
    let shm = || Box::new(ShmTransport::new(ShmConfig::default()).expect("shared memory"));
    let wanted = Rig::new("alone", toy(), shm()).generate(vec![call("x", 200, 20, SamplingParams::greedy())]);
    for (sender_remote, receiver_remote) in [(true, true), (true, false), (false, true)] {
        let rig = |name, is_remote: bool| {
            if is_remote {
                let (worker, _thread) = start(toy(), shm(), None);
                Rig::new(name, Box::new(worker.executor), Box::new(worker.transport))
            } else {
                Rig::new(name, toy(), shm())
            }
        };
        let (mut sender, mut receiver) = (rig("sender", sender_remote), rig("receiver", receiver_remote));
        let call = call("x", 200, 20, SamplingParams::greedy());
        let (key, prompt) = (call.key.clone(), call.prompt.clone());
        // A part of it is cached on the sender, so that KV of earlier steps is sent, too.
        let cached = StartGenerate {
            key: None,
            max_tokens: Some(1),
            ..crate::support::call("x", 64, 1, SamplingParams::greedy())
        };
        sender.generate(vec![cached]);
        let options = CallOptions { cache_salt: "x".into(), ..CallOptions::default() };
        let prep = PrepRecv {
            key: key.clone(),
            prompt: prompt.clone(),
            end: 199,
            reserve_tokens: 0,
            commit: false,
            options: options.clone(),
        };
        let Ok(Reply::PrepRecv(prepared)) = receiver.answer(Call::PrepRecv(prep)) else {
            panic!("not prepared");
        };
        let send = RemoteSend {
            key,
            prompt,
            range: KvRange::new(0, 199).expect("ordered"),
            kv_addr_info: prepared.kv_addr_info.expect("nothing is cached"),
            recv_rank: 0,
            options,
        };
        let sending = sender.step([Call::RemoteSend(send)])[0];
        let waiting = StartGenerate { begin: 199, ..call };
        let generating = receiver.step([Call::StartGenerate(Box::new(waiting))])[0];
        for _ in 0..100_000 {
            sender.step([]);
            receiver.step([]);
            if sender.engine.is_idle() && receiver.engine.is_idle() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
        let sent = sender.replies.iter().find(|(id, _)| *id == sending).expect("answered");
        let Ok(Reply::RemoteSend(sent)) = &sent.1 else { panic!("{sent:?}") };
        assert_eq!((sent.sent_tokens, sent.cached_tokens), (199, 64));
        assert_eq!(tokens(&receiver.events_of(generating)), tokens(&wanted[0]));
        let received = receiver.engine.counters().bytes_received;
        assert_eq!(received, sent.bytes, "bytes went from one to the other");
        sender.assert_balanced();
        receiver.assert_balanced();
    }
}
