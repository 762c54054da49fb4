//! One run of a script: what its two sides share.
//!
//! ```text
//!  async side (the request)              the script's thread
//!  owns the run ◀── Command ──────────── waits in `call`
//!  awaits the call on a seat ── reply ─▶ goes on
//! ```
//!
//! Seats lie in one table. While a call runs on one, the async side holds it; else the table does. The async side empties the table
//! when it is dropped, and from then on the table takes none: so no seat outlives its request, whatever its script is doing.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use microserving_protocol::RemoteSendResponse;
use microserving_router::{Ctx, Engine, Error, Parameters, Prepared, Request, Seat};
use rhai::EvalAltResult;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tracing::info;

use crate::fault::{CallError, Stop};
use crate::limits::Limits;

pub(crate) type Fallible<T> = Result<T, Box<EvalAltResult>>;

/// Looking at the clock costs as much as many operations.
const OPERATIONS_PER_LOOK: u64 = 64;
/// The longest line that a script logs.
const LOG_BYTES: usize = 512;

/// A call that the script waits for.
#[derive(Debug)]
pub(crate) enum Call {
    PrepRecv { end: u32 },
    RemoteSend { receiver: Arc<Prepared>, begin: u32, end: u32 },
    StartGenerate { begin: u32 },
}

/// What a call answered.
#[derive(Debug)]
pub(crate) enum Answer {
    Prepared(Prepared),
    Sent(RemoteSendResponse),
    /// The stream stays on the async side.
    Started,
}

/// A call on its way to the async side.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) seat: usize,
    pub(crate) call: Call,
    pub(crate) reply: oneshot::Sender<Result<Answer, Error>>,
}

/// What one run of a script works with.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) ctx: Ctx,
    pub(crate) request: Request,
    pub(crate) parameters: Parameters,
    pub(crate) limits: Arc<Limits>,
    script: Arc<str>,
    seats: Mutex<Seats>,
    commands: mpsc::Sender<Command>,
    /// What engines probably hold of the prompt, by their numbers; looked up once, when it is first asked for.
    held: OnceLock<HashMap<u32, u32>>,
    over: AtomicBool,
    operations: AtomicU64,
    engine_calls: AtomicU32,
    log_lines: AtomicU32,
    clock: Mutex<Clock>,
}

#[derive(Debug, Default)]
struct Seats {
    /// None while a call runs on it, and after it was given up.
    places: Vec<Option<Seat>>,
    closed: bool,
}

/// The time spent computing.
#[derive(Debug)]
struct Clock {
    spent: Duration,
    /// None while the script waits.
    since: Option<Instant>,
}

impl Run {
    pub(crate) fn new(
        script: Arc<str>,
        ctx: Ctx,
        request: Request,
        parameters: Parameters,
        limits: Arc<Limits>,
    ) -> (Arc<Self>, mpsc::Receiver<Command>) {
        let (commands, inbox) = mpsc::channel(1);
        let run = Self {
            ctx,
            request,
            parameters,
            limits,
            script,
            seats: Mutex::default(),
            commands,
            held: OnceLock::new(),
            over: AtomicBool::new(false),
            operations: AtomicU64::new(0),
            engine_calls: AtomicU32::new(0),
            log_lines: AtomicU32::new(0),
            clock: Mutex::new(Clock { spent: Duration::ZERO, since: None }),
        };
        (Arc::new(run), inbox)
    }

    // ---- the script's thread ----

    /// Begins to count the time of the script's thread.
    pub(crate) fn begin(&self) {
        self.clock().since = Some(Instant::now());
    }

    /// Counts one operation; says so if it is one too many. The interpreter's own count begins anew in every closure.
    pub(crate) fn tick(&self) -> Option<Stop> {
        let done = self.operations.fetch_add(1, Ordering::Relaxed);
        if done >= self.limits.operations {
            return Some(Stop::Operations(self.limits.operations));
        }
        if !done.is_multiple_of(OPERATIONS_PER_LOOK) {
            return None;
        }
        if self.over.load(Ordering::Relaxed) {
            return Some(Stop::Cancelled);
        }
        (self.computed() > self.limits.compute_time).then_some(Stop::Time)
    }

    /// Makes a call on a seat and waits for its answer.
    pub(crate) fn call(&self, seat: usize, call: Call) -> Fallible<Answer> {
        if self.engine_calls.fetch_add(1, Ordering::Relaxed) >= self.limits.engine_calls {
            return Err(Stop::Calls(self.limits.engine_calls).into_error());
        }
        let (reply, answer) = oneshot::channel();
        self.stop_clock();
        let sent = self.commands.blocking_send(Command { seat, call, reply });
        // If nobody takes the command, the reply's sender goes with it, and this ends too.
        let answer = sent.ok().and_then(|()| answer.blocking_recv().ok());
        self.begin();
        match answer {
            Some(Ok(answer)) => Ok(answer),
            Some(Err(error)) => Err(call_error(error)),
            None => Err(Stop::Cancelled.into_error()),
        }
    }

    /// Takes a seat, if `take` finds one, and keeps it.
    pub(crate) fn sit(&self, take: impl FnOnce() -> Result<Option<Seat>, Error>) -> Fallible<Option<usize>> {
        self.sit_with(|_| take())
    }

    /// Takes a seat that depends on another one; nothing if that one is given up.
    pub(crate) fn sit_beside(
        &self,
        other: usize,
        take: impl FnOnce(&Seat) -> Option<Seat>,
    ) -> Fallible<Option<usize>> {
        self.sit_with(|places| Ok(places.get(other).and_then(Option::as_ref).and_then(take)))
    }

    fn sit_with(
        &self,
        take: impl FnOnce(&[Option<Seat>]) -> Result<Option<Seat>, Error>,
    ) -> Fallible<Option<usize>> {
        let mut seats = self.seats();
        if seats.closed {
            return Err(Stop::Cancelled.into_error());
        }
        if seats.places.len() >= self.limits.seats {
            return Err(Stop::Seats(self.limits.seats).into_error());
        }
        let Some(seat) = take(&seats.places).map_err(call_error)? else { return Ok(None) };
        seats.places.push(Some(seat));
        Ok(Some(seats.places.len() - 1))
    }

    /// Looks at a seat; nothing if it is given up.
    pub(crate) fn with_seat<T>(&self, seat: usize, look: impl FnOnce(&Seat) -> T) -> Option<T> {
        self.seats().places.get(seat)?.as_ref().map(look)
    }

    /// Returns the tokens of the prompt that an engine probably holds.
    pub(crate) fn held(&self, engine: &Arc<Engine>) -> u32 {
        let held = self.held.get_or_init(|| {
            let engines = self.ctx.cluster().engines();
            let held = self.ctx.hints(&self.request, &engines);
            engines.iter().map(|engine| engine.number()).zip(held).collect()
        });
        held.get(&engine.number()).copied().unwrap_or(0)
    }

    /// Writes a line to the log; lines over the bound are left out.
    pub(crate) fn log(&self, text: &str) {
        if self.log_lines.fetch_add(1, Ordering::Relaxed) < self.limits.log_lines {
            let text: String = text.chars().filter(|char| !char.is_control()).take(LOG_BYTES).collect();
            let request_id = self.ctx.call_context().request_id.as_deref();
            info!(script = &*self.script, request_id, "{text}");
        }
    }

    // ---- the async side ----

    /// Takes a seat out of the table for a call.
    pub(crate) fn take_seat(&self, seat: usize) -> Option<Seat> {
        self.seats().places.get_mut(seat)?.take()
    }

    /// Puts a seat back after a call.
    pub(crate) fn put_seat(&self, at: usize, seat: Seat) {
        let mut seats = self.seats();
        let closed = seats.closed;
        if let Some(place) = seats.places.get_mut(at).filter(|_| !closed) {
            *place = Some(seat);
        }
    }

    /// Gives up every seat that no call runs on.
    pub(crate) fn give_up_seats(&self) {
        self.seats().places.iter_mut().for_each(|place| *place = None);
    }

    /// Ends the run: gives up its seats, takes no more, and ends the script at its next operation.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
        let mut seats = self.seats();
        seats.closed = true;
        seats.places.clear();
    }

    // ---- both ----

    fn computed(&self) -> Duration {
        let clock = self.clock();
        clock.spent + clock.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn stop_clock(&self) {
        let mut clock = self.clock();
        if let Some(since) = clock.since.take() {
            clock.spent += since.elapsed();
        }
    }

    fn clock(&self) -> std::sync::MutexGuard<'_, Clock> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seats(&self) -> std::sync::MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes an error of a call that a script can catch.
pub(crate) fn call_error(error: Error) -> Box<EvalAltResult> {
    Box::new(EvalAltResult::ErrorRuntime(rhai::Dynamic::from(CallError(error)), rhai::Position::NONE))
}
