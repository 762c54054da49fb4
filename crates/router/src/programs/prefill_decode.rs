//! Prefill–decode disaggregation, aware of both engines' context caches.

use async_trait::async_trait;

use crate::{Ctx, Error, Program, Request, TokenStream};

/// One engine computes the prompt's KV, another one decodes. What the decoding engine already holds is neither computed for it nor sent.
///
/// ```text
/// router ── prep_recv(prompt, end) ────────────────────▶ D ── matched ─▶ router
/// router ── remote_send(prompt, addr, matched, end) ─▶ P ══ KV of [matched, end) ══▶ D
/// router ── start_generate(prompt, end) ───────────────▶ D ═ tokens ═▶          end = len - 1
/// ```
///
/// The last token is left to the decoding engine: it needs its logits.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillDecode;

#[async_trait]
impl Program for PrefillDecode {
    fn name(&self) -> &str {
        "prefill_decode"
    }

    fn passes_on(&self) -> bool {
        true
    }

    async fn serve(&self, ctx: &Ctx, request: &Request) -> Result<TokenStream, Error> {
        let mut d = ctx.decoder(request)?;
        let Some(mut p) = ctx.prefiller(request, &d) else {
            return d.start_generate(request, 0).await;
        };
        let end = request.len() - 1;
        let prepared = d.prep_recv(request, end).await?;
        if prepared.matched < end {
            p.remote_send(request, &prepared, prepared.matched, end).await?;
        }
        drop(p);
        d.start_generate(request, end).await
    }
}
