//! Devices that are lost, with all that was in them, and replaced.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use microserving_engine::{Call, Commit, Device, Engine, EngineError, Reply, StartGenerate};
use microserving_executor::{Batch, Executor, ExecutorError, ExecutorInfo, StepOutput, ToyExecutor};
use microserving_protocol::{KvGeometry, KvMemory, LayerId};
use microserving_transport::LoopbackHub;

use crate::support::{Rig, again, config, entropy, key, prep, prompt_of, reference, send, start, toy};

/// A toy whose device can be taken away.
#[derive(Debug)]
struct Losable {
    toy: ToyExecutor,
    is_lost: Arc<AtomicBool>,
}

impl Losable {
    fn boxed(is_lost: &Arc<AtomicBool>) -> Box<dyn Executor> {
        Box::new(Self { toy: ToyExecutor::new(toy()).expect("a sound toy"), is_lost: Arc::clone(is_lost) })
    }
}

impl Executor for Losable {
    fn info(&self) -> &ExecutorInfo {
        self.toy.info()
    }

    fn attach(&mut self, geometry: KvGeometry, memory: Arc<dyn KvMemory>) -> Result<(), ExecutorError> {
        self.toy.attach(geometry, memory)
    }

    fn forward(
        &mut self,
        batch: &mut Batch<'_>,
        on_layer: &mut dyn FnMut(LayerId),
    ) -> Result<StepOutput, ExecutorError> {
        assert!(self.lost().is_none(), "nothing is asked of a device that is known to be gone");
        self.toy.forward(batch, on_layer)
    }

    fn lost(&self) -> Option<String> {
        self.is_lost.load(Ordering::Acquire).then(|| "taken away".to_owned())
    }
}

const NAMES: [&str; 2] = ["p", "d"];

/// Two engines, and what takes their devices away.
fn pair() -> (Rig, [Arc<AtomicBool>; 2]) {
    let mut rig = Rig::with(LoopbackHub::new(), [(config("p", 64), toy()), (config("d", 64), toy())]);
    let lost = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    for (at, is_lost) in lost.iter().enumerate() {
        let transport = Box::new(rig.hub.transport(NAMES[at]));
        let seed = at as u64 + 1;
        let engine = Engine::new(config(NAMES[at], 64), Losable::boxed(is_lost), transport, entropy(seed));
        rig.engines[at] = engine.expect("a sound engine");
    }
    (rig, lost)
}

fn lose(rig: &mut Rig, lost: &[Arc<AtomicBool>; 2], engine: usize) {
    lost[engine].store(true, Ordering::Release);
    rig.hub.crash(NAMES[engine]);
    rig.step(engine);
    let pages = rig.engines[engine].page_counts();
    assert_eq!(pages.free, pages.total, "nothing is left: {pages:?}");
}

fn replace(rig: &mut Rig, engine: usize, name: &str) {
    let transport = Box::new(rig.hub.transport(name));
    let executor = Box::new(ToyExecutor::new(toy()).expect("a sound toy"));
    let device = Device::join(executor, transport, 64).expect("a device");
    let call = rig.call(engine, Call::ReplaceDevice(Box::new(device)));
    rig.step(engine);
    assert_eq!(rig.answer(call), Ok(Reply::DeviceReplaced));
}

fn call(name: &str, kind: u32) -> StartGenerate {
    start(Some(key(name)), &prompt_of(100, kind), 0, 20)
}

#[test]
fn generations_of_every_state_are_computed_again() {
    for steps in [0, 1, 2, 3, 8, 25] {
        let (mut rig, lost) = pair();
        let calls = [call("a", 0), StartGenerate { n: 3, ..call("b", 1) }, call("c", 2)];
        let ids = calls.each_ref().map(|call| rig.call(0, Call::StartGenerate(Box::new(again(call)))));
        for _ in 0..steps {
            rig.step(0);
        }
        let before = rig.engines[0].state().incarnation;
        lose(&mut rig, &lost, 0);
        assert_ne!(rig.engines[0].state().incarnation, before);
        for _ in 0..5 {
            rig.step(0);
        }
        assert_eq!(rig.engines[0].counters().devices_lost, 1, "a loss is noticed once");
        assert!(!rig.engines[0].is_idle(), "all of them wait");
        replace(&mut rig, 0, "next");
        rig.settle();
        for (call, id) in calls.iter().zip(ids) {
            assert_eq!(rig.output(id).tokens, reference(call).tokens, "{steps} steps");
        }
        rig.assert_idle();
    }
}

/// A receiver whose device goes: what waits for data is computed, what nobody has asked for yet is lost, pages in quarantine are free.
#[test]
fn reservations_end_with_their_device() {
    let (mut rig, lost) = pair();
    let waiting = call("waiting", 0);
    rig.prep(1, prep(key("waiting"), &waiting.prompt, 99)).expect("prepared");
    let waiting_id =
        rig.call(1, Call::StartGenerate(Box::new(StartGenerate { begin: 99, ..again(&waiting) })));
    let later = call("later", 1);
    let address = rig.prep(1, prep(key("later"), &later.prompt, 99)).expect("prepared").kv_addr_info;
    let kept = call("kept", 2);
    rig.prep(1, prep(key("kept"), &kept.prompt, 99)).expect("prepared");
    let committing = rig.call(1, Call::Commit(Commit { seq_id: "kept".into(), attempt: None }));
    // One is in quarantine: its sender has begun and sleeps.
    let stopped = call("stopped", 3);
    let given = rig.prep(1, prep(key("stopped"), &stopped.prompt, 99)).expect("prepared").kv_addr_info;
    rig.call(0, Call::RemoteSend(send(key("stopped"), &stopped.prompt, (0, 99), &given.expect("one"))));
    rig.step(0);
    rig.hub.pause("p");
    rig.abort(1, &key("stopped"));
    assert!(rig.engines[1].page_counts().quarantined > 0, "the test tests nothing");

    lose(&mut rig, &lost, 1);
    assert_eq!(rig.answer(committing), Err(EngineError::TransferLost { seq_id: "kept".into() }));
    let refused = rig.prep(1, prep(key("new"), &prompt_of(50, 9), 49));
    assert!(matches!(refused, Err(EngineError::NoRoom { .. })), "{refused:?}");
    let refused = rig.call(
        1,
        Call::RemoteSend(send(key("later"), &later.prompt, (0, 99), &address.clone().expect("one"))),
    );
    rig.step(1);
    assert!(rig.answer(refused).is_err());
    replace(&mut rig, 1, "next");
    rig.hub.heal();
    rig.settle();
    assert_eq!(rig.output(waiting_id).tokens, reference(&waiting).tokens);
    // Whoever prepared finds nothing prepared, and gets what is computed here.
    let output = rig.start(1, StartGenerate { begin: 99, ..again(&later) }).expect("started");
    assert_eq!(output.tokens, reference(&later).tokens);
    // The address of before is nobody's.
    let sent = rig.send(0, send(key("later"), &later.prompt, (0, 99), &address.expect("one")));
    assert!(sent.is_err(), "{sent:?}");
    // And a new one is good.
    let (sent, output) = rig.disaggregate(0, 1, 99, call("again", 4));
    assert_eq!(sent.expect("sent").sent_tokens, 99);
    assert_eq!(output.tokens, reference(&call("again", 4)).tokens);
    rig.assert_idle();
}

#[test]
fn sends_fail_with_their_device_and_can_be_made_again() {
    let (mut rig, lost) = pair();
    let call = call("a", 0);
    let address = rig.prep(1, prep(key("a"), &call.prompt, 99)).expect("prepared").kv_addr_info.expect("one");
    let sending = rig.call(0, Call::RemoteSend(send(key("a"), &call.prompt, (0, 99), &address)));
    rig.step(0);
    lose(&mut rig, &lost, 0);
    assert_eq!(rig.answer(sending), Err(EngineError::TransferLost { seq_id: "a".into() }));
    rig.step(1);
    replace(&mut rig, 0, "next");
    // The receiver has lost a writer, and asks for another.
    let address = rig.prep(1, prep(key("b"), &call.prompt, 99)).expect("prepared").kv_addr_info.expect("one");
    let sent = rig.send(0, send(key("b"), &call.prompt, (0, 99), &address)).expect("sent");
    assert_eq!(sent.computed_tokens, 99, "the new device has nothing cached");
    let output =
        rig.start(1, StartGenerate { key: Some(key("b")), begin: 99, ..again(&call) }).expect("started");
    assert_eq!(output.tokens, reference(&call).tokens);
    assert!(rig.abort(1, &key("a")));
    rig.assert_idle();
}
