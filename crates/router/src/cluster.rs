//! The engines.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use microserving_client::EngineKind;
use microserving_protocol::ModelCard;

use tokio::time::Instant;

use crate::thresholds::Limits;
use crate::{Engine, EngineSpec, Role, Thresholds};

/// The engines that requests can go to. They join and leave while serving; a number is never used again.
#[derive(Debug)]
pub struct Cluster {
    members: RwLock<Members>,
    limits: Arc<Limits>,
    /// Goes up with every change of who may get what: an engine, a role, a model, a way to ask.
    changes: Arc<AtomicU64>,
    offers: RwLock<Vec<Known>>,
}

/// An offer under the name that it is asked for by, as of a change.
#[derive(Debug)]
struct Known {
    model: Option<String>,
    but_not: Role,
    change: u64,
    offer: Arc<Offer>,
}

/// The engines of a model and a part, and what would have to be asked of each of them by every request.
#[derive(Debug)]
pub(crate) struct Offer {
    engines: Vec<Arc<Engine>>,
    /// Their kinds, each once.
    kinds: Vec<EngineKind>,
    /// Whether answers of all of them can be passed on as they are.
    pub(crate) relays: bool,
}

impl Offer {
    fn of(engines: Vec<Arc<Engine>>) -> Self {
        let mut kinds = Vec::new();
        for kind in engines.iter().map(|engine| engine.kind()) {
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        let relays = engines.iter().all(|engine| engine.relays());
        Self { engines, kinds, relays }
    }
}

impl Deref for Offer {
    type Target = [Arc<Engine>];

    fn deref(&self) -> &Self::Target {
        &self.engines
    }
}

/// Offers that are kept; a program may ask for any model.
const MAX_OFFERS: usize = 64;

#[derive(Debug)]
struct Members {
    next_number: u32,
    /// Replaced as a whole, so that readers keep what they have seen.
    engines: Arc<[Arc<Engine>]>,
}

impl Cluster {
    /// Makes a cluster of engines, all of them down until they are seen.
    #[must_use]
    pub fn new(specs: Vec<EngineSpec>) -> Self {
        let numbered = (0..).zip(specs);
        let (changes, limits): (Arc<AtomicU64>, _) = (Arc::default(), Arc::new(Limits::default()));
        let engine = |(number, spec)| Arc::new(Engine::new(number, spec, limits.clone()).counting(&changes));
        let engines: Arc<[_]> = numbered.map(engine).collect();
        let next_number = u32::try_from(engines.len()).unwrap_or(u32::MAX);
        let members = RwLock::new(Members { next_number, engines });
        Self { members, limits, changes, offers: RwLock::default() }
    }

    /// Returns when engines are trusted.
    #[must_use]
    pub fn thresholds(&self) -> Thresholds {
        self.limits.get()
    }

    /// Changes when engines are trusted.
    pub(crate) fn set_thresholds(&self, thresholds: Thresholds) {
        self.limits.set(thresholds);
    }

    /// Returns all engines as of now.
    #[must_use]
    pub fn engines(&self) -> Arc<[Arc<Engine>]> {
        self.members.read().unwrap_or_else(PoisonError::into_inner).engines.clone()
    }

    /// Returns the engine of a number.
    #[must_use]
    pub fn engine(&self, number: u32) -> Option<Arc<Engine>> {
        self.engines().iter().find(|engine| engine.number() == number).cloned()
    }

    /// Returns the engine of a name.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<Arc<Engine>> {
        self.engines().iter().find(|engine| engine.name() == name).cloned()
    }

    /// Takes in an engine; nothing if there is one of its name already.
    pub(crate) fn join(&self, spec: EngineSpec) -> Option<Arc<Engine>> {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        if members.engines.iter().any(|engine| engine.name() == spec.calls.name()) {
            return None;
        }
        let engine = Engine::new(members.next_number, spec, self.limits.clone());
        let engine = Arc::new(engine.counting(&self.changes).joining());
        members.next_number += 1;
        members.engines = members.engines.iter().cloned().chain([engine.clone()]).collect();
        self.changes.fetch_add(1, Ordering::Release);
        Some(engine)
    }

    /// Lets an engine go; says whether it was here.
    pub(crate) fn leave(&self, number: u32) -> bool {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        let rest: Arc<[_]> =
            members.engines.iter().filter(|engine| engine.number() != number).cloned().collect();
        let was_here = rest.len() < members.engines.len();
        members.engines = rest;
        self.changes.fetch_add(1, Ordering::Release);
        was_here
    }

    /// Returns the engines of a model that may decode and take requests.
    #[must_use]
    pub fn decoders(&self, model: Option<&str>) -> Vec<Arc<Engine>> {
        self.available(model, Role::Prefill)
    }

    /// Returns the engines of a model that may prefill for others and take requests.
    #[must_use]
    pub fn prefillers(&self, model: Option<&str>) -> Vec<Arc<Engine>> {
        self.available(model, Role::Decode)
    }

    /// Returns the models that can be asked for now, each once.
    #[must_use]
    pub fn models(&self) -> Vec<ModelCard> {
        let mut models: Vec<ModelCard> = Vec::new();
        for engine in self.engines().iter().filter(|engine| engine.is_open()) {
            for card in engine.models() {
                if !models.iter().any(|known| known.id == card.id) {
                    models.push(card);
                }
            }
        }
        models
    }

    /// Returns the model of a name that can be asked for now, or the first one.
    pub(crate) fn model(&self, asked: Option<&str>) -> Option<ModelCard> {
        let engines = self.engines();
        engines.iter().filter(|engine| engine.is_open()).find_map(|engine| engine.model(asked))
    }

    /// Returns the kinds of the ready engines that serve a model, each once. If all are of one kind, that is it, ready or not.
    #[must_use]
    pub fn kinds(&self, model: &str) -> Vec<EngineKind> {
        let mut kinds = self.offered(Some(model), Role::Prefill).kinds.clone();
        kinds.extend_from_slice(&self.offered(Some(model), Role::Decode).kinds);
        kinds.sort_unstable();
        kinds.dedup();
        if kinds.len() <= 1 {
            return kinds;
        }
        kinds.clear();
        for engine in self.engines().iter() {
            let kind = engine.kind();
            if engine.takes_requests() && !kinds.contains(&kind) && engine.serves(Some(model)) {
                kinds.push(kind);
            }
        }
        kinds
    }

    /// Returns an engine of another kind that serves a model under the same name, so that `engine` must not: nobody has said that they are the
    /// same model with the same tokenizer. Of two kinds, the one that can do more keeps the name.
    pub(crate) fn rival(&self, engine: &Engine) -> Option<(String, Arc<Engine>)> {
        if engine.kind().is_ours() || engine.calls().vouched() {
            return None;
        }
        let models = engine.models();
        self.engines().iter().filter(|other| other.kind() < engine.kind()).find_map(|other| {
            let shared = models.iter().find(|card| other.serves(Some(&card.id)))?;
            Some((shared.id.clone(), other.clone()))
        })
    }

    /// Returns how many engines get requests now.
    #[must_use]
    pub fn num_ready(&self) -> usize {
        self.engines().iter().filter(|engine| engine.is_open()).count()
    }

    /// Returns the requests in flight over all engines: 0 when nothing is being served.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.engines().iter().map(|engine| engine.in_flight()).sum()
    }

    fn available(&self, model: Option<&str>, but_not: Role) -> Vec<Arc<Engine>> {
        let mut now = None;
        let mut now = || *now.get_or_insert_with(Instant::now);
        let engines = self.offered(model, but_not);
        let found: Vec<_> =
            engines.iter().filter(|engine| engine.takes_requests_at(&mut now)).cloned().collect();
        if !found.is_empty() {
            return found;
        }
        // All of them failed lately: then it is rather the requests, and a try is better than a refusal.
        engines.iter().filter(|engine| engine.is_open()).cloned().collect()
    }

    /// Returns the engines of a model that have any other role than `but_not`, in the order of their numbers, whether or not they take requests
    /// just now. Each request asks for this, so it is put together once a change and not once a request.
    pub(crate) fn offered(&self, model: Option<&str>, but_not: Role) -> Arc<Offer> {
        let change = self.changes.load(Ordering::Acquire);
        {
            let offers = self.offers.read().unwrap_or_else(PoisonError::into_inner);
            let same = |known: &&Known| {
                known.change == change && known.but_not == but_not && known.model.as_deref() == model
            };
            if let Some(known) = offers.iter().find(same) {
                return known.offer.clone();
            }
        }
        let fits = |engine: &&Arc<Engine>| engine.role() != but_not && engine.serves(model);
        let offer = Arc::new(Offer::of(self.engines().iter().filter(fits).cloned().collect()));
        let mut offers = self.offers.write().unwrap_or_else(PoisonError::into_inner);
        offers.retain(|known| known.change == change);
        // Names that no engine knows are whatever clients write.
        if offers.len() < MAX_OFFERS && !offer.is_empty() {
            offers.push(Known { model: model.map(str::to_owned), but_not, change, offer: offer.clone() });
        }
        offer
    }
}
