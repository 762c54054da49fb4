//! The async face of an engine.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

use crate::stream::HeardEnough;
use crate::thread::{EngineThread, Envelope};
use crate::{
    Abort, Call, CallId, Commit, CommitReply, Device, Engine, EngineError, EngineInfo, EngineState,
    GenerateStream, KvEventStream, Pause, PauseReply, PrepRecv, PrepRecvReply, RemoteSend, RemoteSendReply,
    Reply, SequenceInfo, StartGenerate,
};

/// Wakes the engine's thread; may be rung from anywhere, any number of times, before the thread exists too.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    thread: OnceLock<Thread>,
}

impl Bell {
    /// Ties the bell to the calling thread.
    pub(crate) fn answer_here(&self) {
        // A second caller would be a second engine thread on one bell; there is none.
        let _ = self.thread.set(std::thread::current());
    }

    /// Wakes the thread, or makes its next sleep return at once.
    pub(crate) fn ring(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

/// What handles and the thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) bell: Arc<Bell>,
    /// Set by the guard; the thread ends at its next look.
    pub(crate) stop: AtomicBool,
    /// Cleared by the thread when it ends, however it ends.
    pub(crate) alive: AtomicBool,
}

/// A cheap, cloneable way to call an engine that runs on its own thread.
///
/// Every method queues one command and waits for its answer. The queue is bounded: when it is full the call is answered
/// [`EngineError::NoRoom`] at once. Dropping a method's future, or a [`GenerateStream`], gives the call up: the engine
/// notices before its next step.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    queue: SyncSender<Envelope>,
    shared: Arc<Shared>,
    info: Arc<EngineInfo>,
    next_call: Arc<AtomicU64>,
    kv_events: watch::Receiver<u64>,
    retry_after: Duration,
}

impl EngineHandle {
    /// Moves `engine` to a thread of its own. The thread ends, and is waited for, when the guard is dropped or joined.
    ///
    /// # Errors
    /// If the operating system has no thread to give.
    pub fn spawn(engine: Engine) -> std::io::Result<(Self, EngineThread)> {
        let info = Arc::new(engine.info().clone());
        let retry_after = engine.config().retry_after;
        let (queue, commands) = std::sync::mpsc::sync_channel(engine.config().command_queue);
        let shared = Arc::new(Shared {
            bell: Arc::default(),
            stop: AtomicBool::new(false),
            alive: AtomicBool::new(true),
        });
        let (kv_events, kv_events_seen) = watch::channel(0);
        let thread = EngineThread::start(engine, commands, Arc::clone(&shared), kv_events)?;
        let handle =
            Self { queue, shared, info, next_call: Arc::default(), kv_events: kv_events_seen, retry_after };
        Ok((handle, thread))
    }

    /// Returns what the engine is.
    #[must_use]
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }

    /// Says whether the engine's thread still runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.shared.alive.load(Ordering::Acquire)
    }

    /// Matches `prompt[..end]` and reserves pages for the rest of it.
    ///
    /// # Errors
    /// See [`EngineError`]; never waits for pages.
    pub async fn prep_recv(&self, call: PrepRecv) -> Result<PrepRecvReply, EngineError> {
        match self.call(Call::PrepRecv(call)).await? {
            Reply::PrepRecv(reply) => Ok(reply),
            other => Err(unexpected(&other)),
        }
    }

    /// Computes what is lacking and delivers a range to an address; returns when the receiver can read all of it.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn remote_send(&self, call: RemoteSend) -> Result<RemoteSendReply, EngineError> {
        match self.call(Call::RemoteSend(call)).await? {
            Reply::RemoteSend(reply) => Ok(reply),
            other => Err(unexpected(&other)),
        }
    }

    /// Prefills what is left of the prompt and decodes; returns as soon as the engine has accepted the call.
    ///
    /// # Errors
    /// What can be told at the door; later failures come as [`crate::GenerateEvent::Failed`].
    pub async fn start_generate(&self, call: StartGenerate) -> Result<GenerateStream, EngineError> {
        let (events, stream) = mpsc::channel(self.stream_capacity(&call));
        let heard_enough = Arc::<HeardEnough>::default();
        let stream = GenerateStream::new(stream, Arc::clone(&self.shared.bell), Arc::clone(&heard_enough));
        match self.send(Call::StartGenerate(Box::new(call)), Some((events, heard_enough))).await? {
            Reply::Started => Ok(stream),
            other => Err(unexpected(&other)),
        }
    }

    /// Gives a request up; returns whether something was given up by this call.
    ///
    /// # Errors
    /// Only if the command queue is full or the engine has stopped.
    pub async fn abort(&self, call: Abort) -> Result<bool, EngineError> {
        match self.call(Call::Abort(call)).await? {
            Reply::Aborted(aborted) => Ok(aborted),
            other => Err(unexpected(&other)),
        }
    }

    /// Keeps received KV in the context cache without generating; waits for the transfer, as long as its lease.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn commit(&self, call: Commit) -> Result<CommitReply, EngineError> {
        match self.call(Call::Commit(call)).await? {
            Reply::Committed(reply) => Ok(reply),
            other => Err(unexpected(&other)),
        }
    }

    /// Stops decoding and returns the tokens so far.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn pause(&self, call: Pause) -> Result<PauseReply, EngineError> {
        match self.call(Call::Pause(call)).await? {
            Reply::Paused(reply) => Ok(reply),
            other => Err(unexpected(&other)),
        }
    }

    /// Lists the live sequences.
    ///
    /// # Errors
    /// Only if the command queue is full or the engine has stopped.
    pub async fn sequences(&self) -> Result<Vec<SequenceInfo>, EngineError> {
        match self.call(Call::Sequences).await? {
            Reply::Sequences(reply) => Ok(reply),
            other => Err(unexpected(&other)),
        }
    }

    /// Shows one sequence.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`] if it does not live here.
    pub async fn sequence(&self, seq_id: microserving_protocol::SeqId) -> Result<SequenceInfo, EngineError> {
        match self.call(Call::Sequence(seq_id)).await? {
            Reply::Sequence(reply) => Ok(reply),
            other => Err(unexpected(&other)),
        }
    }

    /// Shows the load.
    ///
    /// # Errors
    /// Only if the command queue is full or the engine has stopped.
    pub async fn state(&self) -> Result<EngineState, EngineError> {
        match self.call(Call::State).await? {
            Reply::State(reply) => Ok(*reply),
            other => Err(unexpected(&other)),
        }
    }

    /// Follows the context cache's events from number `from` on; what is no longer at hand comes as a snapshot.
    #[must_use]
    pub fn kv_events(&self, from: u64) -> KvEventStream {
        KvEventStream::new(self.clone(), self.kv_events.clone(), from)
    }

    /// Gives the engine another device, in the place of the one that was lost: what waits goes on there.
    ///
    /// # Errors
    /// [`EngineError::InvalidField`] if the device is not like the one before; or if the command queue is full or the engine has stopped.
    pub async fn replace_device(&self, device: Device) -> Result<(), EngineError> {
        match self.call(Call::ReplaceDevice(Box::new(device))).await? {
            Reply::DeviceReplaced => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Takes nothing new from now on, and returns when nothing lives any more.
    ///
    /// # Errors
    /// Only if the command queue is full or the engine has stopped.
    pub async fn drain(&self) -> Result<(), EngineError> {
        match self.call(Call::Drain).await? {
            Reply::Drained => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) async fn call(&self, call: Call) -> Result<Reply, EngineError> {
        self.send(call, None).await
    }

    async fn send(
        &self,
        call: Call,
        listener: Option<(mpsc::Sender<crate::GenerateEvent>, Arc<HeardEnough>)>,
    ) -> Result<Reply, EngineError> {
        let (reply, answer) = oneshot::channel();
        let id = CallId(self.next_call.fetch_add(1, Ordering::Relaxed));
        let (events, heard_enough) = listener.unzip();
        match self.queue.try_send(Envelope { id, call, reply, events, heard_enough }) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                return Err(EngineError::NoRoom {
                    reason: "the command queue is full".into(),
                    retry_after: self.retry_after,
                });
            }
            Err(TrySendError::Disconnected(_)) => return Err(EngineError::Draining),
        }
        self.shared.bell.ring();
        // If this future is dropped the thread sees the closed channel; the guard makes it look.
        let ring = RingOnDrop(&self.shared.bell);
        let result = answer.await.unwrap_or(Err(EngineError::Draining));
        std::mem::forget(ring);
        result
    }

    /// Room for every event that the call can yield, so that the engine never finds a stream full.
    fn stream_capacity(&self, call: &StartGenerate) -> usize {
        let context = self.info.executor.max_context;
        let tokens = call.max_tokens.unwrap_or(context).min(context) as usize;
        // A call for more choices than this is refused at the door; the bound only keeps the product in range.
        let choices = (call.n as usize).clamp(1, 1024);
        tokens * choices + 2
    }
}

/// Wakes the engine when a call's future is dropped before its answer.
struct RingOnDrop<'a>(&'a Bell);

impl Drop for RingOnDrop<'_> {
    fn drop(&mut self) {
        self.0.ring();
    }
}

fn unexpected(reply: &Reply) -> EngineError {
    EngineError::Executor { reason: format!("the engine answered another call's reply: {reply:?}") }
}
