//! The engine's own thread: feeds the heart with commands and time, and delivers what it wants told.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::handle::Shared;
use crate::stream::HeardEnough;
use crate::{Call, CallId, Command, Effect, Effects, Engine, EngineError, GenerateEvent, Reply};

/// How long the thread sleeps at most, so that a missed wake-up costs time and not a hang.
const LONGEST_SLEEP: Duration = Duration::from_millis(500);

/// A call on its way to the thread.
#[derive(Debug)]
pub(crate) struct Envelope {
    pub(crate) id: CallId,
    pub(crate) call: Call,
    pub(crate) reply: oneshot::Sender<Result<Reply, EngineError>>,
    /// Where a generation's events go.
    pub(crate) events: Option<mpsc::Sender<GenerateEvent>>,
    /// Where its listener says which choices may end.
    pub(crate) heard_enough: Option<Arc<HeardEnough>>,
}

/// Owns an engine's thread: dropping it stops the engine and waits for the thread's end.
#[derive(Debug)]
pub struct EngineThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl EngineThread {
    pub(crate) fn start(
        engine: Engine,
        commands: Receiver<Envelope>,
        shared: Arc<Shared>,
        kv_events: watch::Sender<u64>,
    ) -> std::io::Result<Self> {
        let ours = Arc::clone(&shared);
        let name = format!("engine-{}", engine.info().engine_id);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let _alive = ClearOnDrop(&ours);
            Driver::new(engine, commands, &ours, kv_events).run();
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Stops the engine and waits for its thread; calls that are still open are answered [`EngineError::Draining`].
    ///
    /// Returns false if the thread had panicked.
    pub fn join(mut self) -> bool {
        self.stop()
    }

    fn stop(&mut self) -> bool {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.bell.ring();
        self.thread.take().is_none_or(|thread| thread.join().is_ok())
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Says that the thread is over, also when it unwinds.
struct ClearOnDrop<'a>(&'a Shared);

impl Drop for ClearOnDrop<'_> {
    fn drop(&mut self) {
        self.0.alive.store(false, Ordering::Release);
    }
}

/// Where one call's answers go.
struct Caller {
    /// Taken by the reply.
    reply: Option<oneshot::Sender<Result<Reply, EngineError>>>,
    /// Kept until the last event.
    events: Option<mpsc::Sender<GenerateEvent>>,
    heard_enough: Option<Arc<HeardEnough>>,
}

impl Caller {
    fn is_gone(&self) -> bool {
        match (&self.reply, &self.events) {
            (Some(reply), _) => reply.is_closed(),
            (None, Some(events)) => events.is_closed(),
            (None, None) => false,
        }
    }
}

struct Driver<'a> {
    engine: Engine,
    commands: Receiver<Envelope>,
    callers: BTreeMap<CallId, Caller>,
    shared: &'a Shared,
    /// Gone once the engine drains: followers would otherwise hold up a daemon that waits for its last request.
    kv_events: Option<watch::Sender<u64>>,
    origin: Instant,
}

impl<'a> Driver<'a> {
    fn new(
        engine: Engine,
        commands: Receiver<Envelope>,
        shared: &'a Shared,
        kv_events: watch::Sender<u64>,
    ) -> Self {
        Self {
            engine,
            commands,
            callers: BTreeMap::new(),
            shared,
            kv_events: Some(kv_events),
            origin: Instant::now(),
        }
    }

    fn run(&mut self) {
        self.shared.bell.answer_here();
        let bell = Arc::clone(&self.shared.bell);
        self.engine.set_waker(Arc::new(move || bell.ring()));
        while !self.shared.stop.load(Ordering::Acquire) {
            let (commands, all_handles_gone) = self.take_commands();
            let idle = commands.is_empty();
            let began = self.origin.elapsed();
            let effects = self.engine.step(began, commands.into_iter());
            if let Some(modelled) = effects.modelled {
                // The modelled device would be busy for so long; what the step yields is not there earlier.
                let spent = self.origin.elapsed().saturating_sub(began);
                std::thread::sleep(modelled.saturating_sub(spent));
            }
            let computed = effects.computed;
            if computed {
                self.engine.note_step(self.origin.elapsed().saturating_sub(began));
            }
            let delivered = self.deliver(effects);
            if idle && !computed && !delivered {
                if all_handles_gone && self.callers.is_empty() && self.engine.is_idle() {
                    return;
                }
                self.sleep();
            }
        }
    }

    fn take_commands(&mut self) -> (Vec<Command>, bool) {
        let mut commands = Vec::new();
        let mut all_handles_gone = false;
        loop {
            match self.commands.try_recv() {
                Ok(envelope) => {
                    let Envelope { id, call, reply, events, heard_enough } = envelope;
                    self.callers.insert(id, Caller { reply: Some(reply), events, heard_enough });
                    commands.push(Command::Call { id, call });
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    all_handles_gone = true;
                    break;
                }
            }
        }
        // After the calls, so that a call given up before it was taken is still taken and then given up.
        self.callers.retain(|id, caller| {
            let choices = caller.heard_enough.as_ref().map(|heard_enough| heard_enough.take());
            let finish = choices.into_iter().flatten();
            commands.extend(finish.map(|choice| Command::FinishChoice { id: *id, choice }));
            let gone = caller.is_gone();
            if gone {
                commands.push(Command::Cancel { id: *id });
            }
            !gone
        });
        (commands, all_handles_gone)
    }

    fn deliver(&mut self, effects: Effects) -> bool {
        let delivered = !effects.effects.is_empty();
        for effect in effects.effects {
            match effect {
                Effect::Reply { call, result } => self.reply(call, result),
                Effect::Event { call, event } => self.event(call, event),
            }
        }
        if self.engine.draining {
            self.kv_events = None;
        }
        let Some(kv_events) = &self.kv_events else { return delivered };
        kv_events.send_if_modified(|seen| {
            let grown = *seen < effects.next_kv_event;
            *seen = effects.next_kv_event;
            grown
        });
        delivered
    }

    fn reply(&mut self, call: CallId, result: Result<Reply, EngineError>) {
        let Some(caller) = self.callers.get_mut(&call) else { return };
        let streams = matches!(result, Ok(Reply::Started));
        let undelivered = match caller.reply.take() {
            Some(reply) => reply.send(result).is_err(),
            None => false,
        };
        if undelivered {
            // Put a closed sender back, so that the next look finds the caller gone and tells the heart.
            let (closed, _) = oneshot::channel();
            caller.reply = Some(closed);
        } else if !streams {
            self.callers.remove(&call);
        }
    }

    fn event(&mut self, call: CallId, event: GenerateEvent) {
        let Some(caller) = self.callers.get_mut(&call) else { return };
        let last = matches!(event, GenerateEvent::Done { .. } | GenerateEvent::Failed { .. });
        let Some(events) = &caller.events else { return };
        match events.try_send(event) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Closed(_)) => return,
            Err(mpsc::error::TrySendError::Full(_)) => {
                // The stream was made with room for every token of its call, so this is a fault of ours. The stream is cut
                // rather than given a gap: its reader sees a failure.
                tracing::error!(call = call.0, "a generation stream is full; cutting it");
                caller.events = None;
                self.callers.remove(&call);
                return;
            }
        }
        if last {
            self.callers.remove(&call);
        }
    }

    fn sleep(&self) {
        let now = self.origin.elapsed();
        let wait = match self.engine.next_wakeup() {
            Some(at) => at.saturating_sub(now).min(LONGEST_SLEEP),
            None => LONGEST_SLEEP,
        };
        if !wait.is_zero() {
            std::thread::park_timeout(wait);
        }
    }
}
