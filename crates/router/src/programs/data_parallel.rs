//! Data parallel: one engine does it all.

use async_trait::async_trait;

use crate::{Ctx, Error, Program, Request, TokenStream};

/// Each request goes to one engine, which prefills and decodes it.
///
/// ```text
/// router ── start_generate(prompt, 0) ─▶ D ═ tokens ═▶
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct DataParallel;

#[async_trait]
impl Program for DataParallel {
    fn name(&self) -> &str {
        "data_parallel"
    }

    fn moves_kv(&self) -> bool {
        false
    }

    fn is_relayable(&self) -> bool {
        true
    }

    fn passes_on(&self) -> bool {
        true
    }

    async fn serve(&self, ctx: &Ctx, request: &Request) -> Result<TokenStream, Error> {
        let d = ctx.decoder(request)?;
        d.start_generate(request, 0).await
    }
}
