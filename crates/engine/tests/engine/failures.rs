//! Executors that fail: whom it concerns is told, everyone else goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use microserving_engine::{Call, Engine, EngineError};
use microserving_executor::{Batch, Executor, ExecutorError, ExecutorInfo, StepOutput, ToyExecutor};
use microserving_protocol::{KvGeometry, KvMemory, LayerId};
use microserving_transport::LoopbackHub;

use crate::support::{
    Rig, again, config, entropy, key, prep, prompt, prompt_of, reference, send, start, toy,
};

/// How a step goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// The batch's item of this number is refused before anything is computed.
    Malformed(usize),
    /// The computation fails after so many layers.
    AfterLayers(u32),
    /// Nothing is sampled, though it was asked for.
    Silence,
}

/// A toy that fails in one step.
#[derive(Debug)]
struct Failing {
    toy: ToyExecutor,
    failure: Failure,
    fails_at: Arc<AtomicU64>,
    step: u64,
}

impl Executor for Failing {
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
        self.step += 1;
        if self.step != self.fails_at.load(Ordering::Relaxed) {
            return self.toy.forward(batch, on_layer);
        }
        match self.failure {
            Failure::Malformed(item) => {
                Err(ExecutorError::MalformedBatch { item, reason: "a test wants it so".into() })
            }
            Failure::AfterLayers(layers) => {
                (0..layers).map(LayerId).for_each(on_layer);
                Err(ExecutorError::Compute { reason: "a test wants it so".into() })
            }
            Failure::Silence => {
                let num_items = batch.items.len();
                Ok(StepOutput { sampled: vec![None; num_items], modelled: None })
            }
        }
    }
}

/// Two engines, the first of which fails in the step that the returned number is set to.
fn rig(failure: Failure) -> (Rig, Arc<AtomicU64>) {
    let hub = LoopbackHub::with_checksums();
    let mut rig = Rig::with(hub.clone(), [(config("p", 64), toy()), (config("d", 64), toy())]);
    let fails_at = Arc::new(AtomicU64::new(0));
    let failing = Failing {
        toy: ToyExecutor::new(toy()).expect("a sound toy"),
        failure,
        fails_at: Arc::clone(&fails_at),
        step: 0,
    };
    rig.engines[0] =
        Engine::new(config("p", 64), Box::new(failing), Box::new(hub.transport("p")), entropy(1))
            .expect("sound");
    (rig, fails_at)
}

#[test]
fn a_failed_step_ends_what_it_computed_and_nothing_else() {
    for failure in [Failure::AfterLayers(0), Failure::AfterLayers(1), Failure::Silence] {
        let (mut rig, fails_at) = rig(failure);
        let call = start(Some(key("a")), &prompt(40), 0, 30);
        let hit: Vec<_> = (0..3)
            .map(|number| {
                let call = start(None, &prompt_of(10, number), 0, 30);
                rig.call(0, Call::StartGenerate(Box::new(call)))
            })
            .collect();
        for _ in 0..5 {
            rig.step(0);
        }
        fails_at.store(rig.engines[0].counters().steps + 1, Ordering::Relaxed);
        rig.step(0);
        for id in hit {
            let output = rig.output(id);
            assert!(matches!(output.error, Some(EngineError::Executor { .. })), "{failure:?}: {output:?}");
            assert_eq!(output.only().len(), 5, "what it had yielded stands");
        }
        assert!(rig.engines[0].is_idle());
        let output = rig.start(0, again(&call)).expect("the engine goes on");
        assert_eq!(output.tokens, reference(&call).tokens);
        rig.assert_idle();
    }
}

#[test]
fn a_malformed_item_ends_its_own_request() {
    let (mut rig, fails_at) = rig(Failure::Malformed(1));
    let calls: Vec<_> = (0..3).map(|number| start(None, &prompt_of(10, number), 0, 30)).collect();
    let ids: Vec<_> =
        calls.iter().map(|call| rig.call(0, Call::StartGenerate(Box::new(again(call))))).collect();
    for _ in 0..5 {
        rig.step(0);
    }
    fails_at.store(rig.engines[0].counters().steps + 1, Ordering::Relaxed);
    rig.settle();
    for (number, (call, id)) in calls.iter().zip(ids).enumerate() {
        let output = rig.output(id);
        if number == 1 {
            assert!(matches!(output.error, Some(EngineError::Executor { .. })), "{output:?}");
        } else {
            assert_eq!(output.tokens, reference(call).tokens, "nothing was sampled twice or lost");
        }
    }
    rig.assert_idle();
}

#[test]
fn a_send_whose_step_fails_is_cancelled_and_computed_by_the_receiver() {
    for (failure, at) in [
        (Failure::AfterLayers(0), 1),
        (Failure::AfterLayers(1), 2),
        (Failure::AfterLayers(2), 3),
        (Failure::Malformed(0), 2),
    ] {
        let (mut rig, fails_at) = rig(failure);
        fails_at.store(at, Ordering::Relaxed);
        let call = start(Some(key("a")), &prompt(120), 119, 12);
        let alone = reference(&call);
        let address =
            rig.prep(1, prep(key("a"), &call.prompt, 119)).expect("prepared").kv_addr_info.expect("one");
        let sent = rig.send(0, send(key("a"), &call.prompt, (0, 119), &address));
        assert!(matches!(sent, Err(EngineError::Executor { .. })), "{failure:?}: {sent:?}");
        let output = rig.start(1, call).expect("started");
        assert_eq!(output.tokens, alone.tokens, "{failure:?} in step {at}");
        assert_eq!(output.usage.expect("done").received_tokens, 0);
        rig.assert_idle();
    }
}
