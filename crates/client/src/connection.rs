//! One HTTP/1.1 connection to an engine.
//!
//! The head is parsed by `httparse`, as hyper does it; what is ours is the framing of bodies and that the task of a request reads and
//! writes the socket itself. docs/adr/017 says what that saves.

use std::io::{self, IoSlice};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use microserving_protocol::RELAY_HEADER;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::pool::Pool;

/// Room for each read.
const READ_BYTES: usize = 8 << 10;
/// A buffer that has grown beyond this is not kept with an unused connection.
const KEPT_BYTES: usize = 64 << 10;
/// The largest head of an answer.
const MAX_HEAD_BYTES: usize = 64 << 10;
const MAX_HEADERS: usize = 96;
/// The longest line that says how long a chunk is, and the longest trailer.
const MAX_LINE_BYTES: usize = 4 << 10;

/// A connection, and what was read of it and not used yet.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    buffer: BytesMut,
}

/// What matters of an answer's head. A map of all headers would be made three times for a request that is disaggregated, and looked
/// into for a few of them.
#[derive(Debug, Default)]
pub(crate) struct Head {
    pub(crate) status: u16,
    /// The body is a stream of events.
    pub(crate) is_event_stream: bool,
    pub(crate) retry_after: Option<Duration>,
    /// What the engine says of marks.
    pub(crate) relay: Option<String>,
    framing: Framing,
    keep_alive: bool,
}

/// A request without an answer.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) cause: io::Error,
    /// Not one byte of an answer had come.
    pub(crate) silent: bool,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self { stream, buffer: BytesMut::new() }
    }

    /// Says whether the other side has neither closed nor said anything. Costs nothing while nothing has happened.
    pub(crate) fn is_quiet(&self) -> bool {
        let blocks = |error: io::Error| error.kind() == io::ErrorKind::WouldBlock;
        self.buffer.is_empty() && self.stream.try_read(&mut [0]).is_err_and(blocks)
    }

    /// Sends a request and reads the head of its answer.
    pub(crate) async fn exchange(&mut self, head: &[u8], body: &[Bytes]) -> Result<Head, Broken> {
        if let Err(cause) = self.write(head, body).await {
            // Who refuses a body answers before it has read it all.
            return self.read_head().await.map_err(|broken| Broken { cause, ..broken });
        }
        self.read_head().await
    }

    async fn write(&mut self, head: &[u8], body: &[Bytes]) -> io::Result<()> {
        /// Of a body's parts, those that go out in one call.
        const PARTS: usize = 7;
        let (together, rest) = body.split_at(body.len().min(PARTS));
        let mut slices = [IoSlice::new(&[]); PARTS + 1];
        slices[0] = IoSlice::new(head);
        for (slice, part) in slices[1..].iter_mut().zip(together) {
            *slice = IoSlice::new(part);
        }
        let mut slices = &mut slices[..=together.len()];
        while !slices.is_empty() {
            let written = self.stream.write_vectored(slices).await?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut slices, written);
            // What is left may be empty parts only.
            if slices.iter().all(|slice| slice.is_empty()) {
                break;
            }
        }
        for part in rest {
            self.stream.write_all(part).await?;
        }
        Ok(())
    }

    async fn read_head(&mut self) -> Result<Head, Broken> {
        loop {
            let silent = self.buffer.is_empty();
            match Head::parse(&mut self.buffer) {
                Ok(Some(head)) if (100..200).contains(&head.status) => continue,
                Ok(Some(head)) => return Ok(head),
                Ok(None) => {}
                Err(cause) => return Err(Broken { cause, silent }),
            }
            self.buffer.reserve(READ_BYTES);
            match self.stream.read_buf(&mut self.buffer).await {
                Ok(0) => {
                    let reason = "the connection was closed before an answer came";
                    return Err(Broken {
                        cause: io::Error::new(io::ErrorKind::UnexpectedEof, reason),
                        silent,
                    });
                }
                Ok(_) => {}
                Err(cause) => return Err(Broken { cause, silent }),
            }
        }
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.buffer.reserve(READ_BYTES);
        pin!(self.stream.read_buf(&mut self.buffer)).poll(cx)
    }
}

impl Head {
    /// Takes a head off the buffer; nothing if it is not all there.
    fn parse(buffer: &mut BytesMut) -> io::Result<Option<Self>> {
        if buffer.is_empty() {
            return Ok(None);
        }
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut answer = httparse::Response::new(&mut headers);
        let parsed = answer.parse(buffer).map_err(|error| invalid(format!("not an HTTP answer: {error}")))?;
        let httparse::Status::Complete(len) = parsed else {
            if buffer.len() > MAX_HEAD_BYTES {
                return Err(invalid("the answer's head is too large".into()));
            }
            return Ok(None);
        };
        let mut head = Self {
            status: answer.code.unwrap_or(0),
            keep_alive: answer.version == Some(1),
            ..Self::default()
        };
        head.read(answer.headers)?;
        buffer.advance(len);
        Ok(Some(head))
    }

    /// Says whether the engine did what it was asked for.
    pub(crate) fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    fn read(&mut self, headers: &[httparse::Header<'_>]) -> io::Result<()> {
        let (mut length, mut encoding, mut chunked) = (None, None, false);
        for httparse::Header { name, value } in headers {
            let is = |other: &str| name.eq_ignore_ascii_case(other);
            if is("content-length") {
                let number =
                    number(value).ok_or_else(|| invalid(format!("content-length is {}", shown(value))))?;
                if length.is_some_and(|other| other != number) {
                    return Err(invalid("the answer has two lengths".into()));
                }
                length = Some(number);
            } else if is("content-type") {
                self.is_event_stream = value.starts_with(b"text/event-stream");
            } else if is("transfer-encoding") {
                chunked |= lists(value, "chunked");
                encoding = Some(*value);
            } else if is("connection") {
                self.keep_alive &= !lists(value, "close");
            } else if is("retry-after") {
                self.retry_after = number(value).map(Duration::from_secs);
            } else if is(RELAY_HEADER) {
                self.relay = Some(String::from_utf8_lossy(value).into_owned());
            }
        }
        if let (Some(encoding), false) = (encoding, chunked) {
            return Err(invalid(format!("transfer-encoding is {}", shown(encoding))));
        }
        // RFC 9112, section 6.3.
        self.framing = match (self.status, chunked, length) {
            (100..200 | 204 | 304, _, _) => Framing::Length(0),
            (_, true, _) => Framing::Chunks(Chunk::Size),
            (_, false, Some(length)) => Framing::Length(length),
            (_, false, None) => Framing::UntilClosed,
        };
        Ok(())
    }
}

/// Says whether a list of words has one of them, however it is spelt.
fn lists(value: &[u8], word: &str) -> bool {
    value.split(|&byte| byte == b',').any(|part| part.trim_ascii().eq_ignore_ascii_case(word.as_bytes()))
}

fn number(value: &[u8]) -> Option<u64> {
    std::str::from_utf8(value).ok()?.trim().parse().ok()
}

fn shown(value: &[u8]) -> String {
    format!("{:?}", String::from_utf8_lossy(value))
}

/// How an answer's end is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Framing {
    /// So many bytes are still to come.
    Length(u64),
    Chunks(Chunk),
    #[default]
    UntilClosed,
    Ended,
}

/// Where in a chunked body we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chunk {
    Size,
    Data(u64),
    /// The line end behind the data.
    End,
    Trailers,
}

impl Framing {
    /// Takes what the buffer holds of the body. Whole chunks that came together leave together.
    fn take(&mut self, buffer: &mut BytesMut) -> io::Result<Bytes> {
        match self {
            Self::Ended => Ok(Bytes::new()),
            Self::UntilClosed => Ok(buffer.split().freeze()),
            Self::Length(left) => {
                let len = usize::try_from(*left).unwrap_or(usize::MAX).min(buffer.len());
                *left -= len as u64;
                if *left == 0 {
                    *self = Self::Ended;
                }
                Ok(buffer.split_to(len).freeze())
            }
            Self::Chunks(chunk) => {
                let mut data = BytesMut::new();
                if chunk.take(buffer, &mut data)? {
                    *self = Self::Ended;
                }
                Ok(data.freeze())
            }
        }
    }
}

impl Chunk {
    /// Moves the data of chunks from `buffer` to `data`; true at the end of the last one.
    fn take(&mut self, buffer: &mut BytesMut, data: &mut BytesMut) -> io::Result<bool> {
        loop {
            match *self {
                Self::Data(left) => {
                    let len = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
                    data.extend_from_slice(&buffer[..len]);
                    buffer.advance(len);
                    let left = left - len as u64;
                    *self = if left == 0 { Self::End } else { Self::Data(left) };
                    if left > 0 {
                        return Ok(false);
                    }
                }
                Self::Size | Self::End | Self::Trailers => {
                    let Some(end) = memchr::memchr(b'\n', buffer) else {
                        if buffer.len() > MAX_LINE_BYTES {
                            return Err(invalid("a chunk does not say how long it is".into()));
                        }
                        return Ok(false);
                    };
                    let line = buffer[..end].trim_ascii_end();
                    let next = match self {
                        Self::Size => match chunk_size(line)? {
                            0 => Self::Trailers,
                            size => Self::Data(size),
                        },
                        Self::End if line.is_empty() => Self::Size,
                        Self::End => return Err(invalid("a chunk is longer than it says".into())),
                        _ if line.is_empty() => {
                            buffer.advance(end + 1);
                            return Ok(true);
                        }
                        _ => Self::Trailers,
                    };
                    *self = next;
                    buffer.advance(end + 1);
                }
            }
        }
    }
}

fn chunk_size(line: &[u8]) -> io::Result<u64> {
    let wrong = || invalid(format!("not the size of a chunk: {:?}", String::from_utf8_lossy(line)));
    let digits = line.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    let digits = std::str::from_utf8(digits).ok().filter(|text| !text.starts_with('+')).ok_or_else(wrong)?;
    u64::from_str_radix(digits, 16).map_err(|_| wrong())
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// The body of an answer. Read to its end, the connection goes back to its pool; dropped before, it is closed.
#[derive(Debug)]
pub(crate) struct Body {
    connection: Option<Connection>,
    framing: Framing,
    keep_alive: bool,
    pool: Arc<Pool>,
}

impl Body {
    pub(crate) fn begin(head: Head, connection: Connection, pool: &Arc<Pool>) -> (Head, Self) {
        let (framing, keep_alive) = (head.framing, head.keep_alive);
        let mut body = Self { connection: Some(connection), framing, keep_alive, pool: pool.clone() };
        if framing == Framing::Length(0) {
            body.framing = Framing::Ended;
            body.release();
        }
        (head, body)
    }

    /// Returns the next bytes, or nothing at the end.
    pub(crate) async fn next(&mut self) -> io::Result<Option<Bytes>> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// As [`Body::next`].
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        loop {
            let Some(connection) = &mut self.connection else { return Poll::Ready(Ok(None)) };
            let data = match self.framing.take(&mut connection.buffer) {
                Ok(data) => data,
                Err(error) => {
                    self.connection = None;
                    return Poll::Ready(Err(error));
                }
            };
            if self.framing == Framing::Ended {
                self.release();
            }
            if !data.is_empty() {
                return Poll::Ready(Ok(Some(data)));
            }
            let Some(connection) = &mut self.connection else { return Poll::Ready(Ok(None)) };
            let outcome = match ready!(connection.poll_read(cx)) {
                Ok(0) if self.framing == Framing::UntilClosed => Ok(None),
                Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed")),
                Ok(_) => continue,
                Err(error) => Err(error),
            };
            self.connection = None;
            return Poll::Ready(outcome);
        }
    }

    /// Says whether everything has been read.
    pub(crate) const fn is_ended(&self) -> bool {
        self.connection.is_none()
    }

    fn release(&mut self) {
        let Some(mut connection) = self.connection.take() else { return };
        // Bytes behind the end belong to no answer that anyone asked for.
        if self.keep_alive && connection.buffer.is_empty() {
            if connection.buffer.capacity() > KEPT_BYTES {
                connection.buffer = BytesMut::new();
            }
            self.pool.put(connection);
        }
    }
}

#[cfg(test)]
mod tests;
