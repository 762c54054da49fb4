//! The tasks of a router, and who waits for them.

use std::future::Future;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The tasks of a router: those that follow an engine, and the one that sends aborts. Dropping it stops them at once.
#[derive(Debug)]
pub struct RouterTasks {
    spawner: Spawner,
    /// What must not go on for a moment longer than its owner.
    aborts: JoinSet<()>,
}

/// Starts tasks that end when the router stops. Clones start them for the same owner, which waits for them.
#[derive(Clone, Debug)]
pub(crate) struct Spawner {
    stop: CancellationToken,
    tracker: TaskTracker,
}

impl Spawner {
    /// Is cancelled when the router stops; every task spawned here must end then.
    pub(crate) const fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tracker.spawn(task);
    }
}

impl RouterTasks {
    pub(crate) fn new() -> Self {
        let spawner = Spawner { stop: CancellationToken::new(), tracker: TaskTracker::new() };
        Self { spawner, aborts: JoinSet::new() }
    }

    pub(crate) fn spawner(&self) -> Spawner {
        self.spawner.clone()
    }

    pub(crate) fn send_aborts(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.aborts.spawn(task);
    }

    /// Stops following engines, sends the aborts that are still queued, and waits for it.
    pub async fn stop(mut self) {
        self.spawner.stop.cancel();
        self.spawner.tracker.close();
        while self.aborts.join_next().await.is_some() {}
        self.spawner.tracker.wait().await;
    }
}

impl Drop for RouterTasks {
    fn drop(&mut self) {
        self.spawner.stop.cancel();
    }
}
