//! Contexts: prefixes that prompts share, and where their KV should be as the mix of requests changes.
//!
//! ```text
//!  requests ─▶ ContextTable: shared prefixes, rates by engine ─┐
//!  engines  ─▶ load, pages, outlook ───────────────────────────┼─▶ plan ─▶ copies ─▶ copy_context ─▶ placement sends requests there
//!  placement ─▶ who holds what ────────────────────────────────┘
//! ```
//!
//! Nothing is taken away from an engine: a context that is asked for less is evicted there when the room is wanted. So a context moves by
//! being copied and, later, forgotten.

mod migration;
mod plan;
mod table;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use microserving_client::EngineKind;
use microserving_protocol::page_hashes;
use tokio::time::Instant;

pub(crate) use self::migration::migrate;
use self::table::{ContextTable, Seen};
use crate::{Engine, Request};

/// The contexts of a router that moves them. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Contexts(Arc<Mutex<ContextTable>>);

impl Contexts {
    /// Notes that an engine was asked to generate for a request. What goes on elsewhere was noted when it began.
    pub(crate) fn note(&self, engine: &Engine, request: &Request) {
        if engine.kind() != EngineKind::Microserving || !request.has_tokens() || request.is_continued() {
            return;
        }
        let Some(page_size) = engine.page_size() else { return };
        // An engine computes a prompt's last token in any case.
        let tokens = &request.tokens()[..request.len() as usize - 1];
        let model = request.model().unwrap_or_default();
        // Salt and model in one: what is shared under one model is not under another.
        let chain = page_hashes(&format!("{model}\0{}", request.params().cache_salt), tokens, page_size);
        self.table().note(
            Instant::now(),
            engine.number(),
            &Seen {
                chain: &chain,
                page_size,
                tokens,
                model: request.model(),
                salt: &request.params().cache_salt,
                answer: request.params().max_tokens,
            },
        );
    }

    fn table(&self) -> MutexGuard<'_, ContextTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
