//! A walk over the metadata of a GGUF file before it is read.
//!
//! Its reader checks every length against the file, but makes a value of 32 bytes of each element of an array, and a
//! damaged length inside a file of many gigabytes may fit it. So elements are counted first, without keeping any.

/// Elements of all arrays together: several times those of the largest vocabularies with their merges.
const MOST_ELEMENTS: u64 = 1 << 23;

/// Arrays in arrays.
const MOST_LEVELS: u32 = 4;

/// What is left of a file.
struct Rest<'a> {
    bytes: &'a [u8],
    /// Lengths are of 32 bits in the first version of the format.
    wide: bool,
    elements: u64,
}

/// Checks that reading the metadata will not take memory out of all proportion. Whatever else is wrong with it is the
/// reader's to say.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let mut rest = Rest { bytes, wide: true, elements: 0 };
    // Where it ends early, the reader will too.
    let _ = rest.walk();
    if rest.elements > MOST_ELEMENTS {
        return Err(format!("the metadata has arrays of more than {MOST_ELEMENTS} elements"));
    }
    Ok(())
}

impl Rest<'_> {
    /// Walks over all entries; `None` at the first that is damaged, or when there are too many elements.
    fn walk(&mut self) -> Option<()> {
        self.skip(4)?;
        self.wide = self.word()? > 1;
        self.length()?;
        for _ in 0..self.length()? {
            self.string()?;
            let kind = self.word()?;
            self.value(kind, 0)?;
        }
        Some(())
    }

    fn value(&mut self, kind: u32, level: u32) -> Option<()> {
        match kind {
            0 | 1 | 7 => self.skip(1),
            2 | 3 => self.skip(2),
            4..=6 => self.skip(4),
            10..=12 => self.skip(8),
            8 => self.string(),
            9 if level < MOST_LEVELS => {
                let kind = self.word()?;
                let len = self.length()?;
                self.elements = self.elements.saturating_add(len);
                if self.elements > MOST_ELEMENTS {
                    return None;
                }
                for _ in 0..len {
                    self.value(kind, level + 1)?;
                }
                Some(())
            }
            _ => None,
        }
    }

    fn string(&mut self) -> Option<()> {
        let len = self.length()?;
        self.skip(len)
    }

    fn length(&mut self) -> Option<u64> {
        if !self.wide {
            return self.word().map(u64::from);
        }
        let (bytes, rest) = self.bytes.split_first_chunk()?;
        self.bytes = rest;
        Some(u64::from_le_bytes(*bytes))
    }

    fn word(&mut self) -> Option<u32> {
        let (bytes, rest) = self.bytes.split_first_chunk()?;
        self.bytes = rest;
        Some(u32::from_le_bytes(*bytes))
    }

    fn skip(&mut self, len: u64) -> Option<()> {
        self.bytes = self.bytes.get(usize::try_from(len).ok()?..)?;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header of the second version with one entry: `a`, an array of `len` bytes of which `held` are there.
    fn header(version: u32, len: u64, held: usize) -> Vec<u8> {
        let length =
            |x: u64| if version > 1 { x.to_le_bytes().to_vec() } else { (x as u32).to_le_bytes().to_vec() };
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(version.to_le_bytes());
        for part in [length(0), length(1), length(1), b"a".to_vec(), 9_u32.to_le_bytes().to_vec()] {
            bytes.extend(part);
        }
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(length(len));
        bytes.resize(bytes.len() + held, 0);
        bytes
    }

    #[test]
    fn arrays_are_counted_before_they_are_read() {
        for version in [1, 2, 3] {
            assert_eq!(check(&header(version, 1000, 1000)), Ok(()));
            // Damage that the reader tells from the file's length.
            assert_eq!(check(&header(version, 1000, 10)), Ok(()));
            let most = MOST_ELEMENTS as usize;
            assert_eq!(check(&header(version, MOST_ELEMENTS, most)), Ok(()));
            assert!(check(&header(version, MOST_ELEMENTS + 1, most + 1)).is_err());
        }
        assert!(check(&header(3, u64::MAX, 0)).is_err());
        assert_eq!(check(&[]), Ok(()));
    }

    #[test]
    fn nested_arrays_end() {
        let mut bytes = header(3, 1, 0);
        let kind = bytes.len() - 12;
        bytes[kind] = 9;
        for _ in 0..100_000 {
            bytes.extend(9_u32.to_le_bytes());
            bytes.extend(1_u64.to_le_bytes());
        }
        assert_eq!(check(&bytes), Ok(()));
    }
}
