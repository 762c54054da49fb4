//! An engine that keeps count of what it is asked, and computes nothing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use microserving_client::{CallContext, ChunkStream, ClientError, EngineCalls};
use microserving_protocol::{
    AbortRequest, AbortResponse, ApiError, CommitRequest, CommitResponse, CompletionChoice,
    CompletionRequest, CompletionResponse, FinishReason, ModelCard, ModelList, PagesView, PrepRecvRequest,
    PrepRecvResponse, RemoteSendRequest, RemoteSendResponse, StartGenerateRequest, StateView, TokenId, Usage,
};
use serde_json::{Value, json};

use super::trace::TraceEngine;

const PAGE_SIZE: u32 = 16;
const NUM_PAGES: u32 = 1 << 20;
const MAX_CONTEXT: u32 = 1 << 21;

/// The calls of all engines, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Journal(Arc<Mutex<Vec<Value>>>);

impl Journal {
    /// Returns the calls since the last time.
    pub(crate) fn take(&self) -> Vec<Value> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn note(&self, call: Value) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }
}

/// A fake engine. What it has seen, it holds.
#[derive(Debug)]
pub(crate) struct FakeEngine {
    engine: TraceEngine,
    models: Vec<String>,
    journal: Journal,
    held: Mutex<Vec<Vec<TokenId>>>,
}

impl FakeEngine {
    pub(crate) fn new(engine: &TraceEngine, models: &[String], journal: Journal) -> Self {
        Self { engine: engine.clone(), models: models.to_vec(), journal, held: Mutex::default() }
    }

    fn note(&self, call: &str, rest: &[(&str, u32)]) {
        let mut row = json!({"engine": self.engine.name, "call": call});
        for (name, value) in rest {
            row[*name] = (*value).into();
        }
        self.journal.note(row);
    }

    /// Returns how many of `tokens` it holds, in whole pages.
    fn matched(&self, tokens: &[TokenId]) -> u32 {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let common = |held: &Vec<TokenId>| held.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let longest = held.iter().map(common).max().unwrap_or(0);
        u32::try_from(longest).unwrap_or(u32::MAX) / PAGE_SIZE * PAGE_SIZE
    }

    fn hold(&self, tokens: &[TokenId]) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).push(tokens.to_vec());
    }

    fn tokens<'a>(&self, request: &'a CompletionRequest) -> Result<&'a [TokenId], ClientError> {
        request.prompt.tokens().ok_or_else(|| ClientError::Malformed {
            engine: self.engine.name.clone(),
            reason: "the prompt is not tokens".to_owned(),
        })
    }

    /// Returns the first `end` tokens.
    fn prefix<'a>(
        &self,
        request: &'a CompletionRequest,
        end: i64,
    ) -> Result<(&'a [TokenId], u32), ClientError> {
        let tokens = self.tokens(request)?;
        let end = usize::try_from(end).unwrap_or(0).min(tokens.len());
        Ok((&tokens[..end], u32::try_from(end).unwrap_or(u32::MAX)))
    }

    fn answer(&self, request: &CompletionRequest, cached: u32) -> Result<ChunkStream, ClientError> {
        let prompt = u32::try_from(self.tokens(request)?.len()).unwrap_or(u32::MAX);
        let model = self.models.first().map_or("", String::as_str);
        let choice = CompletionChoice {
            text: "x".to_owned(),
            finish_reason: Some(FinishReason::Length),
            ..CompletionChoice::default()
        };
        let last = CompletionResponse::new("dry-run", 0, model, vec![choice]);
        let mut usage = CompletionResponse::new("dry-run", 0, model, Vec::new());
        usage.usage = Some(Usage::new(prompt, 1, cached.min(prompt)));
        Ok(Box::pin(futures::stream::iter([Ok(last), Ok(usage)])))
    }
}

#[async_trait]
impl EngineCalls for FakeEngine {
    fn name(&self) -> &str {
        &self.engine.name
    }

    async fn prep_recv(
        &self,
        _: &CallContext,
        request: &PrepRecvRequest,
    ) -> Result<PrepRecvResponse, ClientError> {
        let (tokens, end) = self.prefix(&request.completion, request.end)?;
        if self.engine.full {
            self.note("prep_recv", &[("end", end), ("status", 503)]);
            let error = ApiError::unavailable("no room", Duration::from_secs(1));
            return Err(ClientError::Refused { engine: self.engine.name.clone(), error: Box::new(error) });
        }
        let matched = self.matched(tokens);
        self.note("prep_recv", &[("end", end), ("matched", matched)]);
        Ok(PrepRecvResponse {
            kv_addr_info: self.engine.name.clone(),
            prefix_matched_length: matched,
            lease_seconds: None,
            seq_id: request.call.seq_id.clone(),
            engine_id: Some(self.engine.name.as_str().into()),
        })
    }

    async fn remote_send(
        &self,
        _: &CallContext,
        request: &RemoteSendRequest,
    ) -> Result<RemoteSendResponse, ClientError> {
        let (tokens, end) = self.prefix(&request.completion, request.end)?;
        let begin = u32::try_from(request.begin).unwrap_or(0).min(end);
        let cached = self.matched(tokens);
        self.hold(tokens);
        let row = json!({
            "engine": self.engine.name, "call": "remote_send", "to": request.kv_addr_info, "begin": begin, "end": end,
            "cached": cached, "computed": end - cached,
        });
        self.journal.note(row);
        Ok(RemoteSendResponse {
            sent_tokens: end - begin,
            cached_tokens: cached,
            computed_tokens: end - cached,
            ..RemoteSendResponse::default()
        })
    }

    async fn start_generate(
        &self,
        _: &CallContext,
        request: &StartGenerateRequest,
    ) -> Result<ChunkStream, ClientError> {
        let tokens = self.tokens(&request.completion)?;
        let cached = self.matched(tokens);
        self.hold(tokens);
        self.note(
            "start_generate",
            &[("begin", u32::try_from(request.begin).unwrap_or(0)), ("cached", cached)],
        );
        self.answer(&request.completion, cached)
    }

    async fn abort(&self, _: &CallContext, _: &AbortRequest) -> Result<AbortResponse, ClientError> {
        self.note("abort", &[]);
        Ok(AbortResponse { aborted: true })
    }

    async fn commit(&self, _: &CallContext, _: &CommitRequest) -> Result<CommitResponse, ClientError> {
        self.note("commit", &[]);
        Ok(CommitResponse { committed_tokens: 0 })
    }

    async fn completions(
        &self,
        _: &CallContext,
        request: &CompletionRequest,
    ) -> Result<ChunkStream, ClientError> {
        self.note("completions", &[]);
        self.answer(request, 0)
    }

    async fn models(&self, _: &CallContext) -> Result<ModelList, ClientError> {
        let card = |model: &String| ModelCard::new(model, 0, MAX_CONTEXT);
        Ok(ModelList::new(self.models.iter().map(card).collect()))
    }

    async fn state(&self, _: &CallContext) -> Result<StateView, ClientError> {
        Ok(StateView {
            engine_id: self.engine.name.as_str().into(),
            incarnation: format!("{:016x}", 1),
            model: self.models.first().cloned().unwrap_or_default(),
            max_context: MAX_CONTEXT,
            page_size: PAGE_SIZE,
            layout_fingerprint: format!("{:016x}", 1),
            pages: PagesView { free: NUM_PAGES, total: NUM_PAGES, ..PagesView::default() },
            waiting: 0,
            running: self.engine.load,
            receiving: 0,
            sending: 0,
            queued_prefill_tokens: self.engine.queued_tokens,
            draining: false,
            counters: Default::default(),
            grpc: false,
            marks: false,
        })
    }

    async fn ready(&self, _: &CallContext) -> Result<(), ClientError> {
        Ok(())
    }

    async fn tokenizer(&self, _: &CallContext) -> Result<Value, ClientError> {
        let error = ApiError::not_found("prompts of a dry run are tokens");
        Err(ClientError::Refused { engine: self.engine.name.clone(), error: Box::new(error) })
    }
}
