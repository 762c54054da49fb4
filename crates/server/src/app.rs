//! The server: an engine, its text side, and the routes.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use microserving_engine::EngineHandle;
use microserving_protocol::SeqId;

use crate::metrics::Metrics;
use crate::routes;
use crate::scrape::Scraper;
use crate::text::ModelText;

/// What a server is told when it is made.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The model's name in `/v1/models`; requests may name this one or none.
    pub served_model_name: String,
    /// How long a request may take whose caller sets no deadline; `None` is for ever.
    pub default_timeout: Option<Duration>,
    /// The largest request body; a larger one is answered 413.
    pub max_body_bytes: usize,
    /// How long a body may take to arrive.
    pub body_timeout: Duration,
    /// Said in `GET /microserving/state`: the calls are served over gRPC too, beside these routes.
    pub grpc: bool,
    /// What the engine takes, as JSON of the cost crate's form, for routers; `None` if it was not calibrated.
    pub profile: Option<Arc<str>>,
}

impl ServerConfig {
    /// Returns the defaults: no deadline, bodies of 16 MiB within 60 seconds.
    #[must_use]
    pub fn new(served_model_name: impl Into<String>) -> Self {
        Self {
            served_model_name: served_model_name.into(),
            default_timeout: None,
            max_body_bytes: 16 << 20,
            body_timeout: Duration::from_secs(60),
            grpc: false,
            profile: None,
        }
    }
}

/// What every handler sees.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) engine: EngineHandle,
    pub(crate) text: ModelText,
    pub(crate) config: ServerConfig,
    pub(crate) metrics: Metrics,
    pub(crate) scraper: Scraper,
    pub(crate) created: u64,
    /// Seeds of keyed calls that bring none: the same call again must be the same call.
    seeds: RandomState,
}

impl App {
    pub(crate) fn new(engine: EngineHandle, text: ModelText, config: ServerConfig) -> Arc<Self> {
        let metrics = Metrics::new(engine.info());
        let scraper = Scraper::new(engine.clone(), metrics.collector());
        let (created, seeds) = (unix_seconds(), RandomState::new());
        Arc::new(Self { engine, text, config, metrics, scraper, created, seeds })
    }

    /// Draws a seed: for a key always the same one, as long as this process lives.
    pub(crate) fn draw_seed(&self, key: Option<&SeqId>) -> u64 {
        key.map_or_else(crate::random::number, |key| self.seeds.hash_one(key))
    }
}

/// Returns the HTTP surface of an engine: every route but health, which belongs to the daemon around it.
///
/// The router holds a handle of the engine and nothing else that must be closed: drop it, or let its server drain it.
pub fn router(engine: EngineHandle, text: ModelText, config: ServerConfig) -> Router {
    routes::router(App::new(engine, text, config), Router::new())
}

/// Returns the seconds since 1970, as `created` fields have them.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
