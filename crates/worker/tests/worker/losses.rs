//! Workers that end: tokens are computed again, never lost and never said twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use microserving_engine::{Call, Device, EngineError, GenerateEvent, PrepRecv, Reply, StartGenerate};
use microserving_executor::{Batch, Executor, ExecutorError, ExecutorInfo, StepOutput};
use microserving_protocol::{KvGeometry, KvMemory, LayerId, SamplingParams};
use microserving_transport::LoopbackHub;
use microserving_worker::Ended;

use crate::support::{Rig, call, start, tokens, toy};

/// A toy that ends its worker's thread in a step.
#[derive(Debug)]
struct Mortal {
    toy: Box<dyn Executor>,
    steps_left: u32,
}

impl Executor for Mortal {
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
        let output = self.toy.forward(batch, on_layer);
        self.steps_left -= 1;
        assert!(self.steps_left > 0, "this is the end that the test wants");
        output
    }
}

fn mortal(hub: &LoopbackHub, steps_left: u32) -> (microserving_worker::Worker, crate::support::Thread) {
    start(Box::new(Mortal { toy: toy(), steps_left }), Box::new(hub.transport("mortal")), None)
}

fn replacement(hub: &LoopbackHub, name: &str) -> Device {
    let (worker, _thread) = start(toy(), Box::new(hub.transport(name)), None);
    Device::join(Box::new(worker.executor), Box::new(worker.transport), 64).expect("a device")
}

fn calls() -> Vec<StartGenerate> {
    let sampled = SamplingParams { temperature: 0.8, seed: 5, ..SamplingParams::default() };
    vec![
        call("a", 100, 30, SamplingParams::greedy()),
        call("b", 33, 40, sampled.clone()),
        StartGenerate { n: 2, ..call("c", 20, 25, sampled) },
    ]
}

#[test]
fn streams_go_on_with_the_tokens_that_would_have_come() {
    let hub = LoopbackHub::new();
    let wanted = Rig::new("alone", toy(), Box::new(hub.transport("alone"))).generate(calls());
    for steps_left in [1, 2, 4, 9, 30] {
        let (worker, thread) = mortal(&hub, steps_left);
        let lost = worker.lost.clone();
        let mut rig = Rig::new("front", Box::new(worker.executor), Box::new(worker.transport));
        let before = rig.engine.state().incarnation;
        let ids = rig.step(calls().into_iter().map(|call| Call::StartGenerate(Box::new(call))));
        rig.until("the worker's end", |_| lost.reason().is_some());
        assert_eq!(thread.join().expect("the thread itself lives"), Ended::Broken("computing"));
        rig.step([]);
        assert_ne!(rig.engine.state().incarnation, before, "addresses of before are stale");
        let pages = rig.engine.page_counts();
        assert_eq!(pages.free, pages.total, "nothing is left of the pages: {pages:?}");
        let said: usize = ids.iter().map(|id| tokens(&rig.events_of(*id)).len()).sum();
        rig.step([]);
        let waits: usize = ids.iter().map(|id| tokens(&rig.events_of(*id)).len()).sum();
        assert_eq!(said, waits, "nobody computes");

        let name = format!("replacement-{steps_left}");
        let device = Call::ReplaceDevice(Box::new(replacement(&hub, &name)));
        assert_eq!(rig.answer(device), Ok(Reply::DeviceReplaced));
        rig.until("the end of all", |rig| rig.engine.is_idle());
        for (id, wanted) in ids.iter().zip(&wanted) {
            let events = rig.events_of(*id);
            let token = |event: &GenerateEvent| match event {
                GenerateEvent::Token { choice, index, token, .. } => Some((*choice, *index, *token)),
                _ => None,
            };
            let sorted = |events: &[GenerateEvent]| {
                let mut all: Vec<_> = events.iter().filter_map(token).collect();
                all.sort_unstable();
                all
            };
            assert_eq!(sorted(&events), sorted(wanted), "{steps_left} steps");
            assert!(matches!(events.last(), Some(GenerateEvent::Done { .. })), "{events:?}");
        }
        assert_eq!(rig.engine.counters().devices_lost, 1);
        rig.assert_balanced();
    }
}

#[test]
fn what_needs_a_device_is_refused_without_one() {
    let hub = LoopbackHub::new();
    let (worker, thread) = start(toy(), Box::new(hub.transport("w")), None);
    let mut rig = Rig::new("front", Box::new(worker.executor), Box::new(worker.transport));
    let prep = |name: &str| {
        let StartGenerate { key, prompt, options, .. } = call(name, 100, 4, SamplingParams::greedy());
        Call::PrepRecv(PrepRecv { key, prompt, end: 99, reserve_tokens: 0, commit: false, options })
    };
    let prepared = rig.answer(prep("before"));
    assert!(matches!(prepared, Ok(Reply::PrepRecv(_))), "{prepared:?}");
    let waiting = StartGenerate { begin: 99, ..call("before", 100, 4, SamplingParams::greedy()) };
    let waiting = rig.step([Call::StartGenerate(Box::new(waiting))])[0];
    assert!(rig.events_of(waiting).is_empty(), "its data has not come");

    hub.crash("w");
    // The front lets go of it as it would of a process that has ended.
    let gone = Arc::new(AtomicBool::new(false));
    rig.engine.set_waker(Arc::new({
        let gone = Arc::clone(&gone);
        move || gone.store(true, Ordering::Release)
    }));
    let Ok(Reply::DeviceReplaced) = rig.answer(Call::ReplaceDevice(Box::new(replacement(&hub, "next"))))
    else {
        panic!("not replaced");
    };
    assert_eq!(thread.join().expect("no panic"), Ended::FrontLeft);
    rig.until("what waited for data is computed here", |rig| rig.engine.is_idle());
    let wanted = Rig::new("alone", toy(), Box::new(hub.transport("alone"))).generate(vec![call(
        "before",
        100,
        4,
        SamplingParams::greedy(),
    )]);
    assert_eq!(tokens(&rig.events_of(waiting)), tokens(&wanted[0]));

    let (mortal, _thread) = mortal(&hub, 1);
    let lost = mortal.lost.clone();
    let device = Device::join(Box::new(mortal.executor), Box::new(mortal.transport), 64).expect("a device");
    assert_eq!(rig.answer(Call::ReplaceDevice(Box::new(device))), Ok(Reply::DeviceReplaced));
    rig.step([Call::StartGenerate(Box::new(call("last", 10, 4, SamplingParams::greedy())))]);
    rig.until("its end", |_| lost.reason().is_some());
    let refused = rig.answer(prep("after"));
    assert!(matches!(refused, Err(EngineError::NoRoom { .. })), "{refused:?}");
}

#[test]
fn another_model_is_no_replacement() {
    let hub = LoopbackHub::new();
    let mut rig = Rig::new("front", toy(), Box::new(hub.transport("one")));
    let other = Device::join(toy(), Box::new(hub.transport("two")), 63).expect("a device");
    let refused = rig.answer(Call::ReplaceDevice(Box::new(other)));
    assert!(matches!(refused, Err(EngineError::InvalidField { field: "num_pages", .. })), "{refused:?}");
    assert_eq!(rig.generate(calls()).len(), 3, "the one that is there goes on");
}

#[test]
fn a_lost_world_ends_its_worker_and_says_why() {
    let hub = LoopbackHub::new();
    let is_lost = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&is_lost);
    let world = move || seen.load(Ordering::Acquire).then(|| "element 1 is gone".to_owned());
    let (worker, thread) = start(toy(), Box::new(hub.transport("w")), Some(Box::new(world)));
    let lost = worker.lost.clone();
    let mut rig = Rig::new("front", Box::new(worker.executor), Box::new(worker.transport));
    assert_eq!(rig.generate(calls()).len(), 3);
    is_lost.store(true, Ordering::Release);
    rig.until("the world's end", |_| lost.reason().is_some());
    assert_eq!(lost.reason().as_deref(), Some("the world is lost: element 1 is gone"));
    assert_eq!(thread.join().expect("no panic"), Ended::WorldLost("element 1 is gone".into()));
}
