//! A request's place on one engine.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use microserving_client::{CallContext, ClientError, Door, EngineKind, Relayed};
use microserving_protocol::{
    AbortRequest, ApiError, CallOptions, CommitRequest, CompletionRequest, PrepRecvRequest,
    RemoteSendRequest, RemoteSendResponse, StartGenerateRequest,
};
use tokio::time::Instant;
use tracing::debug;

use crate::abort::Abort;
use crate::ctx::Trouble;
use crate::engine::InFlight;
use crate::predict::{PrefillTimer, ProfileSource, StreamTimer};
use crate::stream::{Generating, Pieces};
use crate::vitals::Verdict;
use crate::{Ctx, Engine, Error, Request, TokenStream};

/// A request's place on one engine: counts as load there, and gives up what it began when it is dropped.
///
/// The calls have the names and the arguments of the paper's figures. Cancel safety: a call that is dropped, or fails without a word from
/// the engine, may have had its effect there; the seat then sends `abort` when it is dropped.
#[derive(Debug)]
pub struct Seat {
    ctx: Ctx,
    in_flight: InFlight,
    /// The sequence to abort: set before a call that leaves something behind, cleared when that is over.
    begun: Option<AbortRequest>,
    /// Where a reservation ends, and this engine's own computing begins.
    prepared: Option<u32>,
    /// Tokens that the engine was said to hold, until it has told what it really held.
    hinted: Option<u32>,
}

/// A reservation on the receiving engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Tokens that the engine holds already; nothing of `[0, matched)` need be sent.
    pub matched: u32,
    /// The address, opaque to routers.
    pub kv_addr_info: String,
    /// The receiver's PE under PGAS transports.
    pub recv_rank: i64,
}

impl Seat {
    pub(crate) const fn new(ctx: Ctx, in_flight: InFlight, hinted: Option<u32>) -> Self {
        Self { ctx, in_flight, begun: None, prepared: None, hinted }
    }

    /// Returns the engine.
    #[must_use]
    pub fn engine(&self) -> &Arc<Engine> {
        self.in_flight.engine()
    }

    /// Asks the engine to match `prompt[..end]` in its context cache and to reserve pages for the rest of it.
    ///
    /// # Errors
    /// [`Error::Call`]; with 503 if the engine has no room.
    pub async fn prep_recv(&mut self, request: &Request, end: u32) -> Result<Prepared, Error> {
        self.prepare(request, end, false).await
    }

    /// As [`Seat::prep_recv`], for a transfer that ends in [`Seat::commit`]: `end` may be the prompt's length.
    ///
    /// # Errors
    /// As [`Seat::prep_recv`].
    pub async fn prep_recv_to_commit(&mut self, request: &Request, end: u32) -> Result<Prepared, Error> {
        self.prepare(request, end, true).await
    }

    async fn prepare(&mut self, request: &Request, end: u32, commit: bool) -> Result<Prepared, Error> {
        let kind = self.engine().kind();
        if !kind.moves_kv() || !request.has_tokens() {
            let reason = "no range of a prompt can be prepared: the engine moves no KV, or nobody knows the prompt's tokens";
            return Err(ApiError::new(501, reason).into());
        }
        if kind == EngineKind::Mlc && end == 0 {
            // It cannot prepare for nothing; and nothing is what generating from the prompt needs.
            return Ok(Prepared {
                matched: 0,
                kv_addr_info: String::new(),
                recv_rank: self.engine().recv_rank(),
            });
        }
        let body = PrepRecvRequest {
            completion: transfer_body(kind, request),
            call: self.ctx.options(request),
            end: end.into(),
            commit,
            reserve_tokens: 0,
        };
        self.begin(request);
        let engine = self.engine().clone();
        let step = self.step(0, end, 0);
        let answer = engine.while_here(engine.calls().prep_recv(&step, &body)).await;
        let answer = self.judge("prep_recv", answer)?;
        if answer.prefix_matched_length > end {
            let reason = format!("prefix_matched_length is {}, end is {end}", answer.prefix_matched_length);
            let engine = self.engine().name().to_owned();
            return self.judge("prep_recv", Err(ClientError::Malformed { engine, reason }));
        }
        // Until the rest arrives, what this engine has to compute itself is what lies behind the transfer.
        self.in_flight.set_tokens(request.len().saturating_sub(end));
        self.prepared = Some(end);
        self.ctx.stats.matched(answer.prefix_matched_length);
        self.note_held(answer.prefix_matched_length, end);
        Ok(Prepared {
            matched: answer.prefix_matched_length,
            kv_addr_info: answer.kv_addr_info,
            recv_rank: self.engine().recv_rank(),
        })
    }

    /// Asks the engine to compute the KV of `prompt[begin..end]`, as far as it lacks it, and to deliver it to `receiver`. Returns when
    /// the receiver can read all of it.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub async fn remote_send(
        &mut self,
        request: &Request,
        receiver: &Prepared,
        begin: u32,
        end: u32,
    ) -> Result<RemoteSendResponse, Error> {
        let step = self.step(end, end, end.saturating_sub(begin));
        let body = RemoteSendRequest {
            completion: transfer_body(self.engine().kind(), request),
            // The engine need not go on with what nobody waits for.
            call: CallOptions { timeout: step.remaining(), ..self.ctx.options(request) },
            begin: begin.into(),
            end: end.into(),
            kv_addr_info: receiver.kv_addr_info.clone(),
            recv_rank: receiver.recv_rank,
        };
        self.begin(request);
        let mut timer = PrefillTimer::start(&self.in_flight);
        let engine = self.engine().clone();
        let answer = engine.while_here(engine.calls().remote_send(&step, &body)).await;
        let answer = self.judge("remote_send", answer)?;
        self.end();
        self.in_flight.set_tokens(0);
        timer.tell_sent(self.engine(), &answer);
        let sender = (self.engine().clone(), end);
        self.ctx.senders.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
        self.ctx.stats.sent(self.engine().name(), &answer);
        // An engine of another make tells nothing.
        if answer.cached_tokens > 0 || answer.computed_tokens > 0 {
            self.note_held(answer.cached_tokens, end);
        }
        Ok(answer)
    }

    /// Asks the engine to prefill `prompt[begin..]` and to decode. The seat goes with the stream.
    ///
    /// # Errors
    /// [`Error::Call`]; with 503 if the engine has no room.
    pub async fn start_generate(mut self, request: &Request, begin: u32) -> Result<TokenStream, Error> {
        let door = request.door().filter(|_| self.ctx.passes_on && self.engine().marks());
        let body = StartGenerateRequest {
            completion: match door {
                Some(_) => request.body_to_pass_on(),
                None => request.body(self.engine().kind()),
            },
            call: self.ctx.options(request),
            begin: begin.into(),
            generated_from: request.generated_from(),
            choice_index: request.choice_index(),
            resume_from: None,
        };
        self.begin(request);
        let engine = self.engine().clone();
        self.ctx.stats.decode_engine(engine.name());
        // A context runs one generation; whoever runs a second one is told of the first.
        let _ = self.ctx.placed.set(engine.clone());
        // The stream may last as long as the request; its first chunk may not.
        let uncached = request.len() - self.prepared.unwrap_or(0).min(request.len());
        let first_by = self.step(uncached, request.len(), 0).deadline;
        let timer = PrefillTimer::start(&self.in_flight);
        let is_prepared = self.prepared.is_some();
        let started = engine.while_here(start(&engine, &self.ctx.call, &body, request, door, is_prepared));
        let chunks = match first_by {
            None => started.await,
            Some(first_by) => tokio::time::timeout_at(first_by, started)
                .await
                .unwrap_or_else(|_| Err(ClientError::Timeout { engine: engine.name().to_owned() })),
        };
        let chunks = self.judge("start_generate", chunks)?;
        if let Some(contexts) = self.ctx.shared.contexts.as_ref().filter(|_| self.ctx.attempt.0 == 0) {
            contexts.note(self.engine(), request);
        }
        self.ctx.note_given(self.engine(), request, request.len());
        let timer = StreamTimer::new(timer, self.prepared, request.len(), request.params().n == 1);
        Ok(TokenStream::of_pieces(Generating::new(chunks, self, timer, first_by)))
    }

    /// Asks the engine to keep what it received in its context cache: the end of a context migration.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub async fn commit(mut self, request: &Request) -> Result<u32, Error> {
        let mut body = CommitRequest::new(request.seq_id().clone());
        body.attempt = self.begun.as_ref().and_then(|begun| begun.attempt);
        let engine = self.engine().clone();
        let step = self.step(0, request.len(), 0);
        let answer = engine.while_here(engine.calls().commit(&step, &body)).await;
        let answer = self.judge("commit", answer)?;
        self.end();
        self.ctx.note_given(self.engine(), request, answer.committed_tokens);
        Ok(answer.committed_tokens)
    }

    /// Notes what an answer says about the engine.
    pub(crate) fn judge<T>(
        &mut self,
        call: &'static str,
        answer: Result<T, ClientError>,
    ) -> Result<T, Error> {
        self.ctx.shared.metrics.call(call, answer.as_ref().err());
        let source = match answer {
            Ok(answer) => {
                // The head of a stream says little; its first chunk says more.
                if !matches!(call, "start_generate" | "relay") {
                    self.engine().note_sign();
                    self.engine().note_verdict(Verdict::Good);
                }
                return Ok(answer);
            }
            Err(source) => source,
        };
        self.engine().note_verdict(verdict(&source));
        debug!(call, error = %source, "call failed");
        if let ClientError::Timeout { engine } = &source
            && self.ctx.call.remaining().is_none_or(|left| !left.is_zero())
        {
            // The step's time is over and not the request's.
            self.note_failed();
            return Err(Error::Slow { call, engine: engine.clone() });
        }
        if source.means_down() {
            self.engine().note_failure();
        }
        if source.means_not_ready() {
            self.engine().note_not_ready();
        }
        if let ClientError::Refused { error, .. } = &source
            && error.status != 504
        {
            // The engine answered, so it knows: nothing was begun by this call, and what an earlier one began is over or on a lease.
            if call != "start_generate" && call != "commit" {
                self.end();
            }
        }
        let error = Error::Call { call, source };
        if error.is_worth_another_attempt() {
            let room = matches!(&error, Error::Call { source: ClientError::Refused { error, .. }, .. } if error.status == 503);
            let trouble = if room && call == "prep_recv" { Trouble::CannotReceive } else { Trouble::Failed };
            self.ctx.troubles.note(self.engine(), trouble);
        }
        Err(error)
    }

    /// Returns the context of a call that begins now: its deadline is that of a step which computes `uncached` of `len` tokens and sends
    /// `sent`. A profile that nobody measured predicts nothing.
    pub(crate) fn step(&self, uncached: u32, len: u32, sent: u32) -> CallContext {
        let engine = self.engine();
        let measured = engine.profile_source() != ProfileSource::Neutral;
        let predicted = measured.then(|| {
            let outlook = engine.outlook();
            let transfer = Duration::try_from_secs_f64(outlook.transfer_seconds(sent.into()));
            outlook.predict(uncached, len).ttft + transfer.unwrap_or(Duration::ZERO)
        });
        let deadline = self.ctx.shared.steps.until(Instant::now(), predicted, self.ctx.call.deadline);
        CallContext { deadline, ..self.ctx.call.clone() }
    }

    /// Returns what all calls from this seat share.
    pub(crate) const fn ctx(&self) -> &Ctx {
        &self.ctx
    }

    /// Begins to time a prefill that is about to be asked for.
    pub(crate) fn time_prefill(&self) -> PrefillTimer {
        PrefillTimer::start(&self.in_flight)
    }

    /// Goes on in another context.
    pub(crate) fn with_ctx(mut self, ctx: Ctx) -> Self {
        self.ctx = ctx;
        self
    }

    /// From here on the engine may hold something for this request.
    fn begin(&mut self, request: &Request) {
        if !self.engine().kind().is_ours() {
            // There is no call to abort it by: closing the connection is that.
            return;
        }
        self.begun = Some(AbortRequest { seq_id: request.seq_id().clone(), attempt: Some(self.ctx.attempt) });
    }

    /// The engine holds nothing any more.
    pub(crate) fn end(&mut self) {
        self.begun = None;
    }

    /// The prompt of so many tokens is computed.
    pub(crate) fn note_first_token(&mut self, prompt: u32) {
        self.in_flight.begin_decoding(prompt);
    }

    pub(crate) fn note_failed(&self) {
        self.ctx.troubles.note_failed(self.engine());
    }

    /// The engine gave the sequence up for want of room, and may well do it once there is some.
    pub(crate) fn note_preempted(&self) {
        self.ctx.troubles.note(self.engine(), Trouble::CannotReceive);
    }

    /// Notes what the engine really held of the first `end` tokens, for the index's record.
    pub(crate) fn note_held(&mut self, held: u32, end: u32) {
        if let Some(hinted) = self.hinted.take() {
            self.ctx.shared.metrics.hint(hinted.min(end), held);
        }
    }
}

/// Asks an engine to generate.
async fn start(
    engine: &Engine,
    call: &CallContext,
    body: &StartGenerateRequest,
    request: &Request,
    door: Option<Door>,
    is_prepared: bool,
) -> Result<Pieces, ClientError> {
    let calls = engine.calls();
    if let Some(door) = door {
        return match calls.start_relayed(call, body, door).await? {
            Some(Relayed::Stream(parts)) => Ok(Pieces::Marked(parts)),
            Some(Relayed::Whole { .. }) | None => {
                let reason = "the answer is no marked stream, and its state says marks".to_owned();
                Err(ClientError::Malformed { engine: engine.name().to_owned(), reason })
            }
        };
    }
    let chunks = match is_prepared {
        true => calls.start_generate(call, body).await,
        false => calls.generate(call, body, request.written()).await,
    };
    chunks.map(Pieces::Read)
}

/// Returns what a failure says about the engine. What it refuses is the caller's doing; 429 and 503 are a matter of room.
const fn verdict(error: &ClientError) -> Verdict {
    match error {
        ClientError::Refused { error, .. } if error.status < 500 || error.status == 503 => Verdict::Neutral,
        _ => Verdict::Bad,
    }
}

/// Returns the body of a call that moves KV. MLC-LLM takes the sampling parameters from the first call that names a request.
fn transfer_body(kind: EngineKind, request: &Request) -> CompletionRequest {
    if kind == EngineKind::Mlc {
        CompletionRequest { stream: false, ..request.body(kind) }
    } else {
        request.bare_body()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(request) = self.begun.take() {
            self.ctx.shared.aborts.push(Abort {
                engine: self.engine().clone(),
                request,
                request_id: self.ctx.call.request_id.clone(),
            });
        }
    }
}
