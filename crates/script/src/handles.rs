//! The values that scripts hold: names for what the run owns, so that copying or keeping them means nothing.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use microserving_router::{Engine, Health, Prediction, Prepared};
use rhai::{Dynamic, EvalAltResult, INT, Position};
use xxhash_rust::xxh3::xxh3_64;

use crate::fault::Stop;
use crate::run::{Answer, Call, Fallible, Run};

/// `ctx`
#[derive(Clone, Debug)]
pub(crate) struct CtxHandle(pub(crate) Arc<Run>);

/// `req`
#[derive(Clone, Debug)]
pub(crate) struct ReqHandle(pub(crate) Arc<Run>);

/// An engine, seen from one request.
#[derive(Clone, Debug)]
pub(crate) struct EngineHandle {
    pub(crate) run: Arc<Run>,
    pub(crate) engine: Arc<Engine>,
}

/// A seat by its place in the run's table.
#[derive(Clone, Debug)]
pub(crate) struct SeatHandle {
    run: Arc<Run>,
    at: usize,
    engine: Arc<Engine>,
    /// What the script has prepared on it, so that a mistake is its own and not an engine's refusal.
    prepared: Arc<Mutex<Option<Transfer>>>,
}

/// `[matched, end)` of a prompt, and what of it was sent.
#[derive(Debug)]
struct Transfer {
    end: u32,
    /// Where the part that is there without a gap ends, and what lies behind a gap.
    there: u32,
    ahead: Vec<Range<u32>>,
}

impl Transfer {
    fn add(&mut self, sent: Range<u32>) {
        self.ahead.push(sent);
        self.ahead.sort_by_key(|range| range.start);
        for range in &self.ahead {
            if range.start <= self.there {
                self.there = self.there.max(range.end);
            }
        }
    }
}

/// What `prep_recv` answered.
#[derive(Clone, Debug)]
pub(crate) struct PreparedHandle {
    receiver: Arc<Prepared>,
    transfer: Arc<Mutex<Option<Transfer>>>,
    pub(crate) end: u32,
}

/// A stretch of the prompt.
#[derive(Clone, Debug)]
pub(crate) struct TokensHandle {
    run: Arc<Run>,
    range: Range<usize>,
}

/// What `start_generate` answers: the answer has begun, and goes to the client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Started;

/// Makes an error of the script's own.
pub(crate) fn wrong(message: impl Into<String>) -> Box<EvalAltResult> {
    Box::new(EvalAltResult::ErrorRuntime(message.into().into(), Position::NONE))
}

/// Reads a position in the prompt: negative ones count from its end, as on the wire.
fn position(name: &str, value: INT, len: u32) -> Fallible<u32> {
    let from_start = if value < 0 { INT::from(len).saturating_add(value) } else { value };
    u32::try_from(from_start)
        .ok()
        .filter(|at| *at < len)
        .ok_or_else(|| wrong(format!("{name} is {value}, must be within the prompt of {len} tokens")))
}

impl CtxHandle {
    pub(crate) fn decoder(&mut self) -> Fallible<SeatHandle> {
        let run = &self.0;
        let at = run.sit(|| run.ctx.decoder(&run.request).map(Some))?;
        SeatHandle::new(run, at)?.ok_or_else(|| Stop::Cancelled.into_error())
    }

    pub(crate) fn prefiller(&mut self, decoder: SeatHandle) -> Fallible<Dynamic> {
        let run = &self.0;
        let at = run.sit_beside(decoder.at, |seat| run.ctx.prefiller(&run.request, seat))?;
        Ok(SeatHandle::new(run, at)?.map_or(Dynamic::UNIT, Dynamic::from))
    }

    pub(crate) fn seat(&mut self, engine: EngineHandle) -> Fallible<SeatHandle> {
        let run = &self.0;
        let at = run.sit(|| Ok(Some(run.ctx.seat(&engine.engine, &run.request))))?;
        SeatHandle::new(run, at)?.ok_or_else(|| Stop::Cancelled.into_error())
    }

    pub(crate) fn engines(&mut self) -> rhai::Array {
        self.shown(self.0.ctx.engines(&self.0.request))
    }

    pub(crate) fn decoders(&mut self) -> rhai::Array {
        self.shown(self.0.ctx.decoders(&self.0.request))
    }

    pub(crate) fn prefillers(&mut self, decoder: SeatHandle) -> rhai::Array {
        let mut engines = self.0.ctx.prefillers(&self.0.request);
        engines.retain(|engine| self.0.ctx.may_send(&self.0.request, engine, &decoder.engine));
        self.shown(engines)
    }

    fn shown(&self, engines: Vec<Arc<Engine>>) -> rhai::Array {
        let show = |engine| Dynamic::from(EngineHandle { run: self.0.clone(), engine });
        engines.into_iter().map(show).collect()
    }
}

impl ReqHandle {
    pub(crate) fn tokens(&self) -> TokensHandle {
        TokensHandle { run: self.0.clone(), range: 0..self.0.request.tokens().len() }
    }
}

impl EngineHandle {
    /// Predicts what this request would take there, alone on that engine.
    pub(crate) fn predict(&self) -> Prediction {
        let len = self.run.request.len();
        let uncached = len.saturating_sub(self.run.held(&self.engine)).max(1);
        self.engine.outlook().predict(uncached, len)
    }

    pub(crate) fn health(&self) -> &'static str {
        match self.engine.health() {
            Health::Ready => "ready",
            Health::NotReady => "not_ready",
            Health::Suspect => "suspect",
            Health::Down => "down",
        }
    }
}

impl SeatHandle {
    fn new(run: &Arc<Run>, at: Option<usize>) -> Fallible<Option<Self>> {
        let Some(at) = at else { return Ok(None) };
        // Gone already means that the request is over.
        let engine = run.with_seat(at, |seat| seat.engine().clone());
        let engine = engine.ok_or_else(|| Stop::Cancelled.into_error())?;
        Ok(Some(Self { run: run.clone(), at, engine, prepared: Arc::default() }))
    }

    pub(crate) fn engine(&mut self) -> EngineHandle {
        EngineHandle { run: self.run.clone(), engine: self.engine.clone() }
    }

    pub(crate) fn prep_recv(&mut self, end: INT) -> Fallible<PreparedHandle> {
        let end = position("end", end, self.run.request.len())?;
        if self.prepared.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            return Err(wrong("prep_recv was already called on this seat"));
        }
        self.check()?;
        let Answer::Prepared(prepared) = self.run.call(self.at, Call::PrepRecv { end })? else {
            return Err(wrong("prep_recv was answered by something else"));
        };
        let transfer = Transfer { end, there: prepared.matched, ahead: Vec::new() };
        *self.prepared.lock().unwrap_or_else(PoisonError::into_inner) = Some(transfer);
        Ok(PreparedHandle { receiver: Arc::new(prepared), transfer: self.prepared.clone(), end })
    }

    pub(crate) fn remote_send(
        &mut self,
        receiver: PreparedHandle,
        begin: INT,
        end: INT,
    ) -> Fallible<Dynamic> {
        let len = self.run.request.len();
        let (begin, end) = (position("begin", begin, len)?, position("end", end, len)?);
        let (matched, most) = (receiver.receiver.matched, receiver.end);
        if begin >= end || begin < matched || end > most {
            return Err(wrong(format!(
                "[{begin}, {end}) is not within [{matched}, {most}), which the receiver has prepared"
            )));
        }
        self.check()?;
        let call = Call::RemoteSend { receiver: receiver.receiver.clone(), begin, end };
        let Answer::Sent(sent) = self.run.call(self.at, call)? else {
            return Err(wrong("remote_send was answered by something else"));
        };
        if let Some(transfer) = &mut *receiver.transfer.lock().unwrap_or_else(PoisonError::into_inner) {
            transfer.add(begin..end);
        }
        let mut told = rhai::Map::new();
        for (name, tokens) in
            [("sent", sent.sent_tokens), ("cached", sent.cached_tokens), ("computed", sent.computed_tokens)]
        {
            told.insert(name.into(), INT::from(tokens).into());
        }
        Ok(told.into())
    }

    pub(crate) fn start_generate(&mut self, begin: INT) -> Fallible<Started> {
        let begin = position("begin", begin, self.run.request.len())?;
        if let Some(transfer) = &*self.prepared.lock().unwrap_or_else(PoisonError::into_inner) {
            if begin != transfer.end {
                return Err(wrong(format!(
                    "begin is {begin}, must be {}, where this seat's prep_recv ended",
                    transfer.end
                )));
            }
            if transfer.there < transfer.end {
                return Err(wrong(format!(
                    "[{}, {}) was prepared on this seat and not sent to it",
                    transfer.there, transfer.end
                )));
            }
        }
        self.check()?;
        self.run.call(self.at, Call::StartGenerate { begin })?;
        Ok(Started)
    }

    fn check(&self) -> Fallible<()> {
        let there = self.run.with_seat(self.at, |_| ());
        there.ok_or_else(|| wrong("the seat is given up: start_generate was already called"))
    }
}

impl PreparedHandle {
    pub(crate) fn matched(&self) -> INT {
        self.receiver.matched.into()
    }
}

impl TokensHandle {
    fn tokens(&self) -> &[microserving_protocol::TokenId] {
        &self.run.request.tokens()[self.range.clone()]
    }

    pub(crate) fn len(&self) -> INT {
        INT::try_from(self.range.len()).unwrap_or(INT::MAX)
    }

    pub(crate) fn get(&self, at: INT) -> Fallible<INT> {
        let from_start = if at < 0 { self.len().saturating_add(at) } else { at };
        let token = usize::try_from(from_start).ok().and_then(|at| self.tokens().get(at));
        let token = token.ok_or_else(|| wrong(format!("token {at} of {}", self.len())))?;
        Ok(token.0.into())
    }

    /// Returns a part of it; what lies outside is left out, so that short prompts need no cases.
    pub(crate) fn slice(&self, begin: INT, end: INT) -> Self {
        let clamp = |at: INT| usize::try_from(at.max(0)).unwrap_or(usize::MAX).min(self.range.len());
        let (begin, end) = (clamp(begin), clamp(end));
        let range = self.range.start + begin..self.range.start + end.max(begin);
        Self { run: self.run.clone(), range }
    }

    /// Returns a hash of the tokens that is the same in every router.
    pub(crate) fn hash(&self) -> INT {
        let bytes: Vec<u8> = self.tokens().iter().flat_map(|token| token.0.to_le_bytes()).collect();
        positive(xxh3_64(&bytes))
    }
}

/// Returns a hash as scripts get it: not negative, so that `%` is an index.
pub(crate) fn positive(hash: u64) -> INT {
    INT::try_from(hash >> 1).unwrap_or(INT::MAX)
}
