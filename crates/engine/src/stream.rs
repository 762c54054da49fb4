//! The client's end of one generation.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use futures::Stream;
use tokio::sync::mpsc;

use crate::handle::Bell;
use crate::{EngineError, GenerateEvent};

/// Choices whose listener wants no more of them; the engine's thread looks here before each step.
#[derive(Debug, Default)]
pub(crate) struct HeardEnough(Mutex<Vec<u32>>);

impl HeardEnough {
    pub(crate) fn take(&self) -> Vec<u32> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn put(&self, choice: u32) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(choice);
    }
}

/// The events of one `start_generate`; ends after [`GenerateEvent::Done`] or [`GenerateEvent::Failed`].
///
/// The engine never waits for it: the stream has room for every token that the call can yield. Dropping it gives the call
/// up within one step of the engine.
#[derive(Debug)]
pub struct GenerateStream {
    events: mpsc::Receiver<GenerateEvent>,
    over: bool,
    bell: Option<Arc<Bell>>,
    heard_enough: Arc<HeardEnough>,
}

impl GenerateStream {
    pub(crate) fn new(
        events: mpsc::Receiver<GenerateEvent>,
        bell: Arc<Bell>,
        heard_enough: Arc<HeardEnough>,
    ) -> Self {
        Self { events, over: false, bell: Some(bell), heard_enough }
    }

    /// Ends one choice after the tokens it has, as if it had reached a stop token: whoever looks for stop strings in the
    /// text calls this when it finds one.
    ///
    /// The engine hears it before its next step; tokens that were under way may still come. When every choice has ended,
    /// [`GenerateEvent::Done`] follows as usual, and the context stays cached. A choice that has ended is left alone.
    pub fn finish_choice(&self, choice: u32) {
        self.heard_enough.put(choice);
        if let Some(bell) = &self.bell {
            bell.ring();
        }
    }

    /// Returns the next event, or `None` after the last.
    ///
    /// Cancel safe: an event is either returned or still in the stream.
    pub async fn next_event(&mut self) -> Option<GenerateEvent> {
        std::future::poll_fn(|context| self.poll_event(context)).await
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<GenerateEvent>> {
        if self.over {
            return Poll::Ready(None);
        }
        let event = match self.events.poll_recv(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Some(event)) => event,
            // The engine thread ended with the sequence still running.
            Poll::Ready(None) => GenerateEvent::Failed { error: EngineError::Draining },
        };
        self.over = matches!(event, GenerateEvent::Done { .. } | GenerateEvent::Failed { .. });
        Poll::Ready(Some(event))
    }
}

impl Stream for GenerateStream {
    type Item = GenerateEvent;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_event(context)
    }
}

impl Drop for GenerateStream {
    fn drop(&mut self) {
        // Closing first, so that the engine, once awake, sees that nobody listens.
        self.events.close();
        if let Some(bell) = self.bell.take()
            && !self.over
        {
            bell.ring();
        }
    }
}
