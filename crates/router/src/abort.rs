//! Sending aborts after whoever started something has gone away.

use std::sync::Arc;
use std::time::Duration;

use microserving_client::CallContext;
use microserving_protocol::AbortRequest;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::{Engine, Metrics};

/// Aborts that may wait. One that finds the queue full is dropped: the sequence then ends with its lease.
const QUEUE: usize = 4096;
/// Aborts on their way at once.
const CONCURRENCY: usize = 64;
/// How long an engine may take to answer one.
const PATIENCE: Duration = Duration::from_secs(2);

/// An abort that must still be sent.
#[derive(Debug)]
pub(crate) struct Abort {
    pub(crate) engine: Arc<Engine>,
    pub(crate) request: AbortRequest,
    pub(crate) request_id: Option<Arc<str>>,
}

/// Where guards put their aborts: a drop cannot wait, so a task sends them.
#[derive(Clone, Debug)]
pub(crate) struct AbortQueue {
    sender: mpsc::Sender<Abort>,
    metrics: Arc<Metrics>,
}

impl AbortQueue {
    /// Makes a queue, and the receiver for [`send_aborts`].
    pub(crate) fn new(metrics: Arc<Metrics>) -> (Self, mpsc::Receiver<Abort>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (Self { sender, metrics }, receiver)
    }

    /// Puts an abort into the queue; does not wait.
    pub(crate) fn push(&self, abort: Abort) {
        self.metrics.aborts.inc();
        if let Err(error) = self.sender.try_send(abort) {
            warn!(%error, "an abort was not sent; the engine's lease will end instead");
        }
    }
}

/// Sends aborts until told to stop, then what is left in the queue.
pub(crate) async fn send_aborts(mut queue: mpsc::Receiver<Abort>, stop: CancellationToken) {
    let mut on_their_way = JoinSet::new();
    loop {
        let abort = tokio::select! {
            biased;
            Some(_) = on_their_way.join_next(), if on_their_way.len() >= CONCURRENCY => continue,
            abort = queue.recv(), if on_their_way.len() < CONCURRENCY => abort,
            () = stop.cancelled() => break,
        };
        let Some(abort) = abort else { break };
        on_their_way.spawn(send(abort));
        while on_their_way.try_join_next().is_some() {}
    }
    queue.close();
    while let Some(abort) = queue.recv().await {
        on_their_way.spawn(send(abort));
    }
    while on_their_way.join_next().await.is_some() {}
}

async fn send(abort: Abort) {
    let cx = CallContext { request_id: abort.request_id, ..CallContext::within(PATIENCE) };
    match abort.engine.calls().abort(&cx, &abort.request).await {
        Ok(answer) => {
            debug!(engine = abort.engine.name(), seq_id = %abort.request.seq_id, answer.aborted, "abort sent");
        }
        Err(error) => {
            debug!(engine = abort.engine.name(), seq_id = %abort.request.seq_id, %error, "abort failed");
            if error.means_down() {
                abort.engine.note_failure();
            }
        }
    }
}
