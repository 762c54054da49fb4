//! Workers on threads, and engines above them.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use microserving_engine::{
    Call, CallId, CallKey, CallOptions, Command, Effect, Engine, EngineConfig, EngineError, Entropy,
    GenerateEvent, Reply, StartGenerate,
};
use microserving_executor::{Executor, ToyConfig, ToyExecutor};
use microserving_protocol::{ClusterKey, Incarnation, SamplingParams, TokenId};
use microserving_transport::KvTransport;
use microserving_worker::{Connection, Ended, FrontSocket, Order, Worker, WorldEnd};

/// A worker's thread.
pub(crate) type Thread = JoinHandle<Ended>;

/// Starts a worker with these on a thread and waits until it is up.
pub(crate) fn start(
    executor: Box<dyn Executor>,
    transport: Box<dyn KvTransport>,
    world_end: Option<WorldEnd>,
) -> (Worker, Thread) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("front.sock");
    let front = FrontSocket::bind(&path).expect("a free path");
    let thread = std::thread::spawn(move || {
        let connection = Connection::to_front(&path, Duration::from_secs(5)).expect("a front");
        connection.serve(executor, transport, "a report", world_end).expect("served to the end")
    });
    let worker = front.accept(&Order::default(), || true, |_| {}).expect("a worker").expect("in time");
    assert_eq!(worker.report, "a report");
    (worker, thread)
}

pub(crate) fn toy() -> Box<ToyExecutor> {
    let config = ToyConfig {
        page_size: 16,
        num_layers: 3,
        num_kv_heads: 1,
        head_dim: 2,
        max_context: 512,
        ..ToyConfig::default()
    };
    Box::new(ToyExecutor::new(config).expect("a sound toy"))
}

pub(crate) fn prompt(len: u32) -> Arc<[TokenId]> {
    (0..len).map(|at| TokenId((at * 7 + at / 16) % 256)).collect()
}

pub(crate) fn call(name: &str, len: u32, max_tokens: u32, sampling: SamplingParams) -> StartGenerate {
    StartGenerate {
        key: Some(CallKey { seq_id: name.into(), attempt: microserving_protocol::Attempt(0) }),
        prompt: prompt(len),
        begin: 0,
        generated_from: len,
        n: 1,
        first_choice: 0,
        sampling,
        max_tokens: Some(max_tokens),
        min_tokens: 0,
        stop_tokens: Vec::new(),
        ignore_eos: true,
        constraints: Vec::new(),
        resume_from: None,
        options: CallOptions { cache_salt: name.into(), ..CallOptions::default() },
    }
}

/// An engine that is stepped by hand.
#[derive(Debug)]
pub(crate) struct Rig {
    pub(crate) engine: Engine,
    now: Duration,
    next: u64,
    pub(crate) replies: Vec<(CallId, Result<Reply, EngineError>)>,
    pub(crate) events: Vec<(CallId, GenerateEvent)>,
}

impl Rig {
    pub(crate) fn new(name: &str, executor: Box<dyn Executor>, transport: Box<dyn KvTransport>) -> Self {
        let config = EngineConfig { max_batch_tokens: 48, ..EngineConfig::new(name, 64) };
        let entropy = Entropy {
            incarnation: Incarnation(1),
            cluster_key: ClusterKey::from_random([3; 32]),
            key_is_shared: true,
            mint_seed: 4,
        };
        let engine = Engine::new(config, executor, transport, entropy).expect("a sound engine");
        Self { engine, now: Duration::ZERO, next: 0, replies: Vec::new(), events: Vec::new() }
    }

    pub(crate) fn step(&mut self, calls: impl IntoIterator<Item = Call>) -> Vec<CallId> {
        let first = self.next;
        let commands: Vec<Command> = calls
            .into_iter()
            .map(|call| {
                let id = CallId(self.next);
                self.next += 1;
                Command::Call { id, call }
            })
            .collect();
        self.now += Duration::from_micros(200);
        let effects = self.engine.step(self.now, commands.into_iter());
        for effect in effects.effects {
            match effect {
                Effect::Reply { call, result } => self.replies.push((call, result)),
                Effect::Event { call, event } => self.events.push((call, event)),
            }
        }
        (first..self.next).map(CallId).collect()
    }

    /// Steps until something is so; transfers take real time.
    pub(crate) fn until(&mut self, what: &str, mut is_so: impl FnMut(&Self) -> bool) {
        for _ in 0..100_000 {
            if is_so(self) {
                return;
            }
            self.step([]);
            if self.engine.is_idle() {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        panic!("never came: {what}");
    }

    pub(crate) fn answer(&mut self, call: Call) -> Result<Reply, EngineError> {
        let id = self.step([call])[0];
        self.until("an answer", |rig| rig.replies.iter().any(|(answered, _)| *answered == id));
        self.replies.iter().find(|(answered, _)| *answered == id).expect("it is there").1.clone()
    }

    /// Generates all of these at once.
    pub(crate) fn generate(&mut self, calls: Vec<StartGenerate>) -> Vec<Vec<GenerateEvent>> {
        let ids = self.step(calls.into_iter().map(|call| Call::StartGenerate(Box::new(call))));
        self.until("the end of all", |rig| rig.engine.is_idle());
        ids.iter().map(|id| self.events_of(*id)).collect()
    }

    pub(crate) fn events_of(&self, id: CallId) -> Vec<GenerateEvent> {
        self.events.iter().filter(|(of, _)| *of == id).map(|(_, event)| event.clone()).collect()
    }

    /// Checks that no page is held by anybody.
    pub(crate) fn assert_balanced(&self) {
        let pages = self.engine.page_counts();
        assert_eq!(pages.free + pages.cached, pages.total, "{pages:?}");
    }
}

pub(crate) fn tokens(events: &[GenerateEvent]) -> Vec<u32> {
    let token = |event: &GenerateEvent| match event {
        GenerateEvent::Token { token, .. } => Some(token.0),
        _ => None,
    };
    events.iter().filter_map(token).collect()
}
