//! Quantised weights with VNNI: sixteen lanes of four bytes are multiplied and summed to 32 bits at once.
//!
//! Blocks are eight rows high. Twelve would share each unpacked line among more, but with a tile they do not fit the L1 cache: four bits lose
//! a quarter at 512 rows.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::quants::Product;
use super::super::{BLOCK, NR, Output, Q8Block, Quants};
use super::{AHEAD, STREAM_ROWS};

const Q4_0: u8 = Quants::Q4_0 as u8;
const Q4_1: u8 = Quants::Q4_1 as u8;
const Q4K: u8 = Quants::Q4K as u8;

/// Calls `$kernel::<rows, $ahead>`, or `$kernel::<$kind, rows, $ahead>`, tile by tile, over the rows in the tallest blocks
/// that fit.
macro_rules! tiles {
    ($rows:expr, $tiles:expr, |$i:ident, $t:ident| $kernel:ident <$ahead:ident> $args:tt, [$($mr:literal),+]) => {
        for $t in $tiles {
            let mut $i = $rows.start;
            while $i < $rows.end {
                $(while $rows.end - $i >= $mr {
                    // SAFETY: row and tile lie inside what the caller checked; the instructions are there.
                    unsafe { $kernel::<$mr, $ahead>$args };
                    $i += $mr;
                })+
            }
        }
    };
    ($rows:expr, $tiles:expr, |$i:ident, $t:ident| $kernel:ident <$kind:ident, $ahead:ident> $args:tt, [$($mr:literal),+]) => {
        for $t in $tiles {
            let mut $i = $rows.start;
            while $i < $rows.end {
                $(while $rows.end - $i >= $mr {
                    // SAFETY: row and tile lie inside what the caller checked; the instructions are there.
                    unsafe { $kernel::<$kind, $mr, $ahead>$args };
                    $i += $mr;
                })+
            }
        }
    };
}

/// See `Kernels::matmul`.
///
/// # Safety
/// As there; the sizes are checked by the caller, and the machine has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn matmul(
    p: &Product<'_>,
    rows: Range<usize>,
    tiles: Range<usize>,
    out: Output<'_>,
    hints: bool,
) {
    const NONE: usize = 0;
    let few = rows.len() <= STREAM_ROWS && !hints;
    match p.quants {
        Quants::Q8_0 if few => tiles!(rows, tiles, |i, t| eight_bits<NONE>(p, i, t, out), [3, 2, 1]),
        Quants::Q4_0 if few => tiles!(rows, tiles, |i, t| four_bits < Q4_0, NONE > (p, i, t, out), [3, 2, 1]),
        Quants::Q4_1 if few => tiles!(rows, tiles, |i, t| four_bits < Q4_1, NONE > (p, i, t, out), [3, 2, 1]),
        Quants::Q4K if few => tiles!(rows, tiles, |i, t| four_bits < Q4K, NONE > (p, i, t, out), [3, 2, 1]),
        Quants::Q6K if few => tiles!(rows, tiles, |i, t| six_bits<NONE>(p, i, t, out), [3, 2, 1]),
        Quants::Q8_0 => tiles!(rows, tiles, |i, t| eight_bits<AHEAD>(p, i, t, out), [8, 6, 4, 3, 2, 1]),
        Quants::Q4_0 => {
            tiles!(rows, tiles, |i, t| four_bits < Q4_0, AHEAD > (p, i, t, out), [8, 6, 4, 3, 2, 1]);
        }
        Quants::Q4_1 => {
            tiles!(rows, tiles, |i, t| four_bits < Q4_1, AHEAD > (p, i, t, out), [8, 6, 4, 3, 2, 1]);
        }
        Quants::Q4K => {
            tiles!(rows, tiles, |i, t| four_bits < Q4K, AHEAD > (p, i, t, out), [8, 6, 4, 3, 2, 1])
        }
        Quants::Q6K => tiles!(rows, tiles, |i, t| six_bits<AHEAD>(p, i, t, out), [8, 6, 4, 3, 2, 1]),
    }
}

/// Stores `MR` rows of a tile.
///
/// # Safety
/// The rows `i..i + MR` and the tile lie inside the output, exclusively the caller's.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store<const MR: usize>(acc: &[__m512; MR], i: usize, t: usize, out: Output<'_>) {
    for (r, &lanes) in acc.iter().enumerate() {
        // SAFETY: inside the output, as the caller promises.
        unsafe { _mm512_storeu_ps(out.base.add((i + r) * out.stride + t * NR), lanes) };
    }
}

/// Loads a line of weights, fetching the one `AHEAD` bytes on.
///
/// # Safety
/// The line is there; what is fetched may be anywhere.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn line<const AHEAD: usize>(at: *const u8) -> __m512i {
    // SAFETY: as the caller promises.
    unsafe {
        if AHEAD > 0 {
            _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(AHEAD));
        }
        _mm512_loadu_si512(at.cast())
    }
}

/// Four activations of a row in every lane.
///
/// # Safety
/// `row` is a block, and `word < 8`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn word(row: *const Q8Block, word: usize) -> __m512i {
    // SAFETY: inside the block's quants, which a row of bytes need not align.
    _mm512_set1_epi32(unsafe { (&raw const (*row).quants).cast::<i32>().add(word).read_unaligned() })
}

/// Sixteen half-precision numbers.
///
/// # Safety
/// They are there.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: as the caller promises.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(at.cast()) })
}

/// Sixteen bytes as numbers.
///
/// # Safety
/// They are there.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn small(at: *const u8) -> __m512 {
    // SAFETY: as the caller promises.
    _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(at.cast()) }))
}

/// Eight bits, which are biased by 128: sums begin with what takes the bias off.
///
/// # Safety
/// Rows `i..i + MR` and the tile lie inside the product and the output.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn eight_bits<const MR: usize, const AHEAD: usize>(
    p: &Product<'_>,
    i: usize,
    t: usize,
    out: Output<'_>,
) {
    const Q8: Quants = Quants::Q8_0;
    let mut acc = [_mm512_setzero_ps(); MR];
    for block in 0..p.k / BLOCK {
        // SAFETY: inside the product, as the caller promises.
        unsafe {
            let (unit, within) = p.unit(Q8, t, block);
            let weights = unit.add(Q8.header_bytes() + within * Q8.block_bytes());
            let rows: [_; MR] = std::array::from_fn(|r| p.row(i + r, block));
            let mut dots = [_mm512_setzero_si512(); MR];
            for (dot, &row) in dots.iter_mut().zip(&rows) {
                *dot = _mm512_set1_epi32((*row).correction);
            }
            for g in 0..8 {
                let right = line::<AHEAD>(weights.add(64 * g));
                for (dot, &row) in dots.iter_mut().zip(&rows) {
                    *dot = _mm512_dpbusd_epi32(*dot, right, word(row, g));
                }
            }
            let d = halves(unit.add(within * 32));
            for (r, acc) in acc.iter_mut().enumerate() {
                let scale = _mm512_mul_ps(d, _mm512_set1_ps((*rows[r]).scale));
                *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r]), scale, *acc);
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// Types of four bits: `acc += dot * (d * scale) + m * sum`.
///
/// # Safety
/// Rows `i..i + MR` and the tile lie inside the product and the output.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
unsafe fn four_bits<const KIND: u8, const MR: usize, const AHEAD: usize>(
    p: &Product<'_>,
    i: usize,
    t: usize,
    out: Output<'_>,
) {
    let quants = const {
        match KIND {
            Q4_0 => Quants::Q4_0,
            Q4_1 => Quants::Q4_1,
            _ => Quants::Q4K,
        }
    };
    let low = _mm512_set1_epi8(15);
    let mut acc = [_mm512_setzero_ps(); MR];
    for block in 0..p.k / BLOCK {
        // SAFETY: inside the product, as the caller promises.
        unsafe {
            let (unit, within) = p.unit(quants, t, block);
            let weights = unit.add(quants.header_bytes() + within * quants.block_bytes());
            let rows: [_; MR] = std::array::from_fn(|r| p.row(i + r, block));
            let mut dots = [_mm512_setzero_si512(); MR];
            for j in 0..4 {
                let both = line::<AHEAD>(weights.add(64 * j));
                let first = _mm512_and_si512(both, low);
                let second = _mm512_and_si512(_mm512_srli_epi16::<4>(both), low);
                for (dot, &row) in dots.iter_mut().zip(&rows) {
                    *dot = _mm512_dpbusd_epi32(*dot, first, word(row, 2 * j));
                    *dot = _mm512_dpbusd_epi32(*dot, second, word(row, 2 * j + 1));
                }
            }
            let (d, m) = match quants {
                Quants::Q4_0 => {
                    let d = halves(unit.add(within * 32));
                    (d, _mm512_mul_ps(d, _mm512_set1_ps(-8.0)))
                }
                Quants::Q4_1 => (halves(unit), halves(unit.add(32))),
                _ => {
                    let at = unit.add(64 + within * NR);
                    let m = _mm512_mul_ps(halves(unit.add(32)), small(at.add(8 * NR)));
                    (_mm512_mul_ps(halves(unit), small(at)), _mm512_xor_ps(m, _mm512_set1_ps(-0.0)))
                }
            };
            for (r, acc) in acc.iter_mut().enumerate() {
                let scale = _mm512_mul_ps(d, _mm512_set1_ps((*rows[r]).scale));
                *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r]), scale, *acc);
                *acc = _mm512_fmadd_ps(m, _mm512_set1_ps((*rows[r]).sum), *acc);
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// Six bits, biased by 32, with a scale for every sixteen that multiplies as an integer.
///
/// # Safety
/// Rows `i..i + MR` and the tile lie inside the product and the output.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn six_bits<const MR: usize, const AHEAD: usize>(
    p: &Product<'_>,
    i: usize,
    t: usize,
    out: Output<'_>,
) {
    const Q6: Quants = Quants::Q6K;
    let (nibble, pair, ones) = (_mm512_set1_epi8(15), _mm512_set1_epi8(0x30), _mm512_set1_epi16(1));
    let mut acc = [_mm512_setzero_ps(); MR];
    for block in 0..p.k / BLOCK {
        // SAFETY: inside the product, as the caller promises.
        unsafe {
            let (unit, within) = p.unit(Q6, t, block);
            let weights = unit.add(Q6.header_bytes() + within * Q6.block_bytes());
            let rows: [_; MR] = std::array::from_fn(|r| p.row(i + r, block));
            let mut sums = [_mm512_setzero_si512(); MR];
            for s in 0..2 {
                let first = line::<AHEAD>(weights.add(128 * s));
                let second = line::<AHEAD>(weights.add(128 * s + 64));
                let high = line::<AHEAD>(weights.add(256 + 64 * s));
                // What a shift brings over from the neighbouring byte is outside the mask.
                let with =
                    |low, high| _mm512_or_si512(_mm512_and_si512(low, nibble), _mm512_and_si512(high, pair));
                let right = [
                    with(first, _mm512_slli_epi16::<4>(high)),
                    with(_mm512_srli_epi16::<4>(first), _mm512_slli_epi16::<2>(high)),
                    with(second, high),
                    with(_mm512_srli_epi16::<4>(second), _mm512_srli_epi16::<2>(high)),
                ];
                let scale = unit.add(64 + (2 * within + s) * NR);
                let scale = _mm512_cvtepi8_epi32(_mm_loadu_si128(scale.cast()));
                for (sum, &row) in sums.iter_mut().zip(&rows) {
                    let bias = (&raw const (*row).halves).cast::<i32>().add(s).read();
                    let mut dot = _mm512_madd_epi16(_mm512_set1_epi32(bias), ones);
                    for (g, &right) in right.iter().enumerate() {
                        dot = _mm512_dpbusd_epi32(dot, right, word(row, 4 * s + g));
                    }
                    *sum = _mm512_add_epi32(*sum, _mm512_mullo_epi32(dot, scale));
                }
            }
            let d = halves(unit);
            for (r, acc) in acc.iter_mut().enumerate() {
                let scale = _mm512_mul_ps(d, _mm512_set1_ps((*rows[r]).scale));
                *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r]), scale, *acc);
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}
