//! A transport in another process, driven from this one: so that the suite runs where a process can hold but one end.
//!
//! [`serve`] runs in the other process and does what it is told by a [`Remote`] here. Calls and answers are lines of numbers and text in
//! hexadecimal; only the two ends read them.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory, KvRange, MemoryKind};

use crate::{
    Admission, ByteRun, ChannelId, Claim, Grant, KvTransport, PeerAddress, PutRun, Refusal, Telemetry,
    TransportError, TransportEvent,
};

/// The two connections to a process: calls with their answers, and wakes.
#[derive(Debug)]
pub struct Remote {
    line: Arc<Mutex<Line>>,
    wakes: Option<UnixStream>,
}

impl Remote {
    /// Takes the connections that [`serve`] has the other ends of.
    ///
    /// # Errors
    /// If a connection cannot be shared.
    pub fn new(calls: UnixStream, wakes: UnixStream) -> std::io::Result<Self> {
        Ok(Self { line: Arc::new(Mutex::new(Line::new(calls)?)), wakes: Some(wakes) })
    }

    /// Has the process make its transport anew, and does not wait for it: making one may take all processes of a world together.
    pub fn begin_making(&self, checksum: bool) {
        self.line.lock().expect("one thread").say("make", &[u64::from(checksum).to_string()]);
    }

    /// Waits for the transport.
    ///
    /// # Panics
    /// If it could not be made.
    #[must_use]
    pub fn made(&self) -> Box<dyn KvTransport> {
        let answer = self.line.lock().expect("one thread").hear().expect("a transport");
        let [name, bytes] = answer.as_slice() else { panic!("what is {answer:?}?") };
        // Transports have constant names; there are few of them in a test.
        let name = String::from_utf8(unhex(name)).expect("a name").leak();
        Box::new(RemoteTransport {
            line: Arc::clone(&self.line),
            wakes: self.wakes.as_ref().map(|wakes| wakes.try_clone().expect("a connection can be shared")),
            name,
            address: PeerAddress { transport: name.to_owned(), bytes: unhex(bytes) },
            memory: None,
        })
    }

    /// Ends the other process's [`serve`].
    pub fn end(self) {
        self.line.lock().expect("one thread").say("end", &[]);
    }
}

struct Line {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Line")
    }
}

impl Line {
    fn new(stream: UnixStream) -> std::io::Result<Self> {
        Ok(Self { reader: BufReader::new(stream.try_clone()?), writer: stream })
    }

    fn say(&mut self, verb: &str, words: &[String]) {
        writeln!(self.writer, "{}", line_of(verb, words)).expect("the other process lives");
    }

    /// Reads an answer: `ok` and its words, or an error of the contract.
    fn hear(&mut self) -> Result<Vec<String>, TransportError> {
        let mut line = String::new();
        self.reader.read_line(&mut line).expect("the other process lives");
        let mut words = line.split_whitespace().map(str::to_owned);
        match words.next().as_deref() {
            Some("ok") => Ok(words.collect()),
            Some(kind) => {
                let reason = String::from_utf8(unhex(&words.next().unwrap_or_default())).expect("text");
                Err(match kind {
                    "unreachable" => TransportError::Unreachable { transport: "remote", reason },
                    _ => TransportError::Misuse { transport: "remote", reason },
                })
            }
            None => panic!("the other process ended"),
        }
    }

    fn call(&mut self, verb: &str, words: &[String]) -> Result<Vec<String>, TransportError> {
        self.say(verb, words);
        self.hear()
    }

    /// For calls that cannot fail.
    fn call_if_it_lives(&mut self, verb: &str, words: &[String]) -> Option<Vec<String>> {
        writeln!(self.writer, "{}", line_of(verb, words)).ok()?;
        let mut line = String::new();
        self.reader.read_line(&mut line).ok()?;
        line.strip_prefix("ok").map(|words| words.split_whitespace().map(str::to_owned).collect())
    }
}

fn line_of(verb: &str, words: &[String]) -> String {
    std::iter::once(verb).chain(words.iter().map(String::as_str)).collect::<Vec<_>>().join(" ")
}

fn hex(bytes: &[u8]) -> String {
    // A word is never empty.
    std::iter::once("x".to_owned()).chain(bytes.iter().map(|byte| format!("{byte:02x}"))).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.strip_prefix('x').expect("bytes");
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).expect("digits"))
        .collect()
}

#[derive(Debug)]
struct RemoteTransport {
    line: Arc<Mutex<Line>>,
    wakes: Option<UnixStream>,
    name: &'static str,
    address: PeerAddress,
    memory: Option<Arc<RemoteMemory>>,
}

impl RemoteTransport {
    fn call(&self, verb: &str, words: &[String]) -> Result<Vec<String>, TransportError> {
        self.line.lock().expect("one thread").call(verb, words)
    }

    fn tell(&self, verb: &str, words: &[String]) {
        self.call(verb, words).expect("it cannot fail");
    }

    /// As [`Self::call`], but a process that was killed answers nothing, which is no failure.
    fn call_if_it_lives(&self, verb: &str, words: &[String]) -> Vec<String> {
        self.line.lock().expect("one thread").call_if_it_lives(verb, words).unwrap_or_default()
    }
}

impl Drop for RemoteTransport {
    fn drop(&mut self) {
        self.call_if_it_lives("drop", &[]);
    }
}

#[derive(Debug)]
struct RemoteMemory {
    line: Arc<Mutex<Line>>,
    num_bytes: usize,
}

impl KvMemory for RemoteMemory {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    fn base_address(&self) -> usize {
        0
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        let words = [offset.to_string(), into.len().to_string()];
        let answer = self.line.lock().expect("one thread").call("read", &words).expect("memory");
        into.copy_from_slice(&unhex(&answer[0]));
    }

    fn write(&self, offset: usize, from: &[u8]) {
        let words = [offset.to_string(), hex(from)];
        self.line.lock().expect("one thread").call("write", &words).expect("memory");
    }
}

/// Admits everybody to one generation.
#[derive(Debug)]
struct To(Generation);

impl Admission for To {
    fn admit(&self, _: &[u8]) -> Result<Generation, Refusal> {
        Ok(self.0)
    }
}

impl KvTransport for RemoteTransport {
    fn name(&self) -> &'static str {
        self.name
    }

    fn peer_address(&self) -> PeerAddress {
        self.address.clone()
    }

    fn allocate_region(&mut self, num_bytes: usize) -> Result<Arc<dyn KvMemory>, TransportError> {
        self.call("allocate", &[num_bytes.to_string()])?;
        let memory = Arc::new(RemoteMemory { line: Arc::clone(&self.line), num_bytes });
        self.memory = Some(Arc::clone(&memory));
        Ok(memory)
    }

    /// Admits everybody to the generation that `admission` has for an empty credential.
    fn set_admission(&mut self, admission: Arc<dyn Admission>) {
        let generation = admission.admit(&[]).expect("a remote transport admits all to one generation");
        self.tell("admit", &[generation.0.to_string()]);
    }

    fn set_waker(&mut self, waker: Arc<dyn Fn() + Send + Sync>) {
        self.tell("wake", &[]);
        if let Some(wakes) = self.wakes.take() {
            std::thread::spawn(move || {
                let mut byte = [0];
                while std::io::Read::read(&mut &wakes, &mut byte).is_ok_and(|read| read == 1) {
                    waker();
                }
            });
        }
    }

    fn grant(&mut self, grant: Grant) -> Result<(), TransportError> {
        let (begin, end) = (grant.range.begin(), grant.range.end());
        let mut words = vec![grant.generation.0.to_string(), begin.to_string(), end.to_string()];
        words.push(grant.token_bytes.to_string());
        words.extend(grant.runs.iter().flat_map(|run| [run.offset.to_string(), run.num_bytes.to_string()]));
        self.call("grant", &words).map(drop)
    }

    fn arrived_bytes(&self, generation: Generation) -> u64 {
        let answer = self.call("arrived", &[generation.0.to_string()]).expect("a number");
        answer[0].parse().expect("a number")
    }

    fn revoke(&mut self, generation: Generation) {
        self.tell("revoke", &[generation.0.to_string()]);
    }

    fn open(&mut self, claim: Claim) -> Result<ChannelId, TransportError> {
        let words = [
            hex(claim.peer.transport.as_bytes()),
            hex(&claim.peer.bytes),
            hex(&claim.credential),
            claim.range.begin().to_string(),
            claim.range.end().to_string(),
        ];
        self.call("open", &words).map(|answer| ChannelId(answer[0].parse().expect("a number")))
    }

    fn put(&mut self, channel: ChannelId, runs: &[PutRun]) -> Result<(), TransportError> {
        let mut words = vec![channel.0.to_string()];
        let numbers = |run: &PutRun| [run.local_offset, run.remote_offset, run.num_bytes];
        words.extend(runs.iter().flat_map(numbers).map(|number| number.to_string()));
        self.call("put", &words).map(drop)
    }

    fn finish(&mut self, channel: ChannelId) {
        self.tell("finish", &[channel.0.to_string()]);
    }

    fn cancel(&mut self, channel: ChannelId) {
        self.tell("cancel", &[channel.0.to_string()]);
    }

    fn poll(&mut self, now: Duration, events: &mut Vec<TransportEvent>) {
        let answer = self.call_if_it_lives("poll", &[now.as_nanos().to_string()]);
        events.extend(answer.iter().map(|text| event_of(text)));
    }

    fn telemetry(&self) -> Telemetry {
        let answer = self.call("telemetry", &[]).expect("numbers");
        let number = |at: usize| answer[at].parse::<u64>().expect("a number");
        Telemetry {
            bytes_sent: number(0),
            bytes_received: number(1),
            send_busy: Duration::from_nanos(number(2)),
            claims_refused: number(3),
            checksum_failures: number(4),
            fences: number(5),
        }
    }
}

/// Does what a [`Remote`] says, with the transports that `make` makes, until it says that it ends.
///
/// # Panics
/// If the other process breaks off, or says something that is no call.
pub fn serve(
    calls: UnixStream,
    wakes: UnixStream,
    mut make: impl FnMut(bool) -> Result<Box<dyn KvTransport>, String>,
) {
    let mut line = Line::new(calls).expect("a connection can be shared");
    let mut transport: Option<Box<dyn KvTransport>> = None;
    let mut memory: Option<Arc<dyn KvMemory>> = None;
    let wakes = Arc::new(wakes);
    loop {
        let mut text = String::new();
        line.reader.read_line(&mut text).expect("the other process lives");
        let words: Vec<&str> = text.split_whitespace().collect();
        let Some((&verb, words)) = words.split_first() else { panic!("the other process ended") };
        let number = |at: usize| words[at].parse::<u64>().expect("a number");
        let size = |at: usize| words[at].parse::<usize>().expect("a number");
        let channel = || ChannelId(number(0));
        let done = Ok(Vec::new());
        let answer = match (verb, &mut transport) {
            ("end", _) => return,
            ("make", slot) => {
                memory = None;
                *slot = None;
                let made = make(number(0) != 0).expect("a transport");
                let address = made.peer_address();
                *slot = Some(made);
                Ok(vec![hex(address.transport.as_bytes()), hex(&address.bytes)])
            }
            ("drop", slot) => {
                memory = None;
                *slot = None;
                done
            }
            (verb, None) => panic!("there is no transport to {verb} with"),
            ("allocate", Some(transport)) => transport.allocate_region(size(0)).map(|allocated| {
                memory = Some(allocated);
                Vec::new()
            }),
            ("read", Some(_)) => {
                let mut bytes = vec![0; size(1)];
                memory.as_ref().expect("a region").read(size(0), &mut bytes);
                Ok(vec![hex(&bytes)])
            }
            ("write", Some(_)) => {
                memory.as_ref().expect("a region").write(size(0), &unhex(words[1]));
                done
            }
            ("admit", Some(transport)) => {
                transport.set_admission(Arc::new(To(Generation(number(0)))));
                done
            }
            ("wake", Some(transport)) => {
                let (wakes, broken) = (Arc::clone(&wakes), AtomicBool::new(false));
                transport.set_waker(Arc::new(move || {
                    if !broken.load(Ordering::Relaxed) && (&*wakes).write_all(&[1]).is_err() {
                        broken.store(true, Ordering::Relaxed);
                    }
                }));
                done
            }
            ("grant", Some(transport)) => {
                let runs = words[4..].chunks(2).map(|pair| ByteRun {
                    offset: pair[0].parse().expect("a number"),
                    num_bytes: pair[1].parse().expect("a number"),
                });
                let range = range_of(words[1], words[2]);
                let grant = Grant {
                    generation: Generation(number(0)),
                    range,
                    token_bytes: size(3),
                    runs: runs.collect(),
                };
                transport.grant(grant).map(|()| Vec::new())
            }
            ("arrived", Some(transport)) => {
                Ok(vec![transport.arrived_bytes(Generation(number(0))).to_string()])
            }
            ("revoke", Some(transport)) => {
                transport.revoke(Generation(number(0)));
                done
            }
            ("open", Some(transport)) => {
                let name = String::from_utf8(unhex(words[0])).expect("a name");
                let claim = Claim {
                    peer: PeerAddress { transport: name, bytes: unhex(words[1]) },
                    credential: unhex(words[2]),
                    range: range_of(words[3], words[4]),
                };
                transport.open(claim).map(|channel| vec![channel.0.to_string()])
            }
            ("put", Some(transport)) => {
                let runs: Vec<_> = words[1..]
                    .chunks(3)
                    .map(|run| run.iter().map(|word| word.parse().expect("a number")).collect::<Vec<usize>>())
                    .map(|run| PutRun { local_offset: run[0], remote_offset: run[1], num_bytes: run[2] })
                    .collect();
                transport.put(channel(), &runs).map(|()| Vec::new())
            }
            ("finish", Some(transport)) => {
                transport.finish(channel());
                done
            }
            ("cancel", Some(transport)) => {
                transport.cancel(channel());
                done
            }
            ("poll", Some(transport)) => {
                let mut events = Vec::new();
                transport.poll(Duration::from_nanos(number(0)), &mut events);
                Ok(events.iter().map(event_text).collect())
            }
            ("telemetry", Some(transport)) => {
                let t = transport.telemetry();
                let busy = u64::try_from(t.send_busy.as_nanos()).unwrap_or(u64::MAX);
                let numbers =
                    [t.bytes_sent, t.bytes_received, busy, t.claims_refused, t.checksum_failures, t.fences];
                Ok(numbers.iter().map(u64::to_string).collect())
            }
            (verb, Some(_)) => panic!("{verb} is no call"),
        };
        match answer {
            Ok(words) => line.say("ok", &words),
            Err(TransportError::Unreachable { reason, .. }) => {
                line.say("unreachable", &[hex(reason.as_bytes())]);
            }
            Err(error) => line.say("misuse", &[hex(error.to_string().as_bytes())]),
        }
    }
}

fn range_of(begin: &str, end: &str) -> KvRange {
    let number = |text: &str| text.parse().expect("a number");
    KvRange::new(number(begin), number(end)).expect("ordered")
}

const REFUSALS: [Refusal; 6] = [
    Refusal::BadCredential,
    Refusal::Stale,
    Refusal::RangeTaken,
    Refusal::Revoked,
    Refusal::Unreachable,
    Refusal::PeerLost,
];

/// An event as a word without spaces.
fn event_text(event: &TransportEvent) -> String {
    let place =
        |refusal: &Refusal| REFUSALS.iter().position(|known| known == refusal).expect("all are listed");
    match event {
        TransportEvent::Opened { channel } => format!("opened/{}", channel.0),
        TransportEvent::Finished { channel, num_bytes, busy } => {
            format!("finished/{}/{num_bytes}/{}", channel.0, busy.as_nanos())
        }
        TransportEvent::Closed { channel, refusal: None } => format!("closed/{}", channel.0),
        TransportEvent::Closed { channel, refusal: Some(refusal) } => {
            format!("closed/{}/{}", channel.0, place(refusal))
        }
        TransportEvent::Complete { generation } => format!("complete/{}", generation.0),
        TransportEvent::Lost { generation, range, corrupt } => {
            format!("lost/{}/{}/{}/{}", generation.0, range.begin(), range.end(), u8::from(*corrupt))
        }
        TransportEvent::Released { generation, fenced } => {
            format!("released/{}/{}", generation.0, u8::from(*fenced))
        }
    }
}

fn event_of(text: &str) -> TransportEvent {
    let parts: Vec<&str> = text.split('/').collect();
    let number = |at: usize| parts[at].parse::<u64>().expect("a number");
    let (channel, generation) = (ChannelId(number(1)), Generation(number(1)));
    match parts[0] {
        "opened" => TransportEvent::Opened { channel },
        "finished" => {
            TransportEvent::Finished { channel, num_bytes: number(2), busy: Duration::from_nanos(number(3)) }
        }
        "closed" => {
            let refusal = parts.get(2).map(|_| REFUSALS[usize::try_from(number(2)).expect("a place")]);
            TransportEvent::Closed { channel, refusal }
        }
        "complete" => TransportEvent::Complete { generation },
        "lost" => {
            TransportEvent::Lost { generation, range: range_of(parts[2], parts[3]), corrupt: number(4) != 0 }
        }
        "released" => TransportEvent::Released { generation, fenced: number(2) != 0 },
        other => panic!("{other} is no event"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_survive_the_way() {
        let (channel, generation) = (ChannelId(3), Generation(4));
        let range = KvRange::new(5, 9).expect("ordered");
        let mut events = vec![
            TransportEvent::Opened { channel },
            TransportEvent::Finished { channel, num_bytes: 77, busy: Duration::from_nanos(12) },
            TransportEvent::Closed { channel, refusal: None },
            TransportEvent::Complete { generation },
            TransportEvent::Lost { generation, range, corrupt: true },
            TransportEvent::Released { generation, fenced: false },
        ];
        events.extend(REFUSALS.map(|refusal| TransportEvent::Closed { channel, refusal: Some(refusal) }));
        for event in events {
            assert_eq!(event_of(&event_text(&event)), event);
        }
    }
}
