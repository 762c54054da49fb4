//! Reading the fields of a message: bounded by the bytes that are there, an error for everything else.

use microserving_protocol::KvRange;

use super::FrameError;
use super::frame::REFUSALS;
use crate::{ByteRun, Refusal};

/// What is left to decode of a message; numbers are little-endian words of eight bytes.
#[derive(Debug)]
pub struct Fields<'a>(&'a [u8]);

#[allow(
    missing_docs,
    clippy::missing_errors_doc,
    reason = "each reads what its name says, or says what is wrong with it"
)]
impl<'a> Fields<'a> {
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Takes all that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    pub fn word(&mut self) -> Result<u64, FrameError> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(FrameError::Truncated)?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*bytes))
    }

    /// Reads a word that must fit into a smaller type.
    pub fn small<T: TryFrom<u64>>(&mut self, field: &'static str) -> Result<T, FrameError> {
        T::try_from(self.word()?).map_err(|_| FrameError::BadField { field })
    }

    pub fn flag(&mut self, field: &'static str) -> Result<bool, FrameError> {
        match self.word()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(FrameError::BadField { field }),
        }
    }

    pub fn range(&mut self) -> Result<KvRange, FrameError> {
        let (begin, end) = (self.small("begin")?, self.small("end")?);
        KvRange::new(begin, end).ok_or(FrameError::BadField { field: "range" })
    }

    pub fn run(&mut self) -> Result<ByteRun, FrameError> {
        Ok(ByteRun { offset: self.small("offset")?, num_bytes: self.small("num_bytes")? })
    }

    pub fn refusal(&mut self) -> Result<Option<Refusal>, FrameError> {
        match self.small::<usize>("refusal")? {
            0 => Ok(None),
            code => {
                REFUSALS.get(code - 1).copied().map(Some).ok_or(FrameError::BadField { field: "refusal" })
            }
        }
    }

    /// Reads items to the end. The room for them is bounded by the bytes that are there.
    pub fn list<T>(
        &mut self,
        item_bytes: usize,
        max_items: usize,
        item: impl Fn(&mut Self) -> Result<T, FrameError>,
    ) -> Result<Vec<T>, FrameError> {
        if self.0.len() / item_bytes > max_items {
            return Err(FrameError::TooLong);
        }
        let mut items = Vec::with_capacity(self.0.len() / item_bytes);
        while !self.0.is_empty() {
            items.push(item(self)?);
        }
        Ok(items)
    }
}
