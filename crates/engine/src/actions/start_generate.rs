//! `start_generate`: prefill what is left of the prompt, and decode.
//!
//! ```text
//! prepared   0 .. matched .. received .. end = begin .. computed here .. len | output
//! plain      0 .. matched ............................. computed here .. len | output
//! ```
//!
//! The first of `n` choices prefills the prompt; the others wait for it, match its full pages in the cache and compute no
//! more than the last page again. All are the same tokens as `n` calls of one choice each, because a choice differs from
//! another only by its index in the sampler.

use microserving_executor::{SampleError, Sampler};
use microserving_protocol::TokenId;

use super::check_bound;
use crate::calls::{Found, body_hash};
use crate::request::{Limits, Request, deadline};
use crate::sequence::{Choice, Pages, PendingStart, RequestId, Sequence, Slot, State, Work};
use crate::{CallId, CallKey, Engine, EngineError, Reply, StartGenerate};

impl Engine {
    /// Takes a `start_generate` on, or refuses it; events follow an acceptance.
    pub(crate) fn start_generate(&mut self, id: CallId, call: StartGenerate) {
        if let Err(error) = self.try_start(id, call) {
            self.reply(id, Err(error));
        }
    }

    fn try_start(&mut self, id: CallId, mut call: StartGenerate) -> Result<(), EngineError> {
        let len = self.check_start(&call)?;
        let limits = self.limits(&call, len)?;
        let body = start_hash(&call);
        let key = match call.key.clone().or_else(|| self.adoptable(&call)) {
            Some(key) => key,
            None => self.key_or_minted(None).0,
        };
        match self.calls.find(&key)? {
            Found::Nothing => {}
            Found::Older(_) => self.replace_older(&key),
            Found::Same => {
                if self.attach(id, &key, body, call.resume_from.unwrap_or(0))? {
                    return Ok(());
                }
            }
        }
        if call.resume_from.is_some_and(|from| from > 0) {
            return Err(Self::unknown(&key.seq_id));
        }
        let prepared = self.calls.get(&key.seq_id).and_then(|record| {
            // Of another attempt, it has just been aborted.
            if record.attempt == key.attempt { record.receiving } else { None }
        });
        match prepared {
            Some(slot) => self.check_prepared(slot, &call)?,
            None => self.refuse_if_draining()?,
        }
        let followers = call.n - 1;
        let arrivals = followers + u32::from(prepared.is_none());
        self.refuse_if_crowded(arrivals, "waiting", |s| s.state == State::Waiting)?;
        let mut samplers = self.samplers(&mut call)?.into_iter();
        let Some(first) = samplers.next() else { return Ok(()) };

        self.calls.open(&key);
        let request_id = self.name_request();
        let replayed = len - call.generated_from;
        let mut request = Request::new(key.clone(), body, call.n, limits, replayed, id);
        request.usage.prompt_tokens = call.generated_from;
        self.reply(id, Ok(Reply::Started));
        let leader = match prepared {
            Some(slot) => {
                self.start_prepared(slot, &call, request_id, first);
                slot
            }
            None => self.insert(self.choice(&call, &key, request_id, 0, first, None)),
        };
        request.set_slot(0, Some(leader));
        for (index, sampler) in (1..call.n).zip(samplers) {
            let follower = self.choice(&call, &key, request_id, index, sampler, Some(leader));
            let slot = self.insert(follower);
            request.set_slot(index, Some(slot));
        }
        self.requests.insert(request_id, request);
        if let Some(record) = self.calls.get_mut(&key.seq_id) {
            record.generation = Some(request_id);
        }
        if prepared.is_some() {
            self.want(leader);
        }
        Ok(())
    }

    fn check_start(&self, call: &StartGenerate) -> Result<u32, EngineError> {
        let len = self.check_prompt(&call.prompt)?;
        check_bound("begin", call.begin, call.begin < len, &format!("below {len}, the prompt's length"))?;
        let most = self.config.max_choices;
        check_bound("n", call.n, (1..=most).contains(&call.n), &format!("in [1, {most}] on this engine"))?;
        let last = most - call.n;
        let first = call.first_choice;
        check_bound("choice_index", first, first <= last, &format!("in [0, {last}]"))?;
        let from = call.generated_from;
        check_bound("generated_from", from, (1..=len).contains(&from), &format!("in [1, {len}]"))?;
        let replays = from < len;
        check_bound("n", call.n, call.n == 1 || !replays, "1 when output is replayed")?;
        let constraints = u32::try_from(call.constraints.len()).unwrap_or(u32::MAX);
        let fits = constraints == 0 || constraints == call.n;
        check_bound(
            "response_format",
            constraints,
            fits,
            &format!("none, or one grammar for each of {}", call.n),
        )?;
        Ok(len)
    }

    fn limits(&self, call: &StartGenerate, len: u32) -> Result<Limits, EngineError> {
        let max_len = self.max_len();
        let too_long = |field, needed: u64| EngineError::TooLong { field, needed, limit: max_len.into() };
        if len >= max_len {
            return Err(too_long("prompt", u64::from(len) + 1));
        }
        let replayed = len - call.generated_from;
        let max_tokens = match call.max_tokens {
            None => max_len - call.generated_from,
            Some(max_tokens) => {
                let needed = u64::from(call.generated_from) + u64::from(max_tokens);
                if needed > u64::from(max_len) {
                    return Err(too_long("max_tokens", needed));
                }
                let bound = format!("above {replayed}, the output so far");
                check_bound("max_tokens", max_tokens, max_tokens > replayed, &bound)?;
                max_tokens
            }
        };
        let mut stop_tokens = call.stop_tokens.clone();
        if !call.ignore_eos {
            stop_tokens.extend_from_slice(&self.info.executor.eos_tokens);
        }
        Ok(Limits { max_tokens, max_len, stop_tokens })
    }

    /// Returns the one open reservation whose id was minted here and which this call without a key fits.
    fn adoptable(&self, call: &StartGenerate) -> Option<CallKey> {
        let mut fitting = self.sequences.values().filter(|sequence| {
            matches!(&sequence.work, Work::Receive(reception)
                if reception.minted && reception.start.is_none() && reception.end == call.begin)
                && sequence.tokens[..] == call.prompt[..]
                && sequence.salt == call.options.cache_salt
        });
        let first = fitting.next()?;
        // With two of them nobody can say which one is meant.
        fitting.next().is_none().then(|| first.key.clone())
    }

    /// Attaches to a generation that was started by the same call; returns false if there is none.
    fn attach(&mut self, id: CallId, key: &CallKey, body: u64, from: u32) -> Result<bool, EngineError> {
        let Some(request_id) = self.calls.get(&key.seq_id).and_then(|record| record.generation) else {
            return Ok(false);
        };
        let Some(request) = self.requests.get_mut(&request_id) else { return Ok(false) };
        if request.body != body {
            return Err(EngineError::Conflict { seq_id: key.seq_id.clone(), field: "prompt" });
        }
        self.effects.push(crate::Effect::Reply { call: id, result: Ok(Reply::Started) });
        request.attach(id, from, &mut self.effects);
        Ok(true)
    }

    fn check_prepared(&self, slot: Slot, call: &StartGenerate) -> Result<(), EngineError> {
        let Some(sequence) = self.sequences.get(&slot) else { return Ok(()) };
        let Work::Receive(reception) = &sequence.work else { return Ok(()) };
        let differs = |field| EngineError::Conflict { seq_id: sequence.key.seq_id.clone(), field };
        if sequence.tokens[..] != call.prompt[..] {
            return Err(differs("prompt"));
        }
        if sequence.salt != call.options.cache_salt {
            return Err(differs("cache_salt"));
        }
        if !reception.commits.is_empty() {
            return Err(differs("seq_id"));
        }
        let end = reception.end;
        check_bound("begin", call.begin, call.begin == end, &format!("{end}, the end that was prepared"))
    }

    fn start_prepared(&mut self, slot: Slot, call: &StartGenerate, request: RequestId, sampler: Sampler) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        sequence.priority = call.options.priority;
        sequence.arrived = self.now;
        sequence.deadline = deadline(self.now, call.options.timeout);
        if let Work::Receive(reception) = &mut sequence.work {
            reception.lease.renew(self.now);
            reception.start = Some(PendingStart { request, sampler });
        }
    }

    fn choice(
        &self,
        call: &StartGenerate,
        key: &CallKey,
        request: RequestId,
        index: u32,
        sampler: Sampler,
        behind: Option<Slot>,
    ) -> Sequence {
        Sequence {
            key: key.clone(),
            salt: call.options.cache_salt.clone(),
            priority: call.options.priority,
            arrived: self.now,
            since: self.now,
            deadline: deadline(self.now, call.options.timeout),
            tokens: call.prompt.to_vec(),
            prompt_len: u32::try_from(call.prompt.len()).expect("checked at the door"),
            computed: 0,
            pages: Pages::Nothing,
            state: State::Waiting,
            work: Work::Generate(Choice { request, index, sampler: Some(sampler), behind }),
            preemptions: 0,
        }
    }

    /// Makes the samplers of all choices, replayed output and grammars included.
    fn samplers(&self, call: &mut StartGenerate) -> Result<Vec<Sampler>, EngineError> {
        let (prompt, replayed) = call.prompt.split_at(call.generated_from as usize);
        let mut ends: Vec<TokenId> = call.stop_tokens.clone();
        ends.extend_from_slice(&self.info.executor.eos_tokens);
        let mut constraints = std::mem::take(&mut call.constraints).into_iter();
        (0..call.n)
            .map(|index| {
                let mut sampler = Sampler::new(call.sampling.clone(), call.first_choice + index, prompt)
                    .with_min_tokens(call.min_tokens, &ends);
                if let Some(constraint) = constraints.next() {
                    sampler = sampler.with_constraint(constraint);
                }
                for token in replayed {
                    sampler.replay(*token).map_err(|error| replay_error(&error))?;
                }
                Ok(sampler)
            })
            .collect()
    }
}

fn replay_error(error: &SampleError) -> EngineError {
    EngineError::InvalidField { field: "generated_from", reason: format!("the output does not fit: {error}") }
}

/// Hashes what decides a generation's tokens; who waits for them, and how long, is no part of it.
fn start_hash(call: &StartGenerate) -> u64 {
    body_hash(&(
        (&call.prompt, call.begin, call.generated_from, call.n, call.first_choice),
        // Floats have no `Hash`; their shortest text is exact.
        format!("{:?}", call.sampling),
        (call.max_tokens, call.min_tokens, &call.stop_tokens, call.ignore_eos),
        (call.constraints.len(), &call.options.cache_salt),
    ))
}
