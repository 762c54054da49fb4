//! Counting requests that are being answered.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tracing::warn;

use crate::Shutdown;

/// Counts requests until the last byte of their answer is out.
#[derive(Clone, Debug, Default)]
pub(crate) struct InFlight {
    inner: Arc<(AtomicUsize, Notify)>,
}

impl InFlight {
    pub(crate) fn enter(&self) -> InFlightGuard {
        self.inner.0.fetch_add(1, Ordering::AcqRel);
        InFlightGuard(Arc::clone(&self.inner))
    }

    /// Waits until nothing has been in flight for all of `patience`.
    pub(crate) async fn idle_for(&self, patience: Duration) {
        loop {
            let mut emptied = pin!(self.inner.1.notified());
            emptied.as_mut().enable();
            if self.inner.0.load(Ordering::Acquire) > 0 {
                emptied.await;
                continue;
            }
            tokio::select! {
                // Something came and went meanwhile: the time counts from now.
                () = emptied => {}
                () = tokio::time::sleep(patience) => {
                    if self.inner.0.load(Ordering::Acquire) == 0 {
                        return;
                    }
                }
            }
        }
    }

    /// Waits until the shutdown has begun and either nothing is in flight or the drain is over.
    pub(crate) async fn idle_after(&self, shutdown: &Shutdown) {
        shutdown.begun().await;
        let idle = async {
            loop {
                let mut changed = pin!(self.inner.1.notified());
                changed.as_mut().enable();
                if self.inner.0.load(Ordering::Acquire) == 0 {
                    return;
                }
                changed.await;
            }
        };
        tokio::select! {
            () = idle => {}
            () = shutdown.drain_over() => {
                let in_flight = self.inner.0.load(Ordering::Acquire);
                warn!(in_flight, "the drain is over; ending requests in flight");
            }
        }
    }
}

/// One request; gives its count back when dropped.
#[derive(Debug)]
pub(crate) struct InFlightGuard(Arc<(AtomicUsize, Notify)>);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        if self.0.0.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.1.notify_waiters();
        }
    }
}
