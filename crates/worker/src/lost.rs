//! That the worker is gone, as all who depend on it see it.

use std::sync::Arc;

use tokio::sync::watch;

/// Tells that a worker is gone for good, and why. Clones speak of the same worker.
#[derive(Clone, Debug)]
pub struct LostWorker(Arc<watch::Sender<Option<String>>>);

impl LostWorker {
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::channel(None).0))
    }

    /// Notes why; the first reason stands.
    pub(crate) fn set(&self, reason: impl Into<String>) {
        self.0.send_if_modified(|seen| {
            let is_first = seen.is_none();
            if is_first {
                *seen = Some(reason.into());
            }
            is_first
        });
    }

    /// Returns why it is gone, if it is.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        self.0.borrow().clone()
    }

    /// Waits until it is gone and returns why. Cancel safe.
    pub async fn wait(&self) -> String {
        let mut seen = self.0.subscribe();
        match seen.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            // We hold the other end ourselves.
            Err(_) => String::new(),
        }
    }
}
