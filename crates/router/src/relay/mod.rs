//! The short way of a request that one engine serves alone: its body goes to the engine as it came, and the answer's bytes come back
//! as they are. Nothing is tokenised here, and no chunk is parsed.
//!
//! ```text
//! body ── sketch ── place by text ── engine's /v1/… ═ marked bytes ═▶ marks cut off ═ bytes ═▶ client
//!            │ unusual        │ none            │ any failure before the first token
//!            └────────────────┴─────────────────┴──────────▶ the long way, which reads, tokenises, judges and retries
//! ```
//!
//! It is taken where it is known to answer as the long way does, and leaves every decision that is not plain to that one: a request
//! that is refused, fails, or finds no engine is simply served again from its beginning, of which the client has seen nothing.

mod chain;
mod events;
mod handover;
mod sketch;
mod texts;

use std::cmp::Reverse;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures::StreamExt as _;
use microserving_client::{CallContext, ClientError, Door, RelayStream, Relayed, relayed_fault};
use microserving_protocol::{
    Attempt, FinishReason, PromptTokensDetails, RelayPart, RelayUsage, ServingStats, Usage,
};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tracing::debug;

pub(crate) use handover::{Names, ending};
pub(crate) use texts::{Holder, TextIndex};

use crate::admission::{Class, Place};
use crate::client_headers::ClientHeaders;
use crate::ctx::{Troubles, first_open};
use crate::metrics::RequestRecord;
use crate::pattern::Chosen;
use crate::predict::{PrefillTimer, StreamTimer};
use crate::stats::StatsCell;
use crate::vitals::Verdict;
use crate::{Ctx, Engine, Error, Patterns, Role, RouterService, Seat};
use events::Events;
use handover::Origin;
use sketch::Sketch;

/// Longer bodies go the long way, where they are read on a thread of their own.
const MAX_BYTES: usize = 1 << 20;

/// What is known of a request before its body is looked into.
pub(crate) struct Asked<'a> {
    pub(crate) service: &'a Arc<RouterService>,
    pub(crate) call: &'a CallContext,
    pub(crate) chosen: &'a Arc<Chosen>,
    /// Whose rules choose before that, if the client did not.
    pub(crate) rules: Option<&'a Patterns>,
    pub(crate) headers: &'a ClientHeaders,
    pub(crate) door: Door,
}

/// An answer under way, of which the client has seen nothing yet.
pub(crate) struct Begun {
    seat: Seat,
    sent: Instant,
    answer: Answer,
    single: bool,
    place: Place,
    chosen: Arc<Chosen>,
    /// What the engine got, for whoever has to read it after all.
    body: [Bytes; 2],
    door: Door,
    timer: PrefillTimer,
}

enum Answer {
    Whole { body: Bytes, usage: RelayUsage },
    Stream { first: RelayPart, rest: RelayStream },
}

/// Sends a body on its way and waits for the answer, or for its first event.
///
/// # Errors
/// Gives back the leave to be inside if the request is to go the long way.
pub(crate) async fn begin(
    asked: Asked<'_>,
    body: &Bytes,
    inside: OwnedSemaphorePermit,
) -> Result<Begun, OwnedSemaphorePermit> {
    let Asked { service, call, rules, headers, .. } = asked;
    let rules = rules.filter(|rules| rules.has_rules());
    let may_relay = rules.is_some() || asked.chosen.program.is_relayable();
    if !service.relay || !may_relay || call.wants_stats || body.len() > MAX_BYTES {
        return Err(inside);
    }
    let Some(sketch) = Sketch::read(body, asked.door) else { return Err(inside) };
    let chosen = match rules {
        None => Some(asked.chosen.clone()),
        Some(rules) => by_rules(service, rules, &sketch, headers),
    };
    let Some(chosen) = chosen.filter(|chosen| chosen.program.is_relayable()) else { return Err(inside) };
    let place = service.try_admit(inside, Class::of(sketch.priority), headers.tenant())?;
    // A guess, which nobody can avoid by going away.
    let prompt = sketch.num_tokens();
    place.note_prompt(prompt);
    match ask(&asked, &sketch, body).await {
        Some((seat, sent, answer, body, timer)) => {
            let (single, door) = (sketch.single, asked.door);
            Ok(Begun { seat, sent, answer, single, place, chosen, body, door, timer })
        }
        None => {
            place.take_back_prompt(prompt);
            Err(place.into_inside())
        }
    }
}

/// Returns the pattern that rules choose for a request; nothing if they must know more of it.
fn by_rules(
    service: &RouterService,
    rules: &Patterns,
    sketch: &Sketch<'_>,
    headers: &ClientHeaders,
) -> Option<Arc<Chosen>> {
    match &sketch.model {
        Some(model) => rules.for_unread(Some(model), headers),
        None => rules.for_unread(Some(&service.model(None).ok()?.id), headers),
    }
}

type Relaying = (Seat, Instant, Answer, [Bytes; 2], PrefillTimer);

async fn ask(asked: &Asked<'_>, sketch: &Sketch<'_>, body: &Bytes) -> Option<Relaying> {
    let Asked { service, call, door, .. } = *asked;
    let parts = with_seed(body, (!sketch.has_seed).then(|| service.randomness.draw()))?;
    let ctx = Ctx {
        shared: service.shared.clone(),
        call: call.clone(),
        attempt: Attempt(0),
        troubles: Troubles::default(),
        stats: StatsCell::default(),
        moves_kv: false,
        passes_on: false,
        placed: Arc::default(),
        senders: Arc::default(),
    };
    let mut seat = sit(service, ctx, sketch)?;
    let sent = Instant::now();
    let mut timer = seat.time_prefill();
    let engine = seat.engine().clone();
    // A stream's first event may not take as long as the request; a whole answer comes when all of it is there.
    let num_tokens = sketch.num_tokens();
    let by = if sketch.stream { seat.step(num_tokens, num_tokens, 0) } else { call.clone() };
    let relayed = engine.while_here(engine.calls().relay(&by, door, &parts)).await;
    let relayed = match relayed {
        Ok(None) => {
            seat.engine().set_cannot_relay(true);
            return None;
        }
        Ok(Some(relayed)) => Ok(relayed),
        Err(error) => Err(error),
    };
    let answer = match seat.judge("relay", relayed).inspect_err(long_way).ok()? {
        Relayed::Whole { body, usage } => Answer::Whole { body, usage },
        Relayed::Stream(mut rest) => {
            let ended = || ClientError::Lost { engine: engine.name().to_owned(), reason: "it ended".into() };
            let next = async { rest.next().await.unwrap_or_else(|| Err(ended())) };
            let next = engine.while_here(next);
            let slow = || ClientError::Timeout { engine: engine.name().to_owned() };
            let first = match by.deadline {
                Some(by) => tokio::time::timeout_at(by, next).await.unwrap_or_else(|_| Err(slow())),
                None => next.await,
            };
            let first = match first {
                Ok(RelayPart { events, fault: Some(fault), .. }) if events.is_empty() => {
                    Err(judge_fault(&mut seat, "relay", &fault))
                }
                Ok(first) => Ok(first),
                Err(error) => seat.judge("relay", Err(error)),
            };
            Answer::Stream { first: first.inspect_err(long_way).ok()?, rest }
        }
    };
    engine.note_sign();
    engine.note_verdict(Verdict::Good);
    service.shared.retry_budget.deposit();
    service.shared.traffic.arrive();
    service.shared.placement.texts().note(sent, seat.engine(), &sketch.chain);
    if matches!(answer, Answer::Stream { .. }) {
        timer.stop(&engine);
        seat.note_first_token(num_tokens);
    }
    Some((seat, sent, answer, parts, timer))
}

/// Notes what an event that is not for the client says about the engine.
pub(crate) fn judge_fault(seat: &mut Seat, call: &'static str, fault: &[u8]) -> Error {
    if handover::finish_reason(fault) == Some(FinishReason::Preempt) {
        seat.note_preempted();
        return Error::Preempted { engine: seat.engine().name().to_owned() };
    }
    let fault = relayed_fault(seat.engine().name(), fault);
    match seat.judge::<()>(call, Err(fault)) {
        Err(error) => error,
        Ok(()) => Error::Incomplete { engine: seat.engine().name().to_owned() },
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as inspect_err has it")]
fn long_way(error: &Error) {
    debug!(error = %crate::attempts::describe(error), "the request goes the long way");
}

/// Takes a seat on the best engine that can relay.
fn sit(service: &RouterService, ctx: Ctx, sketch: &Sketch<'_>) -> Option<Seat> {
    let engines = match sketch.model.as_deref() {
        Some(model) => service.cluster().offered(Some(model), Role::Prefill),
        None => service.cluster().offered(Some(&service.model(None).ok()?.id), Role::Prefill),
    };
    // Beside engines that must be spoken to in another way, all are chosen from the long way.
    if !engines.relays && engines.iter().any(|engine| engine.takes_requests() && !engine.relays()) {
        return None;
    }
    let placement = &service.shared.placement;
    let holders = placement.texts().holders(Instant::now(), &sketch.chain).into_iter();
    let mut holders: Vec<_> =
        holders.map(|Holder { engine, num_bytes }| (engine, sketch.tokens_in(num_bytes))).collect();
    holders.sort_unstable_by_key(|&(_, tokens)| Reverse(tokens));
    let choice = first_open(&engines, |takes_requests| {
        let fits = |engine: &Engine| takes_requests(engine) && engine.relays();
        placement.choose_by_text(&engines, &fits, sketch.num_tokens(), &holders)
    })?;
    Some(ctx.sit(choice, sketch.num_tokens()))
}

/// Returns the body with a seed in it, as parts that follow each other: then another engine goes on as this one would.
fn with_seed(body: &Bytes, seed: Option<u64>) -> Option<[Bytes; 2]> {
    let Some(seed) = seed else { return Some([Bytes::new(), body.clone()]) };
    let brace = body.iter().position(|&byte| byte == b'{')?;
    let begin = format!("{{\"seed\":{},", seed.cast_signed());
    Some([begin.into(), body.slice(brace + 1..)])
}

impl Begun {
    /// Makes the answer that the client gets.
    pub(crate) fn into_response(
        self,
        service: &Arc<RouterService>,
        arrival: Instant,
        call: CallContext,
        headers: ClientHeaders,
        mut record: RequestRecord,
    ) -> Response {
        let Self { seat, sent, answer, single, place, chosen, body: asked, door, timer } = self;
        record.set_pattern(chosen.program.name());
        let metrics = &service.shared.metrics;
        let text = HeaderValue::from_str(&chosen.text);
        let mut response = match answer {
            Answer::Whole { body, usage } => {
                let pattern = chosen.program.name();
                let whole = arrival.elapsed();
                let first = (sent - arrival) + std::time::Duration::from_micros(usage.first_token_micros);
                let first = first.min(whole);
                metrics.first_token(pattern, first);
                note_usage(metrics, pattern, whole, whole - first, &usage);
                place.note_tokens(usage.completion_tokens);
                record.set_status(200);
                drop((seat, place));
                let mut response = Response::new(Body::from(body));
                let json = HeaderValue::from_static("application/json");
                response.headers_mut().insert(header::CONTENT_TYPE, json);
                response
            }
            Answer::Stream { first, rest } => {
                let timer = StreamTimer::new(timer, None, 0, single);
                let origin =
                    Origin { service: service.clone(), arrival, call, chosen, headers, body: asked, door };
                let events = Events::begin(seat, first, rest, timer, origin, record, place, single);
                let mut response = Response::new(Body::from_stream(events));
                let headers = response.headers_mut();
                let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
                headers.insert(header::CONTENT_TYPE, kind);
                headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
                response
            }
        };
        if let Ok(pattern) = text {
            response.headers_mut().insert(crate::http::PATTERN, pattern);
        }
        response
    }
}

/// Counts a complete answer.
fn note_usage(
    metrics: &crate::Metrics,
    pattern: &str,
    whole: std::time::Duration,
    decoding: std::time::Duration,
    usage: &RelayUsage,
) {
    let RelayUsage { prompt_tokens, completion_tokens, cached_tokens, .. } = *usage;
    let stats = ServingStats {
        matched_tokens: cached_tokens,
        computed_tokens: prompt_tokens.saturating_sub(cached_tokens),
        ..ServingStats::default()
    };
    let usage = Usage {
        prompt_tokens_details: Some(PromptTokensDetails { cached_tokens }),
        ..Usage::new(prompt_tokens, completion_tokens, cached_tokens)
    };
    metrics.answer(pattern, whole, decoding, &usage, &stats);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_put_in_front_and_an_own_one_kept() {
        let body = Bytes::from_static(b" {\"prompt\":\"a\"}");
        let joined = |seed| with_seed(&body, seed).expect("an object").concat();
        assert_eq!(joined(Some(7)), b"{\"seed\":7,\"prompt\":\"a\"}");
        assert_eq!(joined(Some(u64::MAX)), b"{\"seed\":-1,\"prompt\":\"a\"}");
        assert_eq!(joined(None), &body[..]);
    }
}
