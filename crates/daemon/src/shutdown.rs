//! Stopping: one token for everybody, begun by a signal or by hand.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// The daemon is to stop. Clones speak of the same event.
#[derive(Clone, Debug)]
pub struct Shutdown {
    token: CancellationToken,
    drain: Duration,
    deadline: Arc<OnceLock<Instant>>,
}

impl Shutdown {
    /// Makes one that only [`Shutdown::begin`] begins: for embedding and tests.
    #[must_use]
    pub fn manual(drain: Duration) -> Self {
        Self { token: CancellationToken::new(), drain, deadline: Arc::new(OnceLock::new()) }
    }

    /// Makes one that the first SIGTERM or SIGINT begins; the second exits the process with status 130.
    ///
    /// The task that waits for signals lives as long as the runtime: the second signal must work until the very end.
    ///
    /// # Errors
    /// If the handlers cannot be installed.
    pub fn on_signals(drain: Duration) -> std::io::Result<Self> {
        let shutdown = Self::manual(drain);
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let on_signal = shutdown.clone();
        tokio::spawn(async move {
            let mut name = next_signal(&mut terminate, &mut interrupt).await;
            info!(
                signal = name,
                drain_seconds = drain.as_secs_f64(),
                "draining; a second signal ends at once"
            );
            on_signal.begin();
            name = next_signal(&mut terminate, &mut interrupt).await;
            warn!(signal = name, "ending at once");
            // A second signal asks for exactly this: no destructor, no drain.
            std::process::exit(130);
        });
        Ok(shutdown)
    }

    /// Begins the shutdown. Idempotent.
    pub fn begin(&self) {
        self.deadline.get_or_init(|| Instant::now() + self.drain);
        self.token.cancel();
    }

    /// Says whether it has begun.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Waits until it begins. Cancel safe.
    pub async fn begun(&self) {
        self.token.cancelled().await;
    }

    /// Waits until it has begun and the time for draining is over. Cancel safe.
    pub async fn drain_over(&self) {
        self.begun().await;
        if let Some(deadline) = self.deadline.get() {
            tokio::time::sleep_until(*deadline).await;
        }
    }
}

/// SIGHUPs: somebody wants the configuration file to be read again.
#[derive(Debug)]
pub struct Hangups(tokio::signal::unix::Signal);

impl Hangups {
    /// Catches SIGHUP from now on; it no longer ends the process.
    ///
    /// # Errors
    /// If the handler cannot be installed.
    pub fn catch() -> std::io::Result<Self> {
        signal(SignalKind::hangup()).map(Self)
    }

    /// Waits for the next one. Cancel safe; several at once count as one.
    pub async fn next(&mut self) {
        if self.0.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}

async fn next_signal(
    terminate: &mut tokio::signal::unix::Signal,
    interrupt: &mut tokio::signal::unix::Signal,
) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn draining_ends_after_its_time() {
        let shutdown = Shutdown::manual(Duration::from_millis(20));
        assert!(!shutdown.has_begun());
        assert!(tokio::time::timeout(Duration::from_millis(50), shutdown.drain_over()).await.is_err());
        let begun = Instant::now();
        shutdown.begin();
        shutdown.begin();
        shutdown.begun().await;
        shutdown.clone().drain_over().await;
        assert!(begun.elapsed() >= Duration::from_millis(20));
    }
}
