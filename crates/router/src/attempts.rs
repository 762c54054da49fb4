//! Trying again on other engines, until the first token.

use std::future::Future;

use futures::StreamExt;
use microserving_client::CallContext;
use microserving_protocol::{Attempt, CompletionAssembler, CompletionResponse};
use tokio::time::Instant;
use tracing::warn;

use crate::ctx::{Shared, Troubles};
use crate::stats::StatsCell;
use crate::{Ctx, Error, Program, Request, TokenStream};

/// Attempts at one request, the first included.
const MAX_ATTEMPTS: u32 = 4;

/// An answer whose first chunk is there: from here on the client sees it, and it cannot be made again.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) first: CompletionResponse,
    pub(crate) rest: TokenStream,
    pub(crate) stats: StatsCell,
}

/// Runs the program until it has yielded a first chunk.
pub(crate) async fn open(
    shared: &Shared,
    program: &dyn Program,
    request: &Request,
    call: &CallContext,
) -> Result<Opened, Error> {
    let mut attempts = Attempts::new(shared, program, request, call);
    loop {
        let ctx = attempts.next();
        match in_time(call, first_chunk(attempts.program, &ctx, request)).await {
            Ok((first, rest)) => return Ok(Opened { first, rest, stats: ctx.stats }),
            Err(error) => attempts.judge(error)?,
        }
    }
}

/// Runs the program to its end. Nothing is shown before that, so an answer that breaks off is made again too.
pub(crate) async fn collect(
    shared: &Shared,
    program: &dyn Program,
    request: &Request,
    call: &CallContext,
    mut on_chunk: impl FnMut(),
) -> Result<(CompletionResponse, StatsCell), Error> {
    let mut attempts = Attempts::new(shared, program, request, call);
    loop {
        let ctx = attempts.next();
        match in_time(call, whole(attempts.program, &ctx, request, &mut on_chunk)).await {
            Ok(answer) => return Ok((answer, ctx.stats)),
            Err(error) => attempts.judge(error)?,
        }
    }
}

async fn first_chunk(
    program: &dyn Program,
    ctx: &Ctx,
    request: &Request,
) -> Result<(CompletionResponse, TokenStream), Error> {
    let mut stream = program.serve(ctx, request).await?;
    match stream.next().await {
        Some(first) => Ok((first?, stream)),
        None => Err(Error::Incomplete { engine: ctx.stats.get().decode_engine }),
    }
}

async fn whole(
    program: &dyn Program,
    ctx: &Ctx,
    request: &Request,
    on_chunk: &mut impl FnMut(),
) -> Result<CompletionResponse, Error> {
    let mut stream = program.serve(ctx, request).await?;
    let mut assembler = CompletionAssembler::new();
    while let Some(chunk) = stream.next().await {
        assembler.push(chunk?);
        on_chunk();
    }
    assembler.finish().ok_or_else(|| Error::Incomplete { engine: ctx.stats.get().decode_engine })
}

/// Ends what a program awaits at the deadline, whatever it awaits.
pub(crate) async fn in_time<T>(
    call: &CallContext,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    match call.deadline {
        None => work.await,
        Some(deadline) => tokio::time::timeout_at(deadline, work).await.unwrap_or(Err(Error::Deadline)),
    }
}

struct Attempts<'a> {
    shared: &'a Shared,
    program: &'a dyn Program,
    request: &'a Request,
    call: &'a CallContext,
    made: u32,
    troubles: Troubles,
    last: Option<Error>,
    /// Says who serves instead of the program, and why; for the client and the statistics.
    instead: Option<String>,
}

impl<'a> Attempts<'a> {
    fn new(
        shared: &'a Shared,
        program: &'a dyn Program,
        request: &'a Request,
        call: &'a CallContext,
    ) -> Self {
        shared.traffic.arrive();
        shared.retry_budget.deposit();
        Self {
            shared,
            program,
            request,
            call,
            made: 0,
            troubles: Troubles::default(),
            last: None,
            instead: None,
        }
    }

    fn next(&mut self) -> Ctx {
        let attempt = Attempt(self.made);
        self.made += 1;
        let stats = StatsCell::default();
        if let Some(instead) = &self.instead {
            stats.set_pattern(instead);
        }
        Ctx {
            shared: self.shared.clone(),
            call: self.call.clone(),
            attempt,
            troubles: self.troubles.clone(),
            stats,
            moves_kv: self.program.moves_kv(),
        }
    }

    /// Returns the error if there is to be no other attempt. When the engines have run out, what the last one said tells the client
    /// more than that there is none left.
    fn judge(&mut self, error: Error) -> Result<(), Error> {
        // It is another attempt also for the engines: what the program had begun there is on its way out.
        if let (Error::Program { program, reason, .. }, Some(fallback)) = (&error, self.program.fallback()) {
            self.shared.metrics.program_failure(program, reason);
            let failed = self.program.label(program);
            self.instead = Some(format!("{}; fallback of {failed}: {reason}", fallback.pattern()));
            self.program = fallback.program();
            return Ok(());
        }
        if let (Error::NoEngine { .. }, Some(last)) = (&error, self.last.take()) {
            return Err(last);
        }
        if self.made >= MAX_ATTEMPTS || !error.is_worth_another_attempt() {
            return Err(error);
        }
        if !self.shared.retry_budget.try_spend(Instant::now()) {
            self.shared.metrics.retry_refused();
            return Err(error);
        }
        warn!(
            request_id = self.call.request_id.as_deref(),
            seq_id = %self.request.seq_id(),
            attempt = self.made,
            reason = error.reason(),
            error = %describe(&error),
            "trying again"
        );
        self.shared.metrics.retry(error.reason());
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
