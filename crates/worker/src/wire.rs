//! Frames and what stands in them: little-endian numbers, and lists with their length in front.
//!
//! ```text
//! frame   length: u32 (of what follows) | kind: u8 | body
//! ```
//!
//! Both ends are the same build on the same machine; the version in the first frame of a connection sees to the first, and the
//! format needs no more than to be quick and to refuse what it does not understand.

use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Longer frames are not a worker's: a step of 1024 rows of 256 000 logits has this length.
const MAX_FRAME: usize = 1 << 30;
/// What a frame begins with.
const LENGTH_BYTES: usize = 4;

/// A frame that does not say what its kind says.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Malformed(pub(crate) &'static str);

impl From<Malformed> for io::Error {
    fn from(error: Malformed) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

/// A frame to be written.
#[derive(Debug)]
pub(crate) struct Out(Vec<u8>);

impl Out {
    pub(crate) fn new(kind: u8) -> Self {
        Self::reusing(Vec::new(), kind)
    }

    /// Begins a frame in memory that is there already.
    pub(crate) fn reusing(mut memory: Vec<u8>, kind: u8) -> Self {
        memory.clear();
        memory.extend_from_slice(&[0; LENGTH_BYTES]);
        memory.push(kind);
        Self(memory)
    }

    pub(crate) fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    pub(crate) fn flag(&mut self, value: bool) -> &mut Self {
        self.u8(value.into())
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn size(&mut self, value: usize) -> &mut Self {
        self.u64(value as u64)
    }

    pub(crate) fn f32(&mut self, value: f32) -> &mut Self {
        self.u32(value.to_bits())
    }

    pub(crate) fn duration(&mut self, value: Duration) -> &mut Self {
        self.u64(u64::try_from(value.as_nanos()).unwrap_or(u64::MAX))
    }

    pub(crate) fn bytes(&mut self, value: &[u8]) -> &mut Self {
        self.size(value.len());
        self.0.extend_from_slice(value);
        self
    }

    pub(crate) fn text(&mut self, value: &str) -> &mut Self {
        self.bytes(value.as_bytes())
    }

    /// Writes a list: its length, then each of it.
    pub(crate) fn list<T>(
        &mut self,
        values: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator>,
        mut each: impl FnMut(&mut Self, T),
    ) -> &mut Self {
        let values = values.into_iter();
        self.size(values.len());
        for value in values {
            each(self, value);
        }
        self
    }

    /// Writes numbers that are many.
    pub(crate) fn u32s(
        &mut self,
        values: impl IntoIterator<Item = u32, IntoIter: ExactSizeIterator>,
    ) -> &mut Self {
        let values = values.into_iter();
        self.size(values.len());
        self.0.reserve(values.len() * 4);
        self.0.extend(values.flat_map(u32::to_le_bytes));
        self
    }

    /// Writes the frame out, in one write, and returns its memory.
    pub(crate) fn send(mut self, stream: &mut impl Write) -> io::Result<Vec<u8>> {
        let length = self.0.len() - LENGTH_BYTES;
        if length > MAX_FRAME {
            return Err(Malformed("the frame is too long").into());
        }
        let length = u32::try_from(length).map_err(|_| Malformed("the frame is too long"))?;
        self.0[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
        stream.write_all(&self.0)?;
        Ok(self.0)
    }
}

/// The frames that come in on a stream.
#[derive(Debug)]
pub(crate) struct Frames {
    stream: BufReader<UnixStream>,
    body: Vec<u8>,
}

impl Frames {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self { stream: BufReader::with_capacity(64 << 10, stream), body: Vec::new() }
    }

    /// Returns the next frame's kind and body. Blocks until it is whole.
    ///
    /// # Errors
    /// Those of the stream; `UnexpectedEof` when the other end is gone.
    pub(crate) fn next(&mut self) -> io::Result<(u8, In<'_>)> {
        let mut head = [0; LENGTH_BYTES + 1];
        self.stream.read_exact(&mut head)?;
        let [a, b, c, d, kind] = head;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if length == 0 || length > MAX_FRAME {
            return Err(Malformed("no frame has such a length").into());
        }
        self.body.resize(length - 1, 0);
        self.stream.read_exact(&mut self.body)?;
        Ok((kind, In(&self.body)))
    }

    pub(crate) fn stream(&self) -> &UnixStream {
        self.stream.get_ref()
    }
}

/// What is left to be read of a frame's body.
#[derive(Debug)]
pub(crate) struct In<'a>(pub(crate) &'a [u8]);

impl<'a> In<'a> {
    fn take(&mut self, num_bytes: usize) -> Result<&'a [u8], Malformed> {
        let (taken, left) =
            self.0.split_at_checked(num_bytes).ok_or(Malformed("the frame ends too early"))?;
        self.0 = left;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.take(N)?.try_into().map_err(|_| Malformed("the frame ends too early"))
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn flag(&mut self) -> Result<bool, Malformed> {
        Ok(self.u8()? != 0)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn size(&mut self) -> Result<usize, Malformed> {
        usize::try_from(self.u64()?).map_err(|_| Malformed("a size is too large"))
    }

    pub(crate) fn f32(&mut self) -> Result<f32, Malformed> {
        self.u32().map(f32::from_bits)
    }

    pub(crate) fn duration(&mut self) -> Result<Duration, Malformed> {
        self.u64().map(Duration::from_nanos)
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let num_bytes = self.size()?;
        self.take(num_bytes)
    }

    pub(crate) fn text(&mut self) -> Result<String, Malformed> {
        String::from_utf8(self.bytes()?.to_vec()).map_err(|_| Malformed("a text is not UTF-8"))
    }

    pub(crate) fn list<T>(
        &mut self,
        mut each: impl FnMut(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let num = self.size()?;
        // Each takes a byte at least, so that a wrong length allocates no more than the frame is long.
        if num > self.0.len() {
            return Err(Malformed("a list is longer than its frame"));
        }
        (0..num).map(|_| each(self)).collect()
    }

    /// Reads numbers that are many, behind those that are in `into` already.
    pub(crate) fn u32s<T>(&mut self, into: &mut Vec<T>, make: impl Fn(u32) -> T) -> Result<(), Malformed> {
        let num_bytes = self.size()?.checked_mul(4).ok_or(Malformed("a size is too large"))?;
        let words = self.take(num_bytes)?.chunks_exact(4);
        into.extend(words.map(|word| make(u32::from_le_bytes([word[0], word[1], word[2], word[3]]))));
        Ok(())
    }

    /// Checks that nothing is left.
    pub(crate) fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("the frame is longer than what it says")) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let (mut ours, theirs) = UnixStream::pair().expect("a pair");
        let mut out = Out::new(7);
        out.u8(1)
            .flag(true)
            .u32(2)
            .u64(3)
            .f32(-0.5)
            .duration(Duration::from_micros(9))
            .text("grün")
            .bytes(b"\0");
        out.u32s([5, 6]).list(["a", "b"], |out, text| {
            out.text(text);
        });
        out.send(&mut ours).expect("sent");
        let mut frames = Frames::new(theirs);
        let (kind, mut body) = frames.next().expect("a frame");
        assert_eq!(kind, 7);
        assert_eq!((body.u8().unwrap(), body.flag().unwrap()), (1, true));
        assert_eq!((body.u32().unwrap(), body.u64().unwrap(), body.f32().unwrap()), (2, 3, -0.5));
        assert_eq!(body.duration().unwrap(), Duration::from_micros(9));
        assert_eq!((body.text().unwrap().as_str(), body.bytes().unwrap()), ("grün", &b"\0"[..]));
        let mut words = vec![4];
        body.u32s(&mut words, |word| word).unwrap();
        assert_eq!(words, [4, 5, 6]);
        assert_eq!(body.list(In::text).unwrap(), ["a", "b"]);
        body.end().unwrap();
        drop(ours);
        assert_eq!(frames.next().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    proptest! {
        #[test]
        fn nonsense_is_refused_and_allocates_little(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = In(&bytes).list(In::text);
            let _ = In(&bytes).text();
            let mut words = Vec::new();
            let _ = In(&bytes).u32s(&mut words, |word| word);
            prop_assert!(words.len() <= bytes.len());
        }
    }
}
