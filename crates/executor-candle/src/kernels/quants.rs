//! The tiles of quantised weights: how the blocks of a GGUF row are laid out in them, and how one is read back.
//!
//! A tile holds sixteen outputs, one a lane. Its bytes are a run of units, each of which carries the scales of its inputs
//! in front of them, so that a product reads one stream:
//!
//! ```text
//! q8_0  64 inputs   scales f16 [2][16]                        quants u8 [2][8][16][4], biased by 128
//! q4_0  64 inputs   scales f16 [2][16]                        quants u4 [2][4][16][4]
//! q4_1  32 inputs   scale f16 [16], minimum f16 [16]          quants u4 [4][16][4]
//! q4_k  256 inputs  scale f16 [16], minimum f16 [16],
//!                   scales u8 [8][16], minima u8 [8][16]      quants u4 [8][4][16][4]
//! q6_k  256 inputs  scale f16 [16], 32 bytes of padding,
//!                   scales i8 [16][16]                        [8]{ low u4 [4][16][4], high u2 [2][16][4] }
//! ```
//!
//! Four neighbouring inputs of a lane are one word, as the dot products of bytes want them. A word of `u4` holds eight
//! inputs: the first four in the low halves of its bytes, the next in the high halves. A word of `u2` holds sixteen, the
//! first four in the lowest bits. A weight is `q * d + m`, with the `d` and `m` of its block of 32.

use half::f16;

use super::{NR, Q8Block};

/// Inputs of a block: the activations that share a scale, and the weights of the smaller types that do.
pub(crate) const BLOCK: usize = 32;

/// Bytes of a lane-interleaved word in all lanes.
const WORDS: usize = 4 * NR;

/// A quantised type with tiles of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Quants {
    /// Eight bits, a scale per 32.
    Q8_0,
    /// Four bits around 8, a scale per 32.
    Q4_0,
    /// Four bits, a scale and a minimum per 32.
    Q4_1,
    /// Four bits, a six-bit scale and minimum per 32 under a common one of each per 256.
    Q4K,
    /// Six bits around 32, an eight-bit scale per 16 under a common one per 256.
    Q6K,
}

/// A block of a tile, taken apart: `q` includes the eight-bit scales of q6_k, which multiply as integers.
#[derive(Clone, Debug)]
pub(crate) struct Decoded {
    /// `[input][lane]`
    pub(crate) q: [[i32; NR]; BLOCK],
    pub(crate) d: [f32; NR],
    /// Zero for types without a minimum; -8 times the scale for q4_0, whose integers are left as they are stored.
    pub(crate) m: [f32; NR],
}

/// A quantised matrix and the rows that it meets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product<'a> {
    pub(super) quants: Quants,
    pub(super) data: &'a [u8],
    pub(super) k: usize,
    pub(super) blocks: &'a [Q8Block],
    pub(super) stride: usize,
}

impl Product<'_> {
    /// Returns a block of a row.
    ///
    /// # Safety
    /// It lies inside the rows.
    #[inline]
    pub(super) unsafe fn row(&self, row: usize, block: usize) -> *const Q8Block {
        // SAFETY: as the caller promises.
        unsafe { self.blocks.as_ptr().add(row * self.stride + block) }
    }

    /// Returns the unit that a block of a tile lies in, and the block's place in it. `quants` is the product's own type,
    /// given again because kernels know it when they are compiled.
    ///
    /// # Safety
    /// It lies inside the tiles.
    #[inline]
    pub(super) unsafe fn unit(&self, quants: Quants, tile: usize, block: usize) -> (*const u8, usize) {
        let per_unit = quants.unit() / BLOCK;
        let at = tile * quants.tile_bytes(self.k) + block / per_unit * quants.unit_bytes();
        // SAFETY: as the caller promises.
        (unsafe { self.data.as_ptr().add(at) }, block % per_unit)
    }
}

impl Quants {
    /// All types.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 5] = [Self::Q8_0, Self::Q4_0, Self::Q4_1, Self::Q4K, Self::Q6K];

    /// Returns the name used in `numeric_mode`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q4K => "q4_k",
            Self::Q6K => "q6_k",
        }
    }

    /// Returns the inputs of a unit.
    pub(crate) const fn unit(self) -> usize {
        match self {
            Self::Q8_0 | Self::Q4_0 => 64,
            Self::Q4_1 => 32,
            Self::Q4K | Self::Q6K => 256,
        }
    }

    /// Returns the bytes of a unit that precede its quants.
    pub(crate) const fn header_bytes(self) -> usize {
        match self {
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 => 64,
            Self::Q4K | Self::Q6K => 320,
        }
    }

    /// Returns the bytes of a block's quants.
    pub(crate) const fn block_bytes(self) -> usize {
        match self {
            Self::Q8_0 => 8 * WORDS,
            Self::Q4_0 | Self::Q4_1 | Self::Q4K => 4 * WORDS,
            Self::Q6K => 6 * WORDS,
        }
    }

    /// Returns the bytes of a unit.
    pub(crate) const fn unit_bytes(self) -> usize {
        self.header_bytes() + self.unit() / BLOCK * self.block_bytes()
    }

    /// Returns the bytes of a tile of `k` inputs, a multiple of the unit.
    pub(crate) const fn tile_bytes(self, k: usize) -> usize {
        k / self.unit() * self.unit_bytes()
    }

    /// Returns the inputs and the bytes of a block in a file.
    const fn file_block(self) -> (usize, usize) {
        match self {
            Self::Q8_0 => (32, 34),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q4K => (256, 144),
            Self::Q6K => (256, 210),
        }
    }

    /// Puts a row of a file's blocks into a lane of a tile. Returns `false` if a scale is not finite.
    #[must_use]
    pub(crate) fn pack(self, tile: &mut [u8], lane: usize, row: &[u8]) -> bool {
        let (inputs, bytes) = self.file_block();
        let mut finite = true;
        for (index, block) in row.chunks_exact(bytes).enumerate() {
            let at = index * inputs;
            let unit = &mut tile[at / self.unit() * self.unit_bytes()..][..self.unit_bytes()];
            let (header, quants) = unit.split_at_mut(self.header_bytes());
            let within = at % self.unit() / BLOCK;
            match self {
                Self::Q8_0 => {
                    finite &= put_half(header, within * NR + lane, &block[..2]);
                    for (word, bytes) in block[2..].as_chunks().0.iter().enumerate() {
                        let biased = u32::from_le_bytes(*bytes) ^ 0x8080_8080;
                        put_word(quants, within * 8 + word, lane, biased);
                    }
                }
                Self::Q4_0 | Self::Q4_1 => {
                    let scales = self.file_block().1 - 16;
                    finite &= put_half(header, within * NR + lane, &block[..2]);
                    if self == Self::Q4_1 {
                        finite &= put_half(header, NR + lane, &block[2..4]);
                    }
                    // Byte i of a block holds input i in its low half, input i + 16 in its high one.
                    let bytes = words::<4>(&block[scales..]);
                    for (word, shift) in [(0, 0), (2, 0), (0, 4), (2, 4)].into_iter().enumerate() {
                        let (word_at, from) = (within * 4 + word, shift.0);
                        let packed = nibbles(bytes[from], bytes[from + 1], shift.1);
                        put_word(quants, word_at, lane, packed);
                    }
                }
                Self::Q4K => {
                    finite &= put_half(header, lane, &block[..2]) & put_half(header, NR + lane, &block[2..4]);
                    for sub in 0..8 {
                        let (scale, minimum) = six_bits(&block[4..16], sub);
                        header[64 + sub * NR + lane] = scale;
                        header[64 + (8 + sub) * NR + lane] = minimum;
                        // 32 bytes hold a block in their low halves and the next one in their high halves.
                        let bytes = words::<8>(&block[16 + sub / 2 * 32..]);
                        for word in 0..4 {
                            let packed = nibbles(bytes[2 * word], bytes[2 * word + 1], sub % 2 * 4);
                            put_word(quants, sub * 4 + word, lane, packed);
                        }
                    }
                }
                Self::Q6K => {
                    let (low, rest) = block.split_at(128);
                    let (high, rest) = rest.split_at(64);
                    finite &= put_half(header, lane, &rest[16..18]);
                    for (sub, &scale) in rest[..16].iter().enumerate() {
                        header[64 + sub * NR + lane] = scale;
                    }
                    for sub in 0..8 {
                        // Each half of the block has 64 low bytes, for blocks 0 and 1 in their low and 2 and 3 in their high
                        // halves, and 32 high bytes with two bits for each of the four.
                        let (half, within) = (sub / 4, sub % 4);
                        let low = words::<8>(&low[half * 64 + within % 2 * 32..]);
                        let high =
                            words::<8>(&high[half * 32..]).map(|word| word >> (2 * within) & 0x0303_0303);
                        for word in 0..4 {
                            let packed = nibbles(low[2 * word], low[2 * word + 1], within / 2 * 4);
                            put_word(quants, sub * 6 + word, lane, packed);
                        }
                        for word in 0..2 {
                            let [a, b, c, d] = [0, 1, 2, 3].map(|i| high[4 * word + i] << (2 * i));
                            put_word(quants, sub * 6 + 4 + word, lane, a | b | c | d);
                        }
                    }
                }
            }
        }
        finite
    }

    /// Puts 32 weights of a lane into a q8_0 tile.
    pub(crate) fn pack_q8(tile: &mut [u8], block: usize, lane: usize, scale: f16, weights: &[i8; BLOCK]) {
        let unit = &mut tile[block / 2 * Self::Q8_0.unit_bytes()..][..Self::Q8_0.unit_bytes()];
        let (header, quants) = unit.split_at_mut(Self::Q8_0.header_bytes());
        put_half(header, block % 2 * NR + lane, &scale.to_le_bytes());
        for (word, weights) in weights.as_chunks::<4>().0.iter().enumerate() {
            let biased = u32::from_le_bytes(weights.map(|weight| weight as u8 ^ 128));
            put_word(quants, block % 2 * 8 + word, lane, biased);
        }
    }

    /// Takes a block of a tile apart.
    pub(crate) fn decode(self, tile: &[u8], block: usize, lanes: std::ops::Range<usize>) -> Decoded {
        let mut all = Decoded { q: [[0; NR]; BLOCK], d: [0.0; NR], m: [0.0; NR] };
        let unit = &tile[block * BLOCK / self.unit() * self.unit_bytes()..][..self.unit_bytes()];
        let (header, quants) = unit.split_at(self.header_bytes());
        let within = block % (self.unit() / BLOCK);
        let quants = &quants[within * self.block_bytes()..][..self.block_bytes()];
        for lane in lanes {
            let half = |at: usize| f16::from_le_bytes([header[2 * at], header[2 * at + 1]]).to_f32();
            let byte = |at: usize| header[64 + at * NR + lane];
            let (d, m) = match self {
                Self::Q8_0 => (half(within * NR + lane), 0.0),
                Self::Q4_0 => (half(within * NR + lane), half(within * NR + lane) * -8.0),
                Self::Q4_1 => (half(lane), half(NR + lane)),
                Self::Q4K => {
                    (half(lane) * f32::from(byte(within)), -(half(NR + lane) * f32::from(byte(8 + within))))
                }
                Self::Q6K => (half(lane), 0.0),
            };
            (all.d[lane], all.m[lane]) = (d, m);
            for (x, q) in all.q.iter_mut().enumerate() {
                let byte_of = |word: usize| i32::from(quants[word * WORDS + 4 * lane + x % 4]);
                let low = byte_of(x / 8) >> (x / 4 % 2 * 4) & 15;
                q[lane] = match self {
                    Self::Q8_0 => byte_of(x / 4) - 128,
                    Self::Q4_0 | Self::Q4_1 | Self::Q4K => low,
                    Self::Q6K => {
                        let high = byte_of(4 + x / 16) >> (x / 4 % 4 * 2) & 3;
                        (low + 16 * high - 32) * i32::from(byte(2 * within + x / 16) as i8)
                    }
                };
            }
        }
        all
    }
}

/// Reads the first `N` words.
fn words<const N: usize>(bytes: &[u8]) -> [u32; N] {
    let (words, _) = bytes.as_chunks::<4>();
    std::array::from_fn(|i| u32::from_le_bytes(words[i]))
}

/// Joins the halves of eight bytes that `shift` chooses: those of `first` become the low ones.
fn nibbles(first: u32, second: u32, shift: usize) -> u32 {
    (first >> shift & 0x0f0f_0f0f) | (second >> shift & 0x0f0f_0f0f) << 4
}

/// Reads the scale and the minimum of a block out of the twelve bytes of a q4_k block that pack eight of each.
fn six_bits(bytes: &[u8], sub: usize) -> (u8, u8) {
    if sub < 4 {
        (bytes[sub] & 63, bytes[sub + 4] & 63)
    } else {
        ((bytes[sub + 4] & 15) | bytes[sub - 4] >> 6 << 4, (bytes[sub + 4] >> 4) | bytes[sub] >> 6 << 4)
    }
}

/// Writes a half-precision number; `false` if it is not finite.
fn put_half(header: &mut [u8], at: usize, bytes: &[u8]) -> bool {
    header[2 * at..2 * at + 2].copy_from_slice(bytes);
    f16::from_le_bytes([bytes[0], bytes[1]]).is_finite()
}

fn put_word(quants: &mut [u8], word: usize, lane: usize, value: u32) {
    quants[word * WORDS + 4 * lane..][..4].copy_from_slice(&value.to_le_bytes());
}
