//! The alphabet in which byte-level vocabularies write bytes as printable characters.
//!
//! It comes from GPT-2: a byte that is a printable Latin-1 character stands for itself, the others take the
//! code points from 256 on, in order.

/// Returns the 256 characters, that of byte `b` at place `b`.
pub(crate) fn alphabet() -> [char; 256] {
    let mut chars = ['\0'; 256];
    let mut next = 256;
    for (byte, place) in (0_u8..=255).zip(chars.iter_mut()) {
        *place = if matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
            char::from(byte)
        } else {
            next += 1;
            char::from_u32(next - 1).expect("256 to 323 are characters")
        };
    }
    chars
}

/// Translates tokens written in the alphabet.
pub(crate) struct ByteLevel {
    /// The byte a character stands for, by code point.
    bytes: [Option<u8>; 512],
}

impl ByteLevel {
    pub(crate) fn new() -> Self {
        let mut bytes = [None; 512];
        for (byte, char) in (0_u8..=255).zip(alphabet()) {
            bytes[char as usize] = Some(byte);
        }
        Self { bytes }
    }

    /// Returns the bytes of a token; a token that is not written in the alphabet stands for itself.
    pub(crate) fn decode(&self, token: &str) -> Vec<u8> {
        token
            .chars()
            .map(|char| self.bytes.get(char as usize).copied().flatten())
            .collect::<Option<Vec<u8>>>()
            .unwrap_or_else(|| token.as_bytes().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_character_of_its_own_and_comes_back() {
        let level = ByteLevel::new();
        let mut seen = std::collections::BTreeSet::new();
        for (byte, char) in (0_u8..=255).zip(alphabet()) {
            assert!(seen.insert(char), "{char} twice");
            assert_eq!(level.decode(&char.to_string()), [byte]);
        }
        assert_eq!(level.decode("Ġthe"), b" the");
        assert_eq!(level.decode("Ċ"), b"\n");
        assert_eq!(level.decode("▁the"), "▁the".as_bytes());
    }
}
