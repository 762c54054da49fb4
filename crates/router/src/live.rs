//! The requests that run now, for those who want one to move.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use microserving_protocol::SeqId;
use tokio::sync::{mpsc, oneshot};

use crate::moving::Moved;
use crate::{Engine, Error};

/// Orders that may wait for a request; who finds the queue full is told that it is busy.
const QUEUE: usize = 4;
/// No engine decodes the request yet.
const NOWHERE: u32 = u32::MAX;

/// Tells a running request to move to another engine.
#[derive(Debug)]
pub(crate) struct Order {
    /// Where to; the best other one if none is named.
    pub(crate) to: Option<Arc<Engine>>,
    /// Who is told how it went.
    pub(crate) done: Done,
}

/// Who waits for the outcome of a move, if anybody does. Dropping it says that the request is over.
#[derive(Debug, Default)]
pub(crate) struct Done(Option<oneshot::Sender<Result<Moved, Error>>>);

impl Done {
    /// Makes one, and where the outcome comes.
    pub(crate) fn channel() -> (Self, oneshot::Receiver<Result<Moved, Error>>) {
        let (sender, receiver) = oneshot::channel();
        (Self(Some(sender)), receiver)
    }

    pub(crate) fn tell(self, outcome: Result<Moved, Error>) {
        if let Some(sender) = self.0 {
            // Whoever asked may have gone away.
            let _ = sender.send(outcome);
        }
    }
}

/// The requests that run now. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct LiveRequests(Arc<Mutex<HashMap<SeqId, Entry>>>);

#[derive(Debug)]
struct Entry {
    request_id: Option<String>,
    engine: Arc<AtomicU32>,
    orders: mpsc::Sender<Order>,
}

/// A request's entry; dropping it takes it out.
#[derive(Debug)]
pub(crate) struct Listed {
    requests: LiveRequests,
    seq_id: SeqId,
    engine: Arc<AtomicU32>,
    pub(crate) orders: mpsc::Receiver<Order>,
}

impl LiveRequests {
    /// Enters a request.
    pub(crate) fn enter(&self, seq_id: &SeqId, request_id: Option<&str>) -> Listed {
        let (sender, orders) = mpsc::channel(QUEUE);
        let engine = Arc::new(AtomicU32::new(NOWHERE));
        let entry =
            Entry { request_id: request_id.map(str::to_owned), engine: engine.clone(), orders: sender };
        self.entries().insert(seq_id.clone(), entry);
        Listed { requests: self.clone(), seq_id: seq_id.clone(), engine, orders }
    }

    /// Returns how to reach a request, by its sequence or by its `x-request-id`.
    pub(crate) fn find(&self, name: &str) -> Option<mpsc::Sender<Order>> {
        let entries = self.entries();
        let by_seq_id = entries.get(&SeqId::new(name));
        let entry =
            by_seq_id.or_else(|| entries.values().find(|entry| entry.request_id.as_deref() == Some(name)))?;
        Some(entry.orders.clone())
    }

    /// Tells every request that an engine decodes to move away from there; returns how many were told.
    pub(crate) fn move_away(&self, engine: &Engine) -> usize {
        let on_it: Vec<_> = {
            let entries = self.entries();
            let on_it = entries.values().filter(|e| e.engine.load(Ordering::Relaxed) == engine.number());
            on_it.map(|entry| entry.orders.clone()).collect()
        };
        on_it
            .into_iter()
            .filter(|orders| orders.try_send(Order { to: None, done: Done::default() }).is_ok())
            .count()
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<SeqId, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listed {
    /// Notes which engine decodes it now.
    pub(crate) fn set_engine(&self, engine: &Engine) {
        self.engine.store(engine.number(), Ordering::Relaxed);
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.requests.entries().remove(&self.seq_id);
    }
}
