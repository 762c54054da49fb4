//! What engines have said, for judging what they say next. Everything is taken in the order in which it was said.

use std::collections::BTreeMap;

use microserving_engine::{Call, CallId, CallKey, Command, Effect, GenerateEvent, Reply};
use microserving_protocol::{Attempt, SeqId};

use super::Invariant;

/// An engine and a request.
type At = (usize, SeqId);

/// What the engines have been asked and have answered, each since its boot.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// Whose calls they are.
    keys: BTreeMap<(usize, CallId), CallKey>,
    aborts: BTreeMap<(usize, CallId), CallKey>,
    /// The highest attempt that was answered well.
    accepted: BTreeMap<At, Attempt>,
    /// The highest attempt whose abort was answered.
    given_up: BTreeMap<At, Attempt>,
    /// The output index that each stream must yield next.
    next_index: BTreeMap<(usize, CallId), u32>,
}

impl History {
    /// Forgets an engine: it has a new boot.
    pub(crate) fn forget(&mut self, engine: usize) {
        self.keys.retain(|(of, _), _| *of != engine);
        self.aborts.retain(|(of, _), _| *of != engine);
        self.accepted.retain(|(of, _), _| *of != engine);
        self.given_up.retain(|(of, _), _| *of != engine);
        self.next_index.retain(|(of, _), _| *of != engine);
    }

    /// Notes what an engine takes.
    pub(crate) fn take(&mut self, engine: usize, command: &Command) {
        match command {
            Command::Call { id, call: Call::Abort(abort) } => {
                if let Some(attempt) = abort.attempt {
                    let key = CallKey { seq_id: abort.seq_id.clone(), attempt };
                    self.aborts.insert((engine, *id), key);
                }
            }
            Command::Call { id, call } => {
                if let Some(key) = key_of(call) {
                    self.keys.insert((engine, *id), key);
                }
            }
            Command::FinishChoice { .. } | Command::Cancel { .. } => {}
        }
    }

    /// Judges what an engine says, and notes it.
    pub(crate) fn judge(&mut self, engine: usize, effect: &Effect) -> Result<(), (Invariant, String)> {
        match effect {
            Effect::Reply { call, result: Ok(Reply::Aborted(_)) } => {
                if let Some(key) = self.aborts.remove(&(engine, *call)) {
                    let given_up = self.given_up.entry((engine, key.seq_id)).or_insert(key.attempt);
                    *given_up = (*given_up).max(key.attempt);
                }
                Ok(())
            }
            Effect::Reply { call, result: Ok(reply) } => self.judge_reply(engine, *call, reply),
            Effect::Reply { .. } => Ok(()),
            Effect::Event { call, event: GenerateEvent::Token { index, choice: 0, .. } } => {
                self.judge_token(engine, *call, *index)
            }
            Effect::Event { .. } => Ok(()),
        }
    }

    fn judge_reply(&mut self, engine: usize, id: CallId, reply: &Reply) -> Result<(), (Invariant, String)> {
        let Some(CallKey { seq_id, attempt }) = self.keys.get(&(engine, id)).cloned() else { return Ok(()) };
        let at = (engine, seq_id);
        let what = || format!("engine {engine} answered {reply:?} to attempt {attempt} of {}", at.1);
        self.judge_attempt(&at, attempt, what)?;
        let highest = self.accepted.entry(at).or_insert(attempt);
        *highest = (*highest).max(attempt);
        Ok(())
    }

    fn judge_token(&mut self, engine: usize, id: CallId, index: u32) -> Result<(), (Invariant, String)> {
        let Some(CallKey { seq_id, attempt }) = self.keys.get(&(engine, id)).cloned() else { return Ok(()) };
        let at = (engine, seq_id);
        let expected = self.next_index.insert((engine, id), index + 1);
        if let Some(expected) = expected.filter(|expected| *expected != index) {
            let detail = format!("engine {engine} emitted index {index} of {}, not {expected}", at.1);
            return Err((Invariant::OneAttempt, detail));
        }
        let what = || format!("engine {engine} emitted index {index} of attempt {attempt} of {}", at.1);
        self.judge_attempt(&at, attempt, what)
    }

    fn judge_attempt(
        &self,
        at: &At,
        attempt: Attempt,
        what: impl Fn() -> String,
    ) -> Result<(), (Invariant, String)> {
        if let Some(higher) = self.accepted.get(at).filter(|accepted| **accepted > attempt) {
            return Err((
                Invariant::OneAttempt,
                format!("{} after it had accepted attempt {higher}", what()),
            ));
        }
        if self.given_up.get(at).is_some_and(|given_up| *given_up >= attempt) {
            return Err((Invariant::GivenUpStaysSo, format!("{}, which was aborted", what())));
        }
        Ok(())
    }
}

/// Returns the key of a call that makes something live.
fn key_of(call: &Call) -> Option<CallKey> {
    match call {
        Call::PrepRecv(call) => call.key.clone(),
        Call::RemoteSend(call) => call.key.clone(),
        Call::StartGenerate(call) => call.key.clone(),
        _ => None,
    }
}
