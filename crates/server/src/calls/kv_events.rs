//! `GET /microserving/kv_events?from=N`.
//!
//! The engine counts changes from 0, the wire from 1: number 0 on the wire means "I know nothing", and is answered by a
//! snapshot, also when the engine still has every change since its start. A follower that lost count always asks from 0.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::Response;
use microserving_engine::{KvChange, KvEventBatch, KvEventStream};
use microserving_protocol::{ApiError, KvEvent, KvEventKind, PageHash};
use serde::Deserialize;
use tracing::debug;

use crate::app::App;
use crate::errors::{Failure, api_error};
use crate::sse;

/// The engine has no change of this number yet, so it answers with a snapshot.
const SNAPSHOT: u64 = u64::MAX;

#[derive(Debug, Deserialize)]
pub(crate) struct From {
    #[serde(default)]
    from: Option<String>,
}

/// Streams the changes of the context cache from number `from` on, a snapshot first if some are gone or `from` is 0.
pub(crate) async fn kv_events(
    State(app): State<Arc<App>>,
    query: Result<Query<From>, QueryRejection>,
) -> Result<Response, Failure> {
    let Query(query) = query.map_err(|rejection| ApiError::bad_request("from", rejection.body_text()))?;
    let from = match query.from.as_deref() {
        None | Some("") => 0,
        Some(text) => text.parse::<u64>().map_err(|_| {
            ApiError::bad_request("from", format!("from is {text:?}, must be a whole number, 0 or more"))
        })?,
    };
    let following = Some(KvEvents::from(&app, from));
    Ok(sse::response(futures::stream::unfold(following, |following| async move {
        let mut following = following?;
        match following.next().await {
            Ok(event) => Some((sse::event(&event), Some(following))),
            Err(error) => Some((sse::error(&error), None)),
        }
    })))
}

/// The changes of a context cache, without end as long as the engine lives.
#[derive(Debug)]
pub struct KvEvents {
    events: KvEventStream,
    ready: VecDeque<KvEvent>,
}

impl KvEvents {
    /// Follows the changes from number `from` on, a snapshot first if some are gone or `from` is 0.
    pub(crate) fn from(app: &App, from: u64) -> Self {
        let events = app.engine.kv_events(from.checked_sub(1).unwrap_or(SNAPSHOT));
        Self { events, ready: VecDeque::new() }
    }

    /// Waits for the next change.
    ///
    /// # Errors
    /// When the engine drains or ends; nothing comes after that.
    pub async fn next(&mut self) -> Result<KvEvent, ApiError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(event);
            }
            match self.events.next_batch().await {
                Ok(batch) => self.ready.extend(wire_events(batch)),
                Err(error) => {
                    debug!(%error, "a follower of cache events is let go");
                    return Err(api_error(&error));
                }
            }
        }
    }
}

fn wire_events(batch: KvEventBatch) -> Vec<KvEvent> {
    let incarnation = format!("{:016x}", batch.incarnation.0);
    let mut events = Vec::new();
    if let Some(snapshot) = batch.snapshot {
        // Everything up to the change before `next_seq`, which is number `next_seq` on the wire.
        events.push(KvEvent {
            incarnation: incarnation.clone(),
            number: snapshot.next_seq,
            kind: KvEventKind::Snapshot { pages: hex(&snapshot.pages) },
        });
    }
    for event in batch.events {
        let kind = match event.change {
            KvChange::Stored { pages, .. } => KvEventKind::Stored { pages: hex(&pages) },
            KvChange::Removed { pages } => KvEventKind::Removed { pages: hex(&pages) },
            KvChange::Cleared => KvEventKind::Cleared,
            // The engine answers a gap with a snapshot and never passes it on.
            KvChange::Gap => continue,
        };
        events.push(KvEvent { incarnation: incarnation.clone(), number: event.seq + 1, kind });
    }
    events
}

fn hex(pages: &[PageHash]) -> Vec<String> {
    pages.iter().map(ToString::to_string).collect()
}
