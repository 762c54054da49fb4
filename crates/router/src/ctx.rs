//! What a program has to work with.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use microserving_client::{CallContext, EngineKind};
use microserving_protocol::{Attempt, CallOptions};

use crate::abort::AbortQueue;
use crate::contexts::Contexts;
use crate::engine::InFlight;
use crate::live::LiveRequests;
use crate::placement::{Choice, Job};
use crate::predict::Traffic;
use crate::stats::StatsCell;
use crate::steps::Steps;
use crate::{Cluster, Engine, Error, Metrics, Placement, Request, RetryBudget, Role, Seat};

/// What lasts as long as the service, and every context shares. Clones are one count: each call of each request has one.
#[derive(Clone, Debug)]
pub(crate) struct Shared(Arc<Parts>);

impl From<Parts> for Shared {
    fn from(parts: Parts) -> Self {
        Self(Arc::new(parts))
    }
}

impl Deref for Shared {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

/// The parts of [`Shared`].
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) placement: Arc<Placement>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) traffic: Arc<Traffic>,
    pub(crate) retry_budget: Arc<RetryBudget>,
    pub(crate) aborts: AbortQueue,
    pub(crate) live: LiveRequests,
    pub(crate) steps: Steps,
    /// What is learned for moving contexts; none where nothing moves them.
    pub(crate) contexts: Option<Contexts>,
}

/// Engines that a request had trouble with, in this attempt or an earlier one. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Troubles(Arc<Mutex<HashMap<u32, Trouble>>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// It has no room to receive. It may still have room, or a queue, for a request that it computes itself.
    CannotReceive,
    /// It failed.
    Failed,
}

impl Troubles {
    fn of(&self, engine: &Engine) -> Option<Trouble> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&engine.number()).copied()
    }

    pub(crate) fn note_failed(&self, engine: &Engine) {
        self.note(engine, Trouble::Failed);
    }

    pub(crate) fn note(&self, engine: &Engine, trouble: Trouble) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(engine.number(), trouble);
    }
}

/// One attempt at serving one request: it finds engines, and carries identity and deadline into every call.
#[derive(Clone, Debug)]
pub struct Ctx {
    pub(crate) shared: Shared,
    pub(crate) call: CallContext,
    pub(crate) attempt: Attempt,
    pub(crate) troubles: Troubles,
    pub(crate) stats: StatsCell,
    /// The program would move KV.
    pub(crate) moves_kv: bool,
    /// The program leaves its streams as they are.
    pub(crate) passes_on: bool,
    /// The engine that decodes, once it has been asked to.
    pub(crate) placed: Arc<OnceLock<Arc<Engine>>>,
    /// Engines that have sent some of the prompt, and of which that is yet to be noted.
    pub(crate) senders: Arc<Mutex<Vec<Given>>>,
}

/// How far an engine can take part in a pattern that moves KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// There is an engine that can send to it: one that takes requests, with the same KV layout.
    Connected,
    /// It could receive, if there were one to send.
    Receives,
    Any,
}

impl Reach {
    const BEST_FIRST: [Self; 3] = [Self::Connected, Self::Receives, Self::Any];

    /// Says whether `engine` has it, where `senders` prefill for others.
    fn has(self, engine: &Engine, senders: &[Arc<Engine>]) -> bool {
        let sends = |other: &Arc<Engine>| {
            other.number() != engine.number() && other.exchanges_with(engine) && other.takes_requests()
        };
        match self {
            Self::Connected => engine.kind().moves_kv() && senders.iter().any(sends),
            Self::Receives => engine.kind().moves_kv(),
            Self::Any => true,
        }
    }
}

/// An engine that was given the first so many tokens of a request.
pub(crate) type Given = (Arc<Engine>, u32);

/// Says whether KV can be moved to an engine for this request.
fn can_move(engine: &Engine, request: &Request) -> bool {
    // MLC-LLM forks the choices of one request when it prefills, and what it prefills here is only the end of the prompt.
    let forks = engine.kind() == EngineKind::Mlc && request.params().n > 1;
    engine.kind().moves_kv() && request.has_tokens() && !forks
}

/// Says whether an engine can serve a request alone. Those of other makes would take the output of an earlier attempt for a part of the prompt.
fn takes(engine: &Engine, request: &Request) -> bool {
    engine.takes(request) && (!request.is_continued() || engine.kind() == EngineKind::Microserving)
}

/// Chooses among engines that take requests. If none does because all of them failed lately, it is rather the requests, and a try is better than
/// a refusal: then among those that are open.
pub(crate) fn first_open(
    engines: &[Arc<Engine>],
    choose: impl Fn(&dyn Fn(&Engine) -> bool) -> Option<Choice>,
) -> Option<Choice> {
    choose(&Engine::takes_requests).or_else(|| {
        let none = !engines.iter().any(|engine| engine.takes_requests());
        none.then(|| choose(&Engine::is_open)).flatten()
    })
}

impl Ctx {
    pub(crate) fn new(
        shared: &Shared,
        call: &CallContext,
        attempt: Attempt,
        troubles: &Troubles,
        moves_kv: bool,
    ) -> Self {
        Self {
            shared: shared.clone(),
            call: call.clone(),
            attempt,
            troubles: troubles.clone(),
            stats: StatsCell::default(),
            moves_kv,
            passes_on: false,
            placed: Arc::default(),
            senders: Arc::default(),
        }
    }

    /// Notes that an engine holds the first `end` tokens of a request, and what those hold that have sent some of them: their pages are
    /// the same, so all are noted at once.
    pub(crate) fn note_given(&self, engine: &Arc<Engine>, request: &Request, end: u32) {
        let mut given = std::mem::take(&mut *self.senders.lock().unwrap_or_else(PoisonError::into_inner));
        given.push((engine.clone(), end));
        self.shared.placement.note(request, &given);
    }

    /// Returns the context of another attempt at the same request.
    pub(crate) fn next_attempt(&self, attempt: Attempt) -> Self {
        Self::new(&self.shared, &self.call, attempt, &self.troubles, self.moves_kv)
    }

    /// Takes a seat on the best engine to decode `request`. Changes state: the seat counts as load until it is dropped.
    ///
    /// # Errors
    /// [`Error::NoEngine`] if every engine that may decode is down or has failed this request.
    pub fn decoder(&self, request: &Request) -> Result<Seat, Error> {
        let engines = self.shared.cluster.offered(request.model(), Role::Prefill);
        let senders = self.shared.cluster.offered(request.model(), Role::Decode);
        // As in `fitting`, but only those that placement looks at are asked. Best are those without trouble, among them those that the pattern
        // can move KV to.
        let tiers = |untroubled| Reach::BEST_FIRST.map(|reach| (untroubled, reach));
        let tiers = [tiers(true), tiers(false)].concat();
        let tiers = tiers.into_iter().filter(|(_, reach)| self.moves_kv || *reach == Reach::Any);
        let choice = first_open(&engines, |takes_requests| {
            tiers.clone().find_map(|(untroubled, reach)| {
                let fits = |engine: &Engine| {
                    let trouble = self.troubles.of(engine);
                    takes_requests(engine)
                        && takes(engine, request)
                        && if untroubled { trouble.is_none() } else { trouble != Some(Trouble::Failed) }
                        && reach.has(engine, &senders)
                };
                self.shared.placement.choose(Job::Decode, &engines, &fits, request, request.len())
            })
        });
        let choice = choice.ok_or(Error::NoEngine { job: "decode" })?;
        Ok(self.sit(choice, request.len()))
    }

    /// Takes a seat on the best engine to prefill for `decoder`: another one, with the same KV layout.
    ///
    /// None means that there is none just now, or that the decoder has no room to receive. Then it can do without: `start_generate`
    /// alone serves any request.
    #[must_use]
    pub fn prefiller(&self, request: &Request, decoder: &Seat) -> Option<Seat> {
        if self.troubles.of(decoder.engine()).is_some() || !can_move(decoder.engine(), request) {
            return None;
        }
        let engines = self.shared.cluster.offered(request.model(), Role::Decode);
        let choice = first_open(&engines, |takes_requests| {
            let fits = |engine: &Engine| {
                takes_requests(engine)
                    && engine.number() != decoder.engine().number()
                    && self.troubles.of(engine) != Some(Trouble::Failed)
                    && engine.exchanges_with(decoder.engine())
            };
            self.shared.placement.choose(Job::Prefill, &engines, &fits, request, request.len())
        })?;
        Some(self.sit(choice, request.len()))
    }

    /// Takes a seat on the best other engine to decode what `decoder` decodes: one with the same KV layout. None means that there is none
    /// just now.
    #[must_use]
    pub fn another_decoder(&self, request: &Request, decoder: &Seat) -> Option<Seat> {
        self.other_decoder(request, decoder.engine())
    }

    pub(crate) fn other_decoder(&self, request: &Request, decoder: &Engine) -> Option<Seat> {
        let mut engines = self.shared.cluster.decoders(request.model());
        engines.retain(|engine| {
            engine.number() != decoder.number()
                && engine.kind() == EngineKind::Microserving
                && engine.exchanges_with(decoder)
                && self.troubles.of(engine).is_none()
        });
        let choice =
            self.shared.placement.choose(Job::Decode, &engines, &|_| true, request, request.len())?;
        Some(self.seat_beside(&choice.engine))
    }

    /// Takes a seat that brings no tokens to compute: its KV is copied there.
    pub(crate) fn seat_beside(&self, engine: &Arc<Engine>) -> Seat {
        Seat::new(self.clone(), InFlight::new(engine.clone(), 0), None)
    }

    /// Takes a seat on a given engine, for programs that choose by themselves.
    #[must_use]
    pub fn seat(&self, engine: &Arc<Engine>, request: &Request) -> Seat {
        self.sit(Choice { engine: engine.clone(), hinted: None }, request.len())
    }

    /// Returns the engines that may decode a request now: those without trouble, or those that had no room if there is no other.
    #[must_use]
    pub fn decoders(&self, request: &Request) -> Vec<Arc<Engine>> {
        self.fitting(request, self.shared.cluster.decoders(request.model()))
    }

    /// Returns the engines that may prefill a request for others now.
    #[must_use]
    pub fn prefillers(&self, request: &Request) -> Vec<Arc<Engine>> {
        let mut engines = self.shared.cluster.prefillers(request.model());
        engines.retain(|engine| self.troubles.of(engine) != Some(Trouble::Failed));
        engines
    }

    /// Returns the engines that may serve a request now, whatever their roles.
    #[must_use]
    pub fn engines(&self, request: &Request) -> Vec<Arc<Engine>> {
        let mut engines = self.shared.cluster.engines().to_vec();
        engines.retain(|engine| engine.takes_requests() && engine.serves(request.model()));
        self.fitting(request, engines)
    }

    /// Says whether one engine may send KV to another for this request: another one, with the same KV layout and room to receive.
    #[must_use]
    pub fn may_send(&self, request: &Request, sender: &Engine, receiver: &Engine) -> bool {
        sender.number() != receiver.number()
            && can_move(receiver, request)
            && sender.exchanges_with(receiver)
            && self.troubles.of(receiver).is_none()
    }

    /// Returns for each engine how many tokens of the prompt it probably holds. A hint: `prep_recv` answers what is really there.
    #[must_use]
    pub fn hints(&self, request: &Request, engines: &[Arc<Engine>]) -> Vec<u32> {
        self.shared.placement.hints(engines, request)
    }

    /// Takes a seat on a given engine that has so many tokens of the prompt to compute.
    #[must_use]
    pub fn seat_for(&self, engine: &Arc<Engine>, tokens: u32) -> Seat {
        self.sit(Choice { engine: engine.clone(), hinted: None }, tokens)
    }

    fn fitting(&self, request: &Request, mut engines: Vec<Arc<Engine>>) -> Vec<Arc<Engine>> {
        engines.retain(|engine| takes(engine, request) && self.troubles.of(engine) != Some(Trouble::Failed));
        if engines.iter().any(|engine| self.troubles.of(engine).is_none()) {
            engines.retain(|engine| self.troubles.of(engine).is_none());
        }
        // What cannot receive KV is the second choice of a pattern that moves it.
        if self.moves_kv && engines.iter().any(|engine| engine.kind().moves_kv()) {
            engines.retain(|engine| engine.kind().moves_kv());
        }
        engines
    }

    /// Returns the requests a second that arrive at this router, where serving one takes so long: the measure of a prior that early
    /// arrivals cannot overturn.
    #[must_use]
    pub fn arrivals_per_second(&self, service_seconds: f64) -> f64 {
        self.shared.traffic.per_second(service_seconds)
    }

    /// Returns the engines.
    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        &self.shared.cluster
    }

    /// Returns the number of the attempt, from 0.
    #[must_use]
    pub const fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// Returns identity and deadline, for calls that a program makes by itself.
    #[must_use]
    pub const fn call_context(&self) -> &CallContext {
        &self.call
    }

    pub(crate) fn sit(&self, choice: Choice, num_tokens: u32) -> Seat {
        let uncached = num_tokens.saturating_sub(choice.hinted.unwrap_or(0));
        Seat::new(self.clone(), InFlight::new(choice.engine, uncached), choice.hinted)
    }

    /// Returns the key and deadline of a call.
    pub(crate) fn options(&self, request: &Request) -> CallOptions {
        CallOptions {
            seq_id: Some(request.seq_id().clone()),
            attempt: (self.attempt.0 > 0).then_some(self.attempt),
            // A deadline that has passed is answered by the client before anything is sent.
            timeout: self.call.remaining().filter(|left| !left.is_zero()),
        }
    }
}
