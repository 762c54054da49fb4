//! The network between router and engines: who is up, what is under way, and what goes wrong.
//!
//! ```text
//!   programs ── call ──▶ packets by due time ── deliver ──▶ inbox of an engine
//!      ▲                                                        │ step
//!      └── answer, events ◀── packets by due time ◀── effects ──┘
//! ```
//!
//! Each call is a connection: its packets keep their order in each direction, calls overtake each other. A connection
//! breaks when a packet is lost, when its engine crashes, or when the caller lets go; then both ends learn of it in time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use microserving_engine::{Call, CallId, Command, Effect, EngineError, GenerateEvent, Reply};
use microserving_protocol::{Incarnation, TokenId};
use microserving_transport::LoopbackHub;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::front::Front;
use super::history::History;
use super::node::{Inspection, MAX_CONTEXT};
use super::oracle::Oracle;
use super::{FaultPoint, Invariant, NetworkFaults, SimOptions, Tally, Violation};
use crate::Dice;

/// Violations kept of a run; the first is what matters.
const MAX_VIOLATIONS: usize = 5;

/// Addresses kept for the stranger.
const MAX_ADDRESSES: usize = 16;

/// How a call fails.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum CallError {
    /// The engine said no.
    Engine(EngineError),
    /// The connection broke; nobody knows whether the call had its effect.
    Broken,
}

/// What is under way.
#[derive(Debug)]
enum Packet {
    Call {
        engine: usize,
        id: CallId,
        call: Box<Call>,
    },
    HangUp {
        engine: usize,
        id: CallId,
    },
    Answer {
        id: CallId,
        result: Result<Reply, EngineError>,
    },
    Event {
        id: CallId,
        event: GenerateEvent,
    },
    /// The caller learns that the connection broke.
    Break {
        id: CallId,
    },
}

/// The caller's end of a connection.
#[derive(Debug)]
struct OpenCall {
    engine: usize,
    /// The boot that the call was delivered to.
    boot: Option<u64>,
    answer: Option<oneshot::Sender<Result<Reply, CallError>>>,
    events: Option<mpsc::UnboundedSender<Result<GenerateEvent, CallError>>>,
    is_stream: bool,
    /// When the last packet of each direction is due.
    up_due: Duration,
    down_due: Duration,
    /// It broke, and the caller is about to learn it.
    broken: bool,
}

/// An engine's place in the cluster.
#[derive(Debug, Default)]
pub(crate) struct Node {
    /// Counts its boots; 0 before the first.
    pub(crate) boot: u64,
    pub(crate) incarnation: Incarnation,
    pub(crate) alive: bool,
    paused: bool,
    cut: bool,
    inbox: Vec<Command>,
    pub(crate) task: Option<AbortHandle>,
    /// Someone wants to know what is left in the engine.
    pub(crate) inspection: Option<oneshot::Sender<Inspection>>,
}

pub(crate) struct State {
    pub(crate) dice: Dice,
    network: NetworkFaults,
    packets: BTreeMap<(Duration, u64), Packet>,
    /// Kept back by a partition, under the key that each had.
    held: Vec<((Duration, u64), Packet)>,
    calls: BTreeMap<CallId, OpenCall>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) history: History,
    /// Addresses that engines have handed out lately.
    pub(crate) addresses: VecDeque<Vec<u8>>,
    /// Prompts that someone has asked to continue, and whose pages are therefore known.
    pub(crate) prompts: Vec<Arc<[TokenId]>>,
    pub(crate) tally: Tally,
    pub(crate) violations: Vec<Violation>,
    pub(crate) router_tasks: Vec<AbortHandle>,
    pub(crate) points: u64,
    healed: bool,
    next_id: u64,
    next_packet: u64,
    trace: u64,
}

/// The shared state of a run.
pub(crate) struct World {
    pub(crate) options: SimOptions,
    pub(crate) hub: LoopbackHub,
    pub(crate) oracle: Mutex<Oracle>,
    pub(crate) wakes: Vec<Arc<Notify>>,
    pub(crate) hub_changed: Notify,
    network_changed: Notify,
    began: Instant,
    pub(crate) seed: u64,
    state: Mutex<State>,
    front: Mutex<(u64, Option<Front>)>,
    /// For what is whispered to routers: dice of their own, so that runs without it stay as they are.
    whispers: Mutex<Dice>,
}

impl World {
    pub(crate) fn new(seed: u64, options: SimOptions, hub: LoopbackHub, oracle: Oracle) -> Arc<Self> {
        let dice = Dice::new(seed).split(2);
        let num_engines = options.num_engines;
        let state = State {
            dice,
            network: options.network.clone(),
            packets: BTreeMap::new(),
            held: Vec::new(),
            calls: BTreeMap::new(),
            nodes: (0..num_engines).map(|_| Node::default()).collect(),
            history: History::default(),
            addresses: VecDeque::new(),
            prompts: Vec::new(),
            tally: Tally::default(),
            violations: Vec::new(),
            router_tasks: Vec::new(),
            points: 0,
            healed: false,
            next_id: 0,
            next_packet: 0,
            trace: 0,
        };
        Arc::new(Self {
            options,
            hub,
            oracle: Mutex::new(oracle),
            wakes: (0..num_engines).map(|_| Arc::default()).collect(),
            hub_changed: Notify::new(),
            network_changed: Notify::new(),
            began: Instant::now(),
            seed,
            state: Mutex::new(state),
            front: Mutex::default(),
            whispers: Mutex::new(Dice::new(seed).split(8)),
        })
    }

    pub(crate) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    pub(crate) fn at(&self, time: Duration) -> Instant {
        self.began + time
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn name_of(engine: usize) -> String {
        format!("engine-{engine}")
    }

    pub(crate) fn violate(&self, invariant: Invariant, detail: String) {
        let violation = Violation { invariant, at: self.now(), detail };
        let mut state = self.state();
        // What is wrong once is often wrong at every step from then on.
        let known = state.violations.iter().any(|known| known.detail == violation.detail);
        if !known && state.violations.len() < MAX_VIOLATIONS {
            state.violations.push(violation);
        }
    }

    /// Takes an event into the hash of the run.
    pub(crate) fn trace(&self, words: &[u64]) {
        let now = self.now();
        self.state().trace_at(now, words);
    }

    /// Says whether a violation was found, so that there is no use in going on.
    pub(crate) fn is_broken(&self) -> bool {
        !self.state().violations.is_empty()
    }

    /// Passes a place where a fault may be put, and puts it there if this is the place.
    pub(crate) fn pass_point(self: &Arc<Self>) {
        let here = {
            let mut state = self.state();
            if state.healed {
                return;
            }
            state.points += 1;
            state.points - 1
        };
        for FaultPoint { victim, .. } in self.options.faults_at.iter().filter(|fault| fault.point == here) {
            match *victim {
                Some(engine) => self.crash(engine),
                None => self.kill_router(),
            }
        }
    }

    // ---- callers

    /// Sends a call; the caller's ends of the connection come back.
    pub(crate) fn send(self: &Arc<Self>, engine: usize, call: Call) -> Connection {
        // A router looks at its engines all the time; nothing hangs on those calls, so they are no places for faults.
        if !matches!(call, Call::State | Call::Sequences) {
            self.pass_point();
        }
        let now = self.now();
        let (answer, answered) = oneshot::channel();
        let (events, stream) = mpsc::unbounded_channel();
        let is_stream = matches!(call, Call::StartGenerate(_));
        let mut state = self.state();
        let id = state.name_call();
        let network = state.network.clone();
        if state.dice.chance(network.duplicate)
            && let Some(twin) = copy_of(&call)
        {
            state.tally.duplicates += 1;
            let twin_id = state.name_call();
            // Nobody listens to the twin: it hangs up some time later.
            let delay = state.delay() + state.dice.time(Duration::ZERO, network.max_echo);
            state.post(now + delay, Packet::Call { engine, id: twin_id, call: Box::new(twin) });
            let later = delay + state.delay() * 3 + Duration::from_millis(200);
            state.post(now + later, Packet::HangUp { engine, id: twin_id });
        }
        state.calls.insert(
            id,
            OpenCall {
                engine,
                boot: None,
                answer: Some(answer),
                events: is_stream.then_some(events),
                is_stream,
                up_due: now,
                down_due: now,
                broken: false,
            },
        );
        if state.dice.chance(network.lose_call) {
            state.tally.lost += 1;
            if state.dice.chance(0.5) {
                state.break_call(id, now);
            }
        } else {
            state.post_up(id, now, Packet::Call { engine, id, call: Box::new(call) });
        }
        drop(state);
        self.network_changed.notify_one();
        Connection {
            world: Arc::clone(self),
            id,
            answered: Some(answered),
            stream: is_stream.then_some(stream),
        }
    }

    fn hang_up(&self, id: CallId) {
        let now = self.now();
        let mut state = self.state();
        let Some(call) = state.calls.remove(&id) else { return };
        let due = (now + state.delay()).max(call.up_due);
        state.post(due, Packet::HangUp { engine: call.engine, id });
        drop(state);
        self.network_changed.notify_one();
    }

    // ---- engines

    /// Takes what has arrived at an engine.
    pub(crate) fn take_inbox(&self, engine: usize) -> Vec<Command> {
        std::mem::take(&mut self.state().nodes[engine].inbox)
    }

    pub(crate) fn is_paused(&self, engine: usize) -> bool {
        self.state().nodes[engine].paused
    }

    /// Says whether this boot of an engine is the one that runs.
    pub(crate) fn is_running(&self, engine: usize, boot: u64) -> bool {
        let node = &self.state().nodes[engine];
        node.alive && node.boot == boot
    }

    /// Sends what an engine wants told.
    pub(crate) fn tell(self: &Arc<Self>, effect: Effect) {
        if !matches!(effect, Effect::Reply { result: Ok(Reply::State(_) | Reply::Sequences(_)), .. }) {
            self.pass_point();
        }
        let now = self.now();
        let mut state = self.state();
        let network = state.network.clone();
        let (id, loss) = match &effect {
            Effect::Reply { call, .. } => (*call, network.lose_answer),
            Effect::Event { call, .. } => (*call, network.break_stream),
        };
        if let Effect::Reply { result: Ok(Reply::PrepRecv(reply)), .. } = &effect
            && let Some(address) = &reply.kv_addr_info
        {
            state.addresses.push_back(address.clone());
            if state.addresses.len() > MAX_ADDRESSES {
                state.addresses.pop_front();
            }
        }
        let Some(engine) = state.calls.get(&id).filter(|call| !call.broken).map(|call| call.engine) else {
            return;
        };
        if state.dice.chance(loss) {
            state.tally.lost += 1;
            state.break_call(id, now);
            let due = now + state.delay();
            state.post(due, Packet::HangUp { engine, id });
        } else {
            let packet = match effect {
                Effect::Reply { call, result } => Packet::Answer { id: call, result },
                Effect::Event { call, event } => Packet::Event { id: call, event },
            };
            state.post_down(id, now, packet);
        }
        drop(state);
        self.network_changed.notify_one();
    }

    // ---- faults

    /// Ends an engine as `kill -9` does.
    pub(crate) fn crash(&self, engine: usize) {
        let now = self.now();
        let task = {
            let mut state = self.state();
            let node = &mut state.nodes[engine];
            if !node.alive {
                return;
            }
            node.alive = false;
            node.paused = false;
            node.inbox.clear();
            let (boot, task) = (node.boot, node.task.take());
            state.tally.crashes += 1;
            let broken: Vec<_> = state
                .calls
                .iter()
                .filter(|(_, call)| call.engine == engine && call.boot == Some(boot))
                .map(|(id, _)| *id)
                .collect();
            for id in broken {
                state.break_call(id, now);
            }
            state.trace_at(now, &[1, engine as u64]);
            task
        };
        self.hub.crash(&Self::name_of(engine));
        if let Some(task) = task {
            task.abort();
        }
        self.hub_changed.notify_one();
        self.network_changed.notify_one();
    }

    pub(crate) fn pause(&self, engine: usize) -> bool {
        let mut state = self.state();
        let node = &mut state.nodes[engine];
        if !node.alive || node.paused {
            return false;
        }
        node.paused = true;
        state.tally.pauses += 1;
        drop(state);
        self.hub.pause(&Self::name_of(engine));
        true
    }

    pub(crate) fn resume(&self, engine: usize) {
        self.state().nodes[engine].paused = false;
        self.hub.resume(&Self::name_of(engine));
        self.hub_changed.notify_one();
        self.wakes[engine].notify_one();
    }

    /// Parts an engine from the router.
    pub(crate) fn cut_from_router(&self, engine: usize) {
        self.state().nodes[engine].cut = true;
    }

    /// Ends it; what was held back arrives late, and before anything that was sent after it.
    pub(crate) fn rejoin_router(&self, engine: usize) {
        let mut state = self.state();
        state.nodes[engine].cut = false;
        let held = std::mem::take(&mut state.held);
        state.packets.extend(held);
        drop(state);
        self.network_changed.notify_one();
    }

    /// Starts a router, if none runs.
    pub(crate) fn start_router(self: &Arc<Self>) {
        let mut front = self.front();
        if front.1.is_none() {
            front.0 += 1;
            front.1 = Some(Front::start(self, front.0));
        }
    }

    /// Returns the running router's routes.
    pub(crate) fn app(&self) -> Option<axum::Router> {
        self.front().1.as_ref().map(|front| front.service.http())
    }

    /// Tells the running router something about who holds a request's prompt, true or not, as often as the options say.
    pub(crate) fn poison_hints(&self, request: &super::request::Request) {
        if self.options.poisoned_hints == 0.0 {
            return;
        }
        let mut dice = self.whispers.lock().unwrap_or_else(PoisonError::into_inner);
        if dice.chance(self.options.poisoned_hints)
            && let Some(front) = &self.front().1
        {
            front.poison(&mut dice, request, self.options.page_size);
        }
    }

    /// Says what the running router still counts as in flight.
    pub(crate) fn router_leftovers(&self) -> Option<String> {
        self.front().1.as_ref().and_then(Front::leftovers)
    }

    /// Lets the router go, so that the world can go: they hold each other.
    pub(crate) fn dismiss_router(&self) {
        let front = self.front().1.take();
        drop(front);
    }

    fn front(&self) -> MutexGuard<'_, (u64, Option<Front>)> {
        self.front.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn max_context(&self) -> u32 {
        MAX_CONTEXT.min(self.options.num_pages * self.options.page_size)
    }

    /// Ends the router as `kill -9` does: its programs are gone, the kernel closes their connections. Another one takes
    /// its place.
    pub(crate) fn kill_router(self: &Arc<Self>) {
        let front = self.front().1.take();
        if let Some(front) = front {
            front.kill();
        }
        let tasks = {
            let mut state = self.state();
            state.tally.router_deaths += 1;
            std::mem::take(&mut state.router_tasks)
        };
        self.trace(&[2]);
        for task in tasks {
            task.abort();
        }
        self.start_router();
    }

    /// Ends all faults of the network. Engines that are down stay down; the caller starts them.
    pub(crate) fn heal(&self) {
        {
            let mut state = self.state();
            state.healed = true;
            state.network = NetworkFaults {
                max_delay: Duration::from_millis(1),
                lose_call: 0.0,
                lose_answer: 0.0,
                break_stream: 0.0,
                duplicate: 0.0,
                max_echo: Duration::ZERO,
            };
        }
        for engine in 0..self.wakes.len() {
            self.rejoin_router(engine);
            self.state().nodes[engine].paused = false;
        }
        self.hub.heal();
        self.hub_changed.notify_one();
        self.wakes.iter().for_each(|wake| wake.notify_one());
    }

    /// Returns how many connections are open.
    pub(crate) fn num_open_calls(&self) -> usize {
        self.state().calls.len()
    }

    // ---- delivery

    /// Delivers packets when they are due; never returns.
    pub(crate) async fn run_network(self: Arc<Self>) {
        loop {
            let now = self.now();
            let mut woken = BTreeSet::new();
            loop {
                let mut state = self.state();
                let Some(first) = state.packets.first_entry().filter(|first| first.key().0 <= now) else {
                    break;
                };
                let (key, packet) = first.remove_entry();
                woken.extend(state.deliver(now, key, packet));
            }
            for engine in woken {
                self.wakes[engine].notify_one();
            }
            let next = self.state().packets.first_key_value().map(|((due, _), _)| *due);
            let changed = self.network_changed.notified();
            match next {
                Some(due) => {
                    tokio::select! {
                        biased;
                        () = changed => {}
                        () = tokio::time::sleep_until(self.at(due)) => {}
                    }
                }
                None => changed.await,
            }
        }
    }

    /// Wakes an engine whenever the transport has something due: whoever polls first delivers for all. Never returns.
    pub(crate) async fn run_hub(self: Arc<Self>) {
        loop {
            let changed = self.hub_changed.notified();
            match self.hub.next_due() {
                Some(due) if due <= self.now() => {
                    self.wakes.iter().for_each(|wake| wake.notify_one());
                    // If every engine is paused or down nobody polls; look again when time has passed.
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                Some(due) => {
                    tokio::select! {
                        biased;
                        () = changed => {}
                        () = tokio::time::sleep_until(self.at(due)) => {}
                    }
                }
                None => changed.await,
            }
        }
    }
}

impl State {
    pub(crate) fn trace_hash(&self) -> u64 {
        self.trace
    }

    fn trace_at(&mut self, now: Duration, words: &[u64]) {
        let mut hash = self.trace ^ now.as_nanos() as u64;
        for word in words {
            hash = (hash.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        self.trace = hash;
    }

    fn name_call(&mut self) -> CallId {
        self.next_id += 1;
        CallId(self.next_id)
    }

    fn delay(&mut self) -> Duration {
        let max = self.network.max_delay;
        self.dice.time(Duration::ZERO, max)
    }

    fn post(&mut self, due: Duration, packet: Packet) {
        self.next_packet += 1;
        self.packets.insert((due, self.next_packet), packet);
    }

    fn post_up(&mut self, id: CallId, now: Duration, packet: Packet) {
        let due = now + self.delay();
        let Some(call) = self.calls.get_mut(&id) else { return };
        let due = due.max(call.up_due);
        call.up_due = due;
        self.post(due, packet);
    }

    fn post_down(&mut self, id: CallId, now: Duration, packet: Packet) {
        let due = now + self.delay();
        let Some(call) = self.calls.get_mut(&id) else { return };
        let due = due.max(call.down_due);
        call.down_due = due;
        self.post(due, packet);
    }

    fn break_call(&mut self, id: CallId, now: Duration) {
        self.post_down(id, now, Packet::Break { id });
        if let Some(call) = self.calls.get_mut(&id) {
            call.broken = true;
        }
    }

    /// Delivers a packet; returns the engine that has news.
    fn deliver(&mut self, now: Duration, key: (Duration, u64), packet: Packet) -> Option<usize> {
        let engine = match &packet {
            Packet::Call { engine, .. } | Packet::HangUp { engine, .. } => Some(*engine),
            Packet::Answer { id, .. } | Packet::Event { id, .. } | Packet::Break { id } => {
                self.calls.get(id).map(|call| call.engine)
            }
        };
        if engine.is_some_and(|engine| self.nodes[engine].cut) {
            self.held.push((key, packet));
            return None;
        }
        match packet {
            Packet::Call { engine, id, call } => {
                self.trace_at(now, &[3, engine as u64, id.0]);
                let node = &mut self.nodes[engine];
                if !node.alive {
                    self.break_call(id, now);
                    return None;
                }
                if let Some(open) = self.calls.get_mut(&id) {
                    open.boot = Some(node.boot);
                }
                node.inbox.push(Command::Call { id, call: *call });
                Some(engine)
            }
            Packet::HangUp { engine, id } => {
                self.trace_at(now, &[4, engine as u64, id.0]);
                let node = &mut self.nodes[engine];
                if !node.alive {
                    return None;
                }
                node.inbox.push(Command::Cancel { id });
                Some(engine)
            }
            Packet::Answer { id, result } => {
                self.trace_at(now, &[5, id.0, u64::from(result.is_ok())]);
                let call = self.calls.get_mut(&id)?;
                let goes_on = call.is_stream && result.is_ok();
                let answer = call.answer.take();
                if !goes_on {
                    self.calls.remove(&id);
                }
                // A caller that let go has hung up by itself.
                let _ = answer?.send(result.map_err(CallError::Engine));
                None
            }
            Packet::Event { id, event } => {
                let call = self.calls.get_mut(&id)?;
                let last = matches!(event, GenerateEvent::Done { .. } | GenerateEvent::Failed { .. });
                let events = call.events.clone();
                if last {
                    self.calls.remove(&id);
                }
                self.trace_at(now, &[6, id.0, u64::from(last)]);
                let _ = events?.send(Ok(event));
                None
            }
            Packet::Break { id } => {
                self.trace_at(now, &[7, id.0]);
                let call = self.calls.remove(&id)?;
                if let Some(answer) = call.answer {
                    let _ = answer.send(Err(CallError::Broken));
                } else if let Some(events) = call.events {
                    let _ = events.send(Err(CallError::Broken));
                }
                None
            }
        }
    }
}

/// The caller's end of a call. Dropping it before the end closes the connection.
pub(crate) struct Connection {
    world: Arc<World>,
    id: CallId,
    answered: Option<oneshot::Receiver<Result<Reply, CallError>>>,
    stream: Option<mpsc::UnboundedReceiver<Result<GenerateEvent, CallError>>>,
}

impl Connection {
    /// Waits for the answer.
    pub(crate) async fn answer(&mut self) -> Result<Reply, CallError> {
        match self.answered.take() {
            // The sender is dropped only with its answer given, or with the connection.
            Some(answered) => answered.await.unwrap_or(Err(CallError::Broken)),
            None => Err(CallError::Broken),
        }
    }

    /// Waits for the next event of a generation.
    pub(crate) async fn event(&mut self) -> Result<GenerateEvent, CallError> {
        match &mut self.stream {
            Some(stream) => stream.recv().await.unwrap_or(Err(CallError::Broken)),
            None => Err(CallError::Broken),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.world.hang_up(self.id);
    }
}

/// Copies a call, if such a call may arrive twice.
fn copy_of(call: &Call) -> Option<Call> {
    match call {
        Call::PrepRecv(call) => Some(Call::PrepRecv(call.clone())),
        Call::RemoteSend(call) => Some(Call::RemoteSend(call.clone())),
        Call::Abort(call) => Some(Call::Abort(call.clone())),
        Call::Commit(call) => Some(Call::Commit(call.clone())),
        _ => None,
    }
}
