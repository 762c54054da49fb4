//! Names for the beginnings of a text, without cutting it into tokens.
//!
//! ```text
//! text   [ chunk 0 ][ chunk 1 ][  chunk 2  ] rest      names: n0 = H(chunk 0), n1 = H(n0, chunk 1), …
//! ```
//!
//! Two requests share a name when they share everything up to its end. It is what `PageHash` is for tokens, and serves the same end:
//! a guess about where a prefix is still held.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The first chunks are short, since many prompts are; later ones are longer, or a long prompt would have hundreds.
const SHORT_BYTES: usize = 128;
const NUM_SHORT: usize = 16;
const LONG_BYTES: usize = 512;

/// The chain of a text that is fed piece by piece.
#[derive(Debug, Default)]
pub(crate) struct TextChain {
    names: Vec<u64>,
    /// The beginning of a chunk whose end has not come.
    rest: Vec<u8>,
    num_bytes: usize,
}

impl TextChain {
    /// Adds a piece. How a text is cut into pieces makes no difference.
    pub(crate) fn feed(&mut self, mut bytes: &[u8]) {
        self.num_bytes += bytes.len();
        if !self.rest.is_empty() {
            let missing = self.chunk_bytes() - self.rest.len();
            let (now, later) = bytes.split_at(missing.min(bytes.len()));
            self.rest.extend_from_slice(now);
            bytes = later;
            if self.rest.len() < self.chunk_bytes() {
                return;
            }
            let chunk = std::mem::take(&mut self.rest);
            self.name(&chunk);
            self.rest = chunk;
            self.rest.clear();
        }
        while bytes.len() >= self.chunk_bytes() {
            let (chunk, later) = bytes.split_at(self.chunk_bytes());
            self.name(chunk);
            bytes = later;
        }
        self.rest.extend_from_slice(bytes);
    }

    /// Begins the chain elsewhere: texts of different tenants share nothing. Call it when all is fed.
    pub(crate) fn set_apart(&mut self, salt: &str) {
        for name in &mut self.names {
            *name = xxh3_64_with_seed(salt.as_bytes(), *name);
        }
    }

    /// Returns the names of the full chunks, first chunk first.
    pub(crate) fn names(&self) -> &[u64] {
        &self.names
    }

    /// Returns the bytes that were fed.
    pub(crate) const fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Returns the bytes in the first `num_chunks` chunks.
    pub(crate) fn bytes_in(num_chunks: usize) -> usize {
        let short = num_chunks.min(NUM_SHORT);
        short * SHORT_BYTES + (num_chunks - short) * LONG_BYTES
    }

    fn chunk_bytes(&self) -> usize {
        if self.names.len() < NUM_SHORT { SHORT_BYTES } else { LONG_BYTES }
    }

    fn name(&mut self, chunk: &[u8]) {
        let before = self.names.last().copied().unwrap_or_default();
        self.names.push(xxh3_64_with_seed(chunk, before));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(pieces: &[&[u8]]) -> Vec<u64> {
        let mut chain = TextChain::default();
        pieces.iter().for_each(|piece| chain.feed(piece));
        chain.names
    }

    #[test]
    fn a_shared_beginning_has_the_same_names_however_it_is_cut() {
        let text: Vec<u8> = (0..10_000u32).map(|i| (i % 251) as u8).collect();
        let whole = names(&[&text]);
        assert_eq!(whole.len(), NUM_SHORT + (10_000 - NUM_SHORT * SHORT_BYTES) / LONG_BYTES);
        for size in [1, 7, 127, 128, 129, 500, 3000] {
            assert_eq!(names(&text.chunks(size).collect::<Vec<_>>()), whole, "{size}");
        }
        let mut other = text.clone();
        other[3000] ^= 1;
        let other = names(&[&other]);
        let shared = whole.iter().zip(&other).take_while(|(a, b)| a == b).count();
        assert!(TextChain::bytes_in(shared) <= 3000 && TextChain::bytes_in(shared + 1) > 3000);
        assert!(whole[shared..].iter().zip(&other[shared..]).all(|(a, b)| a != b));
    }

    #[test]
    fn tenants_share_no_names() {
        let mut chain = TextChain::default();
        chain.feed(&[b'x'; 300]);
        let before = chain.names.clone();
        chain.set_apart("tenant");
        assert!(chain.names.iter().zip(&before).all(|(a, b)| a != b));
        assert_eq!((before.len(), TextChain::bytes_in(2), chain.num_bytes()), (2, 256, 300));
    }
}
