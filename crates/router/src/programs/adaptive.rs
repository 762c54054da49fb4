//! Disaggregation as far as it pays, request by request.

mod decision;
mod shortlist;

use std::sync::{Arc, LazyLock};

use async_trait::async_trait;

use self::decision::{Decision, Question, Side, choose};
use self::shortlist::shortlist;
use crate::{
    BadPattern, Ctx, Engine, Error, Parameter, ParameterKind, Parameters, Program, ProgramFactory, Request,
    Seat, TokenStream,
};

/// Which engines may take which part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Roles {
    /// As configured: an engine for any role takes both parts, another one its own.
    #[default]
    Fixed,
    /// Every engine takes either part; roles come and go with the queues.
    Free,
}

/// Chooses the engines and the split point of each request by what they would cost, the request itself and all others.
///
/// ```text
/// router ── choose(p, d, split) from queues, caches, profiles
/// router ── prep_recv(prompt, split) ───────────────────▶ D ── matched ─▶ router
/// router ── remote_send(prompt, addr, matched, split) ─▶ P ══ KV of [matched, split) ══▶ D
/// router ── start_generate(prompt, split) ──────────────▶ D ═ tokens ═▶         or, where P does not pay, this call alone
/// ```
///
/// What an engine matched in truth replaces what was believed when the choice was made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Adaptive {
    /// Which engines may take which part.
    pub roles: Roles,
}

#[async_trait]
impl Program for Adaptive {
    fn name(&self) -> &str {
        "adaptive"
    }

    fn passes_on(&self) -> bool {
        true
    }

    async fn serve(&self, ctx: &Ctx, request: &Request) -> Result<TokenStream, Error> {
        let (mut d, p, split) = self.choose(ctx, request)?;
        let Some(mut p) = p else {
            return d.start_generate(request, 0).await;
        };
        let prepared = d.prep_recv(request, split).await?;
        if prepared.matched < split {
            p.remote_send(request, &prepared, prepared.matched, split).await?;
        }
        drop(p);
        d.start_generate(request, split).await
    }
}

impl Adaptive {
    /// Takes the seats that cost least: to decode, to prefill if that pays, and the split point between them.
    fn choose(&self, ctx: &Ctx, request: &Request) -> Result<(Seat, Option<Seat>, u32), Error> {
        let (decoders, prefillers) = match self.roles {
            Roles::Fixed => (ctx.decoders(request), ctx.prefillers(request)),
            Roles::Free => (ctx.engines(request), ctx.engines(request)),
        };
        let page_size = decoders.iter().find_map(|engine| engine.page_size()).unwrap_or(1);
        let share = |engines: &[_]| 1.0 / engines.len().max(1) as f64;
        let (decoder_share, prefiller_share) = (share(&decoders), share(&prefillers));
        let decoders = Lineup::new(ctx, request, &decoders);
        let prefillers = Lineup::new(ctx, request, &prefillers);
        let service = decoders.sides.first().map(|d| d.outlook.prefill_seconds(request.len().into(), 0.0));
        let rate = ctx.arrivals_per_second(service.unwrap_or(1.0));
        let question = Question {
            prompt: request.len(),
            output: request.params().max_tokens,
            page_size,
            decoder_rate: rate * decoder_share,
            prefiller_rate: rate * prefiller_share,
        };
        let may_pair =
            |d: usize, p: usize| ctx.may_send(request, &prefillers.engines[p], &decoders.engines[d]);
        let Decision { decoder, prefiller, split } =
            choose(&question, &decoders.sides, &prefillers.sides, may_pair)
                .ok_or(Error::NoEngine { job: "decode" })?;
        let (d, holds) = (&decoders.engines[decoder], decoders.sides[decoder].matched);
        let Some(prefiller) = prefiller else {
            return Ok((ctx.seat_for(d, request.len().saturating_sub(holds)), None, 0));
        };
        let (p, holds) = (&prefillers.engines[prefiller], prefillers.sides[prefiller].matched);
        let (d, p) = (ctx.seat_for(d, request.len() - split), ctx.seat_for(p, split.saturating_sub(holds)));
        Ok((d, Some(p), split))
    }
}

/// Makes [`Adaptive`] programs: `adaptive`, `adaptive:free`.
#[derive(Clone, Copy, Debug, Default)]
pub struct AdaptiveFactory;

impl ProgramFactory for AdaptiveFactory {
    fn name(&self) -> &str {
        "adaptive"
    }

    fn parameters(&self) -> &[Parameter] {
        static PARAMETERS: LazyLock<[Parameter; 1]> = LazyLock::new(|| {
            let kind = ParameterKind::Text {
                default: "fixed".to_owned(),
                one_of: vec!["fixed".to_owned(), "free".to_owned()],
            };
            let doc = "Whether engines keep their configured roles, or every engine takes either part.";
            [Parameter { name: "roles".into(), kind, doc: doc.into() }]
        });
        &*PARAMETERS
    }

    fn about(&self) -> &str {
        "Engines and split point are chosen for each request by what they would cost, one engine alone included."
    }

    fn build(&self, parameters: &Parameters) -> Result<Arc<dyn Program>, BadPattern> {
        let roles = if parameters.text("roles")? == "free" { Roles::Free } else { Roles::Fixed };
        Ok(Arc::new(Adaptive { roles }))
    }
}

/// The engines worth weighing for one part, each with its outlook and what it probably holds of the prompt.
struct Lineup {
    engines: Vec<Arc<Engine>>,
    sides: Vec<Side>,
}

impl Lineup {
    fn new(ctx: &Ctx, request: &Request, engines: &[Arc<Engine>]) -> Self {
        let matched = ctx.hints(request, engines);
        let places = shortlist(engines, &matched, request);
        Self {
            engines: places.iter().map(|&place| engines[place].clone()).collect(),
            sides: places
                .iter()
                .map(|&place| Side { outlook: engines[place].outlook(), matched: matched[place] })
                .collect(),
        }
    }
}
