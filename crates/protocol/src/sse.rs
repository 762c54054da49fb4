//! Server-sent events, framed as OpenAI's clients and MLC's router read them: `data: <one line of JSON>` and a blank line.

use serde::Serialize;

/// The event that ends a stream.
pub const SSE_DONE: &str = "data: [DONE]\n\n";

/// The largest event that [`SseParser`] takes, in bytes.
const MAX_EVENT_BYTES: usize = 16 << 20;

/// Frames one event. JSON as `serde_json` writes it has no line breaks, so an event is always one line.
///
/// # Panics
/// If `value` cannot be written as JSON, which no type of this crate does.
#[must_use]
pub fn sse_event<T: Serialize>(value: &T) -> String {
    let json = serde_json::to_string(value).expect("wire types have string keys and finite numbers");
    format!("data: {json}\n\n")
}

/// An event of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SseEvent {
    /// The text behind `data:`.
    Data(String),
    /// `[DONE]`.
    Done,
}

/// The stream is not one of server-sent events.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    /// An event is not UTF-8.
    #[error("an event is not UTF-8")]
    NotUtf8,
    /// An event is too large.
    #[error("an event has more than {MAX_EVENT_BYTES} bytes")]
    TooLarge,
}

/// Cuts bytes into events, however they were cut into chunks before.
///
/// Comments and fields other than `data` are skipped, line ends may be `\n` or `\r\n`, and data lines of one event are
/// joined by `\n`, so it reads streams of other servers too.
///
/// ```
/// use microserving_protocol::{SseEvent, SseParser};
/// let mut parser = SseParser::new();
/// assert!(parser.push(b"data: {\"a\"").unwrap().is_empty());
/// let events = parser.push(b":1}\n\ndata: [DONE]\n\n").unwrap();
/// assert_eq!(events, [SseEvent::Data("{\"a\":1}".into()), SseEvent::Done]);
/// ```
#[derive(Debug, Default)]
pub struct SseParser {
    line: Vec<u8>,
    data: Option<String>,
}

impl SseParser {
    /// Begins a stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes and returns the events that they complete.
    ///
    /// # Errors
    /// If an event is not UTF-8 or too large; the stream cannot be read further.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<SseEvent>, SseError> {
        let mut events = Vec::new();
        let mut rest = bytes;
        while let Some(at) = memchr::memchr(b'\n', rest) {
            let (end, next) = (&rest[..at], &rest[at + 1..]);
            rest = next;
            if self.line.is_empty() {
                // It lies here in one piece, as nearly all do.
                self.take_line(end, &mut events)?;
                continue;
            }
            self.line.extend_from_slice(end);
            let mut line = std::mem::take(&mut self.line);
            self.take_line(&line, &mut events)?;
            line.clear();
            self.line = line;
        }
        self.line.extend_from_slice(rest);
        if self.line.len() > MAX_EVENT_BYTES {
            return Err(SseError::TooLarge);
        }
        Ok(events)
    }

    /// Says whether bytes of an unfinished event are pending.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        !self.line.is_empty() || self.data.is_some()
    }

    fn take_line(&mut self, line: &[u8], events: &mut Vec<SseEvent>) -> Result<(), SseError> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            match self.data.take() {
                Some(data) if data == "[DONE]" => events.push(SseEvent::Done),
                Some(data) => events.push(SseEvent::Data(data)),
                None => {}
            }
            return Ok(());
        }
        let Some(value) = line.strip_prefix(b"data:") else { return Ok(()) };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        let value = std::str::from_utf8(value).map_err(|_| SseError::NotUtf8)?;
        match &mut self.data {
            Some(data) if data.len() + value.len() >= MAX_EVENT_BYTES => return Err(SseError::TooLarge),
            Some(data) => {
                data.push('\n');
                data.push_str(value);
            }
            None => self.data = Some(value.to_owned()),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse_in_chunks(bytes: &[u8], size: usize) -> Result<Vec<SseEvent>, SseError> {
        let mut parser = SseParser::new();
        let mut events = Vec::new();
        for chunk in bytes.chunks(size.max(1)) {
            events.extend(parser.push(chunk)?);
        }
        Ok(events)
    }

    #[test]
    fn framing_is_exact() {
        let event = sse_event(&serde_json::json!({"text": "two\nlines"}));
        assert_eq!(event, "data: {\"text\":\"two\\nlines\"}\n\n");
    }

    #[test]
    fn streams_of_others() {
        let stream = b": ping\r\n\r\nevent: x\r\nid: 7\r\ndata:{\"a\":1}\r\ndata: b\r\n\r\nretry: 3\n\ndata: [DONE]\n\n";
        for size in 1..stream.len() {
            assert_eq!(
                parse_in_chunks(stream, size),
                Ok(vec![SseEvent::Data("{\"a\":1}\nb".into()), SseEvent::Done])
            );
        }
        assert_eq!(parse_in_chunks(b"data: \xff\n\n", 3), Err(SseError::NotUtf8));
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut parser = SseParser::new();
        let chunk = vec![b'x'; 1 << 20];
        let outcome = (0..32).try_for_each(|_| parser.push(&chunk).map(|_| ()));
        assert_eq!(outcome, Err(SseError::TooLarge));
    }

    proptest! {
        #[test]
        fn how_bytes_are_cut_does_not_matter(texts in prop::collection::vec("\\PC*", 0..5), size in 1usize..40) {
            let mut bytes = Vec::new();
            for text in &texts {
                bytes.extend_from_slice(sse_event(text).as_bytes());
            }
            bytes.extend_from_slice(SSE_DONE.as_bytes());
            let mut expected: Vec<_> = texts
                .iter()
                .map(|text| SseEvent::Data(serde_json::to_string(text).expect("a string")))
                .collect();
            expected.push(SseEvent::Done);
            prop_assert_eq!(parse_in_chunks(&bytes, size), Ok(expected));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), size in 1usize..20) {
            let _ = parse_in_chunks(&bytes, size);
        }
    }
}
