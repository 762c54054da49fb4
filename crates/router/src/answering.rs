//! A request under way: its tokens are kept, so that when an engine is lost it goes on elsewhere, and can be moved.
//!
//! ```text
//! attempt 0   prompt ───────────────▶ a b c ✕
//! attempt 1   prompt a b c ─────────▶       d e f        generated_from = len(prompt)
//! client                              a b c d e f        each token once, in order
//! ```
//!
//! What goes on is *the same program* with a longer prompt. The engine replays the tokens it is given, so penalties, the place in the random
//! sequence, stop strings, half a character and the grammar are as they were, and a token's text, once passed on, is never made again.
//! Of several choices each one that has not finished goes on alone.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use microserving_client::{CallContext, ClientError, EngineKind};
use microserving_protocol::{Attempt, CompletionResponse, TokenId, Usage};
use tokio::time::Instant;
use tracing::{debug, info};

use crate::attempts::{Failures, in_time};
use crate::ctx::{Shared, Troubles};
use crate::kept::{Kept, is_worth_sending};
use crate::line::Line;
use crate::live::{Done, Listed, Order};
use crate::moving::{self, Arrived, Move, Progress, cannot_move};
use crate::program::{PassedOn, Piece, PlannedMove};
use crate::stats::StatsCell;
use crate::{Ctx, Engine, Error, Program, Request, Seat};

/// The answer to one request. Dropping it gives everything up.
pub(crate) struct Answering {
    shared: Shared,
    program: Arc<dyn Program>,
    request: Arc<Request>,
    call: CallContext,
    kept: Vec<Kept>,
    lines: Vec<Line>,
    /// The line that is asked first, so that none waits for another.
    turn: usize,
    troubles: Troubles,
    failures: Failures,
    /// Says who serves instead of the program, and why; for the client and the statistics.
    instead: Option<String>,
    listed: Listed,
    /// A move that the program wants, for when the answer is long enough.
    planned: Option<PlannedMove>,
    moving: Option<Moving>,
    /// The statistics of the run that came last.
    stats: StatsCell,
    /// The last chunk of an engine, which has the usage.
    last: Option<CompletionResponse>,
    /// More than one run took part.
    resumed: bool,
    /// Since when nothing has come because an engine was lost.
    interrupted: Option<Instant>,
    over: bool,
}

/// What another way of serving has given the client of an answer with one choice.
pub(crate) struct Given {
    pub(crate) output: Vec<TokenId>,
    /// The client has its end, too.
    pub(crate) finished: bool,
    pub(crate) listed: Listed,
    pub(crate) troubles: Troubles,
}

/// A move under way.
struct Moving {
    line: LineId,
    task: Pin<Box<dyn Future<Output = Result<Arrived, Error>> + Send>>,
    progress: Progress,
    /// The source may have stopped.
    paused: Arc<AtomicBool>,
    /// The target runs; the source's last tokens are still on their way.
    arrived: Option<Arrived>,
    done: Done,
}

/// Tells lines apart: a key is run once an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LineId {
    first_choice: u32,
    attempt: Attempt,
}

impl LineId {
    fn of(line: &Line) -> Self {
        Self { first_choice: line.choices.first().copied().unwrap_or(0), attempt: line.ctx().attempt }
    }
}

/// What there is to see to next.
#[allow(clippy::large_enum_variant, reason = "there is one of it at a time, and a move is rare")]
enum News {
    Piece(usize, Piece),
    Failed(usize, Error),
    Ended(usize),
    Order(Order),
    Move(Box<Result<Arrived, Error>>),
}

impl Answering {
    /// Runs the program, as soon as the first chunk is asked for.
    pub(crate) fn begin(
        shared: &Shared,
        program: &Arc<dyn Program>,
        request: Request,
        call: &CallContext,
    ) -> Self {
        shared.retry_budget.deposit();
        shared.traffic.arrive();
        let request = Arc::new(request);
        let n = request.params().n;
        let listed = shared.live.enter(request.seq_id(), call.request_id.as_deref());
        let mut answering =
            Self::idle(shared, program, request.clone(), call, listed, vec![Kept::default(); n as usize]);
        answering.start(request, (0..n).collect(), Attempt(0));
        answering
    }

    /// Goes on with an answer that was given in another way until its engine was lost.
    ///
    /// # Errors
    /// The error itself, if there is to be no other attempt.
    pub(crate) fn resume(
        shared: &Shared,
        program: &Arc<dyn Program>,
        request: Arc<Request>,
        call: &CallContext,
        given: Given,
        error: Error,
    ) -> Result<Self, Error> {
        let mut answering = Self::taking_over(shared, program, request.clone(), call, given);
        if answering.kept[0].finished {
            debug!(%error, "the engine was lost after its last token");
            return Ok(answering);
        }
        answering.failures.judge(shared, call, &request, 1, error)?;
        answering.interrupted = Some(Instant::now());
        answering.continue_choice(&request, 0, Attempt(1));
        Ok(answering)
    }

    /// Goes on with an answer that was given in another way until it moved.
    pub(crate) fn moved(
        shared: &Shared,
        program: &Arc<dyn Program>,
        request: Arc<Request>,
        call: &CallContext,
        given: Given,
        arrived: Arrived,
    ) -> Self {
        let mut answering = Self::taking_over(shared, program, request, call, given);
        let Arrived { ctx, request, first, stream, .. } = arrived;
        answering.stats = ctx.stats.clone();
        answering.lines.push(Line::running(ctx, request, vec![0], first, stream));
        answering
    }

    fn taking_over(
        shared: &Shared,
        program: &Arc<dyn Program>,
        request: Arc<Request>,
        call: &CallContext,
        given: Given,
    ) -> Self {
        let Given { output, finished, listed, troubles } = given;
        let idle = Self::idle(shared, program, request, call, listed, vec![Kept::given(output, finished)]);
        Self { troubles, resumed: true, ..idle }
    }

    fn idle(
        shared: &Shared,
        program: &Arc<dyn Program>,
        request: Arc<Request>,
        call: &CallContext,
        listed: Listed,
        kept: Vec<Kept>,
    ) -> Self {
        Self {
            listed,
            shared: shared.clone(),
            program: program.clone(),
            kept,
            request,
            call: call.clone(),
            lines: Vec::with_capacity(1),
            turn: 0,
            troubles: Troubles::default(),
            failures: Failures::default(),
            instead: None,
            planned: None,
            moving: None,
            stats: StatsCell::default(),
            last: None,
            resumed: false,
            interrupted: None,
            over: false,
        }
    }

    /// Returns the statistics of the run that came last.
    pub(crate) const fn stats(&self) -> &StatsCell {
        &self.stats
    }

    /// Returns the next chunk for the client, usage last; then nothing.
    ///
    /// # Errors
    /// Why it cannot go on; what has come is a clean prefix of the answer. Nothing follows.
    pub(crate) async fn next(&mut self) -> Result<Option<Piece>, Error> {
        if self.over {
            return Ok(None);
        }
        let next = in_time(self.call.deadline, self.go_on()).await;
        if !matches!(next, Ok(Some(_))) {
            self.over = true;
            self.moving = None;
            self.planned = None;
            self.lines.clear();
        }
        next
    }

    async fn go_on(&mut self) -> Result<Option<Piece>, Error> {
        while !self.lines.is_empty() {
            match std::future::poll_fn(|cx| self.poll_news(cx)).await {
                News::Piece(line, piece) => {
                    let piece = match piece {
                        Piece::Chunk(chunk) => self.take(line, chunk)?.map(Piece::Chunk),
                        Piece::Events(passed) => self.pass_on(line, passed).map(Piece::Events),
                    };
                    self.arrive_if_due();
                    if piece.is_some() {
                        return Ok(piece);
                    }
                }
                News::Ended(line) => self.end(line)?,
                News::Failed(line, error) => self.recover(line, error)?,
                News::Order(order) => self.obey(order),
                News::Move(outcome) => self.note_move(*outcome)?,
            }
        }
        self.over = true;
        Ok(self.usage().map(Piece::Chunk))
    }

    fn poll_news(&mut self, cx: &mut Context<'_>) -> Poll<News> {
        if let Poll::Ready(Some(order)) = self.listed.orders.poll_recv(cx) {
            return Poll::Ready(News::Order(order));
        }
        if let Some(moving) = &mut self.moving
            && moving.arrived.is_none()
            && let Poll::Ready(outcome) = moving.task.as_mut().poll(cx)
        {
            return Poll::Ready(News::Move(Box::new(outcome)));
        }
        let num_lines = self.lines.len();
        for step in 0..num_lines {
            let at = (self.turn + step) % num_lines;
            if let Poll::Ready(item) = self.lines[at].poll_next(cx) {
                self.turn = at + 1;
                return Poll::Ready(match item {
                    Some(Ok(piece)) => News::Piece(at, piece),
                    Some(Err(error)) => News::Failed(at, error),
                    None => News::Ended(at),
                });
            }
        }
        Poll::Pending
    }

    /// Keeps what is new, and returns what of it is for the client.
    fn take(
        &mut self,
        at: usize,
        mut chunk: CompletionResponse,
    ) -> Result<Option<CompletionResponse>, Error> {
        let line = &self.lines[at];
        if let Some(engine) = line.engine() {
            self.listed.set_engine(engine);
        }
        let (wants_ids, echoes) = (self.request.params().return_token_ids, line.request.echoes());
        if chunk.choices.is_empty() {
            self.last = Some(chunk);
            // A marked answer says what it took when it is complete, and not before.
            self.kept.iter_mut().for_each(Kept::note_complete);
            return Ok(None);
        }
        if let Some(since) = self.interrupted.take() {
            self.shared.metrics.recovered(since.elapsed());
        }
        let line = &self.lines[at];
        let id = LineId::of(line);
        let mut misnumbered = false;
        chunk.choices.retain_mut(|choice| {
            let Some(&index) = line.choices.get(choice.index as usize) else {
                misnumbered = true;
                return false;
            };
            choice.index = index;
            let Some(kept) = self.kept.get_mut(index as usize) else { return false };
            if let (Some(moving), Some(tokens)) = (&self.moving, &choice.token_ids)
                && moving.line == id
            {
                moving.progress.extend(tokens);
            }
            kept.take(choice, echoes) && is_worth_sending(choice, wants_ids)
        });
        if misnumbered {
            let engine = self.stats.get().decode_engine;
            let reason = "a chunk has a choice that was not asked for".into();
            let source = ClientError::Malformed { engine, reason };
            self.recover(at, Error::Call { call: "start_generate", source })?;
            return Ok(None);
        }
        self.move_if_planned(at);
        if self.resumed && chunk.usage.is_some() {
            chunk.usage = Some(Usage { prompt_tokens_details: None, ..self.totals(0) });
        }
        Ok((!chunk.choices.is_empty()).then_some(chunk))
    }

    /// Keeps what is new of an answer that is passed on, and returns what of it is for the client.
    fn pass_on(&mut self, at: usize, passed: PassedOn) -> Option<PassedOn> {
        let line = &self.lines[at];
        if let Some(engine) = line.engine() {
            self.listed.set_engine(engine);
        }
        if let Some(since) = self.interrupted.take() {
            self.shared.metrics.recovered(since.elapsed());
        }
        if let Some(moving) = self.moving.as_ref().filter(|moving| moving.line == LineId::of(line)) {
            moving.progress.extend(&passed.tokens);
        }
        // Only an answer with one choice is passed on.
        self.kept[0].take_unread(&passed);
        self.move_if_planned(at);
        (!passed.events.is_empty()).then_some(passed)
    }

    /// Finds out which choices have finished of those that were passed on.
    fn settle(&mut self) {
        self.kept.iter_mut().for_each(Kept::settle);
    }

    /// A line has said all it has to say.
    fn end(&mut self, at: usize) -> Result<(), Error> {
        let complete = self.lines[at].choices.iter().all(|&choice| self.kept[choice as usize].finished);
        if !complete {
            let engine = self.stats.get().decode_engine;
            return self.recover(at, Error::Incomplete { engine });
        }
        self.close(at);
        Ok(())
    }

    /// Goes on elsewhere with what a line has not finished, or returns the error if that cannot be.
    fn recover(&mut self, at: usize, error: Error) -> Result<(), Error> {
        let line = self.close(at);
        let open: Vec<u32> =
            line.choices.iter().copied().filter(|&choice| !self.kept[choice as usize].finished).collect();
        if open.is_empty() {
            // Only the usage is missing, and that is known here.
            debug!(%error, "the engine was lost after its last token");
            return Ok(());
        }
        let made = line.ctx().attempt.0.saturating_add(1);
        if let (Error::Program { program, reason, .. }, Some(fallback)) = (&error, self.program.fallback()) {
            // It is another attempt also for the engines: what the program had begun there is on its way out.
            self.shared.metrics.program_failure(program, reason);
            let failed = self.program.label(program);
            self.instead = Some(format!("{}; fallback of {failed}: {reason}", fallback.pattern()));
            let next = fallback.program().clone();
            self.program = next;
            self.go_on_with(&line, open, Attempt(made));
            return Ok(());
        }
        let begun = open.iter().any(|&choice| self.kept[choice as usize].begun);
        let can_continue = open.iter().all(|&choice| self.kept[choice as usize].can_continue())
            && line.engine().is_none_or(|engine| engine.kind() == EngineKind::Microserving)
            && line.request.has_tokens();
        if begun && !can_continue {
            return Err(error);
        }
        self.failures.judge(&self.shared, &self.call, &line.request, made, error)?;
        self.go_on_with(&line, open, Attempt(made));
        Ok(())
    }

    fn go_on_with(&mut self, line: &Line, open: Vec<u32>, attempt: Attempt) {
        let begun = open.iter().any(|&choice| self.kept[choice as usize].begun);
        if begun {
            self.interrupted.get_or_insert_with(Instant::now);
        }
        if !line.has_begun() || (!begun && open.len() == line.choices.len()) {
            // Nothing is new since it was asked for.
            self.start(line.request.clone(), line.choices.clone(), attempt);
            return;
        }
        self.resumed = true;
        self.last = None;
        for choice in open {
            self.continue_choice(&line.request, choice, attempt);
        }
    }

    fn continue_choice(&mut self, request: &Request, choice: u32, attempt: Attempt) {
        let kept = &self.kept[choice as usize];
        info!(
            request_id = self.call.request_id.as_deref(),
            seq_id = %self.request.seq_id(),
            choice,
            num_tokens = kept.num_tokens(),
            "going on elsewhere"
        );
        self.shared.metrics.resumed.inc();
        let next = request.continuing(choice, &kept.output, kept.begun);
        self.start(Arc::new(next), vec![choice], attempt);
    }

    /// Runs the program for some of the choices.
    fn start(&mut self, request: Arc<Request>, choices: Vec<u32>, attempt: Attempt) {
        let moves_kv = self.program.moves_kv();
        let mut ctx = Ctx::new(&self.shared, &self.call, attempt, &self.troubles, moves_kv);
        ctx.passes_on = self.program.passes_on();
        if let Some(instead) = &self.instead {
            ctx.stats.set_pattern(instead);
        }
        self.stats = ctx.stats.clone();
        self.lines.push(Line::open(&self.program, ctx, request, choices));
    }

    /// Takes a line out, and gives up a move that hung on it.
    fn close(&mut self, at: usize) -> Line {
        self.settle();
        let line = self.lines.swap_remove(at);
        if let Some(moving) = self.moving.take_if(|moving| moving.line == LineId::of(&line)) {
            let finished = line.choices.iter().all(|&choice| self.kept[choice as usize].finished);
            moving.done.tell(Err(cannot_move(if finished {
                "it has finished"
            } else {
                "its engine was lost"
            })));
        }
        line
    }

    fn obey(&mut self, Order { to, done }: Order) {
        match self.target(to) {
            Ok(target) => self.begin_move(0, target, done),
            Err(error) => done.tell(Err(error)),
        }
    }

    /// Takes a place on the engine that the request is to move to.
    fn target(&self, to: Option<Arc<Engine>>) -> Result<Seat, Error> {
        let line = self.lines.first().ok_or_else(|| cannot_move("it has finished"))?;
        let source = line.engine().ok_or_else(|| cannot_move("nobody decodes it yet"))?;
        moving::target(line.ctx(), &line.request, source, to.as_ref())
    }

    /// Begins the move that the program wants, once the answer is as long as it said.
    fn move_if_planned(&mut self, at: usize) {
        if let Some(plan) = self.lines[at].take_plan() {
            self.planned = Some(plan);
        }
        let longest = self.kept.iter().map(Kept::num_tokens).max().unwrap_or(0);
        if let Some(plan) = self.planned.take_if(|plan| longest >= plan.after_tokens) {
            self.begin_move(at, plan.target, Done::default());
        }
    }

    /// Begins to move a line; `done` is told how it went.
    fn begin_move(&mut self, at: usize, target: Seat, done: Done) {
        let line = &self.lines[at];
        let foreign = line.engine().is_some_and(|engine| engine.kind() != EngineKind::Microserving);
        let refusal = if self.moving.is_some() {
            Some("it is moving already")
        } else if self.kept.len() > 1 {
            Some("several choices do not move together")
        } else if !self.kept[0].can_continue() || !line.request.has_tokens() || foreign {
            Some("its engine does not tell its tokens")
        } else {
            None
        };
        let source = match (refusal, line.engine()) {
            (None, Some(source)) => source.clone(),
            (refusal, _) => {
                done.tell(Err(cannot_move(refusal.unwrap_or("nobody decodes it yet"))));
                return;
            }
        };
        let progress = Progress::new(&self.kept[0].output);
        let paused = Arc::new(AtomicBool::new(false));
        let task = Move {
            ctx: line.ctx().clone(),
            request: line.request.clone(),
            choice: 0,
            source,
            target,
            progress: progress.clone(),
            paused: paused.clone(),
        };
        let line = LineId::of(line);
        self.moving =
            Some(Moving { line, task: Box::pin(task.run()), progress, paused, arrived: None, done });
    }

    fn note_move(&mut self, outcome: Result<Arrived, Error>) -> Result<(), Error> {
        let Some(moving) = &mut self.moving else { return Ok(()) };
        let error = match outcome {
            Ok(arrived) => {
                moving.arrived = Some(arrived);
                self.arrive_if_due();
                return Ok(());
            }
            Err(error) => error,
        };
        self.shared.metrics.moved("failed");
        let at = self.lines.iter().position(|line| LineId::of(line) == moving.line);
        let paused = moving.paused.load(Ordering::Relaxed);
        if let Some(moving) = self.moving.take() {
            moving.done.tell(Err(error.clone()));
        }
        match at {
            // The source stands, or may: what it computed is in its cache, and another attempt goes on from there.
            Some(at) if paused => self.recover(at, error),
            _ => {
                debug!(%error, "the move failed; the source goes on");
                Ok(())
            }
        }
    }

    /// Changes over to the target once the client has all that the source yielded.
    fn arrive_if_due(&mut self) {
        if self.moving.is_none() {
            return;
        }
        self.settle();
        let Some(moving) = &mut self.moving else { return };
        let due = moving.arrived.as_ref().is_some_and(|a| a.moved.output_tokens <= self.kept[0].num_tokens());
        let at = self.lines.iter().position(|line| LineId::of(line) == moving.line);
        let (true, Some(at)) = (due && !self.kept[0].finished, at) else { return };
        let Some(moving) = self.moving.take() else { return };
        let Some(Arrived { ctx, request, first, stream, moved }) = moving.arrived else { return };
        self.stats = ctx.stats.clone();
        self.resumed = true;
        self.last = None;
        self.shared.metrics.moved("ok");
        self.shared.metrics.paused(Duration::from_micros(moved.paused_micros));
        // The source is given up here, after the target has begun.
        self.lines[at] = Line::running(ctx, request, self.lines[at].choices.clone(), first, stream);
        moving.done.tell(Ok(moved));
    }

    /// Returns the last chunk, with the usage of all runs together.
    fn usage(&mut self) -> Option<CompletionResponse> {
        let last = self.last.take();
        let counted = self.kept.iter().all(Kept::can_continue);
        if !self.resumed && (last.is_some() || !counted) {
            return last;
        }
        let (cached, own) = match last {
            Some(last) => (last.usage.map_or(0, |usage| usage.cached_tokens()), last.microserving),
            None => (0, None),
        };
        let mut chunk = CompletionResponse::new("", 0, "", Vec::new());
        chunk.usage = Some(self.totals(cached.min(self.request.prompt_len())));
        chunk.microserving = own;
        Some(chunk)
    }

    fn totals(&self, cached: u32) -> Usage {
        let output = self.kept.iter().fold(0, |sum: u32, kept| sum.saturating_add(kept.num_tokens()));
        Usage::new(self.request.prompt_len(), output, cached)
    }
}
