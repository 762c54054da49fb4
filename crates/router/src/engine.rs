//! One engine, as the router keeps it.

use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use microserving_client::{BadUrl, ClientError, EngineAddress, EngineCalls, EngineKind};
use microserving_protocol::{ModelCard, StateView};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::predict::{Costs, ProfileSource};
use crate::thresholds::Limits;
use crate::vitals::{Verdict, Vitals};
use crate::{BreakerState, Outlook, Request, Thresholds};

/// Tokens in a page of the prefixes that an engine which does not tell its page size is believed to hold.
const FOREIGN_PAGE_SIZE: u32 = 16;

/// What an engine is used for. Any engine can do everything; a role is the operator's wish.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// Prefills and decodes.
    #[default]
    Any = 0,
    /// Only prefills for others.
    Prefill = 1,
    /// Decodes, prefilling what others did not.
    Decode = 2,
}

impl Role {
    /// Returns the name used in configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    const fn of(number: u8) -> Self {
        match number {
            1 => Self::Prefill,
            2 => Self::Decode,
            _ => Self::Any,
        }
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = [Self::Any, Self::Prefill, Self::Decode];
        let found = all.into_iter().find(|role| role.name() == text);
        found.ok_or_else(|| format!("is {text:?}, must be any, prefill or decode"))
    }
}

/// An engine to route to.
#[derive(Clone, Debug)]
pub struct EngineSpec {
    /// How to call it.
    pub calls: Arc<dyn EngineCalls>,
    /// What it is used for.
    pub role: Role,
    /// Its PE under PGAS transports; other transports ignore it.
    pub recv_rank: i64,
    /// Its share of the requests, beside one of weight 1.
    pub weight: f64,
    /// How configuration writes where it is, and what it is.
    pub address: String,
}

impl EngineSpec {
    /// Describes an engine for any role.
    #[must_use]
    pub fn new(calls: Arc<dyn EngineCalls>, role: Role) -> Self {
        Self { address: calls.name().to_owned(), calls, role, recv_rank: 0, weight: 1.0 }
    }

    /// Gives it another share of the requests than 1.
    #[must_use]
    pub fn with_weight(mut self, weight: f64) -> Self {
        self.weight = weight;
        self
    }

    /// Describes the engine at an address, whatever its kind.
    ///
    /// # Errors
    /// If its URL is none.
    pub fn at(address: &EngineAddress, role: Role) -> Result<Self, BadUrl> {
        Ok(Self {
            recv_rank: address.recv_rank,
            address: address.to_string(),
            ..Self::new(address.connect()?, role)
        })
    }
}

/// Whether an engine gets requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Health {
    /// Not seen yet, or a connection to it failed.
    Down = 0,
    /// It answers, and says that it takes no requests (starting, draining).
    NotReady = 1,
    /// It takes requests.
    Ready = 2,
    /// It took requests, and has given no sign of life for a while.
    Suspect = 3,
}

impl Health {
    /// Returns the name that is shown.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Down => "down",
            Self::NotReady => "not_ready",
            Self::Ready => "ready",
            Self::Suspect => "suspect",
        }
    }
}

/// How busy an engine is: the larger of what we have in flight there and what it reports.
///
/// Our own count is exact and at once; what it reports beyond that are other routers' requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests in flight.
    pub requests: u32,
    /// Prompt tokens that wait to be computed.
    pub queued_tokens: u64,
}

/// One engine of the cluster.
#[derive(Debug)]
pub struct Engine {
    number: u32,
    calls: Arc<dyn EngineCalls>,
    recv_rank: i64,
    address: String,
    role: AtomicU8,
    /// The bits of an `f64`.
    weight: AtomicU64,
    is_draining: AtomicBool,
    health: AtomicU8,
    vitals: Vitals,
    limits: Arc<Limits>,
    requests: AtomicU32,
    queued_tokens: AtomicU64,
    /// It was seen not to know of relaying.
    cannot_relay: AtomicBool,
    seen: Mutex<Seen>,
    /// What it takes to compute there.
    pub(crate) costs: Costs,
    /// The cluster's count of changes.
    changes: Arc<AtomicU64>,
    /// It was there when the router began, and has not been seen yet.
    is_unseen: AtomicBool,
    /// It was down since it was ready last: it comes back as a new one, whatever it says on the way.
    was_down: AtomicBool,
    /// Wakes the watcher, so that a failed call is followed by a look at once.
    pub(crate) look: Notify,
    /// Cancelled when it leaves the cluster; whoever watches it ends then.
    left: CancellationToken,
    /// Cancelled when requests on it must go elsewhere. One a life: an engine that comes back begins a new one.
    lost: Mutex<CancellationToken>,
}

/// What the engine told of itself.
#[derive(Debug, Default)]
struct Seen {
    state: Option<StateView>,
    /// The part of its last report that is not our own doing.
    others: Load,
    models: Vec<ModelCard>,
}

impl Engine {
    pub(crate) fn new(number: u32, spec: EngineSpec, limits: Arc<Limits>) -> Self {
        Self {
            number,
            calls: spec.calls,
            recv_rank: spec.recv_rank,
            address: spec.address,
            role: AtomicU8::new(spec.role as u8),
            weight: AtomicU64::new(spec.weight.to_bits()),
            is_draining: AtomicBool::new(false),
            health: AtomicU8::new(Health::Down as u8),
            vitals: Vitals::new(Instant::now()),
            limits,
            requests: AtomicU32::new(0),
            queued_tokens: AtomicU64::new(0),
            cannot_relay: AtomicBool::new(false),
            seen: Mutex::new(Seen::default()),
            costs: Costs::default(),
            changes: Arc::default(),
            is_unseen: AtomicBool::new(true),
            was_down: AtomicBool::new(true),
            look: Notify::new(),
            left: CancellationToken::new(),
            lost: Mutex::new(CancellationToken::new()),
        }
    }

    /// Counts changes of its role and its models in `changes`.
    pub(crate) fn counting(mut self, changes: &Arc<AtomicU64>) -> Self {
        self.changes = changes.clone();
        self
    }

    /// Notes that it joins engines that are served by already.
    pub(crate) fn joining(self) -> Self {
        Self { is_unseen: AtomicBool::new(false), ..self }
    }

    /// Returns its number in the cluster, never reused.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.calls.name()
    }

    /// Returns what kind of server it is.
    #[must_use]
    pub fn kind(&self) -> EngineKind {
        self.calls.kind()
    }

    /// Returns what it is used for.
    #[must_use]
    pub fn role(&self) -> Role {
        Role::of(self.role.load(Ordering::Relaxed))
    }

    /// Changes what it is used for; requests that it has go on.
    pub fn set_role(&self, role: Role) {
        self.role.store(role as u8, Ordering::Relaxed);
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Returns its share of the requests, beside one of weight 1.
    #[must_use]
    pub fn weight(&self) -> f64 {
        f64::from_bits(self.weight.load(Ordering::Relaxed))
    }

    /// Changes its share of the requests.
    pub fn set_weight(&self, weight: f64) {
        self.weight.store(weight.to_bits(), Ordering::Relaxed);
    }

    /// Says whether it gets no new requests because somebody wants it empty.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    /// Gives it no new requests; those in flight end as they would.
    pub fn drain(&self) {
        self.is_draining.store(true, Ordering::Relaxed);
    }

    /// Gives it new requests again.
    pub fn undrain(&self) {
        if self.is_draining.swap(false, Ordering::Relaxed) {
            self.start_slowly();
        }
    }

    /// Says whether it gets new requests now: it is ready, nobody drains it, and it has not failed too often in a row.
    #[must_use]
    pub fn takes_requests(&self) -> bool {
        self.takes_requests_at(&mut Instant::now)
    }

    /// As [`Engine::takes_requests`]; the clock is read only if it matters.
    pub(crate) fn takes_requests_at(&self, now: &mut impl FnMut() -> Instant) -> bool {
        self.is_open() && self.vitals.admits(now)
    }

    /// Says whether it is ready and nobody drains it, whatever became of its last requests.
    pub(crate) fn is_open(&self) -> bool {
        self.health() == Health::Ready && !self.is_draining()
    }

    /// Returns its share of the requests just now: its weight, or the part of it that a slow start has come to.
    #[must_use]
    pub fn effective_weight(&self, now: Instant) -> f64 {
        self.weight() * self.vitals.share(now)
    }

    /// Returns whether failures in a row keep requests away from it.
    #[must_use]
    pub fn breaker(&self) -> BreakerState {
        self.vitals.breaker(Instant::now())
    }

    /// Notes that it lives: it answered, or a stream of it delivers.
    pub(crate) fn note_sign(&self) {
        self.vitals.note_sign(Instant::now());
    }

    pub(crate) fn thresholds(&self) -> Thresholds {
        self.limits.get()
    }

    /// Returns how long it has given no sign of life.
    #[must_use]
    pub fn silence(&self) -> Duration {
        self.vitals.silence(Instant::now())
    }

    /// Notes what a call says about it.
    pub(crate) fn note_verdict(&self, verdict: Verdict) {
        if let Some(state) = self.vitals.judge(Instant::now(), verdict, &self.limits.get()) {
            tracing::warn!(engine = self.name(), breaker = state.name(), "the engine's breaker changed");
        }
    }

    fn begins_with_the_router(&self) -> bool {
        self.vitals.age(Instant::now()) < self.limits.get().slow_start
    }

    fn start_slowly(&self) {
        self.vitals.begin_ramp(Instant::now(), self.limits.get().slow_start);
    }

    /// Returns the way to call it.
    #[must_use]
    pub fn calls(&self) -> &Arc<dyn EngineCalls> {
        &self.calls
    }

    /// Returns how configuration writes where it is, and what it is.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    pub(crate) const fn recv_rank(&self) -> i64 {
        self.recv_rank
    }

    /// Returns whether it gets requests.
    #[must_use]
    pub fn health(&self) -> Health {
        match self.health.load(Ordering::Acquire) {
            3 => Health::Suspect,
            2 => Health::Ready,
            1 => Health::NotReady,
            _ => Health::Down,
        }
    }

    /// Changes whether it gets requests; returns true if that was news.
    pub(crate) fn set_health(&self, health: Health) -> bool {
        let before = self.health.swap(health as u8, Ordering::AcqRel);
        match health {
            Health::Down => self.was_down.store(true, Ordering::Relaxed),
            // When the router begins, all engines are new to it, and none is to be spared at the cost of the others.
            Health::Ready
                if self.was_down.swap(false, Ordering::Relaxed)
                    && !(self.is_unseen.swap(false, Ordering::Relaxed) && self.begins_with_the_router()) =>
            {
                self.start_slowly();
            }
            _ => {}
        }
        before != health as u8
    }

    /// Notes that a connection to it failed: no more requests until it is seen again, which is tried at once.
    pub(crate) fn note_failure(&self) {
        if self.set_health(Health::Down) {
            tracing::warn!(engine = self.name(), "engine is down");
        }
        self.look.notify_one();
    }

    /// Notes that it said it takes no requests (it starts, or drains): none until it is asked again, which is done at once.
    pub(crate) fn note_not_ready(&self) {
        if self.set_health(Health::NotReady) {
            tracing::warn!(engine = self.name(), "engine is not ready");
        }
        self.look.notify_one();
    }

    /// Notes a sign that it may be gone; it is asked at once.
    pub(crate) fn note_doubt(&self) {
        self.look.notify_one();
    }

    /// Is cancelled when it leaves the cluster.
    pub(crate) const fn left(&self) -> &CancellationToken {
        &self.left
    }

    /// Is cancelled when requests that are on it now must go elsewhere.
    pub(crate) fn lost(&self) -> CancellationToken {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends requests that are on it elsewhere; what comes after begins a new life.
    pub(crate) fn give_up(&self) {
        let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *lost).cancel();
    }

    /// Lets it go, with its watcher; `force` sends requests that are on it elsewhere.
    pub(crate) fn leave(&self, force: bool) {
        self.drain();
        self.left.cancel();
        if force {
            self.give_up();
        }
    }

    /// Waits for a call, but not longer than the engine can be reached.
    pub(crate) async fn while_here<T>(
        &self,
        call: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        let lost = self.lost();
        tokio::select! {
            biased;
            answer = call => answer,
            () = lost.cancelled() => Err(self.lost_error()),
        }
    }

    /// Returns what a request on it fails with when it is given up.
    pub(crate) fn lost_error(&self) -> ClientError {
        ClientError::Lost {
            engine: self.name().to_owned(),
            reason: "the router has given the engine up".into(),
        }
    }

    /// Says whether answers of its doors for clients can be passed on as they are.
    pub(crate) fn relays(&self) -> bool {
        self.calls.may_relay() && !self.cannot_relay.load(Ordering::Relaxed)
    }

    /// Says whether it marks the answers of `start_generate`, so that they can be passed on as they are.
    pub(crate) fn marks(&self) -> bool {
        self.calls.may_relay() && self.with_seen(|seen| seen.state.as_ref().is_some_and(|state| state.marks))
    }

    /// Notes whether it was seen not to know of relaying.
    pub(crate) fn set_cannot_relay(&self, cannot: bool) {
        if self.cannot_relay.swap(cannot, Ordering::Relaxed) != cannot {
            self.changes.fetch_add(1, Ordering::Release);
        }
    }

    /// Returns how busy it is: our own requests, and those of others as it last told.
    #[must_use]
    pub fn load(&self) -> Load {
        let (own, others) = (self.own_load(), self.others_load());
        Load {
            requests: own.requests.saturating_add(others.requests),
            queued_tokens: own.queued_tokens.saturating_add(others.queued_tokens),
        }
    }

    /// Returns what other routers have there, as it last told.
    pub(crate) fn others_load(&self) -> Load {
        self.with_seen(|seen| seen.others)
    }

    pub(crate) fn own_load(&self) -> Load {
        Load { requests: self.in_flight(), queued_tokens: self.queued_tokens() }
    }

    /// Returns our own requests in flight there.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Returns the prompt tokens of our own requests that wait there to be computed.
    #[must_use]
    pub fn queued_tokens(&self) -> u64 {
        self.queued_tokens.load(Ordering::Relaxed)
    }

    /// Returns what it takes and has to do now, for predictions.
    #[must_use]
    pub fn outlook(&self) -> Outlook {
        self.costs.outlook(Instant::now(), self.load().queued_tokens)
    }

    /// Returns where the profile came from that its outlook rests on.
    #[must_use]
    pub fn profile_source(&self) -> ProfileSource {
        self.costs.source()
    }

    /// Says whether it serves `model`; none is any.
    #[must_use]
    pub fn serves(&self, model: Option<&str>) -> bool {
        model.is_none_or(|model| self.with_seen(|seen| seen.models.iter().any(|card| card.id == model)))
    }

    /// Returns the model of a name if it serves that, or the first one that it serves.
    pub(crate) fn model(&self, asked: Option<&str>) -> Option<ModelCard> {
        let fits = |card: &&ModelCard| asked.is_none_or(|name| card.id == name);
        self.with_seen(|seen| seen.models.iter().find(fits).cloned())
    }

    /// Returns the models it serves.
    #[must_use]
    pub fn models(&self) -> Vec<ModelCard> {
        self.with_seen(|seen| seen.models.clone())
    }

    /// Returns its last report.
    #[must_use]
    pub fn state(&self) -> Option<StateView> {
        self.with_seen(|seen| seen.state.clone())
    }

    /// Returns the tokens in a page, once it has reported; engines of other makes never do, so a usual size stands for theirs.
    #[must_use]
    pub fn page_size(&self) -> Option<u32> {
        if !self.kind().is_ours() {
            return Some(FOREIGN_PAGE_SIZE);
        }
        self.with_seen(|seen| seen.state.as_ref().map(|state| state.page_size))
    }

    /// Says whether KV may go from one to the other: they are of one kind, which moves KV, and as far as both have reported, their layouts
    /// are the same.
    #[must_use]
    pub fn exchanges_with(&self, other: &Self) -> bool {
        let layout = |engine: &Self| {
            engine.with_seen(|seen| seen.state.as_ref().map(|state| state.layout_fingerprint.clone()))
        };
        if self.kind() != other.kind() || !self.kind().moves_kv() {
            return false;
        }
        match (layout(self), layout(other)) {
            (Some(a), Some(b)) => a == b,
            _ => true,
        }
    }

    /// Says whether it can serve a request alone: one that has no tokens, or none but tokens, is not for every kind.
    #[must_use]
    pub fn takes(&self, request: &Request) -> bool {
        match self.kind() {
            EngineKind::Microserving => request.has_tokens(),
            EngineKind::Mlc => request.has_tokens() || request.written().is_some(),
            EngineKind::OpenAi => request.written().is_some(),
        }
    }

    pub(crate) fn set_models(&self, models: Vec<ModelCard>) {
        let is_new = self.with_seen(|seen| {
            let is_new = seen.models != models;
            seen.models = models;
            is_new
        });
        if is_new {
            self.changes.fetch_add(1, Ordering::Release);
        }
    }

    /// Takes a report that was asked for when our own load was `before`; returns true if it comes from another boot than the
    /// last one.
    ///
    /// What is ours is taken off at once: a report is a quarter of a second old on average, and a request of ours that has ended
    /// since must not weigh twice as long as it ran.
    pub(crate) fn set_state(&self, state: StateView, before: Load) -> bool {
        let now = self.own_load();
        let requests = state.waiting.saturating_add(state.running).saturating_add(state.receiving);
        let others = Load {
            requests: requests.saturating_sub(before.requests.max(now.requests)),
            queued_tokens: state
                .queued_prefill_tokens
                .saturating_sub(before.queued_tokens.max(now.queued_tokens)),
        };
        self.with_seen(|seen| {
            let rebooted = seen.state.as_ref().is_some_and(|before| before.incarnation != state.incarnation);
            seen.state = Some(state);
            seen.others = others;
            rebooted
        })
    }

    fn with_seen<T>(&self, f: impl FnOnce(&mut Seen) -> T) -> T {
        f(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// One request in flight on an engine; gives its load back when dropped.
#[derive(Debug)]
pub(crate) struct InFlight {
    engine: Arc<Engine>,
    tokens: u64,
    /// Tries whether an engine that failed works again.
    is_probe: bool,
    /// The prompt's length, once its first token is there.
    decoding: Option<u32>,
}

impl InFlight {
    /// Counts a request that brings `tokens` prompt tokens to compute.
    pub(crate) fn new(engine: Arc<Engine>, tokens: u32) -> Self {
        engine.requests.fetch_add(1, Ordering::Relaxed);
        engine.queued_tokens.fetch_add(u64::from(tokens), Ordering::Relaxed);
        let is_probe = engine.vitals.begin();
        Self { engine, tokens: tokens.into(), is_probe, decoding: None }
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Notes that so many prompt tokens are left to compute.
    pub(crate) fn set_tokens(&mut self, tokens: u32) {
        let tokens = u64::from(tokens);
        self.engine.queued_tokens.fetch_add(tokens, Ordering::Relaxed);
        self.engine.queued_tokens.fetch_sub(self.tokens, Ordering::Relaxed);
        self.tokens = tokens;
    }

    /// Returns the prompt tokens that it has left to compute.
    pub(crate) const fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns how many prompt tokens of others wait there.
    pub(crate) fn queued_before(&self) -> u64 {
        self.engine.load().queued_tokens.saturating_sub(self.tokens)
    }

    /// Notes that its prompt of so many tokens is computed and that it decodes from now on.
    pub(crate) fn begin_decoding(&mut self, prompt: u32) {
        self.set_tokens(0);
        if self.decoding.is_none() {
            self.decoding = Some(prompt);
            self.engine.costs.begin_decoding(prompt);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.is_probe {
            self.engine.vitals.end_probe();
        }
        self.engine.requests.fetch_sub(1, Ordering::Relaxed);
        self.engine.queued_tokens.fetch_sub(self.tokens, Ordering::Relaxed);
        if let Some(prompt) = self.decoding {
            self.engine.costs.end_decoding(prompt);
        }
    }
}
