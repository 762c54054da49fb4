//! Quantised weights: bytes are multiplied in pairs to sixteen bits, summed there as far as they fit, then widened.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::super::quants::Product;
use super::super::{BLOCK, NR, Output, Q8Block, Quants};
use super::store;

/// Rows from which a tile is unpacked first.
const UNPACK_ROWS: usize = 9;

/// Inputs of a stretch, a multiple of every unit.
const STRETCH: usize = 512;

const STRETCH_BLOCKS: usize = STRETCH / BLOCK;

const Q4_0: u8 = Quants::Q4_0 as u8;
const Q4_1: u8 = Quants::Q4_1 as u8;
const Q4K: u8 = Quants::Q4K as u8;

/// A stretch of a tile, its quants a byte each and its scales in single precision.
#[repr(C, align(64))]
struct Unpacked {
    /// `[stretch / 4][16][4]`; of q8_0 their sizes without the sign.
    quants: [u8; STRETCH * NR],
    /// Of q8_0 alone: with the sign.
    signed: [u8; STRETCH * NR],
    /// `[blocks][16]`
    d: [f32; STRETCH_BLOCKS * NR],
    /// `[blocks][16]`; of types of four bits.
    m: [f32; STRETCH_BLOCKS * NR],
    /// `[blocks][2][16][2]`: of q6_k, every scale twice, once for each sum of a lane.
    scales: [i16; STRETCH_BLOCKS * 2 * NR * 2],
}

/// Calls `$kernel::<rows>`, or `$kernel::<$kind, rows>`, over a range of rows in the tallest blocks that fit.
macro_rules! rows {
    ($rows:expr, |$i:ident| $kernel:ident $args:tt) => {{
        let mut $i = $rows.start;
        while $i < $rows.end {
            // SAFETY: rows and tile lie inside what the caller checked; the instructions are there.
            unsafe {
                match $rows.end - $i {
                    1 => $kernel::<1>$args,
                    2 => $kernel::<2>$args,
                    3 => $kernel::<3>$args,
                    _ => $kernel::<4>$args,
                }
            }
            $i = $rows.end.min($i + 4);
        }
    }};
    ($rows:expr, |$i:ident| <$kind:ident> $kernel:ident $args:tt) => {{
        let mut $i = $rows.start;
        while $i < $rows.end {
            // SAFETY: as above.
            unsafe {
                match $rows.end - $i {
                    1 => $kernel::<$kind, 1>$args,
                    2 => $kernel::<$kind, 2>$args,
                    3 => $kernel::<$kind, 3>$args,
                    _ => $kernel::<$kind, 4>$args,
                }
            }
            $i = $rows.end.min($i + 4);
        }
    }};
}

/// See `Kernels::matmul`.
///
/// # Safety
/// As there; the sizes are checked by the caller, and the machine has the instructions.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul(p: &Product<'_>, rows: Range<usize>, tiles: Range<usize>, out: Output<'_>) {
    if rows.len() < UNPACK_ROWS {
        for t in tiles {
            match p.quants {
                Quants::Q8_0 => rows!(rows, |i| eight_bits(p, i, t, out)),
                Quants::Q4_0 => rows!(rows, |i| <Q4_0> four_bits(p, i, t, out)),
                Quants::Q4_1 => rows!(rows, |i| <Q4_1> four_bits(p, i, t, out)),
                Quants::Q4K => rows!(rows, |i| <Q4K> four_bits(p, i, t, out)),
                Quants::Q6K => rows!(rows, |i| six_bits(p, i, t, out)),
            }
        }
        return;
    }
    let mut unpacked = Unpacked {
        quants: [0; STRETCH * NR],
        signed: [0; STRETCH * NR],
        d: [0.0; STRETCH_BLOCKS * NR],
        m: [0.0; STRETCH_BLOCKS * NR],
        scales: [0; STRETCH_BLOCKS * 2 * NR * 2],
    };
    let blocks = p.k / BLOCK;
    for begin in (0..blocks).step_by(STRETCH_BLOCKS) {
        let stretch = begin..blocks.min(begin + STRETCH_BLOCKS);
        for t in tiles.clone() {
            let u = &mut unpacked;
            // SAFETY: as the caller promises.
            unsafe {
                match p.quants {
                    Quants::Q8_0 => unpack_eight(p, t, stretch.clone(), u),
                    Quants::Q4_0 => unpack_four::<Q4_0>(p, t, stretch.clone(), u),
                    Quants::Q4_1 => unpack_four::<Q4_1>(p, t, stretch.clone(), u),
                    Quants::Q4K => unpack_four::<Q4K>(p, t, stretch.clone(), u),
                    Quants::Q6K => unpack_six(p, t, stretch.clone(), u),
                }
            }
            match p.quants {
                Quants::Q8_0 => rows!(rows, |i| eight_unpacked(p, u, &stretch, i, t, out)),
                Quants::Q6K => rows!(rows, |i| six_unpacked(p, u, &stretch, i, t, out)),
                _ => rows!(rows, |i| four_unpacked(p, u, &stretch, i, t, out)),
            }
        }
    }
}

/// Reads `MR` rows of a tile back from the output, or zeros at the beginning.
///
/// # Safety
/// The rows `i..i + MR` and the tile lie inside the output, exclusively the caller's.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn resume<const MR: usize>(begin: bool, i: usize, t: usize, out: Output<'_>) -> [[__m256; 2]; MR] {
    let mut acc = [[_mm256_setzero_ps(); 2]; MR];
    if !begin {
        for (r, row) in acc.iter_mut().enumerate() {
            for (half, lanes) in row.iter_mut().enumerate() {
                // SAFETY: inside the output, as the caller promises.
                *lanes = unsafe { _mm256_loadu_ps(out.base.add((i + r) * out.stride + t * NR + 8 * half)) };
            }
        }
    }
    acc
}

/// Keeps sums in registers: integer additions may be reordered, and LLVM, given a whole block of them, makes trees whose
/// leaves it then spills (a third of the speed was lost to that).
#[inline]
#[target_feature(enable = "avx2")]
fn keep<const N: usize>(sums: &mut [__m256i; N]) {
    for sum in sums {
        // SAFETY: no instruction at all.
        unsafe { asm!("/* {0} */", inout(ymm_reg) * sum, options(pure, nomem, nostack, preserves_flags)) };
    }
}

/// Four activations of a row in every lane.
///
/// # Safety
/// `row` is a block, and `word < 8`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn word(row: *const Q8Block, word: usize) -> __m256i {
    // SAFETY: inside the block's quants, which a row of bytes need not align.
    unsafe { _mm256_set1_epi32((&raw const (*row).quants).cast::<i32>().add(word).read_unaligned()) }
}

/// Eight half-precision numbers.
///
/// # Safety
/// They are there.
#[inline]
#[target_feature(enable = "f16c")]
unsafe fn halves(at: *const u8) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
}

/// Eight bytes as numbers.
///
/// # Safety
/// They are there.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn small(at: *const u8) -> __m256 {
    // SAFETY: as the caller promises.
    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(at.cast()) }))
}

/// The type that a kernel of four bits is compiled for.
const fn four_bit_type(kind: u8) -> Quants {
    match kind {
        Q4_0 => Quants::Q4_0,
        Q4_1 => Quants::Q4_1,
        _ => Quants::Q4K,
    }
}

/// The scales and minima of a block of four bits.
///
/// # Safety
/// `unit` is a unit of the type and has that block.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn scales<const KIND: u8>(unit: *const u8, within: usize) -> ([__m256; 2], [__m256; 2]) {
    let mut both = ([_mm256_setzero_ps(); 2], [_mm256_setzero_ps(); 2]);
    for half in 0..2 {
        // SAFETY: inside the unit's header.
        unsafe {
            (both.0[half], both.1[half]) = match KIND {
                Q4_0 => {
                    let d = halves(unit.add(within * 32 + half * 16));
                    (d, _mm256_mul_ps(d, _mm256_set1_ps(-8.0)))
                }
                Q4_1 => (halves(unit.add(half * 16)), halves(unit.add(32 + half * 16))),
                _ => {
                    let at = unit.add(64 + within * NR + half * 8);
                    let d = _mm256_mul_ps(halves(unit.add(half * 16)), small(at));
                    let m = _mm256_mul_ps(halves(unit.add(32 + half * 16)), small(at.add(8 * NR)));
                    (d, _mm256_xor_ps(m, _mm256_set1_ps(-0.0)))
                }
            };
        }
    }
    both
}

/// Ends a block of four bits: `acc += dot * (d * scale) + m * sum`.
///
/// # Safety
/// `rows` are blocks.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_scaled<const MR: usize>(
    acc: &mut [[__m256; 2]; MR],
    dots: &[[__m256i; 2]; MR],
    (d, m): (&[__m256; 2], &[__m256; 2]),
    rows: &[*const Q8Block; MR],
) {
    for (r, acc) in acc.iter_mut().enumerate() {
        // SAFETY: blocks, as the caller promises.
        let (scale, sum) = unsafe { (_mm256_set1_ps((*rows[r]).scale), _mm256_set1_ps((*rows[r]).sum)) };
        for (half, acc) in acc.iter_mut().enumerate() {
            let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(dots[r][half], _mm256_set1_epi16(1)));
            *acc = _mm256_fmadd_ps(dot, _mm256_mul_ps(d[half], scale), *acc);
            *acc = _mm256_fmadd_ps(m[half], sum, *acc);
        }
    }
}

/// Types of four bits. A pair of products is at most 2 * 15 * 127, so that eight of them fit sixteen bits.
///
/// # Safety
/// Rows `i..i + MR` and the tile lie inside the product and the output.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn four_bits<const KIND: u8, const MR: usize>(p: &Product<'_>, i: usize, t: usize, out: Output<'_>) {
    let quants = four_bit_type(KIND);
    let low = _mm256_set1_epi8(15);
    let mut acc = [[_mm256_setzero_ps(); 2]; MR];
    for block in 0..p.k / BLOCK {
        // SAFETY: inside the product, as the caller promises.
        unsafe {
            let (unit, within) = p.unit(quants, t, block);
            let weights = unit.add(quants.header_bytes() + within * quants.block_bytes());
            let rows: [_; MR] = std::array::from_fn(|r| p.row(i + r, block));
            let mut dots = [[_mm256_setzero_si256(); 2]; MR];
            for j in 0..4 {
                for half in 0..2 {
                    let both = _mm256_loadu_si256(weights.add(64 * j + 32 * half).cast());
                    let first = _mm256_and_si256(both, low);
                    let second = _mm256_and_si256(_mm256_srli_epi16::<4>(both), low);
                    for (dots, &row) in dots.iter_mut().zip(&rows) {
                        let products = _mm256_maddubs_epi16(first, word(row, 2 * j));
                        dots[half] = _mm256_add_epi16(dots[half], products);
                        let products = _mm256_maddubs_epi16(second, word(row, 2 * j + 1));
                        dots[half] = _mm256_add_epi16(dots[half], products);
                    }
                }
                dots.iter_mut().for_each(|dots| keep(dots));
            }
            let (d, m) = scales::<KIND>(unit, within);
            add_scaled(&mut acc, &dots, (&d, &m), &rows);
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// [`four_bits`] over an unpacked stretch.
///
/// # Safety
/// As there; `u` holds the stretch.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn four_unpacked<const MR: usize>(
    p: &Product<'_>,
    u: &Unpacked,
    stretch: &Range<usize>,
    i: usize,
    t: usize,
    out: Output<'_>,
) {
    // SAFETY: as the caller promises.
    let mut acc = unsafe { resume::<MR>(stretch.start == 0, i, t, out) };
    for (at, block) in stretch.clone().enumerate() {
        // SAFETY: inside the product and the stretch.
        unsafe {
            let weights = u.quants.as_ptr().add(at * BLOCK * NR);
            let rows: [_; MR] = std::array::from_fn(|r| p.row(i + r, block));
            let mut dots = [[_mm256_setzero_si256(); 2]; MR];
            for g in 0..8 {
                let right = [0, 32].map(|half| _mm256_load_si256(weights.add(64 * g + half).cast()));
                for (dots, &row) in dots.iter_mut().zip(&rows) {
                    let left = word(row, g);
                    for (dot, right) in dots.iter_mut().zip(right) {
                        *dot = _mm256_add_epi16(*dot, _mm256_maddubs_epi16(right, left));
                    }
                }
                dots.iter_mut().for_each(|dots| keep(dots));
            }
            let d = [0, 8].map(|half| _mm256_load_ps(u.d.as_ptr().add(at * NR + half)));
            let m = [0, 8].map(|half| _mm256_load_ps(u.m.as_ptr().add(at * NR + half)));
            add_scaled(&mut acc, &dots, (&d, &m), &rows);
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// # Safety
/// The stretch lies inside the tile, and is no longer than the buffer.
#[target_feature(enable = "avx2,f16c")]
unsafe fn unpack_four<const KIND: u8>(p: &Product<'_>, t: usize, stretch: Range<usize>, u: &mut Unpacked) {
    let quants = four_bit_type(KIND);
    let low = _mm256_set1_epi8(15);
    for (at, block) in stretch.enumerate() {
        // SAFETY: inside the tile and the buffer.
        unsafe {
            let (unit, within) = p.unit(quants, t, block);
            let weights = unit.add(quants.header_bytes() + within * quants.block_bytes());
            let to = u.quants.as_mut_ptr().add(at * BLOCK * NR);
            for j in 0..4 {
                for half in [0, 32] {
                    let both = _mm256_loadu_si256(weights.add(64 * j + half).cast());
                    let second = _mm256_srli_epi16::<4>(both);
                    _mm256_store_si256(to.add(128 * j + half).cast(), _mm256_and_si256(both, low));
                    _mm256_store_si256(to.add(128 * j + 64 + half).cast(), _mm256_and_si256(second, low));
                }
            }
            let (d, m) = scales::<KIND>(unit, within);
            for half in 0..2 {
                _mm256_store_ps(u.d.as_mut_ptr().add(at * NR + 8 * half), d[half]);
                _mm256_store_ps(u.m.as_mut_ptr().add(at * NR + 8 * half), m[half]);
            }
        }
    }
}

/// Eight bits. `maddubs` wants one unsigned factor and saturates at 16 bits: |w| times a with w's sign stays within
/// 2 * 128 * 127, but leaves no room to add a second one.
///
/// # Safety
/// Rows `i..i + MR` and the tile lie inside the product and the output.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn eight_bits<const MR: usize>(p: &Product<'_>, i: usize, t: usize, out: Output<'_>) {
    const Q8: Quants = Quants::Q8_0;
    let (bias, ones) = (_mm256_set1_epi8(-128), _mm256_set1_epi16(1));
    let mut acc = [[_mm256_setzero_ps(); 2]; MR];
    for block in 0..p.k / BLOCK {
        // SAFETY: inside the product, as the caller promises.
        unsafe {
            let (unit, within) = p.unit(Q8, t, block);
            let weights = unit.add(Q8.header_bytes() + within * Q8.block_bytes());
            let rows: [_; MR] = std::array::from_fn(|r| p.row(i + r, block));
            let mut dots = [[_mm256_setzero_si256(); 2]; MR];
            for g in 0..8 {
                for half in 0..2 {
                    let right = _mm256_loadu_si256(weights.add(64 * g + 32 * half).cast());
                    let right = _mm256_xor_si256(right, bias);
                    let size = _mm256_abs_epi8(right);
                    for (dots, &row) in dots.iter_mut().zip(&rows) {
                        let products = _mm256_maddubs_epi16(size, _mm256_sign_epi8(word(row, g), right));
                        dots[half] = _mm256_add_epi32(dots[half], _mm256_madd_epi16(products, ones));
                    }
                }
                dots.iter_mut().for_each(|dots| keep(dots));
            }
            for half in 0..2 {
                let d = halves(unit.add(within * 32 + half * 16));
                for (r, acc) in acc.iter_mut().enumerate() {
                    let scale = _mm256_mul_ps(d, _mm256_set1_ps((*rows[r]).scale));
                    acc[half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][half]), scale, acc[half]);
                }
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// [`eight_bits`] over an unpacked stretch.
///
/// # Safety
/// As there; `u` holds the stretch.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn eight_unpacked<const MR: usize>(
    p: &Product<'_>,
    u: &Unpacked,
    stretch: &Range<usize>,
    i: usize,
    t: usize,
    out: Output<'_>,
) {
    let ones = _mm256_set1_epi16(1);
    // SAFETY: as the caller promises.
    let mut acc = unsafe { resume::<MR>(stretch.start == 0, i, t, out) };
    for (at, block) in stretch.clone().enumerate() {
        // SAFETY: inside the product and the stretch.
        unsafe {
            let (sizes, signed) =
                (u.quants.as_ptr().add(at * BLOCK * NR), u.signed.as_ptr().add(at * BLOCK * NR));
            let rows: [_; MR] = std::array::from_fn(|r| p.row(i + r, block));
            let mut dots = [[_mm256_setzero_si256(); 2]; MR];
            for g in 0..8 {
                for half in 0..2 {
                    let size = _mm256_load_si256(sizes.add(64 * g + 32 * half).cast());
                    let right = _mm256_load_si256(signed.add(64 * g + 32 * half).cast());
                    for (dots, &row) in dots.iter_mut().zip(&rows) {
                        let products = _mm256_maddubs_epi16(size, _mm256_sign_epi8(word(row, g), right));
                        dots[half] = _mm256_add_epi32(dots[half], _mm256_madd_epi16(products, ones));
                    }
                }
                dots.iter_mut().for_each(|dots| keep(dots));
            }
            for half in 0..2 {
                let d = _mm256_load_ps(u.d.as_ptr().add(at * NR + 8 * half));
                for (r, acc) in acc.iter_mut().enumerate() {
                    let scale = _mm256_mul_ps(d, _mm256_set1_ps((*rows[r]).scale));
                    acc[half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][half]), scale, acc[half]);
                }
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// # Safety
/// The stretch lies inside the tile, and is no longer than the buffer.
#[target_feature(enable = "avx2,f16c")]
unsafe fn unpack_eight(p: &Product<'_>, t: usize, stretch: Range<usize>, u: &mut Unpacked) {
    const Q8: Quants = Quants::Q8_0;
    let bias = _mm256_set1_epi8(-128);
    for (at, block) in stretch.enumerate() {
        // SAFETY: inside the tile and the buffer.
        unsafe {
            let (unit, within) = p.unit(Q8, t, block);
            let weights = unit.add(Q8.header_bytes() + within * Q8.block_bytes());
            for j in (0..BLOCK * NR).step_by(32) {
                let right = _mm256_xor_si256(_mm256_loadu_si256(weights.add(j).cast()), bias);
                let to = at * BLOCK * NR + j;
                _mm256_store_si256(u.quants.as_mut_ptr().add(to).cast(), _mm256_abs_epi8(right));
                _mm256_store_si256(u.signed.as_mut_ptr().add(to).cast(), right);
            }
            for half in 0..2 {
                let d = halves(unit.add(within * 32 + half * 16));
                _mm256_store_ps(u.d.as_mut_ptr().add(at * NR + 8 * half), d);
            }
        }
    }
}

/// The four words of a lane that one word of two bits completes, for eight lanes.
///
/// # Safety
/// `low` and `high` are the words of the first of eight lanes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn join(low: *const u8, high: *const u8) -> [__m256i; 4] {
    let (nibble, pair) = (_mm256_set1_epi8(15), _mm256_set1_epi8(0x30));
    // SAFETY: two words of four bits and one of two, as the caller promises.
    let (first, second, high) = unsafe {
        (
            _mm256_loadu_si256(low.cast()),
            _mm256_loadu_si256(low.add(64).cast()),
            _mm256_loadu_si256(high.cast()),
        )
    };
    // What a shift brings over from the neighbouring byte is outside the mask.
    let with = |low, high| _mm256_or_si256(_mm256_and_si256(low, nibble), _mm256_and_si256(high, pair));
    [
        with(first, _mm256_slli_epi16::<4>(high)),
        with(_mm256_srli_epi16::<4>(first), _mm256_slli_epi16::<2>(high)),
        with(second, high),
        with(_mm256_srli_epi16::<4>(second), _mm256_srli_epi16::<2>(high)),
    ]
}

/// Eight scales of q6_k, each twice: for both sums of sixteen bits in a lane.
///
/// # Safety
/// They are there.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn doubled(at: *const u8) -> __m256i {
    // SAFETY: as the caller promises.
    let wide = _mm256_cvtepi8_epi32(unsafe { _mm_loadl_epi64(at.cast()) });
    // A byte's sign fills the upper half, which the lower half replaces.
    _mm256_or_si256(_mm256_slli_epi32::<16>(wide), _mm256_and_si256(wide, _mm256_set1_epi32(0xffff)))
}

/// Six bits. The bias of 32 is taken off while sums are of sixteen bits: four pairs of at most 2 * 63 * 127 may wrap round
/// there, but what is left of them, at most 8 * 32 * 127, fits again. Widening multiplies with the scale.
///
/// # Safety
/// Rows `i..i + MR` and the tile lie inside the product and the output.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn six_bits<const MR: usize>(p: &Product<'_>, i: usize, t: usize, out: Output<'_>) {
    const Q6: Quants = Quants::Q6K;
    let mut acc = [[_mm256_setzero_ps(); 2]; MR];
    for block in 0..p.k / BLOCK {
        // SAFETY: inside the product, as the caller promises.
        unsafe {
            let (unit, within) = p.unit(Q6, t, block);
            let weights = unit.add(Q6.header_bytes() + within * Q6.block_bytes());
            let rows: [_; MR] = std::array::from_fn(|r| p.row(i + r, block));
            for half in 0..2 {
                let mut dots = [_mm256_setzero_si256(); MR];
                for s in 0..2 {
                    let low = weights.add(128 * s + 32 * half);
                    let right = join(low, weights.add(256 + 64 * s + 32 * half));
                    let scale = doubled(unit.add(64 + (2 * within + s) * NR + 8 * half));
                    for (dot, &row) in dots.iter_mut().zip(&rows) {
                        *dot = _mm256_add_epi32(*dot, sixteen(row, s, &right, scale));
                    }
                    keep(&mut dots);
                }
                let d = halves(unit.add(half * 16));
                for (r, acc) in acc.iter_mut().enumerate() {
                    let scale = _mm256_mul_ps(d, _mm256_set1_ps((*rows[r]).scale));
                    acc[half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), scale, acc[half]);
                }
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// Sixteen inputs of a row against their weights, times the scale.
///
/// # Safety
/// `row` is a block, and `s < 2`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn sixteen(row: *const Q8Block, s: usize, right: &[__m256i; 4], scale: __m256i) -> __m256i {
    // SAFETY: inside the block, whose pairs of 16 bits are as aligned as a word.
    unsafe {
        let mut sum = _mm256_set1_epi32((&raw const (*row).halves).cast::<i32>().add(s).read());
        for (g, &right) in right.iter().enumerate() {
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(right, word(row, 4 * s + g)));
        }
        _mm256_madd_epi16(sum, scale)
    }
}

/// [`six_bits`] over an unpacked stretch.
///
/// # Safety
/// As there; `u` holds the stretch.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn six_unpacked<const MR: usize>(
    p: &Product<'_>,
    u: &Unpacked,
    stretch: &Range<usize>,
    i: usize,
    t: usize,
    out: Output<'_>,
) {
    // SAFETY: as the caller promises.
    let mut acc = unsafe { resume::<MR>(stretch.start == 0, i, t, out) };
    for (at, block) in stretch.clone().enumerate() {
        // SAFETY: inside the product and the stretch.
        unsafe {
            let weights = u.quants.as_ptr().add(at * BLOCK * NR);
            let rows: [_; MR] = std::array::from_fn(|r| p.row(i + r, block));
            for half in 0..2 {
                let mut dots = [_mm256_setzero_si256(); MR];
                for s in 0..2 {
                    let right = [0, 1, 2, 3]
                        .map(|g| _mm256_load_si256(weights.add(64 * (4 * s + g) + 32 * half).cast()));
                    let scale = u.scales.as_ptr().add(((2 * at + s) * NR + 8 * half) * 2);
                    let scale = _mm256_load_si256(scale.cast());
                    for (dot, &row) in dots.iter_mut().zip(&rows) {
                        *dot = _mm256_add_epi32(*dot, sixteen(row, s, &right, scale));
                    }
                    keep(&mut dots);
                }
                let d = _mm256_load_ps(u.d.as_ptr().add(at * NR + 8 * half));
                for (r, acc) in acc.iter_mut().enumerate() {
                    let scale = _mm256_mul_ps(d, _mm256_set1_ps((*rows[r]).scale));
                    acc[half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), scale, acc[half]);
                }
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// # Safety
/// The stretch lies inside the tile, and is no longer than the buffer.
#[target_feature(enable = "avx2,f16c")]
unsafe fn unpack_six(p: &Product<'_>, t: usize, stretch: Range<usize>, u: &mut Unpacked) {
    const Q6: Quants = Quants::Q6K;
    for (at, block) in stretch.enumerate() {
        // SAFETY: inside the tile and the buffer.
        unsafe {
            let (unit, within) = p.unit(Q6, t, block);
            let weights = unit.add(Q6.header_bytes() + within * Q6.block_bytes());
            let to = u.quants.as_mut_ptr().add(at * BLOCK * NR);
            for half in 0..2 {
                for s in 0..2 {
                    let low = weights.add(128 * s + 32 * half);
                    let right = join(low, weights.add(256 + 64 * s + 32 * half));
                    for (g, right) in right.into_iter().enumerate() {
                        _mm256_store_si256(to.add(64 * (4 * s + g) + 32 * half).cast(), right);
                    }
                    let scale = doubled(unit.add(64 + (2 * within + s) * NR + 8 * half));
                    let place = u.scales.as_mut_ptr().add(((2 * at + s) * NR + 8 * half) * 2);
                    _mm256_store_si256(place.cast(), scale);
                }
                let d = halves(unit.add(half * 16));
                _mm256_store_ps(u.d.as_mut_ptr().add(at * NR + 8 * half), d);
            }
        }
    }
}
