//! KV memory that several threads may touch without `unsafe`: words of 8 bytes, each read and written atomically.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use microserving_protocol::{KvMemory, MemoryKind};

/// A cache line of words; its alignment is the region's.
#[repr(align(64))]
struct Line([AtomicU64; LINE_WORDS]);

const LINE_WORDS: usize = 8;
const LINE_BYTES: usize = 8 * LINE_WORDS;

impl Line {
    const fn zeroed() -> Self {
        Self([const { AtomicU64::new(0) }; LINE_WORDS])
    }
}

/// Host memory of one process, made of atomic words.
///
/// Words are read and written relaxed: which bytes may be read when is ordered by the transport's own lock, under the rule
/// that a page has one writer at a time. Neighbouring bytes of one word may have different writers.
pub struct LoopbackMemory {
    lines: Box<[Line]>,
    num_bytes: usize,
}

impl fmt::Debug for LoopbackMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoopbackMemory").field("num_bytes", &self.num_bytes).finish_non_exhaustive()
    }
}

impl LoopbackMemory {
    /// Allocates zeroed memory.
    #[must_use]
    pub fn new(num_bytes: usize) -> Self {
        let lines = (0..num_bytes.div_ceil(LINE_BYTES)).map(|_| Line::zeroed()).collect();
        Self { lines, num_bytes }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.lines[index / LINE_WORDS].0[index % LINE_WORDS]
    }

    fn check(&self, offset: usize, num_bytes: usize) {
        assert!(
            offset.checked_add(num_bytes).is_some_and(|end| end <= self.num_bytes),
            "{num_bytes} bytes at {offset} do not lie in a region of {} bytes",
            self.num_bytes
        );
    }
}

impl KvMemory for LoopbackMemory {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    fn base_address(&self) -> usize {
        // Exposed, so that an executor may make a pointer of it again; the words have interior mutability.
        self.lines.as_ptr().expose_provenance()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.check(offset, into.len());
        each_word(offset, into.len(), |index, in_word, piece| {
            let bytes = self.word(index).load(Ordering::Relaxed).to_le_bytes();
            into[piece.clone()].copy_from_slice(&bytes[in_word..in_word + piece.len()]);
        });
    }

    fn write(&self, offset: usize, from: &[u8]) {
        self.check(offset, from.len());
        each_word(offset, from.len(), |index, in_word, piece| {
            let word = self.word(index);
            if piece.len() == 8 {
                let bytes = from[piece].try_into().expect("the piece has 8 bytes");
                word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
            } else {
                let splice = |old: u64| {
                    let mut bytes = old.to_le_bytes();
                    bytes[in_word..in_word + piece.len()].copy_from_slice(&from[piece.clone()]);
                    Some(u64::from_le_bytes(bytes))
                };
                // Never fails: the closure always answers.
                let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, splice);
            }
        });
    }
}

/// Cuts `num_bytes` at `offset` into words: calls `each(word, first byte in the word, range in the caller's buffer)`.
fn each_word(offset: usize, num_bytes: usize, mut each: impl FnMut(usize, usize, std::ops::Range<usize>)) {
    let mut done = 0;
    while done < num_bytes {
        let at = offset + done;
        let piece = (8 - at % 8).min(num_bytes - done);
        each(at / 8, at % 8, done..done + piece);
        done += piece;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_is_aligned_and_stays() {
        let memory = LoopbackMemory::new(1000);
        assert_eq!(memory.base_address() % 64, 0);
        assert_eq!(memory.base_address(), memory.base_address());
        assert_eq!(memory.num_bytes(), 1000);
    }

    #[test]
    fn every_offset_and_length_reads_back_and_spares_its_neighbours() {
        for offset in 0..20 {
            for num_bytes in 0..30 {
                let memory = LoopbackMemory::new(64);
                memory.write(0, &[0xee; 64]);
                let data: Vec<u8> = (0..num_bytes).collect();
                memory.write(offset, &data);
                let mut all = [0; 64];
                memory.read(0, &mut all);
                let mut expected = [0xee; 64];
                expected[offset..offset + data.len()].copy_from_slice(&data);
                assert_eq!(all, expected);
                let mut some = vec![0; data.len()];
                memory.read(offset, &mut some);
                assert_eq!(some, data);
            }
        }
    }

    #[test]
    #[should_panic(expected = "do not lie in a region")]
    fn reading_outside_panics() {
        LoopbackMemory::new(16).read(usize::MAX, &mut [0; 2]);
    }
}
