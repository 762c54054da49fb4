//! The engines.

use std::sync::Arc;

use microserving_protocol::ModelCard;

use crate::{Engine, EngineSpec, Health, Role};

/// The engines that requests can go to.
#[derive(Debug)]
pub struct Cluster {
    engines: Vec<Arc<Engine>>,
}

impl Cluster {
    /// Makes a cluster of engines, all of them down until they are seen.
    #[must_use]
    pub fn new(specs: Vec<EngineSpec>) -> Self {
        let engines = (0..).zip(specs).map(|(number, spec)| Arc::new(Engine::new(number, spec))).collect();
        Self { engines }
    }

    /// Returns all engines.
    #[must_use]
    pub fn engines(&self) -> &[Arc<Engine>] {
        &self.engines
    }

    /// Returns the ready engines of a model that may decode.
    #[must_use]
    pub fn decoders(&self, model: Option<&str>) -> Vec<Arc<Engine>> {
        self.ready(model, Role::Prefill)
    }

    /// Returns the ready engines of a model that may prefill for others.
    #[must_use]
    pub fn prefillers(&self, model: Option<&str>) -> Vec<Arc<Engine>> {
        self.ready(model, Role::Decode)
    }

    /// Returns the models that ready engines serve, each once.
    #[must_use]
    pub fn models(&self) -> Vec<ModelCard> {
        let mut models: Vec<ModelCard> = Vec::new();
        for engine in self.engines().iter().filter(|engine| engine.health() == Health::Ready) {
            for card in engine.models() {
                if !models.iter().any(|known| known.id == card.id) {
                    models.push(card);
                }
            }
        }
        models
    }

    /// Returns how many engines get requests now.
    #[must_use]
    pub fn num_ready(&self) -> usize {
        self.engines.iter().filter(|engine| engine.health() == Health::Ready).count()
    }

    /// Returns the requests in flight over all engines: 0 when nothing is being served.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.engines().iter().map(|engine| engine.in_flight()).sum()
    }

    fn ready(&self, model: Option<&str>, but_not: Role) -> Vec<Arc<Engine>> {
        let fits = |engine: &&Arc<Engine>| {
            engine.health() == Health::Ready && engine.role() != but_not && engine.serves(model)
        };
        self.engines.iter().filter(fits).cloned().collect()
    }
}
