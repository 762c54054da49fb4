//! The context cache's events, for those who keep an index of them.

use std::collections::VecDeque;

use microserving_kvcache::{KvChange, KvEvent, KvSnapshot};
use microserving_protocol::Incarnation;
use tokio::sync::watch;

use crate::{Call, EngineError, EngineHandle, Reply};

/// What a follower gets at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventBatch {
    /// The boot that the numbers count in: a follower of another one starts again.
    pub incarnation: Incarnation,
    /// Set when the events asked for are not at hand: forget everything and begin with this.
    pub snapshot: Option<KvSnapshot>,
    /// The changes after that, in order and without a gap.
    pub events: Vec<KvEvent>,
    /// The number to ask for next.
    pub next: u64,
}

/// The last events, bounded; asked by any number of followers, each at its own pace.
#[derive(Debug)]
pub(crate) struct EventHistory {
    events: VecDeque<KvEvent>,
    /// The number of the first event at hand, or of the next one if there is none.
    first: u64,
    next: u64,
    capacity: usize,
}

impl EventHistory {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { events: VecDeque::new(), first: 0, next: 0, capacity }
    }

    /// Takes over what the cache has reported.
    pub(crate) fn extend(&mut self, events: Vec<KvEvent>) {
        for event in events {
            self.next = event.seq + 1;
            if event.change == KvChange::Gap {
                self.events.clear();
                self.first = self.next;
                continue;
            }
            if self.events.is_empty() {
                self.first = event.seq;
            }
            self.events.push_back(event);
            if self.events.len() > self.capacity {
                self.events.pop_front();
                self.first += 1;
            }
        }
    }

    /// Returns the number of the next event.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Returns the events from number `from` on, or `None` if some of them are gone or it lies in the future.
    pub(crate) fn since(&self, from: u64) -> Option<Vec<KvEvent>> {
        if from < self.first || from > self.next {
            return None;
        }
        let skip = usize::try_from(from - self.first).ok()?;
        Some(self.events.iter().skip(skip).cloned().collect())
    }
}

/// Follows an engine's context-cache events. Slow followers cost nothing: they are given a snapshot when they come back.
#[derive(Debug)]
pub struct KvEventStream {
    engine: EngineHandle,
    news: watch::Receiver<u64>,
    from: u64,
    first: bool,
}

impl KvEventStream {
    pub(crate) fn new(engine: EngineHandle, news: watch::Receiver<u64>, from: u64) -> Self {
        Self { engine, news, from, first: true }
    }

    /// Waits for events and returns all that are at hand; the first call returns at once, perhaps with none.
    ///
    /// Cancel safe: nothing is lost, the next call asks for the same events again.
    ///
    /// # Errors
    /// [`EngineError::Draining`] when the engine drains or has stopped, [`EngineError::NoRoom`] when its command queue is full.
    pub async fn next_batch(&mut self) -> Result<KvEventBatch, EngineError> {
        loop {
            if !self.first {
                let from = self.from;
                self.news.wait_for(|&next| next > from).await.map_err(|_| EngineError::Draining)?;
            }
            let reply = self.engine.call(Call::KvEvents { from: self.from }).await?;
            let Reply::KvEvents(batch) = reply else {
                return Err(EngineError::Executor { reason: "not the events asked for".into() });
            };
            let news = self.first || batch.snapshot.is_some() || !batch.events.is_empty();
            self.from = batch.next;
            if news {
                self.first = false;
                return Ok(batch);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(seq: u64, change: KvChange) -> KvEvent {
        KvEvent { seq, change }
    }

    #[test]
    fn followers_get_what_is_at_hand_or_nothing() {
        let mut history = EventHistory::new(3);
        assert_eq!(history.since(0), Some(vec![]));
        assert_eq!(history.since(1), None, "the future is another boot's");
        history.extend((0..5).map(|seq| event(seq, KvChange::Cleared)).collect());
        assert_eq!(history.next(), 5);
        assert_eq!(history.since(1), None);
        assert_eq!(history.since(2).map(|events| events.len()), Some(3));
        assert_eq!(history.since(5), Some(vec![]));
        history.extend(vec![event(7, KvChange::Gap)]);
        assert_eq!(history.since(7), None, "the gap itself cannot be followed");
        assert_eq!(history.since(8), Some(vec![]));
    }
}
