//! Engines in virtual time, and the calls that tests make again and again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use microserving_engine::{
    Abort, Call, CallId, CallKey, CallOptions, Command, Effect, Engine, EngineConfig, EngineError, Entropy,
    GenerateEvent, GenerateUsage, PrepRecv, PrepRecvReply, RemoteSend, RemoteSendReply, Reply, StartGenerate,
};
use microserving_executor::{ToyConfig, ToyExecutor};
use microserving_kvcache::invariants;
use microserving_protocol::{
    Attempt, ClusterKey, FinishReason, Incarnation, KvRange, SamplingParams, TokenId,
};
use microserving_transport::LoopbackHub;

pub(crate) const PAGE: u32 = 16;

/// A small toy model; every engine of a test has the same.
pub(crate) fn toy() -> ToyConfig {
    ToyConfig {
        page_size: PAGE,
        num_layers: 2,
        num_kv_heads: 1,
        head_dim: 2,
        max_context: 512,
        ..ToyConfig::default()
    }
}

pub(crate) fn config(name: &str, num_pages: u32) -> EngineConfig {
    EngineConfig { max_batch_tokens: 48, lease: Duration::from_secs(1), ..EngineConfig::new(name, num_pages) }
}

pub(crate) fn entropy(seed: u64) -> Entropy {
    Entropy {
        incarnation: Incarnation(seed),
        cluster_key: ClusterKey::from_random([u8::try_from(seed % 251).expect("small"); 32]),
        key_is_shared: false,
        mint_seed: seed,
    }
}

pub(crate) fn engine(hub: &LoopbackHub, config: EngineConfig, toy: ToyConfig, seed: u64) -> Engine {
    let transport = Box::new(hub.transport(config.engine_id.as_str()));
    let executor = Box::new(ToyExecutor::new(toy).expect("a sound toy"));
    Engine::new(config, executor, transport, entropy(seed)).expect("a sound engine")
}

pub(crate) fn prompt(len: u32) -> Arc<[TokenId]> {
    prompt_of(len, 0)
}

pub(crate) fn prompt_of(len: u32, kind: u32) -> Arc<[TokenId]> {
    (0..len).map(|at| TokenId((at * 7 + at / 16 + kind * 31) % 256)).collect()
}

pub(crate) fn key(seq_id: &str) -> CallKey {
    attempt(seq_id, 0)
}

pub(crate) fn attempt(seq_id: &str, attempt: u32) -> CallKey {
    CallKey { seq_id: seq_id.into(), attempt: Attempt(attempt) }
}

pub(crate) fn prep(key: CallKey, prompt: &Arc<[TokenId]>, end: u32) -> PrepRecv {
    PrepRecv {
        key: Some(key),
        prompt: Arc::clone(prompt),
        end,
        reserve_tokens: 0,
        commit: false,
        options: CallOptions::default(),
    }
}

pub(crate) fn send(key: CallKey, prompt: &Arc<[TokenId]>, range: (u32, u32), address: &[u8]) -> RemoteSend {
    RemoteSend {
        key: Some(key),
        prompt: Arc::clone(prompt),
        range: KvRange::new(range.0, range.1).expect("ordered"),
        kv_addr_info: address.to_vec(),
        recv_rank: 0,
        options: CallOptions::default(),
    }
}

pub(crate) fn start(
    key: Option<CallKey>,
    prompt: &Arc<[TokenId]>,
    begin: u32,
    max_tokens: u32,
) -> StartGenerate {
    StartGenerate {
        key,
        prompt: Arc::clone(prompt),
        begin,
        generated_from: u32::try_from(prompt.len()).expect("short"),
        n: 1,
        first_choice: 0,
        sampling: SamplingParams::greedy(),
        max_tokens: Some(max_tokens),
        min_tokens: 0,
        stop_tokens: Vec::new(),
        ignore_eos: true,
        constraints: Vec::new(),
        resume_from: None,
        options: CallOptions::default(),
    }
}

/// What a generation yielded.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Output {
    pub(crate) tokens: Vec<Vec<TokenId>>,
    pub(crate) finish: Vec<Option<FinishReason>>,
    pub(crate) usage: Option<GenerateUsage>,
    pub(crate) error: Option<EngineError>,
}

impl Output {
    /// Collects events, checking that indices have no gap and nothing follows a finish.
    pub(crate) fn from_events(events: &[GenerateEvent], first_index: u32) -> Self {
        let mut output = Self::default();
        for event in events {
            assert!(output.usage.is_none() && output.error.is_none(), "{event:?} follows the end");
            match event {
                GenerateEvent::Token { choice, index, token, finish, .. } => {
                    let choice = *choice as usize;
                    while output.tokens.len() <= choice {
                        output.tokens.push(Vec::new());
                        output.finish.push(None);
                    }
                    assert_eq!(output.finish[choice], None, "a token follows the last one");
                    let expected = first_index + u32::try_from(output.tokens[choice].len()).expect("few");
                    assert_eq!(*index, expected, "indices of choice {choice} have a gap");
                    output.tokens[choice].push(*token);
                    output.finish[choice] = *finish;
                }
                GenerateEvent::Done { usage } => output.usage = Some(*usage),
                GenerateEvent::Failed { error } => output.error = Some(error.clone()),
            }
        }
        output
    }

    pub(crate) fn only(&self) -> &[TokenId] {
        assert_eq!(self.tokens.len(), 1, "{self:?}");
        &self.tokens[0]
    }
}

/// Engines that share a hub and a clock, stepped in turn.
pub(crate) struct Rig {
    pub(crate) hub: LoopbackHub,
    pub(crate) engines: Vec<Engine>,
    pub(crate) now: Duration,
    next_call: u64,
    queues: Vec<VecDeque<Command>>,
    replies: BTreeMap<CallId, Result<Reply, EngineError>>,
    events: BTreeMap<CallId, Vec<GenerateEvent>>,
}

impl Rig {
    pub(crate) fn new(num_engines: usize) -> Self {
        Self::with(
            LoopbackHub::with_checksums(),
            (0..num_engines).map(|n| (config(&format!("e{n}"), 64), toy())),
        )
    }

    pub(crate) fn with(
        hub: LoopbackHub,
        configs: impl IntoIterator<Item = (EngineConfig, ToyConfig)>,
    ) -> Self {
        let engines: Vec<Engine> = configs
            .into_iter()
            .zip(1..)
            .map(|((config, toy), seed)| engine(&hub, config, toy, seed))
            .collect();
        let queues = engines.iter().map(|_| VecDeque::new()).collect();
        Self {
            hub,
            engines,
            now: Duration::ZERO,
            next_call: 0,
            queues,
            replies: BTreeMap::new(),
            events: BTreeMap::new(),
        }
    }

    /// Queues a call for an engine's next step.
    pub(crate) fn call(&mut self, engine: usize, call: Call) -> CallId {
        let id = CallId(self.next_call);
        self.next_call += 1;
        self.queues[engine].push_back(Command::Call { id, call });
        id
    }

    pub(crate) fn cancel(&mut self, engine: usize, id: CallId) {
        self.queues[engine].push_back(Command::Cancel { id });
    }

    /// Steps one engine once; returns whether it did anything.
    pub(crate) fn step(&mut self, engine: usize) -> bool {
        let commands: Vec<Command> = self.queues[engine].drain(..).collect();
        let had_commands = !commands.is_empty();
        let effects = self.engines[engine].step(self.now, commands.into_iter());
        let active = had_commands || effects.computed || !effects.effects.is_empty();
        if let Some(modelled) = effects.modelled {
            self.now += modelled;
        }
        for effect in effects.effects {
            match effect {
                Effect::Reply { call, result } => {
                    assert!(self.replies.insert(call, result).is_none(), "{call:?} was answered twice");
                }
                Effect::Event { call, event } => self.events.entry(call).or_default().push(event),
            }
        }
        active
    }

    /// Steps all engines once.
    pub(crate) fn tick(&mut self) -> bool {
        let mut active = false;
        for engine in 0..self.engines.len() {
            active |= self.step(engine);
        }
        active
    }

    /// Steps all engines until none does anything, letting messages arrive that are under way, but no time pass
    /// otherwise.
    pub(crate) fn settle(&mut self) {
        let mut quiet = 0;
        for _ in 0..100_000 {
            if self.tick() {
                quiet = 0;
            } else if let Some(due) = self.hub.next_due() {
                self.now = self.now.max(due);
            } else {
                quiet += 1;
            }
            if quiet == 3 {
                return;
            }
        }
        panic!("the engines do not come to rest");
    }

    pub(crate) fn advance(&mut self, time: Duration) {
        self.now += time;
        self.settle();
    }

    /// Returns a call's answer, which must be there.
    pub(crate) fn answer(&mut self, id: CallId) -> Result<Reply, EngineError> {
        self.replies.get(&id).unwrap_or_else(|| panic!("{id:?} is not answered yet")).clone()
    }

    pub(crate) fn is_answered(&self, id: CallId) -> bool {
        self.replies.contains_key(&id)
    }

    pub(crate) fn events(&self, id: CallId) -> &[GenerateEvent] {
        self.events.get(&id).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn output(&self, id: CallId) -> Output {
        Output::from_events(self.events(id), 0)
    }

    pub(crate) fn prep(&mut self, engine: usize, call: PrepRecv) -> Result<PrepRecvReply, EngineError> {
        let id = self.call(engine, Call::PrepRecv(call));
        self.step(engine);
        self.answer(id).map(|reply| match reply {
            Reply::PrepRecv(reply) => reply,
            other => panic!("{other:?}"),
        })
    }

    pub(crate) fn send(&mut self, engine: usize, call: RemoteSend) -> Result<RemoteSendReply, EngineError> {
        let id = self.call(engine, Call::RemoteSend(call));
        self.settle();
        self.answer(id).map(|reply| match reply {
            Reply::RemoteSend(reply) => reply,
            other => panic!("{other:?}"),
        })
    }

    pub(crate) fn start(&mut self, engine: usize, call: StartGenerate) -> Result<Output, EngineError> {
        let first_index =
            u32::try_from(call.prompt.len()).expect("short").saturating_sub(call.generated_from);
        let id = self.call(engine, Call::StartGenerate(Box::new(call)));
        self.settle();
        match self.answer(id)? {
            Reply::Started => Ok(Output::from_events(self.events(id), first_index)),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn abort(&mut self, engine: usize, key: &CallKey) -> bool {
        let call = Abort { seq_id: key.seq_id.clone(), attempt: Some(key.attempt) };
        let id = self.call(engine, Call::Abort(call));
        self.step(engine);
        match self.answer(id) {
            Ok(Reply::Aborted(aborted)) => aborted,
            other => panic!("{other:?}"),
        }
    }

    /// Runs the three calls: `end` tokens are prepared on `receiver`, what it lacks of them is computed on `sender`.
    pub(crate) fn disaggregate(
        &mut self,
        sender: usize,
        receiver: usize,
        end: u32,
        call: StartGenerate,
    ) -> (Option<RemoteSendReply>, Output) {
        let key = call.key.clone().expect("a key");
        let prepared = self.prep(receiver, prep(key.clone(), &call.prompt, end)).expect("prepared");
        let matched = prepared.prefix_matched_length;
        let sent = prepared.kv_addr_info.map(|address| {
            assert!(matched < end);
            self.send(sender, send(key.clone(), &call.prompt, (matched, end), &address)).expect("sent")
        });
        let output = self.start(receiver, StartGenerate { begin: end, ..call }).expect("started");
        (sent, output)
    }

    /// Asserts that nothing lives, and no page is held, on any engine.
    pub(crate) fn assert_idle(&mut self) {
        self.settle();
        for engine in &mut self.engines {
            let name = engine.info().engine_id.clone();
            assert!(engine.is_idle(), "{name} is not idle: {:?}", engine.state());
            invariants::check(engine.cache()).expect("sound pages");
            let pages = engine.page_counts();
            assert_eq!(pages.free + pages.cached, pages.total, "{name} holds pages: {pages:?}");
        }
    }
}

/// The tokens that one engine yields alone, undisturbed: what every other way must yield too.
pub(crate) fn reference(call: &StartGenerate) -> Output {
    let mut rig = Rig::new(1);
    let output = rig.start(0, again(call)).expect("started");
    rig.assert_idle();
    output
}

/// Copies a call that has no grammar.
pub(crate) fn again(call: &StartGenerate) -> StartGenerate {
    StartGenerate {
        key: call.key.clone(),
        prompt: Arc::clone(&call.prompt),
        sampling: call.sampling.clone(),
        stop_tokens: call.stop_tokens.clone(),
        constraints: Vec::new(),
        options: call.options.clone(),
        ..*call
    }
}
