//! What an orchestration pattern is.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{Stream, TryStreamExt as _};
use microserving_protocol::{CompletionResponse, TokenId};

use crate::{Ctx, Error, Request, Seat};

/// An orchestration pattern: how one request is served by calls to engines.
///
/// Programs keep no state of a request outside `serve` and the stream it returns, so any number of requests run at once, each under the
/// program it began with.
#[async_trait]
pub trait Program: Send + Sync + fmt::Debug {
    /// Returns the name that configuration and headers know it by.
    fn name(&self) -> &str;

    /// Says whether the program moves KV between engines where it can: engines that cannot receive any are then its second choice.
    fn moves_kv(&self) -> bool {
        true
    }

    /// Says whether serving a request is no more than giving it whole to the engine that placement chooses, as data parallel does. The
    /// router may then pass body and answer on as they are, and calls `serve` only for requests that need more.
    fn is_relayable(&self) -> bool {
        false
    }

    /// Says whether the streams that the program returns are those of seats as they are: an answer may then be passed on as the engine
    /// wrote it. A program that looks into its streams, or makes its own, must not say so.
    fn passes_on(&self) -> bool {
        false
    }

    /// Serves a request up to the beginning of its stream.
    ///
    /// It is called again for the same request, with a context of a higher attempt, when an engine is lost: before the first chunk with the
    /// same request, after it with one whose [`Request::tokens`] end in what has been generated. Dropping the future at any await, or the
    /// stream, gives everything back: that is what [`crate::Seat`]s are for.
    ///
    /// # Errors
    /// Whatever the calls return; the caller decides whether to try again.
    async fn serve(&self, ctx: &Ctx, request: &Request) -> Result<TokenStream, Error>;

    /// Returns what answers say served them, given the pattern's text. By default that text.
    fn label(&self, pattern: &str) -> String {
        pattern.to_owned()
    }

    /// Returns what serves a request that this program fails by its own fault, with [`Error::Program`]. By default nothing.
    fn fallback(&self) -> Option<&Fallback> {
        None
    }
}

/// The pattern that serves what a program cannot.
#[derive(Clone, Debug)]
pub struct Fallback {
    pattern: String,
    program: Arc<dyn Program>,
}

impl Fallback {
    /// Names a program; one that has a fallback itself would be none.
    pub(crate) fn new(pattern: String, program: Arc<dyn Program>) -> Option<Self> {
        program.fallback().is_none().then_some(Self { pattern, program })
    }

    /// Returns the pattern as text.
    #[must_use]
    pub fn pattern(&self) -> &str {
        &self.pattern
    }

    /// Returns the program.
    #[must_use]
    pub const fn program(&self) -> &Arc<dyn Program> {
        &self.program
    }
}

/// The chunks of one answer, usage last. Dropping it cancels the generation.
pub struct TokenStream {
    pieces: Pin<Box<dyn Stream<Item = Result<Piece, Error>> + Send>>,
    plan: Option<PlannedMove>,
}

/// Something of an answer.
#[derive(Debug)]
pub(crate) enum Piece {
    /// A chunk that was read, or the usage.
    Chunk(CompletionResponse),
    /// Events as they go to the client.
    Events(PassedOn),
}

/// Events of an answer with one choice, unread.
#[derive(Debug)]
pub(crate) struct PassedOn {
    /// Empty if the tokens show nothing yet.
    pub(crate) events: Bytes,
    /// The tokens since the last ones.
    pub(crate) tokens: Vec<TokenId>,
}

impl PassedOn {
    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.tokens.is_empty()
    }
}

/// A move to another engine that a program wants.
#[derive(Debug)]
pub(crate) struct PlannedMove {
    /// How long the answer is by then.
    pub(crate) after_tokens: u32,
    pub(crate) target: Seat,
}

impl TokenStream {
    /// Wraps a stream of chunks.
    #[must_use]
    pub fn new(chunks: impl Stream<Item = Result<CompletionResponse, Error>> + Send + 'static) -> Self {
        Self::of_pieces(chunks.map_ok(Piece::Chunk))
    }

    pub(crate) fn of_pieces(pieces: impl Stream<Item = Result<Piece, Error>> + Send + 'static) -> Self {
        Self { pieces: Box::pin(pieces), plan: None }
    }

    pub(crate) fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, Error>>> {
        self.pieces.as_mut().poll_next(cx)
    }

    /// Moves the request to `target` once its answer has `after_tokens` tokens: its KV first, while the engine that decodes goes on, then
    /// the stream. If that cannot be, the stream goes on where it is.
    #[must_use]
    pub fn then_move(mut self, after_tokens: u32, target: Seat) -> Self {
        self.plan = Some(PlannedMove { after_tokens, target });
        self
    }

    pub(crate) fn take_plan(&mut self) -> Option<PlannedMove> {
        self.plan.take()
    }
}

impl fmt::Debug for TokenStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenStream(..)")
    }
}

impl Stream for TokenStream {
    type Item = Result<CompletionResponse, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(match ready!(self.poll_piece(cx)) {
            Some(Ok(Piece::Chunk(chunk))) => Some(Ok(chunk)),
            Some(Ok(Piece::Events(_))) => Some(Err(Error::Program {
                program: "a program".to_owned(),
                reason: "passed_on",
                message: "it reads a stream that it said it passes on".to_owned(),
            })),
            Some(Err(error)) => Some(Err(error)),
            None => None,
        })
    }
}
