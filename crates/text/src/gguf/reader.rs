//! Reads the key/value section of a GGUF file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use super::{GgufValue, GgufVocab};
use crate::error::TextError;

/// Arrays of arrays may nest so deep.
const MAX_DEPTH: usize = 4;
/// The most keys a file may have.
const MAX_KEYS: u64 = 1 << 16;
/// The longest key, in bytes: the format allows no longer one.
const MAX_KEY_BYTES: u64 = 65_535;

/// The key/value section of a GGUF file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufMetadata {
    values: BTreeMap<String, GgufValue>,
}

impl GgufMetadata {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// [`TextError::Read`] if it cannot be read, [`TextError::Malformed`] if it is no GGUF file or broken,
    /// [`TextError::Unsupported`] for another version.
    pub fn open(path: &Path) -> Result<Self, TextError> {
        let cannot_read = |source| TextError::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(cannot_read)?;
        let num_bytes = file.metadata().map_err(cannot_read)?.len();
        Self::read(BufReader::new(file), num_bytes, &path.display().to_string())
    }

    /// Reads a header out of `reader`, which holds `num_bytes` bytes at most; `name` stands for it in errors.
    /// No count in the file makes this reserve more memory than those bytes could fill.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn read(reader: impl Read, num_bytes: u64, name: &str) -> Result<Self, TextError> {
        let mut source = Source { reader, left: num_bytes };
        let malformed = |fault: Fault| TextError::malformed(name, fault.0);
        let magic: [u8; 4] = source.array().map_err(malformed)?;
        if &magic != b"GGUF" {
            return Err(TextError::malformed(name, "it does not begin with `GGUF`"));
        }
        let version = u32::from_le_bytes(source.array().map_err(malformed)?);
        if !matches!(version, 2 | 3) {
            let big_endian = matches!(version.swap_bytes(), 1..=3);
            let hint = if big_endian { "the file is big endian" } else { "versions 2 and 3 are" };
            return Err(TextError::unsupported(format!("{name}: version"), version.to_string(), hint));
        }
        let _num_tensors = source.count().map_err(malformed)?;
        let num_keys = source.count().map_err(malformed)?;
        if num_keys > MAX_KEYS {
            return Err(TextError::malformed(name, format!("{num_keys} keys, more than {MAX_KEYS}")));
        }
        let mut values = BTreeMap::new();
        for index in 0..num_keys {
            let in_key = |fault: Fault| malformed(Fault(format!("key {index}: {}", fault.0)));
            let key = source.string(MAX_KEY_BYTES).map_err(in_key)?;
            let in_value = |fault: Fault| malformed(Fault(format!("`{key}`: {}", fault.0)));
            let kind = u32::from_le_bytes(source.array().map_err(in_value)?);
            let value = source.value(kind, 0).map_err(in_value)?;
            if values.insert(key.clone(), value).is_some() {
                return Err(TextError::malformed(name, format!("`{key}` appears twice")));
            }
        }
        Ok(Self { values })
    }

    /// Returns a value.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.values.get(key)
    }

    /// Returns all keys and values, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &GgufValue)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Returns a text, if the key is there.
    ///
    /// # Errors
    /// [`TextError::Malformed`] naming the key, if it is something else.
    pub fn string(&self, key: &str) -> Result<Option<&str>, TextError> {
        self.typed(key, "a text", |value| match value {
            GgufValue::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// Returns a truth value, if the key is there.
    ///
    /// # Errors
    /// [`TextError::Malformed`] naming the key, if it is something else.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, TextError> {
        self.typed(key, "true or false", |value| match value {
            GgufValue::Bool(truth) => Some(*truth),
            _ => None,
        })
    }

    /// Returns a number from 0 to 2³²−1, if the key is there.
    ///
    /// # Errors
    /// [`TextError::Malformed`] naming the key, if it is something else.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, TextError> {
        self.typed(key, "a number from 0 to 4294967295", |value| match value {
            GgufValue::Unsigned(number) => u32::try_from(*number).ok(),
            GgufValue::Signed(number) => u32::try_from(*number).ok(),
            _ => None,
        })
    }

    /// Returns what the file says about its vocabulary.
    ///
    /// # Errors
    /// [`TextError::Malformed`] naming the key that is missing or of the wrong type.
    pub fn vocab(&self) -> Result<GgufVocab, TextError> {
        GgufVocab::from_metadata(self)
    }

    pub(super) fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        get: impl FnOnce(&'a GgufValue) -> Option<T>,
    ) -> Result<Option<T>, TextError> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        match get(value) {
            Some(value) => Ok(Some(value)),
            None => Err(TextError::malformed(key, format!("it must be {wanted}, and is {}", value.kind()))),
        }
    }
}

/// What is wrong with the bytes.
#[derive(Debug)]
struct Fault(String);

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self(error.to_string())
    }
}

/// A reader that knows how much can still come.
struct Source<R> {
    reader: R,
    left: u64,
}

impl<R: Read> Source<R> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let mut bytes = [0; N];
        self.take(N as u64)?;
        self.reader.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Accounts for bytes about to be read.
    fn take(&mut self, num_bytes: u64) -> Result<(), Fault> {
        let left = self.left.checked_sub(num_bytes);
        self.left =
            left.ok_or_else(|| Fault(format!("it ends {} bytes too early", num_bytes - self.left)))?;
        Ok(())
    }

    fn count(&mut self) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn string(&mut self, limit: u64) -> Result<String, Fault> {
        let num_bytes = self.count()?;
        if num_bytes > limit {
            return Err(Fault(format!("a text of {num_bytes} bytes, more than {limit}")));
        }
        self.take(num_bytes)?;
        let length = usize::try_from(num_bytes).map_err(|_| Fault(format!("a text of {num_bytes} bytes")))?;
        let mut bytes = vec![0; length];
        self.reader.read_exact(&mut bytes)?;
        String::from_utf8(bytes)
            .map_err(|error| Fault(format!("a text is not UTF-8: {}", error.utf8_error())))
    }

    fn value(&mut self, kind: u32, depth: usize) -> Result<GgufValue, Fault> {
        Ok(match kind {
            0 => GgufValue::Unsigned(u8::from_le_bytes(self.array()?).into()),
            1 => GgufValue::Signed(i8::from_le_bytes(self.array()?).into()),
            2 => GgufValue::Unsigned(u16::from_le_bytes(self.array()?).into()),
            3 => GgufValue::Signed(i16::from_le_bytes(self.array()?).into()),
            4 => GgufValue::Unsigned(u32::from_le_bytes(self.array()?).into()),
            5 => GgufValue::Signed(i32::from_le_bytes(self.array()?).into()),
            6 => GgufValue::Float(f32::from_le_bytes(self.array()?).into()),
            7 => match self.array::<1>()? {
                [0] => GgufValue::Bool(false),
                [1] => GgufValue::Bool(true),
                [other] => return Err(Fault(format!("{other} is neither true nor false"))),
            },
            8 => GgufValue::String(self.string(self.left)?),
            9 => self.list(depth)?,
            10 => GgufValue::Unsigned(u64::from_le_bytes(self.array()?)),
            11 => GgufValue::Signed(i64::from_le_bytes(self.array()?)),
            12 => GgufValue::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(Fault(format!("values of type {other} do not exist"))),
        })
    }

    fn list(&mut self, depth: usize) -> Result<GgufValue, Fault> {
        if depth == MAX_DEPTH {
            return Err(Fault(format!("lists nested deeper than {MAX_DEPTH}")));
        }
        let kind = u32::from_le_bytes(self.array()?);
        let count = self.count()?;
        let smallest: u64 = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            9 => 12,
            _ => 8,
        };
        if count.checked_mul(smallest).is_none_or(|num_bytes| num_bytes > self.left) {
            return Err(Fault(format!("a list of {count} values does not fit into the file")));
        }
        if kind == 8 {
            return Ok(GgufValue::Strings(
                (0..count).map(|_| self.string(self.left)).collect::<Result<_, _>>()?,
            ));
        }
        let mut integers = Vec::new();
        let mut floats = Vec::new();
        let mut others = Vec::new();
        for _ in 0..count {
            match self.value(kind, depth + 1)? {
                GgufValue::Unsigned(number) => match i64::try_from(number) {
                    Ok(number) => integers.push(number),
                    Err(_) => return Err(Fault(format!("{number} in a list is too large"))),
                },
                GgufValue::Signed(number) => integers.push(number),
                GgufValue::Float(number) => floats.push(number),
                other => others.push(other),
            }
        }
        Ok(match kind {
            0..=5 | 10 | 11 => GgufValue::Integers(integers),
            6 | 12 => GgufValue::Floats(floats),
            _ => GgufValue::Array(others),
        })
    }
}

#[cfg(test)]
mod tests;
