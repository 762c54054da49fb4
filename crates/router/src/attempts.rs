//! When to try again, and when to tell the client.

use std::future::Future;
use std::sync::Arc;

use microserving_client::{CallContext, ClientError};
use microserving_protocol::{CompletionAssembler, CompletionResponse};
use tokio::time::Instant;
use tracing::warn;

use crate::answering::Answering;
use crate::ctx::Shared;
use crate::program::Piece;
use crate::stats::StatsCell;
use crate::{Error, Program, Request};

/// Attempts at one request, the first included.
const MAX_ATTEMPTS: u32 = 4;

/// Runs the program until it has yielded a first chunk.
pub(crate) async fn open(
    shared: &Shared,
    program: &Arc<dyn Program>,
    request: Request,
    call: &CallContext,
) -> Result<(Piece, Answering), Error> {
    let mut answering = Answering::begin(shared, program, request, call);
    match answering.next().await? {
        Some(first) => Ok((first, answering)),
        None => Err(Error::Incomplete { engine: answering.stats().get().decode_engine }),
    }
}

/// Runs the program to its end.
pub(crate) async fn collect(
    shared: &Shared,
    program: &Arc<dyn Program>,
    request: Request,
    call: &CallContext,
    mut on_tokens: impl FnMut(u32),
) -> Result<(CompletionResponse, StatsCell), Error> {
    let mut answering = Answering::begin(shared, program, request, call);
    let mut assembler = CompletionAssembler::new();
    while let Some(piece) = answering.next().await? {
        match piece {
            Piece::Chunk(chunk) => {
                assembler.push(chunk);
                on_tokens(1);
            }
            Piece::Events(passed) => {
                assembler.push_events(&passed.events).map_err(|error| {
                    let engine = answering.stats().get().decode_engine;
                    let reason = format!("an event is malformed: {error}");
                    Error::Call { call: "start_generate", source: ClientError::Malformed { engine, reason } }
                })?;
                on_tokens(u32::try_from(passed.tokens.len()).unwrap_or(u32::MAX));
            }
        }
    }
    let stats = answering.stats().clone();
    let whole = assembler.finish();
    Ok((whole.ok_or_else(|| Error::Incomplete { engine: stats.get().decode_engine })?, stats))
}

/// Ends what a program awaits at the deadline, whatever it awaits.
pub(crate) async fn in_time<T>(
    deadline: Option<Instant>,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    match deadline {
        None => work.await,
        Some(deadline) => tokio::time::timeout_at(deadline, work).await.unwrap_or(Err(Error::Deadline)),
    }
}

/// The failures of one request so far, which say whether it is tried again.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    last: Option<Error>,
}

impl Failures {
    /// Returns the error if there is to be no other attempt after `made` of them. When the engines have run out, what the last one said
    /// tells the client more than that there is none left.
    pub(crate) fn judge(
        &mut self,
        shared: &Shared,
        call: &CallContext,
        request: &Request,
        made: u32,
        error: Error,
    ) -> Result<(), Error> {
        if let (Error::NoEngine { .. }, Some(last)) = (&error, self.last.take()) {
            return Err(last);
        }
        if made >= MAX_ATTEMPTS || !error.is_worth_another_attempt() {
            return Err(error);
        }
        if !shared.retry_budget.try_spend(Instant::now()) {
            shared.metrics.retry_refused();
            return Err(error);
        }
        warn!(
            request_id = call.request_id.as_deref(),
            seq_id = %request.seq_id(),
            attempt = made,
            reason = error.reason(),
            error = %describe(&error),
            "trying again"
        );
        shared.metrics.retry(error.reason());
        self.last = Some(error);
        Ok(())
    }
}

/// Writes an error with its causes.
pub(crate) fn describe(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", describe(cause)),
        None => error.to_string(),
    }
}
