//! Live migration: a request begins on one engine and ends on another.

use std::sync::Arc;

use async_trait::async_trait;

use crate::{BadPattern, Ctx, Error, Parameter, Parameters, Program, ProgramFactory, Request, TokenStream};

/// How long an answer is when its request moves, if nobody says.
const DEFAULT_TOKENS: u32 = 16;

/// Serves on one engine, and moves the running request to another one after some tokens.
///
/// ```text
/// router ── start_generate(prompt, 0) ──────────────────▶ A ═ tokens ═▶
///        ── prep_recv(so far) ─▶ B   remote_send ─▶ A ══ KV ══▶ B       while A decodes
///        ── pause ──────────────────────────────────────▶ A ── all tokens so far
///        ── start_generate(so far, attempt 1) ──────────▶ B ═ tokens ═▶
///        ── abort ──────────────────────────────────────▶ A
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Migrate {
    after_tokens: u32,
}

impl Migrate {
    /// Makes the pattern that moves a request when its answer has `after_tokens` tokens.
    #[must_use]
    pub const fn new(after_tokens: u32) -> Self {
        Self { after_tokens }
    }
}

#[async_trait]
impl Program for Migrate {
    fn name(&self) -> &str {
        "migrate"
    }

    fn passes_on(&self) -> bool {
        true
    }

    async fn serve(&self, ctx: &Ctx, request: &Request) -> Result<TokenStream, Error> {
        let a = ctx.decoder(request)?;
        let b = ctx.another_decoder(request, &a);
        let stream = a.start_generate(request, 0).await?;
        match b {
            Some(b) if request.num_generated() < self.after_tokens => {
                Ok(stream.then_move(self.after_tokens, b))
            }
            _ => Ok(stream),
        }
    }
}

/// Makes [`Migrate`] programs: `migrate:64`.
#[derive(Clone, Copy, Debug, Default)]
pub struct MigrateFactory;

impl ProgramFactory for MigrateFactory {
    fn name(&self) -> &str {
        "migrate"
    }

    fn parameters(&self) -> &[Parameter] {
        static PARAMETERS: [Parameter; 1] = [Parameter::integer(
            "after_tokens",
            DEFAULT_TOKENS as i64,
            1,
            1_000_000,
            "How many tokens the answer has when the request moves.",
        )];
        &PARAMETERS
    }

    fn about(&self) -> &str {
        "One engine begins, and the running request moves to another."
    }

    fn build(&self, parameters: &Parameters) -> Result<Arc<dyn Program>, BadPattern> {
        let after_tokens = u32::try_from(parameters.integer("after_tokens")?).unwrap_or(DEFAULT_TOKENS);
        Ok(Arc::new(Migrate::new(after_tokens)))
    }
}
