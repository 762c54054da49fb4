//! The router: every OpenAI request becomes a short program over the three MicroServing calls.
//!
//! - [`Program`] is an orchestration pattern: an async function over a [`Ctx`] and a [`Request`]. [`DataParallel`], [`PrefillDecode`],
//!   [`Balanced`] and [`Adaptive`] come with the crate; write your own beside them.
//! - [`Ctx`] finds engines: [`Ctx::decoder`] and [`Ctx::prefiller`] return a [`Seat`], a request's place on one engine, which is where the
//!   calls are.
//! - [`RouterService`] serves clients: it tokenises once, runs the program, goes on elsewhere when an engine is lost, and
//!   answers in OpenAI's words ([`RouterService::http`]).
//! - [`Cluster`] knows the engines, their health and load; [`Placement`] chooses among them.
//! - [`Config`] is all that can change while serving, one document with a revision: engines, pattern, [`Rule`]s, [`Thresholds`]. Every
//!   change goes through [`RouterService::configure`].
//! - [`Outlook`] is what an engine takes and has to do at one moment, from which [`Prediction`]s come.
//!
//! # A seat is a guard
//!
//! A request that sits on an engine counts there as load, and may have left pages reserved. Both must be given back on success, on
//! error and when the client goes away, at every await of every program, users' programs included. So no program says "abort" or
//! "decrement": it holds [`Seat`]s, and a seat that is dropped before its stream has ended gives back its load and sends `abort`.
//! Programs stay as short as the figures they come from.
//!
//! ```
//! use async_trait::async_trait;
//! use microserving_router::{Ctx, Error, Program, Request, TokenStream};
//!
//! /// Long prompts are prefilled elsewhere, short ones where they are decoded.
//! #[derive(Debug)]
//! struct ByLength {
//!     threshold: u32,
//! }
//!
//! #[async_trait]
//! impl Program for ByLength {
//!     fn name(&self) -> &str {
//!         "by_length"
//!     }
//!
//!     async fn serve(&self, ctx: &Ctx, request: &Request) -> Result<TokenStream, Error> {
//!         let mut d = ctx.decoder(request)?;
//!         let end = request.len() - 1;
//!         if request.len() > self.threshold
//!             && let Some(mut p) = ctx.prefiller(request, &d)
//!         {
//!             let prepared = d.prep_recv(request, end).await?;
//!             if prepared.matched < end {
//!                 p.remote_send(request, &prepared, prepared.matched, end).await?;
//!             }
//!             return d.start_generate(request, end).await;
//!         }
//!         d.start_generate(request, 0).await
//!     }
//! }
//! ```

#![forbid(unsafe_code)]

mod abort;
mod admission;
mod answering;
mod attempts;
mod caution;
mod client_headers;
mod cluster;
mod config;
mod connect;
mod contexts;
mod control;
mod ctx;
mod engine;
mod error;
mod http;
mod ids;
mod index;
mod kept;
mod line;
mod live;
mod membership;
mod metrics;
mod moving;
mod operations;
mod pages;
mod parameters;
mod pattern;
mod placement;
mod predict;
mod program;
mod programs;
mod prompt;
mod relay;
mod request;
mod retry_budget;
mod rules;
mod scripts;
mod seat;
mod service;
mod stats;
mod steps;
mod stream;
mod tasks;
mod thresholds;
mod vitals;
mod watch;

pub use cluster::Cluster;
pub use config::{Config, EngineEntry};
pub use connect::{Connect, ConnectHttp};
pub use control::Change;
pub use ctx::Ctx;
pub use engine::{Engine, EngineSpec, Health, Load, Role};
pub use error::Error;
pub use http::ResponseFuture;
pub use ids::Randomness;
pub use index::{EngineFeed, FeedError, HeldPrefix, HeldPrefixes, IndexStats, PrefixIndex};
pub use metrics::Metrics;
pub use moving::Moved;
pub use operations::{ContextMove, MovedContext};
pub use parameters::{Parameter, ParameterKind, Parameters};
pub use pattern::{BadPattern, Pattern, Patterns, ProgramFactory};
pub use placement::{Placement, PlacementPolicy};
pub use predict::{Outlook, Prediction, ProfileSource};
pub use program::{Fallback, Program, TokenStream};
pub use programs::{
    Adaptive, AdaptiveFactory, Balanced, BalancedFactory, DataParallel, Migrate, MigrateFactory,
    PrefillDecode, Roles,
};
pub use prompt::PromptCodec;
pub use request::Request;
pub use retry_budget::RetryBudget;
pub use rules::{HeaderRule, Rule, rules_from_json};
pub use scripts::{BadScript, ProgramLoader, Script, ScriptCounts};
pub use seat::{Prepared, Seat};
pub use service::{RouterConfig, RouterService};
pub use tasks::RouterTasks;
pub use thresholds::Thresholds;
pub use vitals::BreakerState;
