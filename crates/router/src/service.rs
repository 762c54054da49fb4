//! The router as one value: engines, programs, metrics, and the tasks that keep them current.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use microserving_client::{CallContext, EngineKind};
use microserving_cost::Profile;
use microserving_protocol::{ApiError, ModelCard};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::abort::{AbortQueue, send_aborts};
use crate::admission::Admission;
use crate::contexts::{Contexts, migrate};
use crate::control::Control;
use crate::ctx::{Parts, Shared};
use crate::live::LiveRequests;
use crate::pattern::Fixed;
use crate::predict::Traffic;
use crate::prompt::Codecs;
use crate::scripts::Scripts;
use crate::steps::Steps;
use crate::tasks::Spawner;
use crate::{
    BadPattern, Cluster, Config, Connect, ConnectHttp, EngineSpec, Error, Metrics, Pattern, Patterns,
    Placement, PlacementPolicy, PrefixIndex, Program, ProgramFactory, ProgramLoader, PromptCodec, Randomness,
    RetryBudget, RouterTasks, Rule, Thresholds,
};

/// How a router works.
#[derive(Debug)]
pub struct RouterConfig {
    /// The engines.
    pub engines: Vec<EngineSpec>,
    /// The pattern of requests that name none.
    pub pattern: Pattern,
    /// Programs without parameters beside the crate's own; one of the same name replaces it.
    pub programs: Vec<Arc<dyn Program>>,
    /// Makers of programs with parameters, likewise.
    pub factories: Vec<Arc<dyn ProgramFactory>>,
    /// Whoever makes programs of text, so that scripts can be loaded while serving.
    pub loader: Option<Arc<dyn ProgramLoader>>,
    /// Scripts to begin with: names and texts.
    pub scripts: Vec<(String, String)>,
    /// The rules that choose a pattern before that one.
    pub rules: Vec<Rule>,
    /// When engines are trusted, and requests turned away.
    pub thresholds: Thresholds,
    /// How engines are called that join by their address.
    pub connector: Arc<dyn Connect>,
    /// What operators must bring as a bearer token; none lets everybody in who reaches their routes.
    pub admin_token: Option<String>,
    /// How engines are chosen.
    pub placement: PlacementPolicy,
    /// Memory that the index of held prefixes takes at most, in bytes.
    pub index_bytes: usize,
    /// How long a request may take, all calls together.
    pub request_timeout: Duration,
    /// How long one step of a program may take where nothing is predicted: a `prep_recv`, a `remote_send`, a first token.
    pub step_timeout: Duration,
    /// Requests served at once; more wait.
    pub max_in_flight: usize,
    /// Requests that may wait in each class of priority; more are answered 429.
    pub max_queued: usize,
    /// The tokenizer of all models; without one, each model's own is fetched from an engine.
    pub codec: Option<Arc<dyn PromptCodec>>,
    /// What engines take that do not tell; without it a neutral guess is corrected by what they are seen to take.
    pub profile: Option<Arc<Profile>>,
    /// Where names and seeds come from.
    pub randomness: Randomness,
    /// Pass bodies and answers on as they are where that is all there is to do; without it every request is tokenised.
    pub relay: bool,
    /// Copy contexts, the prefixes that prompts share, to where they will be asked for. Nothing is relayed then: contexts are tokens.
    pub context_migration: bool,
}

impl RouterConfig {
    /// Routes to `engines`, data parallel, everything else at its default.
    #[must_use]
    pub fn new(engines: Vec<EngineSpec>) -> Self {
        Self {
            engines,
            pattern: Pattern::named("data_parallel"),
            programs: Vec::new(),
            factories: Vec::new(),
            loader: None,
            scripts: Vec::new(),
            rules: Vec::new(),
            thresholds: Thresholds::default(),
            connector: Arc::new(ConnectHttp),
            admin_token: None,
            placement: PlacementPolicy::default(),
            index_bytes: PrefixIndex::DEFAULT_BYTES,
            request_timeout: Duration::from_secs(600),
            step_timeout: Duration::from_secs(60),
            max_in_flight: 4096,
            max_queued: 1024,
            codec: None,
            profile: None,
            randomness: Randomness::system(),
            relay: true,
            context_migration: false,
        }
    }
}

/// A router.
#[derive(Debug)]
pub struct RouterService {
    pub(crate) shared: Shared,
    pub(crate) patterns: Patterns,
    pub(crate) scripts: Scripts,
    pub(crate) codecs: Codecs,
    pub(crate) randomness: Randomness,
    /// Requests that may be inside, running or waiting.
    pub(crate) inside: Arc<Semaphore>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) request_timeout: Duration,
    pub(crate) spawner: Spawner,
    pub(crate) relay: bool,
    pub(crate) connector: Arc<dyn Connect>,
    pub(crate) admin_token: Option<String>,
    pub(crate) control: Control,
    draining: AtomicBool,
}

impl RouterService {
    /// Makes a router and starts its tasks; must be called on a tokio runtime.
    ///
    /// # Errors
    /// If the configured pattern, or that of a rule, does not exist, or a script is broken.
    pub fn start(config: RouterConfig) -> Result<(Arc<Self>, RouterTasks), BadPattern> {
        let fixed = config.programs.into_iter().map(|program| Arc::new(Fixed(program)) as Arc<_>);
        // Scripts build on the other patterns, and the one in use may be a script.
        let first = Pattern::named("data_parallel");
        let patterns = Patterns::new(&first, fixed.chain(config.factories).collect())?;
        let scripts = Scripts::new(config.loader);
        for (name, source) in &config.scripts {
            scripts
                .put(&patterns, name, source)
                .map_err(|error| BadPattern::new(format!("script {name}: {}", error.message)))?;
        }
        patterns.set_all(&config.pattern, &config.rules).map_err(|(_, error)| error)?;
        let metrics = Arc::new(Metrics::new());
        let (aborts, queue) = AbortQueue::new(metrics.clone());
        let seed = config.randomness.draw();
        let index = Arc::new(PrefixIndex::new(config.index_bytes, seed));
        let shared = Shared::from(Parts {
            cluster: Arc::new(Cluster::new(config.engines)),
            placement: Arc::new(Placement::new(config.placement, index, seed)),
            metrics,
            traffic: Arc::new(Traffic::new(config.profile)),
            retry_budget: Arc::new(RetryBudget::new(Instant::now())),
            aborts,
            live: LiveRequests::default(),
            steps: Steps { unpredicted: config.step_timeout },
            contexts: config.context_migration.then(Contexts::default),
        });
        let mut tasks = RouterTasks::new();
        let spawner = tasks.spawner();
        tasks.send_aborts(send_aborts(queue, spawner.stop().clone()));
        shared.cluster.set_thresholds(config.thresholds);
        let admission = Arc::new(Admission::new(config.max_in_flight, config.max_queued));
        let start = Config::of(&shared.cluster, &patterns);
        let service = Self {
            shared,
            patterns,
            scripts,
            codecs: Codecs::new(config.codec),
            randomness: config.randomness,
            inside: Arc::new(Semaphore::new(admission.most_inside().min(Semaphore::MAX_PERMITS))),
            admission,
            request_timeout: config.request_timeout,
            spawner,
            relay: config.relay && !config.context_migration,
            connector: config.connector,
            admin_token: config.admin_token,
            control: Control::new(start),
            draining: AtomicBool::new(false),
        };
        for engine in service.cluster().engines().iter() {
            service.follow(engine);
        }
        if let Some(contexts) = service.shared.contexts.clone() {
            let (spawner, name) = (&service.spawner, service.randomness.name("ctx-"));
            spawner.spawn(migrate(service.shared.clone(), contexts, name, spawner.stop().clone()));
        }
        service.warn_of_caution();
        Ok((Arc::new(service), tasks))
    }

    /// Returns the engines.
    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        &self.shared.cluster
    }

    /// Returns the patterns.
    #[must_use]
    pub const fn patterns(&self) -> &Patterns {
        &self.patterns
    }

    /// Returns the index of held prefixes.
    #[must_use]
    pub fn index(&self) -> &Arc<PrefixIndex> {
        self.shared.placement.index()
    }

    /// Returns the metrics.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    /// Takes no new requests that generate from now on; those in flight end as they would.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Waits until at least `num_engines` engines are ready, and the tokenizers of their models are here.
    ///
    /// # Errors
    /// If the time runs out, with the number of engines ready by then or what kept the tokenizers away.
    pub async fn wait_ready(&self, num_engines: usize, timeout: Duration) -> Result<(), Error> {
        let cx = CallContext::within(timeout);
        let ready = async {
            while self.cluster().num_ready() < num_engines {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(timeout, ready).await.is_err() {
            return Err(Error::NotReady { ready: self.cluster().num_ready(), wanted: num_engines });
        }
        for model in self.cluster().models() {
            if !self.needs(&model.id).tokens {
                continue;
            }
            self.codecs.get(self.cluster(), &cx, &model.id).await?;
        }
        Ok(())
    }

    /// Returns in which forms the engines of a model need their requests.
    pub(crate) fn needs(&self, model: &str) -> Needs {
        let kinds = self.cluster().kinds(model);
        let ours = kinds.contains(&EngineKind::Microserving);
        Needs {
            // Engines of other makes tell no tokenizer, so moving KV between them needs a given one.
            tokens: ours || (self.codecs.is_given() && kinds.contains(&EngineKind::Mlc)),
            written: kinds.iter().any(|kind| !kind.is_ours()),
        }
    }

    /// Returns the model that a request means.
    ///
    /// # Errors
    /// 404 if there is no such model, 503 if no engine is ready.
    pub(crate) fn model(&self, asked: Option<&str>) -> Result<ModelCard, ApiError> {
        let cluster = self.cluster();
        cluster.model(asked).ok_or_else(|| match asked {
            Some(name) if cluster.model(None).is_some() => ApiError::model_not_found(name),
            _ => Error::NoEngine { job: "answer" }.to_api_error(),
        })
    }
}

/// In which forms the engines of a model need their requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needs {
    /// As token ids.
    pub(crate) tokens: bool,
    /// As the client wrote them.
    pub(crate) written: bool,
}

/// Returns the seconds since 1970.
pub(crate) fn now_unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
