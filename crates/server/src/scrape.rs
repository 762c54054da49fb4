//! Fetching the engine's counters for `/metrics` without making a scrape wait for a step.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use microserving_engine::EngineHandle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::metrics::StateCollector;

/// How long a scrape waits for the newest counters; after that it shows the last ones.
const PATIENCE: Duration = Duration::from_millis(100);

/// Asks the engine for its state, one question at a time, and puts the answer where metrics show it.
///
/// The engine answers between two steps, and a step can take longer than a scraper waits. The question then goes on behind
/// the scrape's back, so that the next scrape shows what this one missed.
#[derive(Debug)]
pub(crate) struct Scraper {
    engine: EngineHandle,
    collector: Arc<StateCollector>,
    /// The question under way; ended with the scraper.
    asking: Mutex<Option<JoinHandle<()>>>,
    answers: watch::Sender<u64>,
}

impl Scraper {
    pub(crate) fn new(engine: EngineHandle, collector: Arc<StateCollector>) -> Self {
        Self { engine, collector, asking: Mutex::default(), answers: watch::Sender::new(0) }
    }

    /// Freshens the counters, or gives up waiting for them.
    pub(crate) async fn freshen(&self) {
        let mut answers = self.answers.subscribe();
        answers.mark_unchanged();
        self.ask();
        // Too late is no error: the last counters are shown.
        let _ = tokio::time::timeout(PATIENCE, answers.changed()).await;
    }

    fn ask(&self) {
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        if asking.as_ref().is_some_and(|question| !question.is_finished()) {
            return;
        }
        let (engine, collector) = (self.engine.clone(), Arc::clone(&self.collector));
        let answers = self.answers.clone();
        *asking = Some(tokio::spawn(async move {
            if let Ok(state) = engine.state().await {
                collector.show(state);
            }
            answers.send_modify(|count| *count += 1);
        }));
    }
}

impl Drop for Scraper {
    fn drop(&mut self) {
        let asking = self.asking.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(question) = asking.take() {
            question.abort();
        }
    }
}
