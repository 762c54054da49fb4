//! The real router, and clients that call it as HTTP clients would, without sockets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use http_body_util::BodyExt;
use microserving_protocol::{
    ApiError, CompletionRequest, CompletionResponse, Prompt, SseEvent, SseParser, StreamOptions, Usage,
    page_hashes,
};
use microserving_router::{
    EngineSpec, Pattern as RouterPattern, PlacementPolicy, Randomness, Role, RouterConfig, RouterService,
    RouterTasks,
};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tower::ServiceExt;

use super::Invariant;
use super::request::{Pattern, Received, Request};
use super::wire::SimEngine;
use super::world::World;
use crate::Dice;

/// Tries of a client that is told to come again.
const MAX_TRIES: u32 = 5;

/// A running router.
pub(crate) struct Front {
    pub(crate) service: Arc<RouterService>,
    lives: Arc<AtomicBool>,
    _tasks: RouterTasks,
}

impl Front {
    /// Starts a router over the cluster; `number` tells it from those before.
    pub(crate) fn start(world: &Arc<World>, number: u64) -> Self {
        let lives = Arc::new(AtomicBool::new(true));
        let engines = (0..world.options.num_engines)
            .map(|engine| EngineSpec::new(Arc::new(SimEngine::new(world, engine, &lives)), Role::Any))
            .collect();
        let policies = [PlacementPolicy::RoundRobin, PlacementPolicy::LeastLoaded, PlacementPolicy::Prefix];
        let config = RouterConfig {
            pattern: RouterPattern::named("prefill_decode"),
            placement: policies[(world.seed % 3) as usize],
            request_timeout: world.options.lease * 4 + Duration::from_secs(8),
            randomness: Randomness::seeded(world.seed ^ number << 32),
            context_migration: world.options.contexts_move,
            ..RouterConfig::new(engines)
        };
        let (service, tasks) = RouterService::start(config).expect("the pattern is one of the router's own");
        Self { service, lives, _tasks: tasks }
    }

    /// Ends it as `kill -9` does: nothing that its guards want to send goes out any more.
    pub(crate) fn kill(self) {
        self.lives.store(false, Ordering::Relaxed);
    }

    /// Tells the router that some engine holds a part of a prompt, whether or not it does: a hint that is wrong must cost time only.
    pub(crate) fn poison(&self, dice: &mut Dice, request: &Request, page_size: u32) {
        let pages = page_hashes(&request.salt, &request.prompt, page_size);
        let engines = self.service.cluster().engines();
        let engine = engines[dice.below(engines.len() as u64) as usize].number();
        let count = dice.below(pages.len() as u64 + 1) as usize;
        self.service.index().note(Instant::now(), engine, count, |depth| pages.get(depth).copied());
    }

    /// Says what the router still counts as in flight.
    pub(crate) fn leftovers(&self) -> Option<String> {
        let cluster = self.service.cluster();
        let tokens: u64 = cluster.engines().iter().map(|engine| engine.queued_tokens()).sum();
        let in_flight = cluster.in_flight();
        (in_flight > 0 || tokens > 0).then(|| format!("{in_flight} requests, {tokens} queued tokens"))
    }
}

/// How a request to the router ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Ended {
    /// With the whole answer.
    Done,
    /// With an error that the router told.
    Refused(Box<ApiError>),
    /// With the connection.
    RouterDied,
    /// With an answer that is wrong, which has been reported.
    Wrong,
}

/// What comes over a connection.
enum Part {
    Head(u16),
    Data(Bytes),
    End,
}

/// Serves a request by the router; a client that is told to come again does so while it has seen nothing.
pub(crate) async fn ask(world: &Arc<World>, request: &Request) -> Ended {
    let mut received = Received::new(Arc::clone(&request.reference));
    for _ in 1..MAX_TRIES {
        let ended = ask_once(world, request, &mut received).await;
        match &ended {
            Ended::Refused(error) if matches!(error.status, 429 | 503) && received.tokens.is_empty() => {
                world.state().tally.retries += 1;
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            _ => return ended,
        }
    }
    ask_once(world, request, &mut received).await
}

async fn ask_once(world: &Arc<World>, request: &Request, received: &mut Received) -> Ended {
    world.poison_hints(request);
    let mut connection = connect(world, request);
    let mut parser = SseParser::new();
    let mut status = 0;
    let mut body = Vec::new();
    let mut usage = None;
    loop {
        match connection.recv().await {
            None => return Ended::RouterDied,
            Some(Part::Head(head)) => status = head,
            Some(Part::Data(bytes)) if status != 200 => body.extend_from_slice(&bytes),
            Some(Part::End) if status != 200 => {
                return Ended::Refused(Box::new(ApiError::from_body(status, &body)));
            }
            Some(Part::End) => return wrong(world, request, "the stream ended without [DONE]".into()),
            Some(Part::Data(bytes)) => {
                let events = match parser.push(&bytes) {
                    Ok(events) => events,
                    Err(error) => return wrong(world, request, error.to_string()),
                };
                for event in events {
                    match take(event, received, &mut usage) {
                        Ok(None) => {}
                        Ok(Some(Ended::Done)) => return finish(world, request, received, usage),
                        Ok(Some(ended)) => return ended,
                        Err(detail) => return wrong(world, request, detail),
                    }
                }
            }
        }
    }
}

/// Takes one event; an error is what is wrong with it.
fn take(
    event: SseEvent,
    received: &mut Received,
    usage: &mut Option<Usage>,
) -> Result<Option<Ended>, String> {
    let SseEvent::Data(data) = event else { return Ok(Some(Ended::Done)) };
    let value: serde_json::Value = serde_json::from_str(&data).map_err(|error| error.to_string())?;
    if let Some(error) = ApiError::from_value(500, &value) {
        return Ok(Some(Ended::Refused(Box::new(error))));
    }
    let chunk: CompletionResponse = serde_json::from_value(value).map_err(|error| error.to_string())?;
    if chunk.usage.is_some() {
        *usage = chunk.usage;
    }
    for choice in chunk.choices {
        let tokens = choice.token_ids.unwrap_or_default();
        let last = tokens.len();
        for (place, token) in (1..).zip(tokens) {
            let finish = choice.finish_reason.filter(|_| place == last);
            received.take_token(token, finish)?;
        }
    }
    Ok(None)
}

fn finish(world: &World, request: &Request, received: &Received, usage: Option<Usage>) -> Ended {
    if received.finish.is_none() {
        return wrong(world, request, "the answer is done without a last token".into());
    }
    let expected = (request.prompt.len(), received.tokens.len());
    let told = usage.map(|usage| (usage.prompt_tokens as usize, usage.completion_tokens as usize));
    if told != Some(expected) {
        return wrong(world, request, format!("the usage is {told:?}, not {expected:?}"));
    }
    let mut state = world.state();
    state.tally.tokens += received.tokens.len() as u64;
    state.tally.prompt_tokens += request.prompt.len() as u64;
    state.tally.cached_tokens += usage.map_or(0, |usage| usage.cached_tokens().into());
    if let Some(first) = received.first {
        state.tally.first_token += first.saturating_duration_since(world.at(request.arrives));
    }
    Ended::Done
}

fn wrong(world: &World, request: &Request, detail: String) -> Ended {
    let detail = format!("{} through the router ({:?}): {detail}", request.name, request.pattern);
    world.violate(Invariant::TokensExact, detail);
    Ended::Wrong
}

/// Opens a connection to the router. The router's side runs in a task of its own, which ends with the router, or when the
/// client lets go.
fn connect(world: &Arc<World>, request: &Request) -> Connection {
    let (parts, received) = mpsc::channel(4);
    let task = world.app().map(|app| {
        let request = http_request(request);
        let task = tokio::spawn(async move {
            let Ok(response) = app.oneshot(request).await;
            let (head, mut body) = response.into_parts();
            if parts.send(Part::Head(head.status.as_u16())).await.is_err() {
                return;
            }
            while let Some(frame) = body.frame().await {
                let Ok(data) = frame.map(|frame| frame.into_data().unwrap_or_default()) else { return };
                if parts.send(Part::Data(data)).await.is_err() {
                    return;
                }
            }
            let _ = parts.send(Part::End).await;
        });
        let handle = task.abort_handle();
        world.state().router_tasks.push(handle.clone());
        handle
    });
    Connection { parts: received, task }
}

struct Connection {
    parts: mpsc::Receiver<Part>,
    task: Option<tokio::task::AbortHandle>,
}

impl Connection {
    async fn recv(&mut self) -> Option<Part> {
        self.parts.recv().await
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // A server drops the handler of a connection that closes.
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

fn http_request(request: &Request) -> axum::http::Request<Body> {
    let sampling = &request.sampling;
    let completion = CompletionRequest {
        temperature: Some(sampling.temperature),
        repetition_penalty: Some(sampling.repetition_penalty),
        seed: Some(sampling.seed.cast_signed()),
        max_tokens: Some(request.max_output.into()),
        stream: true,
        stream_options: Some(StreamOptions { include_usage: true, ..StreamOptions::default() }),
        cache_salt: (!request.salt.is_empty()).then(|| request.salt.to_string()),
        return_token_ids: true,
        ..CompletionRequest::new(Prompt::Tokens(request.prompt.to_vec().into()))
    };
    let body = serde_json::to_vec(&completion).expect("a request of ours is JSON");
    let pattern = match request.pattern {
        Pattern::DataParallel => "data_parallel".to_owned(),
        Pattern::Balanced(share) => format!("balanced:{share}"),
        Pattern::Move => "migrate:3".to_owned(),
        Pattern::PrefillDecode | Pattern::TwoSenders | Pattern::Migrate => "prefill_decode".to_owned(),
    };
    axum::http::Request::post("/v1/completions")
        .header("content-type", "application/json")
        .header("x-microserving-pattern", pattern)
        .body(Body::from(body))
        .expect("method, path and headers are fine")
}
