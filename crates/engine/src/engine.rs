//! The heart: everything an engine knows, and the step that moves it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use microserving_executor::{Executor, ExecutorError};
use microserving_kvcache::{KvCache, KvCacheConfig, KvError, PageTable, ReplacedPages, invariants};
use microserving_protocol::{Generation, KvGeometry, KvMemory, SeqId};
use microserving_transport::{ChannelId, KvTransport, TransportError};

use crate::calls::Calls;
use crate::device::{Device, Waker};
use crate::gatekeeper::Gatekeeper;
use crate::kv_events::EventHistory;
use crate::mutants::Rules;
use crate::pace::Pace;
use crate::planner::MIN_PREFILL;
use crate::request::Request;
use crate::reservations::Quarantined;
use crate::sequence::{Mint, RequestId, Sequence, Slot};
use crate::{
    Call, CallId, CallKey, Command, Effect, Effects, EngineConfig, EngineCounters, EngineError, EngineInfo,
    Entropy, KvEventBatch, Reply,
};

/// Why an engine could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A value of the configuration is out of bounds.
    #[error("the engine's configuration is out of bounds")]
    Config(#[source] EngineError),
    /// The page pool cannot be made.
    #[error("the page pool cannot be made")]
    Pool(#[source] KvError),
    /// The transport has no memory to give.
    #[error("the KV region of {num_bytes} bytes cannot be allocated")]
    Region {
        /// Its size.
        num_bytes: usize,
        /// The cause.
        #[source]
        source: TransportError,
    },
    /// The executor cannot use the memory.
    #[error("the executor cannot use the KV region")]
    Executor(#[source] ExecutorError),
}

/// What a cancelled transfer still reads.
#[derive(Debug)]
pub(crate) struct Closing {
    /// Never read; dropping it gives the pages back.
    _table: Option<PageTable>,
    _replaced: Vec<ReplacedPages>,
}

impl Closing {
    pub(crate) fn new(table: Option<PageTable>, replaced: Vec<ReplacedPages>) -> Self {
        Self { _table: table, _replaced: replaced }
    }
}

/// The synchronous heart of an engine: one executor, one transport, one pool of pages.
///
/// It does no IO of its own, reads no clock and draws no random number: [`Engine::step`] is told the time, and everything
/// asked of it comes as a [`Command`]. So it runs the same under [`crate::EngineHandle`]'s thread, in virtual time, and in a test.
#[derive(Debug)]
pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) info: EngineInfo,
    pub(crate) entropy: Entropy,
    pub(crate) geometry: KvGeometry,
    /// Keeps the region mapped as long as pages are handed out.
    pub(crate) memory: Arc<dyn KvMemory>,
    pub(crate) executor: Box<dyn Executor>,
    pub(crate) transport: Box<dyn KvTransport>,
    /// Executor and transport are gone, and nothing is asked of them until they are replaced.
    pub(crate) device_lost: bool,
    /// What the next transport is to call, too.
    pub(crate) waker: Option<Waker>,
    pub(crate) gate: Arc<Gatekeeper>,
    pub(crate) cache: KvCache,
    pub(crate) sequences: BTreeMap<Slot, Sequence>,
    pub(crate) requests: BTreeMap<RequestId, Request>,
    pub(crate) calls: Calls,
    /// Which sequence each open channel belongs to.
    pub(crate) channels: BTreeMap<ChannelId, Slot>,
    /// Cancelled channels whose source pages may still be read.
    pub(crate) closing: BTreeMap<ChannelId, Closing>,
    /// Which sequence waits for each open grant.
    pub(crate) receiving: BTreeMap<Generation, Slot>,
    /// Pages that wait for their release by the transport; their sequences are gone.
    pub(crate) quarantined: BTreeMap<Generation, Quarantined>,
    pub(crate) mint: Mint,
    pub(crate) pace: Pace,
    next_slot: u64,
    next_request: u64,
    pub(crate) now: Duration,
    /// When something was computed last; while nothing is, waiting leads nowhere.
    pub(crate) last_computed: Duration,
    pub(crate) effects: Vec<Effect>,
    pub(crate) counters: EngineCounters,
    pub(crate) draining: bool,
    pub(crate) drains: Vec<CallId>,
    history: EventHistory,
    pub(crate) rules: Rules,
}

impl Engine {
    /// Makes an engine: allocates its KV region from the transport and gives it to the executor.
    ///
    /// # Errors
    /// [`StartError`], naming the part that refused.
    pub fn new(
        config: EngineConfig,
        executor: Box<dyn Executor>,
        transport: Box<dyn KvTransport>,
        entropy: Entropy,
    ) -> Result<Self, StartError> {
        config.validate().map_err(StartError::Config)?;
        let page_size = executor.info().layout.page_size;
        let cache = KvCache::new(cache_config(&config, page_size)).map_err(StartError::Pool)?;
        let device = Device::join(executor, transport, config.num_pages)?;
        let Device { executor, mut transport, geometry, memory } = device;
        let gate = Arc::new(Gatekeeper::new(
            entropy.cluster_key.clone(),
            config.engine_id.clone(),
            entropy.incarnation,
        ));
        transport.set_admission(Arc::clone(&gate) as Arc<_>);
        let info = EngineInfo {
            engine_id: config.engine_id.clone(),
            incarnation: entropy.incarnation,
            executor: executor.info().clone(),
            num_pages: config.num_pages,
            transport: transport.name(),
            lease: config.lease,
        };
        Ok(Self {
            info,
            geometry,
            memory,
            executor,
            transport,
            device_lost: false,
            waker: None,
            gate,
            cache,
            sequences: BTreeMap::new(),
            requests: BTreeMap::new(),
            calls: Calls::new(config.tombstone_ttl, config.max_tombstones, config.max_logged_tokens),
            channels: BTreeMap::new(),
            closing: BTreeMap::new(),
            receiving: BTreeMap::new(),
            quarantined: BTreeMap::new(),
            mint: Mint::new(entropy.mint_seed),
            pace: Pace::new(config.max_step, MIN_PREFILL),
            next_slot: 0,
            next_request: 0,
            now: Duration::ZERO,
            last_computed: Duration::ZERO,
            effects: Vec::new(),
            counters: EngineCounters::default(),
            draining: false,
            drains: Vec::new(),
            history: EventHistory::new(config.kv_event_log),
            rules: Rules::RIGHT,
            config,
            entropy,
        })
    }

    /// Returns what the engine is.
    #[must_use]
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }

    /// Returns how it was configured.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Returns the pages and what is in them, for checks and tests.
    #[must_use]
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// Sets what the transport calls, from any thread, when it has news for an engine that may be asleep.
    pub fn set_waker(&mut self, waker: Arc<dyn Fn() + Send + Sync>) {
        self.transport.set_waker(Arc::clone(&waker));
        self.waker = Some(Waker(waker));
    }

    /// Makes the engine follow one deliberately wrong rule, or none.
    #[cfg(feature = "mutants")]
    pub fn set_mutant(&mut self, mutant: Option<crate::Mutant>) {
        self.rules = Rules { mutant };
        self.calls.set_rules(self.rules);
    }

    /// Takes commands, ends what has run out, hears the transport, computes one batch, and says what came of it.
    ///
    /// `now` counts from an origin of the caller's choice and is never taken to go back. Returns after one batch at most;
    /// [`Effects::computed`] says whether another step is likely to find work at once, [`Engine::next_wakeup`] when time
    /// alone makes some.
    pub fn step(&mut self, now: Duration, commands: impl Iterator<Item = Command>) -> Effects {
        self.now = self.now.max(now);
        self.look_after_device();
        for command in commands {
            match command {
                Command::Call { id, call } => self.take(id, call),
                Command::FinishChoice { id, choice } => self.finish_choice(id, choice),
                Command::Cancel { id } => self.cancel(id),
            }
        }
        self.hear_transport();
        self.expire();
        let plan = self.plan();
        let computed = !plan.is_empty();
        if computed {
            self.last_computed = self.now;
        }
        let modelled = if computed { self.compute(plan) } else { None };
        self.settle();
        if self.config.check_invariants {
            self.check();
        }
        Effects {
            effects: std::mem::take(&mut self.effects),
            modelled,
            computed,
            next_kv_event: self.history.next(),
            incarnation: self.info.incarnation,
        }
    }

    /// Takes how long the last step took that computed something, for [`EngineConfig::max_step`]. A driver without a clock may leave it.
    pub fn note_step(&mut self, time: Duration) {
        self.pace.took(time);
    }

    /// Says whether nothing lives: no sequence, no transfer that still reads our pages.
    ///
    /// Quarantined pages may remain; they wait for peers, not for us.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.closing.is_empty() && self.effects.is_empty()
    }

    fn take(&mut self, id: CallId, call: Call) {
        match call {
            Call::PrepRecv(call) => self.prep_recv(id, &call),
            Call::RemoteSend(call) => self.remote_send(id, &call),
            Call::StartGenerate(call) => self.start_generate(id, *call),
            Call::Abort(call) => self.abort(id, &call),
            Call::Commit(call) => self.commit(id, &call),
            Call::Pause(call) => self.pause(id, &call),
            Call::Sequences => {
                let all = self.sequences.values().map(|sequence| self.show(sequence)).collect();
                self.reply(id, Ok(Reply::Sequences(all)));
            }
            Call::Sequence(seq_id) => {
                let shown = self.show_request(&seq_id).map(Reply::Sequence);
                self.reply(id, shown);
            }
            Call::State => {
                let state = Box::new(self.state());
                self.reply(id, Ok(Reply::State(state)));
            }
            Call::KvEvents { from } => {
                let batch = self.kv_events(from);
                self.reply(id, Ok(Reply::KvEvents(batch)));
            }
            Call::ReplaceDevice(device) => self.take_device(id, *device),
            Call::Drain => {
                self.draining = true;
                self.drains.push(id);
            }
        }
    }

    fn kv_events(&mut self, from: u64) -> KvEventBatch {
        self.history.extend(self.cache.take_events());
        let next = self.history.next();
        let incarnation = self.info.incarnation;
        match self.history.since(from) {
            Some(events) => KvEventBatch { incarnation, snapshot: None, events, next },
            None => {
                let snapshot = Some(self.cache.snapshot());
                KvEventBatch { incarnation, snapshot, events: Vec::new(), next }
            }
        }
    }

    /// What is done once at the end of every step.
    fn settle(&mut self) {
        for request in self.calls.sweep(self.now) {
            self.requests.remove(&request);
        }
        self.history.extend(self.cache.take_events());
        if self.draining && self.sequences.is_empty() && self.closing.is_empty() {
            for id in std::mem::take(&mut self.drains) {
                self.reply(id, Ok(Reply::Drained));
            }
        }
    }

    pub(crate) fn reply(&mut self, call: CallId, result: Result<Reply, EngineError>) {
        self.effects.push(Effect::Reply { call, result });
    }

    /// Puts a sequence in and ties it to its request's record.
    pub(crate) fn insert(&mut self, sequence: Sequence) -> Slot {
        let slot = Slot(self.next_slot);
        self.next_slot += 1;
        self.calls.begin_life(&sequence.key.seq_id);
        self.sequences.insert(slot, sequence);
        slot
    }

    pub(crate) fn name_request(&mut self) -> RequestId {
        let id = RequestId(self.next_request);
        self.next_request += 1;
        id
    }

    /// Returns `key`, or a new one of our own making; and whether it is ours.
    pub(crate) fn key_or_minted(&mut self, key: Option<&CallKey>) -> (CallKey, bool) {
        match key {
            Some(key) => (key.clone(), false),
            None => (CallKey { seq_id: self.mint.next(), attempt: microserving_protocol::Attempt(0) }, true),
        }
    }

    /// Refuses what is new while draining.
    pub(crate) fn refuse_if_draining(&self) -> Result<(), EngineError> {
        if self.draining { Err(EngineError::Draining) } else { Ok(()) }
    }

    pub(crate) fn no_room(&self, reason: impl Into<String>) -> EngineError {
        EngineError::NoRoom { reason: reason.into(), retry_after: self.config.retry_after }
    }

    /// Looks for any record, dead or alive, of a request.
    pub(crate) fn unknown(seq_id: &SeqId) -> EngineError {
        EngineError::UnknownSequence { seq_id: seq_id.clone() }
    }

    /// Checks every invariant; a violation is a fault of ours and stops a debug build where it happens.
    fn check(&mut self) {
        self.cache.collect();
        let idle = self.is_idle() && self.quarantined.is_empty();
        let checked =
            if idle { invariants::check_idle(&mut self.cache) } else { invariants::check(&self.cache) };
        if let Err(violation) = checked {
            tracing::error!(%violation, "page invariant broken");
            debug_assert!(false, "{violation}");
        }
    }
}

fn cache_config(config: &EngineConfig, page_size: u32) -> KvCacheConfig {
    let mut cache = KvCacheConfig::new(config.num_pages, page_size);
    // A share of a small pool would be less than one transfer.
    let floor = 16.min(config.num_pages);
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the share is in [0, 1], so the product is in [0, num_pages]"
    )]
    let share = (f64::from(config.num_pages) * f64::from(config.quarantine_cap)) as u32;
    cache.max_quarantined_pages = share.max(floor);
    cache
}
