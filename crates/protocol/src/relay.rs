//! Relaying: how an engine marks an answer that a router passes on without reading it.
//!
//! A router that relays sends `x-microserving-relay: 1` to `/v1/completions` or `/v1/chat/completions`. The engine confirms by the same
//! header, and beside the answer, in places that can be cut off without parsing JSON, tells what a router must know:
//!
//! ```text
//! whole    x-microserving-relay: 12 16 0 1834            prompt, output and cached tokens, microseconds to the first token
//!
//! stream   x-microserving-relay: 1
//!          : 104,105                                     a comment before each event: the tokens since the last one
//!          data: {"id":"cmpl-…","choices":[…]}
//!
//!          :end 12 16 0 1834                             the comment before [DONE]
//!          data: [DONE]
//! ```
//!
//! An event without a comment is not for the client: it is an error, and the last one.
//!
//! A router that has prepared a sequence asks `start_generate` for the same: `x-microserving-relay: completion` or `chat` says as what the
//! events are to be written. There every token is marked at once. If its text is held back, for half a character or what may be a stop
//! string, an empty line follows the mark instead of an event: who moves the sequence must know all of its tokens.

use std::fmt::{self, Write as _};
use std::str::FromStr;

use bytes::{Bytes, BytesMut};
use memchr::memchr;

use crate::TokenId;

/// The header by which a router asks for marks and an engine says that they are there.
pub const RELAY_HEADER: &str = "x-microserving-relay";

/// The largest event that is relayed, in bytes.
const MAX_EVENT_BYTES: usize = 16 << 20;

/// What a relayed answer took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RelayUsage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of all choices.
    pub completion_tokens: u32,
    /// Tokens of the prompt that were not computed.
    pub cached_tokens: u32,
    /// Microseconds from the request's arrival at the engine to its first token.
    pub first_token_micros: u64,
}

impl fmt::Display for RelayUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { prompt_tokens, completion_tokens, cached_tokens, first_token_micros } = self;
        write!(f, "{prompt_tokens} {completion_tokens} {cached_tokens} {first_token_micros}")
    }
}

impl FromStr for RelayUsage {
    type Err = RelayError;

    fn from_str(text: &str) -> Result<Self, RelayError> {
        let mut numbers = text.split_ascii_whitespace();
        let mut next =
            || numbers.next().and_then(|number| number.parse::<u64>().ok()).ok_or(RelayError::Mark);
        let mut small = || next().and_then(|number| u32::try_from(number).map_err(|_| RelayError::Mark));
        Ok(Self {
            prompt_tokens: small()?,
            completion_tokens: small()?,
            cached_tokens: small()?,
            first_token_micros: next()?,
        })
    }
}

/// Writes the mark of an event that shows `tokens`.
#[must_use]
pub fn relay_mark(tokens: &[TokenId]) -> String {
    let mut mark = String::with_capacity(3 + 8 * tokens.len());
    mark.push_str(": ");
    for (i, token) in tokens.iter().enumerate() {
        let comma = if i > 0 { "," } else { "" };
        let _ = write!(mark, "{comma}{}", token.0);
    }
    mark.push('\n');
    mark
}

/// Writes the mark of a stream's end.
#[must_use]
pub fn relay_end_mark(usage: &RelayUsage) -> String {
    format!(":end {usage}\n")
}

/// The stream is not marked as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RelayError {
    /// A mark cannot be read.
    #[error("a mark of the stream cannot be read")]
    Mark,
    /// Not an event.
    #[error("the stream holds something that is no event")]
    NoEvent,
    /// An event is too large.
    #[error("an event has more than {MAX_EVENT_BYTES} bytes")]
    TooLarge,
}

/// Some whole events of a marked stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RelayPart {
    /// The events as the client gets them, marks cut off.
    pub events: Bytes,
    /// The tokens that they show, if the answer has one choice.
    pub tokens: Vec<TokenId>,
    /// What the answer took, with the last event.
    pub usage: Option<RelayUsage>,
    /// The data of an event without a mark, which came after these: an error, not for the client.
    pub fault: Option<Bytes>,
}

/// Writes the mark of tokens that show nothing yet.
#[must_use]
pub fn relay_bare_mark(tokens: &[TokenId]) -> String {
    relay_mark(tokens) + "\n"
}

/// Cuts the marks off a stream, however its bytes were cut before.
///
/// ```
/// use bytes::Bytes;
/// use microserving_protocol::{RelayCutter, TokenId};
/// let mut cutter = RelayCutter::default();
/// let part = cutter.push(Bytes::from_static(b": 7,8\ndata: {}\n\n: 9\nda")).unwrap();
/// assert_eq!((&part.events[..], part.tokens), (&b"data: {}\n\n"[..], vec![TokenId(7), TokenId(8)]));
/// ```
#[derive(Debug, Default)]
pub struct RelayCutter {
    /// The beginning of an event whose end has not come.
    pending: BytesMut,
}

impl RelayCutter {
    /// Takes the next bytes and returns the events that they complete.
    ///
    /// # Errors
    /// If the stream is not marked as it should be; it cannot be read further.
    pub fn push(&mut self, bytes: Bytes) -> Result<RelayPart, RelayError> {
        let bytes = if self.pending.is_empty() {
            bytes
        } else {
            self.pending.extend_from_slice(&bytes);
            self.pending.split().freeze()
        };
        let mut part = RelayPart::default();
        let mut joined = BytesMut::new();
        let mut at = 0;
        while let Some((event, next)) = Event::find(&bytes, at)? {
            at = next;
            let Some(mark) = event.mark else {
                part.fault = Some(bytes.slice(event.data));
                break;
            };
            part.read_mark(&bytes[mark])?;
            if event.data.is_empty() {
                continue;
            }
            // One event goes on as it lies there; several are put together, for one write is cheaper than two.
            if part.events.is_empty() && joined.is_empty() {
                part.events = bytes.slice(event.data);
            } else {
                if joined.is_empty() {
                    joined.extend_from_slice(&part.events);
                }
                joined.extend_from_slice(&bytes[event.data]);
            }
        }
        if !joined.is_empty() {
            part.events = joined.freeze();
        }
        if part.fault.is_none() {
            self.pending.extend_from_slice(&bytes[at..]);
        }
        if self.pending.len() > MAX_EVENT_BYTES { Err(RelayError::TooLarge) } else { Ok(part) }
    }

    /// Says whether bytes of an unfinished event are pending.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }
}

/// Where an event lies.
struct Event {
    mark: Option<std::ops::Range<usize>>,
    /// Empty if the mark's tokens show nothing yet.
    data: std::ops::Range<usize>,
}

impl Event {
    /// Finds the event that begins at `at`, and where the next one does; nothing if it has not ended.
    fn find(bytes: &[u8], at: usize) -> Result<Option<(Self, usize)>, RelayError> {
        let line_end = |from: usize| memchr(b'\n', &bytes[from..]).map(|len| from + len);
        let Some(end) = line_end(at) else { return Ok(None) };
        let (mark, begin, end) = if bytes[at] == b':' {
            let Some(data_end) = line_end(end + 1) else { return Ok(None) };
            if data_end == end + 1 {
                let bare = Self { mark: Some(at..end), data: data_end..data_end };
                return Ok(Some((bare, data_end + 1)));
            }
            (Some(at..end), end + 1, data_end)
        } else {
            (None, at, end)
        };
        match bytes.get(end + 1) {
            None => Ok(None),
            Some(b'\n') if bytes[begin..].starts_with(b"data: ") => {
                Ok(Some((Self { mark, data: begin..end + 2 }, end + 2)))
            }
            Some(_) => Err(RelayError::NoEvent),
        }
    }
}

impl RelayPart {
    fn read_mark(&mut self, mark: &[u8]) -> Result<(), RelayError> {
        let text = std::str::from_utf8(mark).map_err(|_| RelayError::Mark)?;
        if let Some(usage) = text.strip_prefix(":end ") {
            self.usage = Some(usage.parse()?);
            return Ok(());
        }
        let ids = text.strip_prefix(':').map(str::trim).ok_or(RelayError::Mark)?;
        if ids.is_empty() {
            return Ok(());
        }
        for id in ids.split(',') {
            self.tokens.push(TokenId(id.parse().map_err(|_| RelayError::Mark)?));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USAGE: RelayUsage =
        RelayUsage { prompt_tokens: 12, completion_tokens: 3, cached_tokens: 4, first_token_micros: 1834 };

    fn stream() -> String {
        let tokens = |ids: &[u32]| relay_mark(&ids.iter().copied().map(TokenId).collect::<Vec<_>>());
        format!(
            "{}data: {{\"a\":1}}\n\n{}{}data: {{\"b\":2}}\n\n{}data: [DONE]\n\n",
            tokens(&[1, 20]),
            relay_bare_mark(&[TokenId(3)]),
            tokens(&[]),
            relay_end_mark(&USAGE)
        )
    }

    #[test]
    fn marks_are_cut_off_however_the_stream_is_cut() {
        let stream = stream();
        for size in 1..=stream.len() {
            let mut cutter = RelayCutter::default();
            let (mut events, mut tokens, mut usage) = (Vec::new(), Vec::new(), None);
            for piece in stream.as_bytes().chunks(size) {
                let part = cutter.push(Bytes::copy_from_slice(piece)).expect("marked");
                events.extend_from_slice(&part.events);
                tokens.extend(part.tokens);
                usage = usage.or(part.usage);
                assert_eq!(part.fault, None);
            }
            let expected = b"data: {\"a\":1}\n\ndata: {\"b\":2}\n\ndata: [DONE]\n\n";
            assert_eq!((&events[..], cutter.is_pending()), (&expected[..], false), "{size}");
            assert_eq!((tokens, usage), (vec![TokenId(1), TokenId(20), TokenId(3)], Some(USAGE)), "{size}");
        }
    }

    #[test]
    fn an_event_without_a_mark_is_kept_from_the_client() {
        let mut cutter = RelayCutter::default();
        let bytes = Bytes::from_static(b": 1\ndata: {}\n\ndata: {\"error\":{}}\n\n");
        let part = cutter.push(bytes).expect("a stream");
        assert_eq!(&part.events[..], b"data: {}\n\n");
        assert_eq!(part.fault.as_deref(), Some(&b"data: {\"error\":{}}\n\n"[..]));
    }

    #[test]
    fn what_is_not_marked_right_is_an_error() {
        for (text, error) in [
            (": x\ndata: {}\n\n", RelayError::Mark),
            (": 1,\ndata: {}\n\n", RelayError::Mark),
            (": 4294967296\ndata: {}\n\n", RelayError::Mark),
            (":end 1 2\ndata: {}\n\n", RelayError::Mark),
            (":end 1 2 3 x\ndata: {}\n\n", RelayError::Mark),
            (": 1\nevent: x\n\n", RelayError::NoEvent),
            (": 1\ndata: {}\ndata: {}\n\n", RelayError::NoEvent),
            ("\n\n", RelayError::NoEvent),
        ] {
            assert_eq!(RelayCutter::default().push(Bytes::from(text)), Err(error), "{text}");
        }
    }

    #[test]
    fn usage_reads_back() {
        assert_eq!(USAGE.to_string().parse(), Ok(USAGE));
        assert_eq!("1 2 3".parse::<RelayUsage>(), Err(RelayError::Mark));
    }
}
