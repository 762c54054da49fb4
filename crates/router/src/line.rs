//! One run of a program, for a request or for one choice of it that goes on alone.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use microserving_protocol::CompletionResponse;

use crate::program::{Piece, PlannedMove};
use crate::{Ctx, Engine, Error, Program, Request, TokenStream};

type Opening = Pin<Box<dyn Future<Output = Result<TokenStream, Error>> + Send>>;

/// A program that serves `request`: first on its way to a stream, then the stream.
pub(crate) struct Line {
    pub(crate) request: Arc<Request>,
    /// Which of the client's choices it serves: the stream's choice 0 is the first of them.
    pub(crate) choices: Vec<u32>,
    ctx: Ctx,
    state: State,
    begun: bool,
}

#[allow(clippy::large_enum_variant, reason = "it streams for most of its life")]
enum State {
    Opening(Opening),
    Streaming(Box<Streaming>),
    Over,
}

struct Streaming {
    /// The first chunk, if it was taken out to see that the stream runs.
    first: Option<CompletionResponse>,
    rest: TokenStream,
}

impl Line {
    /// Runs `program` from its beginning, as soon as it is polled.
    pub(crate) fn open(
        program: &Arc<dyn Program>,
        ctx: Ctx,
        request: Arc<Request>,
        choices: Vec<u32>,
    ) -> Self {
        let opening = {
            let (program, ctx, request) = (program.clone(), ctx.clone(), request.clone());
            Box::pin(async move { program.serve(&ctx, &request).await })
        };
        Self { request, choices, ctx, state: State::Opening(opening), begun: false }
    }

    /// Takes over a stream that runs already, and its first chunk.
    pub(crate) fn running(
        ctx: Ctx,
        request: Arc<Request>,
        choices: Vec<u32>,
        first: CompletionResponse,
        stream: TokenStream,
    ) -> Self {
        Self {
            request,
            choices,
            ctx,
            state: State::Streaming(Box::new(Streaming { first: Some(first), rest: stream })),
            begun: false,
        }
    }

    /// Returns the context of this run.
    pub(crate) const fn ctx(&self) -> &Ctx {
        &self.ctx
    }

    /// Returns the engine that decodes, once it has been asked to.
    pub(crate) fn engine(&self) -> Option<&Arc<Engine>> {
        self.ctx.placed.get()
    }

    /// Says whether a chunk has come.
    pub(crate) const fn has_begun(&self) -> bool {
        self.begun
    }

    /// Returns the move that the program wants, once.
    pub(crate) fn take_plan(&mut self) -> Option<PlannedMove> {
        match &mut self.state {
            State::Streaming(streaming) => streaming.rest.take_plan(),
            State::Opening(_) | State::Over => None,
        }
    }

    /// Returns the next piece; nothing after the last one, or after an error.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, Error>>> {
        loop {
            let item = match &mut self.state {
                State::Over => return Poll::Ready(None),
                State::Opening(opening) => match opening.as_mut().poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(stream)) => {
                        self.state = State::Streaming(Box::new(Streaming { first: None, rest: stream }));
                        continue;
                    }
                    Poll::Ready(Err(error)) => Some(Err(error)),
                },
                State::Streaming(streaming) => match streaming.first.take() {
                    Some(first) => Some(Ok(Piece::Chunk(first))),
                    None => match streaming.rest.poll_piece(cx) {
                        Poll::Pending => return Poll::Pending,
                        Poll::Ready(item) => item,
                    },
                },
            };
            match &item {
                Some(Ok(_)) => self.begun = true,
                // Gives back whatever the program held.
                Some(Err(_)) | None => self.state = State::Over,
            }
            return Poll::Ready(item);
        }
    }
}
