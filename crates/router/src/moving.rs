//! Moving a running request from one engine to another: its KV first, while it decodes, then the rest of it and the stream.
//!
//! ```text
//! A ══ tokens ═══════════════════════════════▶ ┆
//!      copy whole pages [0, k) ─▶ B            ┆
//!      copy those written meanwhile ─▶ B       ┆
//!      … until at most one is left             ┆
//!                                     pause A ─▶ the tokens so far
//!                                              ┆ copy the last whole page ─▶ B
//!                                              ┆ start_generate(prompt + tokens, attempt + 1) ─▶ B ══ tokens ═▶
//!                                              ┆ abort A
//! ```
//!
//! A copy is `prep_recv` on B with `commit`, `remote_send` on A, `commit` on B, under a name of its own, so that it ends nothing of the
//! request on A. What does not fill a page is computed on B. A is given up after B's first token is here and not before: whatever fails
//! until then leaves A's sequence alive or, once it is paused, its KV in A's cache, and the request goes on from there.
//!
//! Pre-copy follows Clark et al.: "Live Migration of Virtual Machines" (2005); for KV, Sun et al.: "Llumnix" (2024).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures::StreamExt;
use microserving_client::ClientError;
use microserving_protocol::{Attempt, CompletionResponse, PauseRequest, TokenId};
use serde::Serialize;
use tokio::time::Instant;
use tracing::{debug, info};

use crate::{Ctx, Engine, Error, Request, Seat, TokenStream};

/// Copies before it stops, however fast the source writes.
const MAX_ROUNDS: u32 = 8;

/// A request that has moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Moved {
    /// The engine that decoded it before.
    pub from: String,
    /// The engine that decodes it now.
    pub to: String,
    /// Its tokens of output when it moved.
    pub output_tokens: u32,
    /// Tokens whose KV was copied while it decoded.
    pub copied_running: u32,
    /// Tokens whose KV was copied while it stood.
    pub copied_paused: u32,
    /// Tokens that the target computed anew.
    pub computed: u32,
    /// From the pause to the target's first token, in microseconds.
    pub paused_micros: u64,
}

/// The output of a choice that is being moved, as far as it has come to the router. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress(Arc<Mutex<Vec<TokenId>>>);

impl Progress {
    pub(crate) fn new(output: &[TokenId]) -> Self {
        Self(Arc::new(Mutex::new(output.to_vec())))
    }

    pub(crate) fn extend(&self, tokens: &[TokenId]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(tokens);
    }

    fn get(&self) -> Vec<TokenId> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Takes a place on the engine that a request is to move to: the one named, or the best other one.
pub(crate) fn target(
    ctx: &Ctx,
    request: &Request,
    source: &Engine,
    to: Option<&Arc<Engine>>,
) -> Result<Seat, Error> {
    match to {
        Some(to) if to.number() == source.number() => Err(cannot_move("it is there already")),
        Some(to) if !to.exchanges_with(source) => Err(cannot_move("the engines' KV layouts differ")),
        Some(to) => Ok(ctx.seat_beside(to)),
        None => ctx
            .other_decoder(request, source)
            .ok_or_else(|| cannot_move("there is no other engine that may take it")),
    }
}

pub(crate) fn cannot_move(reason: &str) -> Error {
    Error::CannotMove { reason: reason.to_owned() }
}

/// A request that runs on the target. The source's stream must yield all of its `outputs` before this one is read.
pub(crate) struct Arrived {
    pub(crate) ctx: Ctx,
    pub(crate) request: Arc<Request>,
    pub(crate) first: CompletionResponse,
    pub(crate) stream: TokenStream,
    pub(crate) moved: Moved,
}

/// One move, everything that it needs to know.
#[derive(Debug)]
pub(crate) struct Move {
    /// The context in which the source serves.
    pub(crate) ctx: Ctx,
    /// What the source serves.
    pub(crate) request: Arc<Request>,
    /// Which of the client's choices that is.
    pub(crate) choice: u32,
    pub(crate) source: Arc<Engine>,
    /// A place on the target, which counts as load there meanwhile.
    pub(crate) target: Seat,
    pub(crate) progress: Progress,
    /// Set when the source may have stopped.
    pub(crate) paused: Arc<AtomicBool>,
}

impl Move {
    /// Moves; ends when the target has yielded a first chunk.
    pub(crate) async fn run(self) -> Result<Arrived, Error> {
        let mut copies = self.copy_running().await?;
        // From here on the source may stand still, even if its answer is lost.
        copies.of.paused.store(true, Ordering::Relaxed);
        let stopped = Instant::now();
        let (output, cached) = copies.of.pause().await?;
        let copied_running = copies.copied;
        copies.copy(&output).await?;
        copies.change_over(output, cached, copied_running, stopped).await
    }

    /// Copies what the source has, until there is at most a page more.
    pub(crate) async fn copy_running(self) -> Result<Copies, Error> {
        let page = self.source.page_size().or_else(|| self.target.engine().page_size());
        let mut copies = Copies { of: self, page: page.unwrap_or(u32::MAX).max(1), copied: 0, round: 0 };
        while copies.round < MAX_ROUNDS {
            let output = copies.of.progress.get();
            if !copies.copy(&output).await? {
                break;
            }
        }
        Ok(copies)
    }

    /// Returns prompt and output.
    fn so_far(&self, output: &[TokenId]) -> Vec<TokenId> {
        let prompt = &self.request.tokens()[..self.request.prompt_len() as usize];
        [prompt, output].concat()
    }

    /// Stops the source and returns all of the choice's output, and the prompt tokens that were cached when it began.
    async fn pause(&self) -> Result<(Vec<TokenId>, Option<u32>), Error> {
        let mut body = PauseRequest::new(self.request.seq_id().clone());
        body.attempt = Some(self.ctx.attempt);
        let answer = self.source.calls().pause(&self.ctx.call, &body).await;
        self.ctx.shared.metrics.call("pause", answer.as_ref().err());
        let answer = answer.map_err(|source| {
            if matches!(source, ClientError::Refused { .. }) {
                // It has said that it goes on.
                self.paused.store(false, Ordering::Relaxed);
            }
            Error::Call { call: "pause", source }
        })?;
        // What came with the call is not repeated.
        let mut output = self.request.tokens()[self.request.prompt_len() as usize..].to_vec();
        output.extend(answer.token_ids.into_iter().next().unwrap_or_default());
        // A request that moves again began where it was first.
        let told = || answer.microserving.map(|stats| stats.matched_tokens);
        Ok((output, self.ctx.stats.cached_before().or_else(told)))
    }
}

/// The copies of one move: each goes on where the last one ended.
#[derive(Debug)]
pub(crate) struct Copies {
    of: Move,
    page: u32,
    copied: u32,
    round: u32,
}

impl Copies {
    /// As [`Copies::change_over`], from a source that stops when nobody listens to it any more: what it has said is all that counts.
    pub(crate) async fn leave_for(self, output: Vec<TokenId>) -> Result<Arrived, Error> {
        let copied = self.copied;
        self.change_over(output, None, copied, Instant::now()).await
    }

    /// Generates on the target behind `output`; ends when it has yielded a first chunk.
    async fn change_over(
        self,
        output: Vec<TokenId>,
        cached: Option<u32>,
        copied_running: u32,
        stopped: Instant,
    ) -> Result<Arrived, Error> {
        let copied = self.copied;
        let Move { ctx, request, choice, source, target, .. } = self.of;
        let to = target.engine().name().to_owned();
        let ctx = ctx.next_attempt(Attempt(ctx.attempt.0.saturating_add(1)));
        let next = Arc::new(request.continuing(choice, &output, true));
        if let Some(cached) = cached {
            ctx.stats.set_cached_before(cached);
        }
        let target = target.with_ctx(ctx.clone());
        let mut stream = target.start_generate(&next, copied.min(next.len() - 1)).await?;
        let first = match stream.next().await {
            Some(first) => first?,
            None => return Err(Error::Incomplete { engine: to }),
        };
        let moved = Moved {
            from: source.name().to_owned(),
            to,
            output_tokens: u32::try_from(output.len()).unwrap_or(u32::MAX),
            copied_running,
            copied_paused: copied - copied_running,
            computed: next.len() - copied,
            paused_micros: u64::try_from(stopped.elapsed().as_micros()).unwrap_or(u64::MAX),
        };
        info!(seq_id = %request.seq_id(), ?moved, "request moved");
        Ok(Arrived { ctx, request: next, first, stream, moved })
    }

    /// Copies the whole pages of prompt and output that have not been; says whether more than one page was there to copy, so that
    /// there may be more by now.
    async fn copy(&mut self, output: &[TokenId]) -> Result<bool, Error> {
        let tokens = self.of.so_far(output);
        // The last token has been drawn and not been fed: it has no KV yet.
        let computed = u32::try_from(tokens.len()).unwrap_or(u32::MAX).saturating_sub(1);
        let whole = computed / self.page * self.page;
        if whole <= self.copied {
            return Ok(false);
        }
        let new = whole - self.copied;
        let Move { ctx, request, source, target, .. } = &self.of;
        let name = format!("{}-move", request.seq_id());
        let copy = request.copying(&name, &tokens[..whole as usize]);
        // Names of attempts rise from move to move of one request, as those of its own attempts do.
        let attempt = Attempt(ctx.attempt.0.saturating_mul(MAX_ROUNDS + 1).saturating_add(self.round));
        let sent = copy_context(&ctx.next_attempt(attempt), &copy, source, target.engine()).await?;
        debug!(seq_id = %request.seq_id(), whole, sent, "pages copied");
        self.copied = whole;
        self.round += 1;
        Ok(new > self.page)
    }
}

/// Copies the KV of all of a request's tokens from one engine's cache into another's; returns how many tokens were sent.
///
/// The source computes what it lacks. The target keeps whole pages; until it has committed them, nothing of it can be matched there.
pub(crate) async fn copy_context(
    ctx: &Ctx,
    copy: &Request,
    source: &Arc<Engine>,
    target: &Arc<Engine>,
) -> Result<u32, Error> {
    let end = copy.len();
    let mut to = ctx.seat_beside(target);
    let prepared = to.prep_recv_to_commit(copy, end).await?;
    if prepared.matched < end {
        ctx.seat_beside(source).remote_send(copy, &prepared, prepared.matched, end).await?;
    }
    to.commit(copy).await?;
    Ok(end - prepared.matched)
}
