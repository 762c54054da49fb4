//! Closed-loop load over HTTP/1.1: each client keeps one connection and sends its next request when it has the last answer.
//!
//! It reads only as much of HTTP as our own servers write, because the measuring side shares the machine with what it measures: a
//! request costs it some microseconds. It must also be right about what it counts, so every answer's framing is read by its
//! rules, and the body is given to a check.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

/// Where a request holds the number that makes it different from all others.
pub(crate) const MARK: &str = "################";
/// Longest wait for the next byte of an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest line of a head.
const MAX_LINE_BYTES: u64 = 16 << 10;
/// After so many failures in a row a client gives up: whatever is wrong will not go away.
const MAX_FAILURES: usize = 3;

/// A request as it goes over the wire.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    address: SocketAddr,
    bytes: Vec<u8>,
    mark: usize,
}

impl Message {
    /// Makes a POST of JSON; `body` holds [`MARK`] once.
    pub(crate) fn post(
        address: SocketAddr,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Result<Self> {
        let mut text = format!(
            "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n",
            body.len()
        );
        for (name, value) in headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        text.push_str("\r\n");
        text.push_str(body);
        let mark = text.find(MARK).context("the request has no mark")?;
        Ok(Self { address, bytes: text.into_bytes(), mark })
    }

    fn set_number(&mut self, number: u64) {
        let digits = format!("{number:016x}");
        self.bytes[self.mark..self.mark + MARK.len()].copy_from_slice(digits.as_bytes());
    }
}

/// What clients do, and for how long.
pub(crate) struct Load<'a> {
    /// What each client sends; one entry a client.
    pub(crate) messages: Vec<Message>,
    /// Before anything counts.
    pub(crate) warm_up: Duration,
    /// The time that counts.
    pub(crate) measured: Duration,
    /// Says what is wrong with an answer's body.
    pub(crate) check: &'a (dyn Fn(&[u8]) -> Result<()> + Sync),
}

/// What clients saw.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Seconds to the end of each answer that came in the time that counts.
    pub(crate) whole: Vec<f64>,
    /// Seconds to the first byte of the same answers' bodies.
    pub(crate) first: Vec<f64>,
    /// Requests sent, those of the warm-up included.
    pub(crate) num_sent: u64,
    /// Those of them that failed.
    pub(crate) num_failed: u64,
    /// What was wrong with one of them.
    pub(crate) failure: Option<String>,
}

impl Load<'_> {
    /// Runs to the end; `next_number` numbers the requests, over all runs.
    pub(crate) fn run(&self, next_number: &mut u64) -> Seen {
        /// More than a client can send in one run.
        const NUMBERS: u64 = 1 << 32;
        let ready = Barrier::new(self.messages.len());
        let mut seen = Seen::default();
        std::thread::scope(|scope| {
            let clients: Vec<_> = self
                .messages
                .iter()
                .map(|message| {
                    let (ready, first) = (&ready, *next_number);
                    *next_number += NUMBERS;
                    scope.spawn(move || self.client(message.clone(), first, ready))
                })
                .collect();
            for client in clients {
                seen.add(client.join().expect("a client does not panic"));
            }
        });
        seen
    }

    fn client(&self, mut message: Message, first_number: u64, ready: &Barrier) -> Seen {
        let mut seen = Seen::default();
        let mut connection = None;
        let mut failures_in_a_row = 0;
        ready.wait();
        let begin = Instant::now() + self.warm_up;
        let end = begin + self.measured;
        while Instant::now() < end && failures_in_a_row < MAX_FAILURES {
            message.set_number(first_number + seen.num_sent);
            seen.num_sent += 1;
            let answer = exchange(&mut connection, &message);
            let now = Instant::now();
            match answer.and_then(|answer| (self.check)(&answer.body).map(|()| answer)) {
                Ok(answer) => {
                    failures_in_a_row = 0;
                    // An answer counts where it ends: then a slow one weighs as much in the rate as it took.
                    if (begin..end).contains(&now) {
                        seen.whole.push(answer.whole.as_secs_f64());
                        seen.first.push(answer.first.as_secs_f64());
                    }
                }
                Err(error) => {
                    failures_in_a_row += 1;
                    seen.num_failed += 1;
                    seen.failure = Some(format!("{error:#}"));
                    connection = None;
                }
            }
        }
        seen
    }
}

impl Seen {
    fn add(&mut self, other: Self) {
        self.whole.extend(other.whole);
        self.first.extend(other.first);
        self.num_sent += other.num_sent;
        self.num_failed += other.num_failed;
        self.failure = self.failure.take().or(other.failure);
    }
}

struct Answer {
    body: Vec<u8>,
    first: Duration,
    whole: Duration,
}

/// Sends a request and reads its answer to the end, on the connection that is there or on a new one.
fn exchange(connection: &mut Option<BufReader<TcpStream>>, message: &Message) -> Result<Answer> {
    let reader = match connection {
        Some(reader) => reader,
        None => connection.insert(connect(message.address)?),
    };
    let start = Instant::now();
    reader.get_mut().write_all(&message.bytes).context("cannot send")?;
    let mut body = Vec::new();
    let (status, framing) = read_head(reader)?;
    let mut first = None;
    match framing {
        Framing::Length(length) => {
            read_exactly(reader, length, &mut body)?;
            first = Some(start.elapsed());
        }
        Framing::Chunks => {
            while read_chunk(reader, &mut body)? {
                first.get_or_insert_with(|| start.elapsed());
            }
        }
    }
    let whole = start.elapsed();
    ensure!(status == 200, "status {status}: {}", String::from_utf8_lossy(&body));
    Ok(Answer { body, first: first.unwrap_or(whole), whole })
}

fn connect(address: SocketAddr) -> Result<BufReader<TcpStream>> {
    let stream = TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(BufReader::with_capacity(64 << 10, stream))
}

#[derive(Debug, PartialEq, Eq)]
enum Framing {
    Length(u64),
    Chunks,
}

fn read_head(reader: &mut impl std::io::BufRead) -> Result<(u16, Framing)> {
    let status = read_line(reader)?;
    let status = status
        .strip_prefix("HTTP/1.1 ")
        .and_then(|rest| rest.get(..3)?.parse().ok())
        .with_context(|| format!("not a status line: {status:?}"))?;
    let mut framing = None;
    loop {
        let line = read_line(reader)?;
        if line.is_empty() {
            return Ok((status, framing.context("the answer does not say how long it is")?));
        }
        let (name, value) = line.split_once(':').with_context(|| format!("not a header: {line:?}"))?;
        let value = value.trim();
        if name.eq_ignore_ascii_case("content-length") {
            let length = value.parse().with_context(|| format!("content-length is {value:?}"))?;
            framing = Some(Framing::Length(length));
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            ensure!(value.eq_ignore_ascii_case("chunked"), "transfer-encoding is {value:?}");
            framing = Some(Framing::Chunks);
        }
    }
}

/// Reads the next chunk into `body`; false after the last one.
fn read_chunk(reader: &mut impl std::io::BufRead, body: &mut Vec<u8>) -> Result<bool> {
    let line = read_line(reader)?;
    let size = line.split(';').next().unwrap_or_default().trim();
    let size = u64::from_str_radix(size, 16).with_context(|| format!("not a chunk size: {line:?}"))?;
    if size == 0 {
        // Trailers, up to the empty line.
        while !read_line(reader)?.is_empty() {}
        return Ok(false);
    }
    read_exactly(reader, size, body)?;
    let end = read_line(reader)?;
    ensure!(end.is_empty(), "a chunk is longer than its size");
    Ok(true)
}

fn read_exactly(reader: &mut impl std::io::BufRead, length: u64, body: &mut Vec<u8>) -> Result<()> {
    let read = reader.by_ref().take(length).read_to_end(body).context("the answer broke off")?;
    ensure!(read as u64 == length, "the connection ended within the answer");
    Ok(())
}

fn read_line(reader: &mut impl std::io::BufRead) -> Result<String> {
    let mut line = String::new();
    reader.by_ref().take(MAX_LINE_BYTES).read_line(&mut line).context("the answer broke off")?;
    let Some(text) = line.strip_suffix('\n') else { bail!("the connection ended within the answer's head") };
    Ok(text.strip_suffix('\r').unwrap_or(text).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads answers that follow each other on one connection, to the end.
    fn read(mut bytes: &[u8]) -> Result<Vec<(u16, String)>> {
        let mut answers = Vec::new();
        while !bytes.is_empty() {
            let (status, framing) = read_head(&mut bytes)?;
            let mut body = Vec::new();
            match framing {
                Framing::Length(length) => read_exactly(&mut bytes, length, &mut body)?,
                Framing::Chunks => while read_chunk(&mut bytes, &mut body)? {},
            }
            answers.push((status, String::from_utf8(body)?));
        }
        Ok(answers)
    }

    #[test]
    fn answers_are_read_by_their_framing_whatever_they_hold() {
        let bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n0\r\n\r\nHTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n5\r\n0\r\n\r\n\r\nA;x=1\r\n0123456789\r\n0\r\nt: 1\r\n\r\nHTTP/1.1 204 No\r\ncontent-length: 0\r\n\r\n";
        let expected =
            [(200, "0\r\n\r\n".to_owned()), (503, "0\r\n\r\n0123456789".into()), (204, String::new())];
        assert_eq!(read(bytes).expect("whole"), expected);
    }

    #[test]
    fn broken_answers_are_errors() {
        for (bytes, reason) in [
            ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n1234", "within the answer"),
            ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n", "within the answer's head"),
            ("HTTP/1.1 200 OK\r\n\r\n", "how long"),
            ("HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", "content-length is"),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n", "transfer-encoding is"),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabc\r\n", "longer than its size"),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "not a chunk size"),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n", "within the answer's head"),
            ("SSH-2.0\r\n", "not a status line"),
            ("HTTP/1.1 2é", "within the answer's head"),
            ("HTTP/1.1 2é\r\n", "not a status line"),
        ] {
            let error = read(bytes.as_bytes()).expect_err(bytes);
            assert!(format!("{error:#}").contains(reason), "{bytes:?}: {error:#}");
        }
    }

    #[test]
    fn requests_differ_only_in_their_number() {
        let address = "127.0.0.1:1".parse().expect("an address");
        let body = format!(r#"{{"prompt":"{MARK} and more"}}"#);
        let mut message = Message::post(address, "/x", &[("a", "b")], &body).expect("has a mark");
        message.set_number(0x2a);
        let text = String::from_utf8(message.bytes.clone()).expect("text");
        let expected = "POST /x HTTP/1.1\r\nhost: 127.0.0.1:1\r\ncontent-type: application/json\r\ncontent-length: 38\r\na: b\r\n\r\n{\"prompt\":\"000000000000002a and more\"}";
        assert_eq!(text, expected);
        assert!(Message::post(address, "/x", &[], "{}").is_err());
    }
}
