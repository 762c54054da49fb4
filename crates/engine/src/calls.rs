//! Idempotency: what was asked under which key, and what came of it.
//!
//! ```text
//!              same attempt                              lower attempt   higher attempt
//! prep_recv    the same answer                           StaleAttempt    the old one is aborted
//!              Conflict while the key generates unprepared
//! remote_send  joins the job, or the stored answer       StaleAttempt    the old one is aborted
//! start        attaches to the stream and replays        StaleAttempt    the old one is aborted
//! abort        nothing more to do                        nothing         aborts, and is remembered
//! ```
//!
//! A record lives as long as anything of its request does, and then as a tombstone: for a while, and among so many.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use microserving_protocol::{Attempt, Generation, Incarnation, KvRange, SeqId};

use crate::mutants::{Mutant, Rules};
use crate::sequence::{RequestId, Slot};
use crate::{CallKey, CommitReply, EngineError, PrepRecvReply, RemoteSendReply};

/// How a request stands as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Nothing ended it.
    Open,
    /// It was aborted.
    Aborted,
    /// The lease of its reservation ran out.
    LeaseExpired,
}

/// A `prep_recv` that was answered.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    pub(crate) body: u64,
    pub(crate) reply: PrepRecvReply,
}

/// A `remote_send` that runs or was answered.
#[derive(Clone, Debug)]
pub(crate) struct Sending {
    pub(crate) body: u64,
    /// The receiver's grant that it writes under.
    pub(crate) grant: (Incarnation, Generation),
    pub(crate) progress: SendProgress,
}

/// How far a `remote_send` has come.
#[derive(Clone, Debug)]
pub(crate) enum SendProgress {
    /// This sequence does it.
    Running(Slot),
    /// It was answered.
    Done(RemoteSendReply),
}

/// All that is known of one request on this engine.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) attempt: Attempt,
    pub(crate) fate: Fate,
    pub(crate) prepared: Option<Prepared>,
    /// The reservation, until a `start_generate`, a `commit` or its end.
    pub(crate) receiving: Option<Slot>,
    pub(crate) sends: BTreeMap<KvRange, Sending>,
    pub(crate) generation: Option<RequestId>,
    pub(crate) committed: Option<CommitReply>,
    /// Tokens in the log of its generation, once that has ended.
    logged_tokens: usize,
    /// Sequences of this request that live.
    live: u32,
    /// Since when nothing lives.
    over_since: Option<Duration>,
}

impl Record {
    fn new(attempt: Attempt) -> Self {
        Self {
            attempt,
            fate: Fate::Open,
            prepared: None,
            receiving: None,
            sends: BTreeMap::new(),
            generation: None,
            committed: None,
            logged_tokens: 0,
            live: 0,
            over_since: None,
        }
    }

    /// Says whether anything of the request lives.
    pub(crate) fn is_live(&self) -> bool {
        self.live > 0
    }
}

/// What a call finds under its key.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Nothing: the call is the first.
    Nothing,
    /// The same attempt.
    Same,
    /// A lower attempt, which is to be aborted.
    Older(Attempt),
}

/// The table.
#[derive(Debug)]
pub(crate) struct Calls {
    records: BTreeMap<SeqId, Record>,
    /// Tombstones in order of age; stale entries (the record came to life again or is gone) are skipped.
    over: VecDeque<(Duration, SeqId)>,
    ttl: Duration,
    max_tombstones: usize,
    /// Tokens in the logs of ended generations, over all records.
    logged_tokens: usize,
    max_logged_tokens: usize,
    rules: Rules,
}

impl Calls {
    pub(crate) fn new(ttl: Duration, max_tombstones: usize, max_logged_tokens: usize) -> Self {
        Self {
            records: BTreeMap::new(),
            over: VecDeque::new(),
            ttl,
            max_tombstones,
            logged_tokens: 0,
            max_logged_tokens,
            rules: Rules::RIGHT,
        }
    }

    #[cfg(feature = "mutants")]
    pub(crate) fn set_rules(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Looks a call up and says whether it may go on.
    ///
    /// # Errors
    /// `StaleAttempt` for a lower attempt; `Aborted` or `LeaseExpired` if this attempt ended so.
    pub(crate) fn find(&self, key: &CallKey) -> Result<Found, EngineError> {
        let Some(record) = self.records.get(&key.seq_id) else { return Ok(Found::Nothing) };
        if key.attempt > record.attempt {
            return Ok(Found::Older(record.attempt));
        }
        if key.attempt < record.attempt && !self.rules.break_by(Mutant::NoAttemptCheck) {
            return Err(EngineError::StaleAttempt { seq_id: key.seq_id.clone(), attempt: key.attempt });
        }
        match record.fate {
            Fate::Open => Ok(Found::Same),
            Fate::Aborted => Err(EngineError::Aborted { seq_id: key.seq_id.clone() }),
            Fate::LeaseExpired => Err(EngineError::LeaseExpired { seq_id: key.seq_id.clone() }),
        }
    }

    /// Returns the record of a request.
    pub(crate) fn get(&self, seq_id: &SeqId) -> Option<&Record> {
        self.records.get(seq_id)
    }

    /// Returns the record of a request, for changing what it holds.
    pub(crate) fn get_mut(&mut self, seq_id: &SeqId) -> Option<&mut Record> {
        self.records.get_mut(seq_id)
    }

    /// Returns the record under `key`, making it if there is none or if it is of another attempt.
    ///
    /// The caller has aborted whatever lived under a lower attempt.
    pub(crate) fn open(&mut self, key: &CallKey) -> &mut Record {
        let record = self.records.entry(key.seq_id.clone()).or_insert_with(|| Record::new(key.attempt));
        if record.attempt < key.attempt {
            debug_assert!(!record.is_live(), "the older attempt is aborted first");
            self.logged_tokens -= record.logged_tokens;
            *record = Record::new(key.attempt);
        }
        record
    }

    /// Says that the generation of a record has ended with so many tokens in its log.
    pub(crate) fn keep_log(&mut self, seq_id: &SeqId, num_tokens: usize) {
        if let Some(record) = self.records.get_mut(seq_id) {
            self.logged_tokens = self.logged_tokens - record.logged_tokens + num_tokens;
            record.logged_tokens = num_tokens;
        }
    }

    /// Lets go of a generation that has ended, and of its log.
    pub(crate) fn forget_generation(&mut self, seq_id: &SeqId) {
        self.keep_log(seq_id, 0);
        if let Some(record) = self.records.get_mut(seq_id) {
            record.generation = None;
        }
    }

    /// Counts one more thing that lives under `seq_id`.
    pub(crate) fn begin_life(&mut self, seq_id: &SeqId) {
        if let Some(record) = self.records.get_mut(seq_id) {
            record.live += 1;
            record.over_since = None;
        }
    }

    /// Counts one thing less; the last one makes the record a tombstone.
    pub(crate) fn end_life(&mut self, seq_id: &SeqId, now: Duration) {
        let Some(record) = self.records.get_mut(seq_id) else { return };
        record.live = record.live.saturating_sub(1);
        if record.live == 0 {
            self.bury(seq_id, now);
        }
    }

    /// Makes a record without life a tombstone, and drops the oldest if there are too many.
    pub(crate) fn bury(&mut self, seq_id: &SeqId, now: Duration) {
        let Some(record) = self.records.get_mut(seq_id) else { return };
        if record.is_live() || record.over_since == Some(now) {
            return;
        }
        record.over_since = Some(now);
        self.over.push_back((now, seq_id.clone()));
    }

    /// Drops tombstones that are too old or too many; returns the generations whose logs go with them.
    pub(crate) fn sweep(&mut self, now: Duration) -> Vec<RequestId> {
        let mut dropped = Vec::new();
        loop {
            let too_many =
                self.over.len() > self.max_tombstones || self.logged_tokens > self.max_logged_tokens;
            let Some((since, seq_id)) = self.over.front() else { break };
            let current = self.records.get(seq_id).is_some_and(|r| r.over_since == Some(*since));
            if current && !too_many && now < *since + self.ttl {
                break;
            }
            if let Some((_, seq_id)) = self.over.pop_front()
                && current
                && let Some(record) = self.records.remove(&seq_id)
            {
                self.logged_tokens -= record.logged_tokens;
                dropped.extend(record.generation);
            }
        }
        dropped
    }

    /// Returns when the next tombstone falls.
    pub(crate) fn next_sweep(&self) -> Option<Duration> {
        self.over.front().map(|(since, _)| *since + self.ttl)
    }

    /// Returns how many records there are.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }
}

/// Hashes a call's body for telling repetitions from misuse.
pub(crate) fn body_hash(body: &impl Hash) -> u64 {
    // Keyed with constants on purpose: equal calls must hash alike, and both come from the same caller.
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(attempt: u32) -> CallKey {
        CallKey { seq_id: SeqId::new("a"), attempt: Attempt(attempt) }
    }

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn attempts_are_ordered() {
        let mut calls = Calls::new(s(60), 8, 100);
        assert_eq!(calls.find(&key(3)), Ok(Found::Nothing));
        calls.open(&key(3));
        assert_eq!(calls.find(&key(3)), Ok(Found::Same));
        assert_eq!(calls.find(&key(4)), Ok(Found::Older(Attempt(3))));
        assert!(matches!(calls.find(&key(2)), Err(EngineError::StaleAttempt { attempt: Attempt(2), .. })));
    }

    #[test]
    fn an_ended_attempt_says_how_it_ended_until_its_tombstone_falls() {
        for (fate, is) in [
            (Fate::Aborted, EngineError::Aborted { seq_id: SeqId::new("a") }),
            (Fate::LeaseExpired, EngineError::LeaseExpired { seq_id: SeqId::new("a") }),
        ] {
            let mut calls = Calls::new(s(60), 8, 100);
            calls.open(&key(1)).fate = fate;
            calls.bury(&SeqId::new("a"), s(10));
            assert_eq!(calls.find(&key(1)), Err(is));
            assert_eq!(calls.find(&key(2)), Ok(Found::Older(Attempt(1))), "a later attempt is free to try");
            calls.sweep(s(69));
            assert!(calls.find(&key(1)).is_err());
            calls.sweep(s(70));
            assert_eq!(calls.find(&key(1)), Ok(Found::Nothing));
        }
    }

    #[test]
    fn what_lives_is_never_swept_and_tombstones_are_bounded() {
        let mut calls = Calls::new(s(60), 2, 100);
        calls.open(&key(0));
        calls.begin_life(&SeqId::new("a"));
        for name in ["b", "c", "d"] {
            let key = CallKey { seq_id: SeqId::new(name), attempt: Attempt(0) };
            calls.open(&key);
            calls.bury(&key.seq_id, s(1));
        }
        calls.sweep(s(2));
        assert_eq!(calls.len(), 3, "b is the oldest of three tombstones");
        assert!(calls.get(&SeqId::new("b")).is_none());
        calls.end_life(&SeqId::new("a"), s(3));
        calls.sweep(s(100));
        assert_eq!(calls.len(), 0);
    }

    #[test]
    fn long_logs_push_out_the_oldest() {
        let mut calls = Calls::new(s(60), 8, 100);
        for name in ["a", "b", "c"] {
            let key = CallKey { seq_id: SeqId::new(name), attempt: Attempt(0) };
            calls.open(&key);
            calls.keep_log(&key.seq_id, 45);
            calls.bury(&key.seq_id, s(1));
        }
        calls.sweep(s(2));
        assert!(calls.get(&SeqId::new("a")).is_none());
        assert_eq!(calls.len(), 2);
        let later = CallKey { seq_id: SeqId::new("b"), attempt: Attempt(1) };
        calls.open(&later);
        assert_eq!(calls.logged_tokens, 45, "a new attempt has no log yet");
    }

    #[test]
    fn a_record_that_lives_again_outlives_its_old_tombstone() {
        let mut calls = Calls::new(s(60), 8, 100);
        let id = SeqId::new("a");
        calls.open(&key(0));
        calls.bury(&id, s(0));
        calls.begin_life(&id);
        calls.sweep(s(61));
        assert!(calls.get(&id).is_some());
        calls.end_life(&id, s(62));
        calls.sweep(s(100));
        assert!(calls.get(&id).is_some());
        calls.sweep(s(122));
        assert!(calls.get(&id).is_none());
    }
}
