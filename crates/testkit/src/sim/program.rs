//! A small router: the three-call flow of each pattern, with retries. It is rude on purpose: it may start to generate after
//! a failed transfer, forget to abort, or leave in the middle, as real callers do.

use std::sync::Arc;
use std::time::Duration;

use microserving_engine::{
    Abort, Call, CallKey, CallOptions, Commit, GenerateEvent, PrepRecv, PrepRecvReply, RemoteSend, Reply,
    StartGenerate,
};
use microserving_protocol::{Attempt, KvRange, SeqId, TokenId};

use super::Invariant;
use super::request::{Pattern, Received, Request};
use super::world::{CallError, World};
use crate::Dice;

/// Tries before a request is given up.
const MAX_ATTEMPTS: u32 = 6;

/// Why a try came to nothing.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Failure {
    /// A call failed.
    Call(CallError),
    /// A call took too long.
    Timeout,
    /// The answer was wrong, which has been reported.
    Wrong,
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        Self::Call(error)
    }
}

/// One request being served.
pub(crate) struct Program {
    world: Arc<World>,
    request: Request,
    received: Received,
    dice: Dice,
    attempt: u32,
}

impl Program {
    pub(crate) fn new(world: Arc<World>, request: Request, dice: Dice) -> Self {
        let received = Received::new(Arc::clone(&request.reference));
        Self { world, request, received, dice, attempt: 0 }
    }

    /// Serves the request to its end, trying again where that may help.
    pub(crate) async fn run(mut self) -> Result<(), Failure> {
        let mut last = Failure::Timeout;
        let mut engines = self.choose_engines();
        for attempt in 0..MAX_ATTEMPTS {
            self.attempt = attempt;
            if attempt > 0 {
                self.world.state().tally.retries += 1;
                tokio::time::sleep(self.dice.millis(5, 150)).await;
                if !self.dice.chance(self.world.options.stubborn) {
                    engines = self.choose_engines();
                }
            }
            match self.attempt(&engines).await {
                Ok(()) => return Ok(()),
                Err(Failure::Wrong) => return Err(Failure::Wrong),
                // The stream broke after its last token: the client has everything.
                Err(_) if self.received.finish.is_some() => return Ok(()),
                Err(failure) => last = failure,
            }
            if self.dice.chance(self.world.options.polite) {
                abort(&self.world, &self.request.name, &engines, Attempt(attempt)).await;
            }
        }
        Err(last)
    }

    /// Returns the engines in order of roles: the decoding one first.
    fn choose_engines(&mut self) -> Vec<usize> {
        let mut engines: Vec<_> = (0..self.world.options.num_engines).collect();
        for place in (1..engines.len()).rev() {
            engines.swap(place, self.dice.below(place as u64 + 1) as usize);
        }
        engines
    }

    async fn attempt(&mut self, engines: &[usize]) -> Result<(), Failure> {
        let prompt = self.prompt_so_far();
        let len = prompt.len() as u32;
        let decoder = engines[0];
        match self.request.pattern {
            Pattern::DataParallel | Pattern::Move => self.generate(decoder, &prompt, 0, self.key()).await,
            Pattern::PrefillDecode => self.split(engines, &prompt, len - 1, 1).await,
            Pattern::Balanced(share) => {
                let left = (f64::from(len) * share).ceil() as u32;
                self.split(engines, &prompt, len - left.clamp(1, len), 1).await
            }
            Pattern::TwoSenders => self.split(engines, &prompt, len - 1, 2).await,
            Pattern::Migrate => {
                self.migrate(engines, &prompt).await?;
                let key = self.key();
                self.generate(decoder, &prompt, 0, key).await
            }
        }
    }

    /// prep_recv, remote_send from one or two engines, start_generate.
    async fn split(
        &mut self,
        engines: &[usize],
        prompt: &Arc<[TokenId]>,
        end: u32,
        num_senders: u32,
    ) -> Result<(), Failure> {
        let decoder = engines[0];
        let reply = self.prepare(decoder, prompt, end, false, self.key()).await?;
        let sent = self.send(engines, prompt, end, num_senders, &reply).await;
        if sent.is_err() && self.dice.chance(0.5) {
            return sent;
        }
        // After a failed transfer the engine finds out by itself and computes what is lacking, or says that it cannot.
        self.generate(decoder, prompt, end, self.key()).await
    }

    /// Copies the prompt's context to the decoding engine and keeps it there.
    async fn migrate(&mut self, engines: &[usize], prompt: &Arc<[TokenId]>) -> Result<(), Failure> {
        let end = prompt.len() as u32;
        let key = CallKey {
            seq_id: SeqId::new(format!("{}-copy", self.request.name)),
            attempt: Attempt(self.attempt),
        };
        let reply = self.prepare(engines[0], prompt, end, true, key.clone()).await?;
        self.send(engines, prompt, end, 1, &reply).await?;
        let commit = Commit { seq_id: key.seq_id, attempt: Some(key.attempt) };
        self.call(engines[0], Call::Commit(commit)).await?;
        Ok(())
    }

    async fn prepare(
        &mut self,
        engine: usize,
        prompt: &Arc<[TokenId]>,
        end: u32,
        commit: bool,
        key: CallKey,
    ) -> Result<PrepRecvReply, Failure> {
        let reserve_tokens = if commit { 0 } else { self.dice.below(8) as u32 };
        let call = PrepRecv {
            key: Some(key),
            prompt: Arc::clone(prompt),
            end,
            reserve_tokens,
            commit,
            options: self.options(),
        };
        match self.call(engine, Call::PrepRecv(call)).await? {
            Reply::PrepRecv(reply) if reply.prefix_matched_length <= end => {
                self.world.state().tally.matched_tokens += u64::from(reply.prefix_matched_length);
                Ok(reply)
            }
            other => Err(self.wrong(format!("prep_recv with end {end} was answered {other:?}"))),
        }
    }

    async fn send(
        &mut self,
        engines: &[usize],
        prompt: &Arc<[TokenId]>,
        end: u32,
        num_senders: u32,
        to: &PrepRecvReply,
    ) -> Result<(), Failure> {
        let begin = to.prefix_matched_length;
        let Some(address) = &to.kv_addr_info else {
            return if begin == end {
                Ok(())
            } else {
                Err(self.wrong(format!("no address, and only {begin} of {end} tokens matched")))
            };
        };
        let middle = if num_senders > 1 { begin + (end - begin) / 2 } else { begin };
        let parts = [(engines[1], begin, middle), (engines[engines.len() - 1], middle, end)];
        let mut connections = Vec::new();
        for (engine, begin, end) in parts {
            let Some(range) = KvRange::new(begin, end).filter(|range| !range.is_empty()) else { continue };
            let call = RemoteSend {
                key: Some(to.key.clone()),
                prompt: Arc::clone(prompt),
                range,
                kv_addr_info: address.clone(),
                recv_rank: 0,
                options: self.options(),
            };
            connections.push((range, self.world.send(engine, Call::RemoteSend(call))));
        }
        for (range, connection) in &mut connections {
            let answer = tokio::time::timeout(self.patience(), connection.answer()).await;
            match answer.map_err(|_| Failure::Timeout)?? {
                Reply::RemoteSend(reply) if reply.sent_tokens == range.num_tokens() => {
                    self.world.state().tally.sent_tokens += u64::from(reply.sent_tokens);
                }
                other => return Err(self.wrong(format!("remote_send of {range} was answered {other:?}"))),
            }
        }
        Ok(())
    }

    async fn generate(
        &mut self,
        engine: usize,
        prompt: &Arc<[TokenId]>,
        begin: u32,
        key: CallKey,
    ) -> Result<(), Failure> {
        let call = StartGenerate {
            key: Some(key),
            prompt: Arc::clone(prompt),
            begin,
            generated_from: self.request.prompt.len() as u32,
            n: 1,
            first_choice: 0,
            sampling: self.request.sampling.clone(),
            max_tokens: Some(self.request.max_output),
            min_tokens: 0,
            stop_tokens: Vec::new(),
            ignore_eos: false,
            constraints: Vec::new(),
            resume_from: None,
            options: self.options(),
        };
        let patience = self.patience();
        let mut connection = self.world.send(engine, Call::StartGenerate(Box::new(call)));
        let started = tokio::time::timeout(patience, connection.answer()).await;
        match started.map_err(|_| Failure::Timeout)?? {
            Reply::Started => {}
            other => return Err(self.wrong(format!("start_generate was answered {other:?}"))),
        }
        loop {
            let event = tokio::time::timeout(patience, connection.event()).await;
            let event = event.map_err(|_| Failure::Timeout)??;
            if let Err(detail) = self.received.take(&event) {
                return Err(self.wrong(detail));
            }
            match event {
                GenerateEvent::Token { .. } => self.world.state().tally.tokens += 1,
                GenerateEvent::Failed { error } => return Err(CallError::Engine(error).into()),
                GenerateEvent::Done { .. } if self.received.finish.is_none() => {
                    return Err(self.wrong("the stream is done without a last token".into()));
                }
                GenerateEvent::Done { .. } => return Ok(()),
            }
        }
    }

    async fn call(&mut self, engine: usize, call: Call) -> Result<Reply, Failure> {
        let mut connection = self.world.send(engine, call);
        let answer = tokio::time::timeout(self.patience(), connection.answer()).await;
        Ok(answer.map_err(|_| Failure::Timeout)??)
    }

    fn wrong(&self, detail: String) -> Failure {
        let detail = format!("{} ({:?}): {detail}", self.request.name, self.request.pattern);
        self.world.violate(Invariant::TokensExact, detail);
        Failure::Wrong
    }

    fn prompt_so_far(&self) -> Arc<[TokenId]> {
        let mut tokens = self.request.prompt.to_vec();
        tokens.extend(&self.received.tokens);
        tokens.into()
    }

    fn key(&self) -> CallKey {
        CallKey { seq_id: SeqId::new(self.request.name.as_str()), attempt: Attempt(self.attempt) }
    }

    fn options(&self) -> CallOptions {
        CallOptions { cache_salt: Arc::clone(&self.request.salt), ..CallOptions::default() }
    }

    /// How long a caller waits for one answer or event.
    fn patience(&self) -> Duration {
        self.world.options.lease * 2 + Duration::from_millis(1500)
    }
}

/// Gives a request up on some engines, as a courtesy: whether that arrives or not.
pub(crate) async fn abort(world: &Arc<World>, name: &str, engines: &[usize], attempt: Attempt) {
    for &engine in engines {
        for seq_id in [name.to_owned(), format!("{name}-copy")] {
            let abort = Abort { seq_id: SeqId::new(seq_id), attempt: Some(attempt) };
            let mut connection = world.send(engine, Call::Abort(abort));
            let _ = tokio::time::timeout(Duration::from_millis(500), connection.answer()).await;
        }
    }
}
