//! Patterns that are loaded as text while serving: their revisions, and the way back.
//!
//! What the text means is not this crate's business: a [`ProgramLoader`] makes programs of it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use microserving_protocol::ApiError;
use serde_json::{Value, json};

use crate::{Patterns, ProgramFactory};

/// Revisions kept of a script, the one in use included.
const MAX_REVISIONS: usize = 16;
/// Scripts at once.
const MAX_SCRIPTS: usize = 64;

/// A script cannot be used as it is written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {message}")]
pub struct BadScript {
    /// From 1.
    pub line: usize,
    /// From 1.
    pub column: usize,
    /// What is wrong there.
    pub message: String,
}

impl BadScript {
    /// Returns what the operator is told.
    #[must_use]
    pub fn to_api_error(&self) -> ApiError {
        ApiError::bad_request("source", self.to_string()).with_code("bad_script")
    }
}

/// How a script has done since it was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScriptCounts {
    /// Attempts at requests.
    pub runs: u64,
    /// Those that it failed by its own fault.
    pub faults: u64,
    /// What the last of them was.
    pub last_fault: Option<String>,
}

/// A pattern that was loaded as text.
pub trait Script: ProgramFactory {
    /// Returns the text.
    fn source(&self) -> &str;

    /// Returns the pattern that serves what the script cannot.
    fn fallback(&self) -> &str;

    /// Returns how it has done.
    fn counts(&self) -> ScriptCounts;
}

/// Makes programs of text.
#[async_trait]
pub trait ProgramLoader: Send + Sync + fmt::Debug {
    /// Checks a script and makes it ready. Changes nothing.
    ///
    /// # Errors
    /// The first thing that is wrong with it, and where.
    fn load(&self, name: &str, source: &str, patterns: &Patterns) -> Result<Arc<dyn Script>, BadScript>;

    /// Runs a script over a recorded trace, or over a small one of its own, and tells what it would have called. No engine is called, and
    /// nothing changes.
    ///
    /// # Errors
    /// 400 if the script or the trace cannot be used.
    async fn dry_run(
        &self,
        name: &str,
        source: &str,
        patterns: &Patterns,
        trace: Option<&[u8]>,
    ) -> Result<Value, ApiError>;
}

/// The scripts of a router.
#[derive(Debug)]
pub(crate) struct Scripts {
    loader: Option<Arc<dyn ProgramLoader>>,
    entries: Mutex<BTreeMap<String, Entry>>,
}

/// The revisions of one script, the one in use last.
#[derive(Debug)]
struct Entry {
    next_revision: u64,
    revisions: Vec<Revision>,
}

#[derive(Clone, Debug)]
struct Revision {
    number: u64,
    script: Arc<dyn Script>,
}

impl Scripts {
    pub(crate) fn new(loader: Option<Arc<dyn ProgramLoader>>) -> Self {
        Self { loader, entries: Mutex::default() }
    }

    /// Returns whoever makes programs of text.
    pub(crate) fn loader(&self) -> Result<&Arc<dyn ProgramLoader>, ApiError> {
        self.loader.as_ref().ok_or_else(|| {
            ApiError::new(501, "this router was built without a script loader").with_code("no_script_loader")
        })
    }

    /// Returns what the audit says of a script: the number of its revision in use, or nothing.
    pub(crate) fn in_audit(&self, name: &str) -> Value {
        let entries = self.entries();
        let newest = entries.get(name).and_then(|entry| entry.revisions.last());
        match newest {
            Some(revision) => json!({"script": name, "script_revision": revision.number}),
            None => json!({"script": null}),
        }
    }

    /// Loads a script, and puts it in the place of the one of its name. Requests in flight end under what they began with.
    pub(crate) fn put(&self, patterns: &Patterns, name: &str, source: &str) -> Result<Value, ApiError> {
        let script = self.loader()?.load(name, source, patterns).map_err(|bad| bad.to_api_error())?;
        let mut entries = self.entries();
        if !entries.contains_key(name) {
            if patterns.factory(name).is_some() {
                let message = format!("{name} is a pattern already, and no script");
                return Err(ApiError::conflict(message).with_param("name"));
            }
            if entries.len() >= MAX_SCRIPTS {
                return Err(ApiError::conflict(format!("there are {MAX_SCRIPTS} scripts already")));
            }
        }
        patterns
            .register(script.clone())
            .map_err(|error| ApiError::bad_request(error.field(), error.to_string()))?;
        let entry = entries
            .entry(name.to_owned())
            .or_insert_with(|| Entry { next_revision: 1, revisions: Vec::new() });
        entry.revisions.push(Revision { number: entry.next_revision, script });
        entry.next_revision += 1;
        if entry.revisions.len() > MAX_REVISIONS {
            entry.revisions.remove(0);
        }
        Ok(entry.to_json(name))
    }

    /// Puts the revision before the one in use back into use.
    pub(crate) fn roll_back(&self, patterns: &Patterns, name: &str) -> Result<Value, ApiError> {
        let mut entries = self.entries();
        let entry = entries.get_mut(name).ok_or_else(|| no_script(name))?;
        let [.., before, _] = &entry.revisions[..] else {
            let message = format!("the script {name} has no revision before the one in use");
            return Err(ApiError::conflict(message).with_code("no_earlier_revision"));
        };
        patterns
            .register(before.script.clone())
            .map_err(|error| ApiError::conflict(error.to_string()).with_param(error.field()))?;
        entry.revisions.pop();
        Ok(entry.to_json(name))
    }

    /// Takes a script away.
    pub(crate) fn remove(&self, patterns: &Patterns, name: &str) -> Result<(), ApiError> {
        let mut entries = self.entries();
        if !entries.contains_key(name) {
            return Err(no_script(name));
        }
        patterns
            .unregister(name)
            .map_err(|error| ApiError::conflict(error.to_string()).with_param("name"))?;
        entries.remove(name);
        Ok(())
    }

    /// Returns one script with its text.
    pub(crate) fn get(&self, name: &str) -> Result<Value, ApiError> {
        self.entries().get(name).map(|entry| entry.to_json(name)).ok_or_else(|| no_script(name))
    }

    /// Returns the text of a script.
    pub(crate) fn source(&self, name: &str) -> Result<String, ApiError> {
        let entries = self.entries();
        let newest = entries.get(name).and_then(|entry| entry.revisions.last());
        newest.map(|revision| revision.script.source().to_owned()).ok_or_else(|| no_script(name))
    }

    /// Returns all scripts, without their texts.
    pub(crate) fn list(&self) -> Vec<Value> {
        let shown = |(name, entry): (&String, &Entry)| {
            let mut shown = entry.to_json(name);
            if let Some(fields) = shown.as_object_mut() {
                fields.shift_remove("source");
            }
            shown
        };
        self.entries().iter().map(shown).collect()
    }

    fn entries(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn to_json(&self, name: &str) -> Value {
        let Some(Revision { number, script }) = self.revisions.last() else { return Value::Null };
        let counts = script.counts();
        let parameters: Vec<Value> = script.parameters().iter().map(crate::Parameter::to_json).collect();
        let earlier: Vec<u64> = self.revisions.iter().rev().skip(1).map(|revision| revision.number).collect();
        json!({
            "name": name,
            "revision": number,
            "earlier_revisions": earlier,
            "fallback": script.fallback(),
            "parameters": parameters,
            "runs": counts.runs,
            "faults": counts.faults,
            "last_fault": counts.last_fault,
            "source": script.source(),
        })
    }
}

fn no_script(name: &str) -> ApiError {
    ApiError::not_found(format!("there is no script {name:?}"))
        .with_param("name")
        .with_code("script_not_found")
}
