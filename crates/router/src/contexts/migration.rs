//! The task that copies contexts.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use microserving_client::{CallContext, EngineKind};
use microserving_protocol::{Attempt, CompletionRequest, Prompt, SeqId, TokenIds};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::Contexts;
use super::plan::{ContextLoad, EngineView, plan};
use super::table::Context;
use crate::ctx::{Shared, Troubles};
use crate::moving::copy_context;
use crate::{Ctx, Engine, Error, Request, Role};

/// Between two plans.
const PLANS: Duration = Duration::from_millis(250);
/// Contexts that a plan looks at.
const MOST: usize = 64;
/// How long a copy may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// A link rests so many times as long as it was used: copies take a tenth of it.
const REST: u32 = 9;
/// How long engines rest after a copy that failed.
const PENALTY: Duration = Duration::from_secs(30);
/// What one running sequence weighs in prompt tokens, as in placement.
const TOKENS_PER_SEQUENCE: u64 = 32;
/// The weight of the newest copy in what copies take.
const NEWEST: f64 = 0.25;

/// A copy that is over.
struct Copied {
    from: Arc<Engine>,
    to: Arc<Engine>,
    tokens: u32,
    began: Instant,
    outcome: Result<(u32, u64), Error>,
}

/// Copies contexts to where they will be asked for, until the router stops. `name` tells this router's copies from those of others.
pub(crate) async fn migrate(shared: Shared, contexts: Contexts, name: String, stop: CancellationToken) {
    let mut running = FuturesUnordered::new();
    let mut links = Links::default();
    let mut number = 0_u64;
    let mut next = Instant::now();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            Some(copied) = running.next(), if !running.is_empty() => {
                links.settle(&shared, &copied);
                continue;
            }
            () = sleep_until(next) => next = Instant::now() + PLANS,
        }
        for (context, from, to) in links.plan(&shared, &contexts) {
            number += 1;
            links.occupy(&from, &to);
            running.push(copy(shared.clone(), format!("{name}-{number}"), context, from, to));
        }
    }
}

/// Makes the request that a context is copied by.
fn request(name: String, context: &Context) -> Result<Request, Error> {
    let tokens = TokenIds::from(&context.tokens[..]);
    let completion = CompletionRequest {
        model: context.model.as_deref().map(str::to_owned),
        cache_salt: (!context.salt.is_empty()).then(|| context.salt.to_string()),
        ..CompletionRequest::new(Prompt::Tokens(tokens.clone()))
    };
    let params = completion.generation(0)?;
    Ok(Request::new(SeqId::from(name), &completion, params, tokens))
}

async fn copy(shared: Shared, name: String, context: Context, from: Arc<Engine>, to: Arc<Engine>) -> Copied {
    let began = Instant::now();
    let call = CallContext::within(PATIENCE);
    let ctx = Ctx::new(&shared, &call, Attempt(0), &Troubles::default(), true);
    let tokens = u32::try_from(context.tokens.len()).unwrap_or(u32::MAX);
    let copied = async {
        let sent = copy_context(&ctx, &request(name, &context)?, &from, &to).await?;
        Ok((sent, ctx.stats.get().sent_bytes))
    };
    let timeout = Error::Slow { call: "commit", engine: to.name().to_owned() };
    let outcome = tokio::time::timeout(PATIENCE, copied).await.unwrap_or(Err(timeout));
    Copied { from, to, tokens, began, outcome }
}

/// What the links have done.
#[derive(Debug, Default)]
struct Links {
    /// When engines may copy again, by number.
    rest: HashMap<u32, Instant>,
    /// What copies took lately.
    seconds_per_token: f64,
}

impl Links {
    fn plan(&mut self, shared: &Shared, contexts: &Contexts) -> Vec<(Context, Arc<Engine>, Arc<Engine>)> {
        let now = Instant::now();
        self.rest.retain(|_, until| *until > now);
        let busiest = contexts.table().busiest(now, MOST);
        if busiest.is_empty() {
            return Vec::new();
        }
        let mut engines = shared.cluster.engines().to_vec();
        engines.retain(|engine| engine.takes_requests() && engine.kind() == EngineKind::Microserving);
        let views: Vec<_> = engines.iter().filter_map(|engine| self.view(engine, &engines)).collect();
        let (mut loads, mut of) = (Vec::new(), Vec::new());
        for (_, _, context) in busiest {
            let Ok(request) = request(String::new(), &context) else { continue };
            loads.push(load(shared, &engines, &context, &request, now));
            of.push(context);
        }
        let named = |number| engines.iter().find(|engine| engine.number() == number).cloned();
        let copies = plan(&loads, &views, self.seconds_per_token);
        let engines_of = |copy: super::plan::Copy| {
            let (from, to) = (named(copy.from)?, named(copy.to)?);
            let tokens = of[copy.context].tokens.len();
            let (source, target) = (from.name(), to.name());
            info!(from = source, to = target, tokens, saves = copy.saved_seconds, "copying a context");
            Some((of[copy.context].clone(), from, to))
        };
        copies.into_iter().filter_map(engines_of).collect()
    }

    fn view(&self, engine: &Arc<Engine>, all: &[Arc<Engine>]) -> Option<EngineView> {
        let state = engine.state()?;
        let load = engine.load();
        let peer = all.iter().find(|other| other.exchanges_with(engine));
        Some(EngineView {
            number: engine.number(),
            outlook: engine.outlook(),
            load_tokens: load.queued_tokens + TOKENS_PER_SEQUENCE * u64::from(load.requests),
            free_pages: state.pages.free,
            cached_pages: state.pages.cached,
            is_free: !self.rest.contains_key(&engine.number()),
            group: peer.map_or(engine.number(), |peer| peer.number()),
        })
    }

    /// Keeps others from two engines while a copy runs.
    fn occupy(&mut self, from: &Engine, to: &Engine) {
        self.until(from, to, Instant::now() + PATIENCE + PENALTY);
    }

    fn until(&mut self, from: &Engine, to: &Engine, until: Instant) {
        self.rest.extend([(from.number(), until), (to.number(), until)]);
    }

    fn settle(&mut self, shared: &Shared, copied: &Copied) {
        let Copied { from, to, tokens, began, outcome } = copied;
        let (now, took) = (Instant::now(), began.elapsed());
        match outcome {
            Ok((sent, bytes)) => {
                self.until(from, to, now + took * REST);
                if *sent > 0 {
                    let per_token = took.as_secs_f64() / f64::from(*sent);
                    let weight = if self.seconds_per_token > 0.0 { NEWEST } else { 1.0 };
                    self.seconds_per_token += weight * (per_token - self.seconds_per_token);
                }
                let seconds = took.as_secs_f64();
                info!(from = from.name(), to = to.name(), tokens, sent, bytes, seconds, "context copied");
            }
            Err(error) => {
                self.until(from, to, now + PENALTY);
                warn!(from = from.name(), to = to.name(), tokens, %error, "a context was not copied");
            }
        }
        shared.metrics.context_copied(outcome.as_ref().ok().copied());
    }
}

/// Returns who asks for a context and who has it.
fn load(
    shared: &Shared,
    engines: &[Arc<Engine>],
    context: &Context,
    request: &Request,
    now: Instant,
) -> ContextLoad {
    let fits = |engine: &&Arc<Engine>| {
        engine.page_size() == Some(context.page_size) && engine.serves(context.model.as_deref())
    };
    let fitting: Vec<_> = engines.iter().filter(fits).cloned().collect();
    let hints = shared.placement.hints(&fitting, request);
    let holders = fitting.iter().zip(hints).filter(|(_, held)| *held >= request.len());
    let decoders = fitting.iter().filter(|engine| engine.role() != Role::Prefill);
    ContextLoad {
        tokens: request.len(),
        pages: request.len() / context.page_size.max(1),
        rates: context.rates(now),
        behind: context.behind,
        answer: context.answer,
        holders: holders.map(|(engine, _)| engine.number()).collect(),
        decoders: decoders.map(|engine| engine.number()).collect(),
    }
}
