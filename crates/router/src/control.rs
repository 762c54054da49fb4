//! Changes while serving: one at a time, each checked before it is made, each with a revision and a row of the audit.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use microserving_protocol::ApiError;
use serde_json::{Value, json};
use tracing::{info, warn};

use crate::service::now_unix_seconds;
use crate::{Config, RouterService};

/// Configurations that can be returned to.
const MAX_HISTORY: usize = 100;
/// Rows of the audit that are shown; all of them are in the log.
const MAX_AUDIT: usize = 1000;

/// How a change is to be made, and by whom.
#[derive(Clone, Debug, Default)]
pub struct Change {
    /// Who makes it, for the audit.
    pub who: String,
    /// What it is, in a few words.
    pub what: String,
    /// The revision that it was thought out for; at another one it is refused. None is any.
    pub expected: Option<Vec<u64>>,
    /// Checks it and makes nothing.
    pub dry_run: bool,
    /// Sends requests on engines that leave elsewhere.
    pub force: bool,
}

impl Change {
    /// Describes a change at any revision.
    #[must_use]
    pub fn new(who: &str, what: &str) -> Self {
        Self { who: who.to_owned(), what: what.to_owned(), ..Self::default() }
    }
}

/// The revision, what it was before, and who changed it.
#[derive(Debug)]
pub(crate) struct Control {
    ledger: Mutex<Ledger>,
}

#[derive(Debug)]
struct Ledger {
    revision: u64,
    history: VecDeque<Entry>,
    audit: VecDeque<Value>,
}

#[derive(Clone, Debug)]
struct Entry {
    revision: u64,
    time: u64,
    who: String,
    what: String,
    config: Config,
}

impl Control {
    pub(crate) fn new(start: Config) -> Self {
        let entry = Entry {
            revision: 1,
            time: now_unix_seconds(),
            who: "start".into(),
            what: "start".into(),
            config: start,
        };
        let ledger = Ledger { revision: 1, history: [entry].into(), audit: VecDeque::new() };
        Self { ledger: Mutex::new(ledger) }
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn revision(&self) -> u64 {
        self.lock().revision
    }

    /// Returns the last `most` rows of the audit, newest first.
    pub(crate) fn audit(&self, most: usize) -> Vec<Value> {
        self.lock().audit.iter().rev().take(most).cloned().collect()
    }

    /// Returns what can be returned to, newest first.
    pub(crate) fn history(&self) -> Vec<Value> {
        let row = |entry: &Entry| json!({"revision": entry.revision, "time": entry.time, "who": entry.who, "what": entry.what});
        self.lock().history.iter().rev().map(row).collect()
    }

    /// Returns the configuration of a revision.
    ///
    /// # Errors
    /// 404 if it is not kept.
    pub(crate) fn at(&self, revision: u64) -> Result<Config, ApiError> {
        let ledger = self.lock();
        let entry = ledger.history.iter().find(|entry| entry.revision == revision);
        entry.map(|entry| entry.config.clone()).ok_or_else(|| {
            ApiError::not_found(format!("revision {revision} is not kept")).with_param("revision")
        })
    }
}

impl Ledger {
    /// Refuses a change that was thought out for another revision.
    fn expect(&self, change: &Change) -> Result<(), ApiError> {
        match &change.expected {
            Some(expected) if !expected.contains(&self.revision) => {
                let message =
                    format!("the revision is {}, the change was made for {expected:?}", self.revision);
                Err(ApiError::new(412, message).with_code("revision_changed"))
            }
            _ => Ok(()),
        }
    }

    /// Notes a change that was made.
    fn note(&mut self, change: &Change, before: &Config, after: Config) -> u64 {
        let (old, new) = Config::difference(before, &after);
        self.note_with(change, after, &old, &new)
    }

    /// Notes a change from `old` to `new`, after which there is this configuration.
    fn note_with(&mut self, change: &Change, config: Config, old: &Value, new: &Value) -> u64 {
        self.revision += 1;
        let time = now_unix_seconds();
        self.push(json!({
            "revision": self.revision, "time": time, "who": change.who, "what": change.what, "outcome": "applied",
            "before": old, "after": new,
        }));
        info!(
            target: "audit",
            revision = self.revision, who = change.who, what = change.what, before = %old, after = %new, "changed"
        );
        if self.history.len() == MAX_HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(Entry {
            revision: self.revision,
            time,
            who: change.who.clone(),
            what: change.what.clone(),
            config,
        });
        self.revision
    }

    fn push(&mut self, row: Value) {
        if self.audit.len() == MAX_AUDIT {
            self.audit.pop_front();
        }
        self.audit.push_back(row);
    }
}

impl RouterService {
    /// Returns the number of the configuration in force; every change makes it larger.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.control.revision()
    }

    /// Changes the configuration: `edit` gets it as it is, all of the outcome is checked, and then it is in force as a whole. Requests in
    /// flight end under what they began with. Returns the revision in force, also if nothing changed.
    ///
    /// # Errors
    /// 412 if the revision is not one of those expected; else what is wrong with the outcome. Nothing changes then.
    pub fn configure(
        &self,
        change: &Change,
        edit: impl FnOnce(&mut Config) -> Result<(), ApiError>,
    ) -> Result<u64, ApiError> {
        let mut ledger = self.control.lock();
        ledger.expect(change)?;
        let before = self.config();
        let mut next = before.clone();
        edit(&mut next)?;
        let plan = self.plan(next)?;
        if change.dry_run {
            return Ok(ledger.revision);
        }
        self.apply(plan, change.force)?;
        let after = self.config();
        if after == before {
            return Ok(ledger.revision);
        }
        if after.pattern != before.pattern {
            self.metrics().pattern_changes.inc();
        }
        Ok(ledger.note(change, &before, after))
    }

    /// Makes a change that is no edit of the configuration's text, such as an engine that joins with a caller of its own, and notes it.
    pub(crate) fn recorded<T>(
        &self,
        change: &Change,
        make: impl FnOnce() -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let mut ledger = self.control.lock();
        let before = self.config();
        let made = make()?;
        let after = self.config();
        if after != before {
            ledger.note(change, &before, after);
        }
        Ok(made)
    }

    /// Changes something that the configuration only names, such as the text of a script: it gets a revision and a row of the audit like any
    /// other. `make` returns what is answered, and for the audit what it was and what it is. Returns the answer and the revision.
    ///
    /// # Errors
    /// 412 if the revision is not one of those expected; else what `make` says. Nothing is noted then.
    pub(crate) fn recorded_beside<T>(
        &self,
        change: &Change,
        make: impl FnOnce() -> Result<(T, Value, Value), ApiError>,
    ) -> Result<(T, u64), ApiError> {
        let mut ledger = self.control.lock();
        ledger.expect(change)?;
        let (made, before, after) = make()?;
        let revision = ledger.note_with(change, self.config(), &before, &after);
        Ok((made, revision))
    }

    /// Notes that a change was refused which nobody waits for an answer to.
    pub fn note_refusal(&self, change: &Change, error: &str) {
        let mut ledger = self.control.lock();
        let revision = ledger.revision;
        warn!(target: "audit", revision, who = change.who, what = change.what, error, "refused");
        ledger.push(json!({
            "revision": revision, "time": now_unix_seconds(), "who": change.who, "what": change.what,
            "outcome": "refused", "error": error,
        }));
    }
}
