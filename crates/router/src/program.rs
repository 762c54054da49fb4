//! What an orchestration pattern is.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use async_trait::async_trait;
use futures::Stream;
use microserving_protocol::CompletionResponse;

use crate::{Ctx, Error, Request};

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

    /// Serves a request up to the beginning of its stream.
    ///
    /// It may be called again for the same request, with a context of a higher attempt, until a first chunk has come. Dropping
    /// the future at any await, or the stream, gives everything back: that is what [`crate::Seat`]s are for.
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
    pub fn program(&self) -> &dyn Program {
        &*self.program
    }
}

/// The chunks of one answer, usage last. Dropping it cancels the generation.
pub struct TokenStream {
    chunks: Pin<Box<dyn Stream<Item = Result<CompletionResponse, Error>> + Send>>,
}

impl TokenStream {
    /// Wraps a stream of chunks.
    #[must_use]
    pub fn new(chunks: impl Stream<Item = Result<CompletionResponse, Error>> + Send + 'static) -> Self {
        Self { chunks: Box::pin(chunks) }
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
        self.chunks.as_mut().poll_next(cx)
    }
}
