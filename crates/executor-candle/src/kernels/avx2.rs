//! The products with AVX2, FMA and F16C: a tile of sixteen columns is two registers.
//!
//! Few rows multiply with weights as they lie in memory, unpacked in registers on the way. For many rows a stretch of a
//! tile is first unpacked into a buffer in the L1 cache, which all rows then share; sums wait in the output between
//! stretches. An element's additions are the same, in the same order, either way.

mod quants;

use std::arch::x86_64::*;
use std::ops::Range;

use super::quants::Product;
use super::{F32Product, MatrixRef, NR, Output, RowsRef};

/// Rows from which half-precision and bfloat16 tiles are unpacked first.
const UNPACK_ROWS: usize = 7;

/// Inputs of a stretch: its sixteen columns in single precision are half of the L1 cache.
const STRETCH: usize = 256;

/// A stretch of a tile in single precision.
#[repr(C, align(64))]
struct Unpacked([f32; STRETCH * NR]);

/// Calls `$kernel::<rows>` over a range of rows in the tallest blocks that fit, tile by tile.
macro_rules! blocks {
    ($rows:expr, $tiles:expr, |$i:ident, $t:ident| $kernel:ident $args:tt, [$($mr:literal),+]) => {
        for $t in $tiles {
            let mut $i = $rows.start;
            while $i < $rows.end {
                $(while $rows.end - $i >= $mr {
                    // SAFETY: row and tile lie inside what the caller checked; the instructions are there.
                    unsafe { $kernel::<$mr>$args };
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
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul(
    matrix: MatrixRef<'_>,
    rows: RowsRef<'_>,
    range: Range<usize>,
    tiles: Range<usize>,
    out: Output<'_>,
) {
    match (matrix, rows) {
        (MatrixRef::F32 { k, .. }, RowsRef::F32(a)) => {
            // SAFETY: as the caller promises.
            unsafe { stretches(matrix, k, a, range, tiles, out) };
        }
        (MatrixRef::F16 { k, .. } | MatrixRef::Bf16 { k, .. }, RowsRef::F32(a))
            if range.len() >= UNPACK_ROWS =>
        {
            // SAFETY: as the caller promises.
            unsafe { stretches(matrix, k, a, range, tiles, out) };
        }
        (MatrixRef::F16 { data, k }, RowsRef::F32(a)) => {
            blocks!(range, tiles, |i, t| f16_block(data, k, a, i, t, out), [6, 4, 3, 2, 1]);
        }
        (MatrixRef::Bf16 { data, k }, RowsRef::F32(a)) => {
            blocks!(range, tiles, |i, t| bf16_block(data, k, a, i, t, out), [4, 3, 2, 1]);
        }
        (MatrixRef::Quantised { quants, data, k }, RowsRef::Q8 { blocks, stride }) => {
            let product = Product { quants, data, k, blocks, stride };
            // SAFETY: as the caller promises.
            unsafe { quants::matmul(&product, range, tiles, out) };
        }
        _ => unreachable!("rows are prepared for the matrix they meet"),
    }
}

/// Multiplies stretch by stretch of `k`, each tile of a stretch unpacked once for all rows.
///
/// # Safety
/// As [`matmul`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn stretches(
    matrix: MatrixRef<'_>,
    k: usize,
    a: &[f32],
    rows: Range<usize>,
    tiles: Range<usize>,
    out: Output<'_>,
) {
    let mut unpacked = Unpacked([0.0; STRETCH * NR]);
    // A single row reads its weights once, in one stream.
    let longest = if rows.len() < UNPACK_ROWS { k } else { STRETCH };
    for begin in (0..k).step_by(longest) {
        let len = longest.min(k - begin);
        for t in tiles.clone() {
            let (at, unpacked) = ((t * k + begin) * NR, &mut unpacked.0);
            let w = match matrix {
                MatrixRef::F32 { data, .. } => &data[at..][..len * NR],
                MatrixRef::F16 { data, .. } => {
                    widen_f16(&data[at..][..len * NR], unpacked);
                    &unpacked[..len * NR]
                }
                MatrixRef::Bf16 { data, .. } => {
                    widen_pairs(&data[at..][..len * NR], unpacked);
                    &unpacked[..len * NR]
                }
                MatrixRef::Quantised { .. } => unreachable!("these have products of their own"),
            };
            // The buffer is every tile of this product.
            let p = F32Product { a: &a[begin..], lda: k, w, tile: 0, ldw: NR, k: len, accumulate: begin > 0 };
            blocks!(rows, t..t + 1, |i, t| f32_block(&p, i, t, out), [6, 4, 3, 2, 1]);
        }
    }
}

/// Widens interleaved pairs of bfloat16 to two lines of lanes.
#[target_feature(enable = "avx2")]
fn widen_pairs(from: &[u16], to: &mut [f32]) {
    let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
    for (from, to) in from.chunks_exact(2 * NR).zip(to.chunks_exact_mut(2 * NR)) {
        for half in 0..2 {
            // SAFETY: both chunks hold two lines of sixteen.
            unsafe {
                let pairs = _mm256_loadu_si256(from.as_ptr().add(16 * half).cast());
                let even = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs));
                let odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, high));
                _mm256_storeu_ps(to.as_mut_ptr().add(8 * half), even);
                _mm256_storeu_ps(to.as_mut_ptr().add(NR + 8 * half), odd);
            }
        }
    }
}

/// Stores `MR` rows of a tile.
///
/// # Safety
/// The rows `i..i + MR` and the tile lie inside the output, exclusively the caller's.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store<const MR: usize>(acc: &[[__m256; 2]; MR], i: usize, t: usize, out: Output<'_>) {
    for (r, row) in acc.iter().enumerate() {
        for (half, &lanes) in row.iter().enumerate() {
            // SAFETY: inside the output, as the caller promises.
            unsafe { _mm256_storeu_ps(out.base.add((i + r) * out.stride + t * NR + 8 * half), lanes) };
        }
    }
}

/// # Safety
/// Rows `i..i + MR` and the tile lie inside the product's slices and the output.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn f32_block<const MR: usize>(p: &F32Product<'_>, i: usize, t: usize, out: Output<'_>) {
    let mut acc = [[_mm256_setzero_ps(); 2]; MR];
    if p.accumulate {
        for (r, row) in acc.iter_mut().enumerate() {
            for (half, lanes) in row.iter_mut().enumerate() {
                // SAFETY: inside the output, as the caller promises.
                *lanes = unsafe { _mm256_loadu_ps(out.base.add((i + r) * out.stride + t * NR + 8 * half)) };
            }
        }
    }
    let (a, w) = (p.a.as_ptr(), p.w.as_ptr());
    for x in 0..p.k {
        // SAFETY: inside the right tile.
        let right = unsafe {
            let at = w.add(t * p.tile + x * p.ldw);
            [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))]
        };
        for (r, row) in acc.iter_mut().enumerate() {
            // SAFETY: inside the left rows.
            let left = _mm256_set1_ps(unsafe { *a.add((i + r) * p.lda + x) });
            for (lanes, &right) in row.iter_mut().zip(&right) {
                *lanes = _mm256_fmadd_ps(left, right, *lanes);
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// # Safety
/// Rows `i..i + MR` and the tile lie inside the slices and the output.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn f16_block<const MR: usize>(data: &[u16], k: usize, a: &[f32], i: usize, t: usize, out: Output<'_>) {
    let mut acc = [[_mm256_setzero_ps(); 2]; MR];
    let (a, w) = (a.as_ptr(), data.as_ptr());
    for x in 0..k {
        // SAFETY: inside the right tile.
        let right = unsafe {
            let at = w.add((t * k + x) * NR);
            [_mm256_cvtph_ps(_mm_loadu_si128(at.cast())), _mm256_cvtph_ps(_mm_loadu_si128(at.add(8).cast()))]
        };
        for (r, row) in acc.iter_mut().enumerate() {
            // SAFETY: inside the left rows.
            let left = _mm256_set1_ps(unsafe { *a.add((i + r) * k + x) });
            for (lanes, &right) in row.iter_mut().zip(&right) {
                *lanes = _mm256_fmadd_ps(left, right, *lanes);
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// A bf16 pair in one 32-bit lane is the even element in the low and the odd one in the high half; moving either to the
/// top gives its f32.
///
/// # Safety
/// Rows `i..i + MR` and the tile lie inside the slices and the output; `k` is even.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn bf16_block<const MR: usize>(
    data: &[u16],
    k: usize,
    a: &[f32],
    i: usize,
    t: usize,
    out: Output<'_>,
) {
    let mut acc = [[_mm256_setzero_ps(); 2]; MR];
    let (a, w) = (a.as_ptr(), data.as_ptr());
    let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
    for x in 0..k / 2 {
        // SAFETY: inside the right tile.
        let pairs = unsafe {
            let at = w.add((t * (k / 2) + x) * 2 * NR);
            [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(16).cast())]
        };
        let even = pairs.map(|pair| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pair)));
        let odd = pairs.map(|pair| _mm256_castsi256_ps(_mm256_and_si256(pair, high)));
        for (r, row) in acc.iter_mut().enumerate() {
            // SAFETY: inside the left rows.
            let (first, second) = unsafe {
                let at = a.add((i + r) * k + 2 * x);
                (_mm256_set1_ps(*at), _mm256_set1_ps(*at.add(1)))
            };
            for (half, lanes) in row.iter_mut().enumerate() {
                *lanes = _mm256_fmadd_ps(first, even[half], *lanes);
                *lanes = _mm256_fmadd_ps(second, odd[half], *lanes);
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// Widens half precision; the output is at least as long, and the length a multiple of 16.
#[target_feature(enable = "avx2,f16c")]
pub(super) fn widen_f16(from: &[u16], to: &mut [f32]) {
    for (from, to) in from.chunks_exact(8).zip(to.chunks_exact_mut(8)) {
        // SAFETY: both chunks hold 8 elements.
        unsafe {
            let wide = _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast()));
            _mm256_storeu_ps(to.as_mut_ptr(), wide);
        }
    }
}

/// Rounds to half precision; both slices are of one length, a multiple of 16.
#[target_feature(enable = "avx2,f16c")]
pub(super) fn narrow_f16(from: &[f32], to: &mut [u16]) {
    for (from, to) in from.chunks_exact(8).zip(to.chunks_exact_mut(8)) {
        // SAFETY: both chunks hold 8 elements.
        unsafe {
            let narrow = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(from.as_ptr()));
            _mm_storeu_si128(to.as_mut_ptr().cast(), narrow);
        }
    }
}
