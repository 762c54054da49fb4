//! One generation: its choices, the log of their tokens, and who listens.

use std::time::Duration;

use microserving_protocol::{FinishReason, TokenId, TokenLogprob};

use crate::sequence::Slot;
use crate::{CallId, CallKey, Effect, EngineError, GenerateEvent, GenerateUsage};

/// When a choice ends.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Output tokens at most, replayed ones included.
    pub(crate) max_tokens: u32,
    /// Tokens of prompt and output together at most.
    pub(crate) max_len: u32,
    /// Tokens that end it.
    pub(crate) stop_tokens: Vec<TokenId>,
}

/// A token that was yielded.
#[derive(Clone, Debug)]
struct Logged {
    token: TokenId,
    logprob: Option<TokenLogprob>,
}

/// What one choice has yielded.
#[derive(Clone, Debug, Default)]
struct ChoiceLog {
    /// The sequence that computes it, while it lives.
    slot: Option<Slot>,
    tokens: Vec<Logged>,
    finish: Option<FinishReason>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Every choice finished.
    Done,
    /// The whole of it failed.
    Failed(EngineError),
}

/// One `start_generate` and its repetitions.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) key: CallKey,
    /// Hash of the call, so that a repetition can be told from a misuse of the key.
    pub(crate) body: u64,
    pub(crate) limits: Limits,
    pub(crate) usage: GenerateUsage,
    pub(crate) ending: Option<Ending>,
    /// `pause` was called; nothing is decoded any more.
    pub(crate) paused: bool,
    /// Output tokens that came with the call.
    replayed: u32,
    choices: Vec<ChoiceLog>,
    listeners: Vec<CallId>,
}

impl Request {
    /// Makes a request of `n` choices that `listener` hears.
    pub(crate) fn new(
        key: CallKey,
        body: u64,
        n: u32,
        limits: Limits,
        replayed: u32,
        listener: CallId,
    ) -> Self {
        Self {
            key,
            body,
            limits,
            usage: GenerateUsage { completion_tokens: replayed, ..GenerateUsage::default() },
            ending: None,
            paused: false,
            replayed,
            choices: vec![ChoiceLog::default(); n as usize],
            listeners: vec![listener],
        }
    }

    /// Ties a choice to the sequence that computes it.
    pub(crate) fn set_slot(&mut self, choice: u32, slot: Option<Slot>) {
        self.choices[choice as usize].slot = slot;
    }

    /// Returns the sequences that still compute.
    pub(crate) fn slots(&self) -> Vec<Slot> {
        self.choices.iter().filter_map(|choice| choice.slot).collect()
    }

    /// Returns how many tokens are in the log, over all choices.
    pub(crate) fn num_logged(&self) -> usize {
        self.choices.iter().map(|choice| choice.tokens.len()).sum()
    }

    /// Returns the tokens of each choice.
    pub(crate) fn tokens(&self) -> Vec<Vec<TokenId>> {
        self.choices.iter().map(|c| c.tokens.iter().map(|logged| logged.token).collect()).collect()
    }

    /// Returns the output length that a choice reaches with its next token.
    pub(crate) fn next_output(&self, choice: u32) -> u32 {
        let logged = self.choices[choice as usize].tokens.len();
        self.replayed + u32::try_from(logged).expect("bounded by max_tokens") + 1
    }

    /// Logs a token and tells all listeners. When it was the last one of the last choice, tells them that too.
    pub(crate) fn yield_token(
        &mut self,
        choice: u32,
        token: TokenId,
        logprob: Option<TokenLogprob>,
        finish: Option<FinishReason>,
        effects: &mut Vec<Effect>,
    ) {
        let log = &mut self.choices[choice as usize];
        let index = self.replayed + u32::try_from(log.tokens.len()).expect("bounded by max_tokens");
        log.tokens.push(Logged { token, logprob: logprob.clone() });
        log.finish = finish;
        if finish.is_some() {
            log.slot = None;
        }
        self.usage.completion_tokens += 1;
        for &call in &self.listeners {
            effects.push(Effect::Event {
                call,
                event: GenerateEvent::Token { choice, index, token, logprob: logprob.clone(), finish },
            });
        }
        if self.choices.iter().all(|choice| choice.finish.is_some()) {
            self.end(Ending::Done, effects);
        }
    }

    /// Says whether `call` listens.
    pub(crate) fn is_heard_by(&self, call: CallId) -> bool {
        self.listeners.contains(&call)
    }

    /// Ends a choice after the tokens it has, because its listener wants no more; returns the sequence that computed it.
    pub(crate) fn finish_choice(&mut self, choice: u32, effects: &mut Vec<Effect>) -> Option<Slot> {
        let log = self.choices.get_mut(choice as usize)?;
        if log.finish.is_some() || log.tokens.is_empty() {
            return None;
        }
        log.finish = Some(FinishReason::Stop);
        let slot = log.slot.take();
        if self.choices.iter().all(|choice| choice.finish.is_some()) {
            self.end(Ending::Done, effects);
        }
        slot
    }

    /// Ends the request and tells all listeners; a second end is ignored.
    pub(crate) fn end(&mut self, ending: Ending, effects: &mut Vec<Effect>) {
        if self.ending.is_some() {
            return;
        }
        for call in std::mem::take(&mut self.listeners) {
            effects.push(Effect::Event { call, event: self.last_event(&ending) });
        }
        self.ending = Some(ending);
    }

    /// Lets `call` listen too: replays what it has not seen, from output index `from` on.
    pub(crate) fn attach(&mut self, call: CallId, from: u32, effects: &mut Vec<Effect>) {
        for (number, log) in (0u32..).zip(&self.choices) {
            let last = log.tokens.len();
            for (place, logged) in log.tokens.iter().enumerate() {
                let index = self.replayed + u32::try_from(place).expect("bounded by max_tokens");
                if index < from {
                    continue;
                }
                effects.push(Effect::Event {
                    call,
                    event: GenerateEvent::Token {
                        choice: number,
                        index,
                        token: logged.token,
                        logprob: logged.logprob.clone(),
                        finish: if place + 1 == last { log.finish } else { None },
                    },
                });
            }
        }
        match &self.ending {
            Some(ending) => effects.push(Effect::Event { call, event: self.last_event(ending) }),
            None => self.listeners.push(call),
        }
    }

    /// Forgets a listener; returns true if it was the last one and the request still runs.
    pub(crate) fn detach(&mut self, call: CallId) -> bool {
        let before = self.listeners.len();
        self.listeners.retain(|&listener| listener != call);
        self.listeners.len() < before && self.listeners.is_empty() && self.ending.is_none()
    }

    fn last_event(&self, ending: &Ending) -> GenerateEvent {
        match ending {
            Ending::Done => GenerateEvent::Done { usage: self.usage },
            Ending::Failed(error) => GenerateEvent::Failed { error: error.clone() },
        }
    }
}

/// Says why a choice ends with this token, if it does.
pub(crate) fn finish_reason(
    limits: &Limits,
    token: TokenId,
    grammar_complete: bool,
    num_output: u32,
    len: u32,
) -> Option<FinishReason> {
    if grammar_complete || limits.stop_tokens.contains(&token) {
        Some(FinishReason::Stop)
    } else if num_output >= limits.max_tokens || len >= limits.max_len {
        Some(FinishReason::Length)
    } else {
        None
    }
}

/// How much of a call's time is left, from `now`.
pub(crate) fn deadline(now: Duration, timeout: Option<Duration>) -> Option<Duration> {
    timeout.and_then(|timeout| now.checked_add(timeout))
}

#[cfg(test)]
mod tests {
    use microserving_protocol::{Attempt, SeqId};

    use super::*;

    fn request(n: u32) -> Request {
        let key = CallKey { seq_id: SeqId::new("a"), attempt: Attempt(0) };
        let limits = Limits { max_tokens: 8, max_len: 100, stop_tokens: vec![TokenId(2)] };
        Request::new(key, 0, n, limits, 3, CallId(1))
    }

    fn events(effects: &[Effect], of: CallId) -> Vec<(u32, u32, Option<FinishReason>)> {
        effects
            .iter()
            .filter_map(|effect| match effect {
                Effect::Event { call, event: GenerateEvent::Token { choice, index, finish, .. } }
                    if *call == of =>
                {
                    Some((*choice, *index, *finish))
                }
                _ => None,
            })
            .collect()
    }

    #[test]
    fn a_choice_whose_listener_heard_enough_ends_once() {
        let mut effects = Vec::new();
        let mut request = request(2);
        request.set_slot(0, Some(Slot(5)));
        request.set_slot(1, Some(Slot(6)));
        assert_eq!(request.finish_choice(0, &mut effects), None, "there is nothing yet to have heard");
        request.yield_token(0, TokenId(9), None, None, &mut effects);
        request.yield_token(1, TokenId(9), None, None, &mut effects);
        assert_eq!(request.finish_choice(0, &mut effects), Some(Slot(5)));
        assert_eq!(request.finish_choice(0, &mut effects), None);
        assert_eq!(request.finish_choice(7, &mut effects), None);
        assert_eq!((request.ending.clone(), request.slots()), (None, vec![Slot(6)]));
        assert_eq!(request.finish_choice(1, &mut effects), Some(Slot(6)));
        assert_eq!(request.ending, Some(Ending::Done));
        assert!(matches!(
            effects.last(),
            Some(Effect::Event { call: CallId(1), event: GenerateEvent::Done { .. } })
        ));
    }

    #[test]
    fn a_late_listener_hears_what_it_missed_and_then_the_rest() {
        let mut effects = Vec::new();
        let mut request = request(1);
        request.yield_token(0, TokenId(9), None, None, &mut effects);
        request.yield_token(0, TokenId(8), None, None, &mut effects);
        effects.clear();
        request.attach(CallId(2), 4, &mut effects);
        assert_eq!(events(&effects, CallId(2)), [(0, 4, None)]);
        request.yield_token(0, TokenId(7), None, Some(FinishReason::Length), &mut effects);
        assert_eq!(events(&effects, CallId(2)), [(0, 4, None), (0, 5, Some(FinishReason::Length))]);
        assert_eq!(events(&effects, CallId(1)), [(0, 5, Some(FinishReason::Length))]);
        effects.clear();
        request.attach(CallId(3), 0, &mut effects);
        assert_eq!(events(&effects, CallId(3)).len(), 3, "a finished request is replayed from its log");
        assert!(matches!(
            effects.last(),
            Some(Effect::Event { call: CallId(3), event: GenerateEvent::Done { usage } })
                if usage.completion_tokens == 6
        ));
    }

    #[test]
    fn only_the_last_listener_takes_the_request_with_it() {
        let mut effects = Vec::new();
        let mut request = request(2);
        request.attach(CallId(2), 0, &mut effects);
        assert!(!request.detach(CallId(1)));
        assert!(!request.detach(CallId(1)), "an unknown listener changes nothing");
        assert!(request.detach(CallId(2)));
    }

    #[test]
    fn a_choice_ends_by_token_grammar_number_or_length() {
        let limits = Limits { max_tokens: 8, max_len: 100, stop_tokens: vec![TokenId(2)] };
        let table = [
            (3, false, 7, 99, None),
            (2, false, 7, 99, Some(FinishReason::Stop)),
            (3, true, 7, 99, Some(FinishReason::Stop)),
            (3, false, 8, 99, Some(FinishReason::Length)),
            (3, false, 7, 100, Some(FinishReason::Length)),
            (2, false, 8, 100, Some(FinishReason::Stop)),
        ];
        for (token, complete, output, len, expected) in table {
            assert_eq!(finish_reason(&limits, TokenId(token), complete, output, len), expected);
        }
    }
}
