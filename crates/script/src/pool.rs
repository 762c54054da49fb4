//! The threads that scripts run on.
//!
//! A script is synchronous, so each run needs a thread until it ends. They are the pool's own and not tokio's: a script needs a known
//! stack, and a hundred of them that wait for prefills must not keep tokenizing from its threads.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Enough for the deepest expression in the deepest function, with a wide margin; it is address space, not memory, until it is used.
const STACK_BYTES: usize = 8 << 20;

type Job = (Box<dyn FnOnce() + Send>, Permit);

/// A bounded set of threads, started as they are needed.
#[derive(Debug)]
pub(crate) struct Pool {
    /// One permit a run. Whoever has one finds a thread at once.
    permits: Arc<Semaphore>,
    /// Gone when the pool is being dropped, which ends the threads.
    jobs: Option<Sender<Job>>,
    waiting: Arc<Mutex<Receiver<Job>>>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Threads with neither a job nor one on its way to them.
    idle: usize,
    threads: Vec<JoinHandle<()>>,
}

/// The right to run one script.
#[derive(Debug)]
pub(crate) struct Permit {
    _permit: OwnedSemaphorePermit,
}

impl Pool {
    /// Makes a pool of at most `size` threads; starts none.
    pub(crate) fn new(size: usize) -> Self {
        let (sender, receiver) = channel();
        Self {
            permits: Arc::new(Semaphore::new(size.clamp(1, Semaphore::MAX_PERMITS))),
            jobs: Some(sender),
            waiting: Arc::new(Mutex::new(receiver)),
            state: Arc::default(),
        }
    }

    /// Waits for a thread, in order of asking; nothing if none is free within `patience`. Cancel safe.
    pub(crate) async fn admit(&self, patience: Duration) -> Option<Permit> {
        let permit = self.permits.clone().acquire_owned();
        let permit = tokio::time::timeout(patience, permit).await.ok()?.ok()?;
        Some(Permit { _permit: permit })
    }

    /// Runs a job that does not panic. The permit is given back when the job has ended, whoever still waits for it.
    pub(crate) fn run(&self, permit: Permit, job: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let job: Job = (Box::new(job), permit);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.idle > 0 {
            state.idle -= 1;
        } else {
            let (waiting, shared) = (self.waiting.clone(), self.state.clone());
            let thread = std::thread::Builder::new()
                .name("script".to_owned())
                .stack_size(STACK_BYTES)
                .spawn(move || work(&waiting, &shared))?;
            state.threads.push(thread);
        }
        if let Some(jobs) = &self.jobs {
            // The receiver lives as long as the pool.
            let _ = jobs.send(job);
        }
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn num_threads(&self) -> usize {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).threads.len()
    }
}

impl Drop for Pool {
    /// Waits for the threads. Their requests are over by now, so whatever they run ends at its next operation.
    fn drop(&mut self) {
        self.jobs = None;
        let threads = std::mem::take(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner).threads);
        for thread in threads {
            let _ = thread.join();
        }
    }
}

fn work(waiting: &Mutex<Receiver<Job>>, state: &Mutex<State>) {
    loop {
        // One thread holds the lock while it waits; the next one waits for the lock. A guard must not outlive this line.
        let job = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((job, permit)) = job else { return };
        job();
        // In this order, so that there are never more threads than permits.
        state.lock().unwrap_or_else(PoisonError::into_inner).idle += 1;
        drop(permit);
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn threads_are_bounded_and_used_again() {
        let pool = Pool::new(2);
        let mut ends = Vec::new();
        for _ in 0..2 {
            let (end, wait) = oneshot::channel::<()>();
            let permit = pool.admit(SOON).await.expect("free");
            pool.run(permit, move || drop(wait.blocking_recv())).expect("a thread");
            ends.push(end);
        }
        assert!(pool.admit(Duration::from_millis(20)).await.is_none(), "both are busy");
        ends.pop();
        for _ in 0..20 {
            let (done, wait) = oneshot::channel();
            let permit = pool.admit(SOON).await.expect("one is free again");
            pool.run(permit, move || done.send(()).expect("it is waited for")).expect("a thread");
            wait.await.expect("it runs");
        }
        assert_eq!(pool.num_threads(), 2);
        drop(ends);
    }
}
