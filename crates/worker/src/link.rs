//! The front's end of the stream for transfers: calls that wait for their answer, and a thread that hears all the rest.

use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use microserving_protocol::Generation;
use microserving_transport::{Admission, Refusal, TransportError, TransportEvent};

use crate::WorkerError;
use crate::lost::LostWorker;
use crate::transfers::{ADMIT, ANSWER, Answer, ENDS, NEWS, News, admitted};
use crate::wire::{Frames, Malformed, Out};

/// What is called when there is news, from the link's thread.
type Waker = Arc<dyn Fn() + Send + Sync>;

/// Shared by the transport, its memory and the thread.
pub(crate) struct Link {
    /// The transport's name.
    pub(crate) name: &'static str,
    pub(crate) lost: LostWorker,
    /// Whole frames are written under the lock.
    writer: Mutex<UnixStream>,
    /// Held for the length of a call: answers come in the order of calls.
    answers: Mutex<Receiver<Answer>>,
    heard: Mutex<Heard>,
}

/// What the worker has told.
#[derive(Default)]
struct Heard {
    events: Vec<TransportEvent>,
    arrived: BTreeMap<Generation, u64>,
    admission: Option<Arc<dyn Admission>>,
    waker: Option<Waker>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("name", &self.name).field("lost", &self.lost).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// Starts hearing.
    pub(crate) fn start(
        frames: Frames,
        name: &'static str,
        lost: LostWorker,
    ) -> Result<Arc<Self>, WorkerError> {
        let system = WorkerError::system("starting to hear the worker");
        let (answer, answers) = channel();
        let writer = match frames.stream().try_clone() {
            Ok(writer) => writer,
            Err(error) => return Err(system(error)),
        };
        let link = Arc::new(Self {
            name,
            lost,
            writer: Mutex::new(writer),
            answers: Mutex::new(answers),
            heard: Mutex::default(),
        });
        let ours = Arc::clone(&link);
        // Ends with the stream: when the worker ends, or when the transport is dropped.
        let thread = std::thread::Builder::new().name("worker-news".into());
        thread.spawn(move || ours.hear(frames, &answer)).map_err(system)?;
        Ok(link)
    }

    fn hear(&self, mut frames: Frames, answer: &Sender<Answer>) {
        let error = loop {
            if let Err(error) = self.hear_one(&mut frames, answer) {
                break error;
            }
        };
        match error.kind() {
            io::ErrorKind::UnexpectedEof => self.lost.set("its process has ended"),
            _ => self.lost.set(error.to_string()),
        }
        self.wake();
    }

    fn hear_one(&self, frames: &mut Frames, answer: &Sender<Answer>) -> io::Result<()> {
        let (kind, mut body) = frames.next()?;
        match kind {
            NEWS => {
                let news = News::read(&mut body)?;
                let mut heard = lock(&self.heard);
                heard.arrived.extend(news.arrived);
                heard.events.extend(news.events);
                drop(heard);
                self.wake();
            }
            ANSWER => {
                // Nobody waits only if the transport is being dropped.
                let _ = answer.send(Answer::read(&mut body)?);
            }
            ADMIT => {
                let (number, credential) = (body.u64()?, body.bytes()?);
                let admission = lock(&self.heard).admission.clone();
                let verdict = match admission {
                    Some(admission) => admission.admit(credential),
                    None => Err(Refusal::BadCredential),
                };
                self.write(admitted(number, verdict))?;
            }
            ENDS => self.lost.set(body.text()?),
            _ => return Err(Malformed("no such news").into()),
        }
        Ok(())
    }

    fn wake(&self) {
        let waker = lock(&self.heard).waker.clone();
        if let Some(waker) = waker {
            waker();
        }
    }

    fn write(&self, frame: Out) -> io::Result<()> {
        frame.send(&mut *lock(&self.writer)).map(drop)
    }

    /// Says something that nothing answers; what it leads to comes as events.
    pub(crate) fn tell(&self, frame: Out) -> Result<(), TransportError> {
        self.write(frame).map_err(|error| self.gone(error))
    }

    /// Asks, and waits for the answer.
    pub(crate) fn ask(&self, frame: Out) -> Result<Answer, TransportError> {
        let answers = lock(&self.answers);
        self.tell(frame)?;
        match answers.recv() {
            Ok(Answer::Error(error)) => Err(error),
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.gone(error)),
        }
    }

    /// Makes an error of a worker that does not answer.
    fn gone(&self, error: impl std::error::Error + Send + Sync + 'static) -> TransportError {
        let operation = "asking the worker";
        match self.lost.reason() {
            Some(reason) => {
                let source = format!("the worker is gone: {reason}").into();
                TransportError::System { transport: self.name, operation, source }
            }
            None => TransportError::System { transport: self.name, operation, source: Box::new(error) },
        }
    }

    /// Makes an error of an answer to something else.
    pub(crate) fn astray(&self, answer: &Answer) -> TransportError {
        TransportError::System {
            transport: self.name,
            operation: "asking the worker",
            source: format!("it answered something else: {answer:?}").into(),
        }
    }

    pub(crate) fn take_events(&self, events: &mut Vec<TransportEvent>) {
        let mut heard = lock(&self.heard);
        events.append(&mut heard.events);
    }

    pub(crate) fn arrived(&self, generation: Generation) -> u64 {
        lock(&self.heard).arrived.get(&generation).copied().unwrap_or(0)
    }

    pub(crate) fn forget_arrived(&self, generation: Generation) {
        lock(&self.heard).arrived.remove(&generation);
    }

    pub(crate) fn set_admission(&self, admission: Arc<dyn Admission>) {
        lock(&self.heard).admission = Some(admission);
    }

    pub(crate) fn set_waker(&self, waker: Waker) {
        lock(&self.heard).waker = Some(waker);
        // What came before would otherwise wake nobody.
        self.wake();
    }

    /// Ends the worker.
    pub(crate) fn close(&self) {
        // A stream that is closed already is as good.
        let _ = lock(&self.writer).shutdown(Shutdown::Both);
    }
}
