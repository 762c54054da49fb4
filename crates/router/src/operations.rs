//! What operators can have done to running requests and to contexts.

use std::sync::Arc;
use std::time::Duration;

use microserving_client::CallContext;
use microserving_protocol::{ApiError, Attempt, CompletionRequest, Prompt, SeqId, TokenId, TokenIds};
use serde::Serialize;
use tracing::info;

use crate::ctx::Troubles;
use crate::live::{Done, Order};
use crate::moving::{Moved, copy_context};
use crate::placement::Job;
use crate::{Ctx, Engine, Error, Request, RouterService};

/// How long a request may take to move. It moves at its client's pace: one that does not read holds it up.
const PATIENCE: Duration = Duration::from_secs(60);

/// A prompt prefix that is to be copied to another engine.
#[derive(Clone, Debug)]
pub struct ContextMove {
    /// Its tokens. Whole pages of them are copied.
    pub tokens: Vec<TokenId>,
    /// The model; none is any.
    pub model: Option<String>,
    /// Whose cache it is in; none is the common one.
    pub cache_salt: Option<String>,
    /// The engine that has it, or computes it; the best one if none is named.
    pub from: Option<String>,
    /// The engine that gets it.
    pub to: String,
}

/// A context that was copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MovedContext {
    /// The engine that sent it; none if nothing had to be sent.
    pub from: String,
    /// The engine that has it now.
    pub to: String,
    /// Tokens that it has there: whole pages.
    pub tokens: u32,
    /// Tokens that were sent; the others were there already.
    pub sent_tokens: u32,
}

impl RouterService {
    /// Moves a running request, named by its `seq_id` or its `x-request-id`, to another engine: to the best other one if `to` is none.
    /// Returns once the other engine has yielded a token and the first one is given up.
    ///
    /// # Errors
    /// 404 for a request or an engine that is not there; [`Error::CannotMove`] if it has to stay, and whatever the engines say.
    pub async fn migrate(&self, name: &str, to: Option<&str>) -> Result<Moved, Error> {
        let to = to.map(|to| self.engine_named("to", to)).transpose()?;
        let orders = self.shared.live.find(name).ok_or_else(|| {
            ApiError::not_found(format!("no running request is called {name:?}")).with_param("seq_id")
        })?;
        let (done, outcome) = Done::channel();
        orders.try_send(Order { to, done }).map_err(|_| busy("it is busy with other orders"))?;
        match tokio::time::timeout(PATIENCE, outcome).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(busy("it has finished")),
            Err(_) => Err(busy("its client does not read")),
        }
    }

    /// Asks every request that an engine decodes to move to another one; returns how many were asked. Those that cannot stay.
    pub fn move_away(&self, engine: &Engine) -> usize {
        self.shared.live.move_away(engine)
    }

    /// Copies a context from one engine's cache to another's.
    ///
    /// # Errors
    /// 404 for an engine that is not there, 400 if there is not one whole page, and whatever the engines say.
    pub async fn migrate_context(&self, context: ContextMove) -> Result<MovedContext, Error> {
        let to = self.engine_named("to", &context.to)?;
        let page = to.page_size().ok_or_else(|| busy("the engine has not told its page size yet"))?.max(1);
        let whole = context.tokens.len() / page as usize * page as usize;
        if whole == 0 {
            let message = format!("the context has {} tokens, a page has {page}", context.tokens.len());
            return Err(ApiError::bad_request("prompt", message).into());
        }
        let tokens = TokenIds::from(&context.tokens[..whole]);
        let completion = CompletionRequest {
            model: context.model,
            cache_salt: context.cache_salt,
            ..CompletionRequest::new(Prompt::Tokens(tokens.clone()))
        };
        let params = completion.generation(0)?;
        let copy = Request::new(SeqId::from(self.randomness.name("ctx-")), &completion, params, tokens);
        let from = match &context.from {
            Some(from) => self.engine_named("from", from)?,
            None => self.best_source(&copy, &to)?,
        };
        if from.number() == to.number() {
            return Err(ApiError::bad_request("to", "from and to are the same engine").into());
        }
        let call = CallContext::within(self.request_timeout);
        let ctx = Ctx::new(&self.shared, &call, Attempt(0), &Troubles::default(), true);
        let sent_tokens = copy_context(&ctx, &copy, &from, &to).await?;
        let moved = MovedContext {
            from: from.name().to_owned(),
            to: to.name().to_owned(),
            tokens: copy.len(),
            sent_tokens,
        };
        info!(?moved, "context moved");
        Ok(moved)
    }

    /// Returns the engine that has most of a context and least to do.
    fn best_source(&self, copy: &Request, to: &Engine) -> Result<Arc<Engine>, Error> {
        let mut engines: Vec<_> = self.cluster().engines().to_vec();
        engines.retain(|engine| {
            engine.takes_requests() && engine.number() != to.number() && engine.exchanges_with(to)
        });
        let choice = self.shared.placement.choose(Job::Prefill, &engines, &|_| true, copy, copy.len());
        choice.map(|choice| choice.engine).ok_or(Error::NoEngine { job: "send" })
    }

    fn engine_named(&self, field: &str, name: &str) -> Result<Arc<Engine>, Error> {
        let engine = self.cluster().named(name);
        Ok(engine
            .ok_or_else(|| ApiError::not_found(format!("no engine is called {name:?}")).with_param(field))?)
    }
}

fn busy(reason: &str) -> Error {
    Error::CannotMove { reason: reason.to_owned() }
}
