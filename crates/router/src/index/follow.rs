//! Following the events of one engine.

use std::sync::Arc;

use futures::StreamExt;
use microserving_client::{CallContext, ClientError, KvEventStream};
use tokio::time::{Duration, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::EngineFeed;
use crate::Engine;

/// How long an engine may take to begin.
const PATIENCE: Duration = Duration::from_secs(5);
/// A stream that says nothing for so long is opened anew, at the same number: a connection may be dead without a word. The new one carries no
/// snapshot unless something was missed.
const QUIET: Duration = Duration::from_secs(30);

/// Keeps the index current with what one engine reports, until it leaves the cluster or the router stops. It leaves the index then.
pub(crate) async fn follow(engine: Arc<Engine>, mut feed: EngineFeed, stop: CancellationToken) {
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = engine.left().cancelled() => {}
        () = keep_following(&engine, &mut feed) => {}
    }
}

/// Why a stream is over.
#[derive(Debug)]
enum End {
    /// The engine is of a make that has no events.
    NoEvents,
    /// Nothing came for a while.
    Quiet,
    /// The connection, or the sense of what it carries, was lost.
    Lost { reason: String, applied: u64 },
    /// Somebody knows better: the engine was restarted, or is back.
    Woken,
}

async fn keep_following(engine: &Engine, feed: &mut EngineFeed) {
    let mut failures = 0;
    loop {
        match follow_once(engine, feed).await {
            End::NoEvents => {
                info!(engine = engine.name(), "engine reports no cache events, its cache is guessed");
                // It may come back as another make.
                feed.woken().await;
                failures = 0;
            }
            End::Quiet => failures = 0,
            End::Woken => {}
            End::Lost { reason, applied } => {
                // A stream that carried something was worth it; one that breaks at once, again and again, is not.
                failures = if applied > 1 { 0 } else { failures + 1 };
                if failures <= 1 {
                    debug!(engine = engine.name(), reason, "cache events are asked for anew");
                } else {
                    warn!(engine = engine.name(), reason, failures, "cache events cannot be followed");
                }
                if failures > 0 {
                    let _ = timeout(feed.pause(failures - 1), feed.woken()).await;
                }
            }
        }
    }
}

async fn follow_once(engine: &Engine, feed: &mut EngineFeed) -> End {
    let lost = |reason: String, applied| End::Lost { reason, applied };
    // A stream has no deadline, only its beginning has.
    let cx = CallContext::default();
    let from = feed.begin();
    let mut events: KvEventStream = match timeout(PATIENCE, engine.calls().kv_events(&cx, from)).await {
        Ok(Ok(events)) => events,
        Ok(Err(ClientError::Refused { error, .. })) if matches!(error.status, 404 | 405 | 501) => {
            return End::NoEvents;
        }
        Ok(Err(error)) => return lost(error.to_string(), 0),
        Err(_) => return lost("no answer".into(), 0),
    };
    let mut applied = 0;
    loop {
        let item = tokio::select! {
            biased;
            () = feed.woken() => return End::Woken,
            item = timeout(QUIET, events.next()) => item,
        };
        match item {
            Err(_) => return End::Quiet,
            Ok(None) => {
                engine.note_doubt();
                return lost("the stream ended".into(), applied);
            }
            Ok(Some(Err(error))) => {
                engine.note_doubt();
                return lost(error.to_string(), applied);
            }
            Ok(Some(Ok(event))) => match feed.accept(&event) {
                Ok(()) => applied += 1,
                Err(error) => return lost(error.to_string(), applied),
            },
        }
    }
}
