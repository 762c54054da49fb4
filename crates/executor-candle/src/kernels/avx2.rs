//! The products with AVX2, FMA and F16C: a tile of sixteen columns is two registers.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{F32Product, MatrixRef, NR, Output, Q8_BLOCK, RowsRef};

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

/// See `Kernels::f32_product`.
///
/// # Safety
/// As there; the sizes are checked by the caller, and the machine has the instructions.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn f32_product(
    p: &F32Product<'_>,
    rows: Range<usize>,
    tiles: Range<usize>,
    out: Output<'_>,
) {
    blocks!(rows, tiles, |i, t| f32_block(p, i, t, out), [6, 4, 2, 1]);
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
        (MatrixRef::F32 { data, k }, RowsRef::F32(a)) => {
            let p = F32Product { a, lda: k, w: data, tile: k * NR, ldw: NR, k, accumulate: false };
            blocks!(range, tiles, |i, t| f32_block(&p, i, t, out), [6, 4, 2, 1]);
        }
        (MatrixRef::F16 { data, k }, RowsRef::F32(a)) => {
            blocks!(range, tiles, |i, t| f16_block(data, k, a, i, t, out), [6, 4, 2, 1]);
        }
        (MatrixRef::Bf16 { data, k }, RowsRef::Bf16(a)) => {
            blocks!(range, tiles, |i, t| bf16_block(data, k, a, i, t, out), [4, 2, 1]);
        }
        (MatrixRef::Q8 { quants, scales, k }, RowsRef::Q8 { quants: a, scales: d, .. }) => {
            let q8 = Q8 { quants, scales, k, a, d };
            blocks!(range, tiles, |i, t| q8_block(&q8, i, t, out), [2, 1]);
        }
        _ => unreachable!("rows are prepared for the matrix they meet"),
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
    a: &[u16],
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
            // SAFETY: inside the left rows; two neighbours are read as one word.
            let pair = unsafe { a.add((i + r) * k + 2 * x).cast::<u32>().read_unaligned() };
            let first = _mm256_set1_ps(f32::from_bits(pair << 16));
            let second = _mm256_set1_ps(f32::from_bits(pair & 0xffff_0000));
            for (half, lanes) in row.iter_mut().enumerate() {
                *lanes = _mm256_fmadd_ps(first, even[half], *lanes);
                *lanes = _mm256_fmadd_ps(second, odd[half], *lanes);
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// A q8_0 product. The rows' corrections are not needed: weights are made signed again.
struct Q8<'a> {
    quants: &'a [u8],
    scales: &'a [u16],
    k: usize,
    a: &'a [i8],
    d: &'a [f32],
}

/// `maddubs` wants one unsigned factor and saturates at 16 bits: |w| times a with w's sign stays within 2 * 128 * 127.
///
/// # Safety
/// Rows `i..i + MR` and the tile lie inside the product's slices and the output.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q8_block<const MR: usize>(p: &Q8<'_>, i: usize, t: usize, out: Output<'_>) {
    let blocks = p.k / Q8_BLOCK;
    let (bias, ones) = (_mm256_set1_epi8(-128), _mm256_set1_epi16(1));
    let mut acc = [[_mm256_setzero_ps(); 2]; MR];
    for block in 0..blocks {
        let at = t * blocks + block;
        let mut dots = [[_mm256_setzero_si256(); 2]; MR];
        for g in 0..8 {
            for half in 0..2 {
                // SAFETY: inside the right tile.
                let right = unsafe {
                    _mm256_loadu_si256(p.quants.as_ptr().add(at * 512 + g * 64 + half * 32).cast())
                };
                let right = _mm256_xor_si256(right, bias);
                let size = _mm256_abs_epi8(right);
                for (r, row) in dots.iter_mut().enumerate() {
                    // SAFETY: inside the left rows; four neighbours are read as one word.
                    let left = _mm256_set1_epi32(unsafe {
                        p.a.as_ptr()
                            .add((i + r) * p.k + block * Q8_BLOCK + g * 4)
                            .cast::<i32>()
                            .read_unaligned()
                    });
                    let products = _mm256_maddubs_epi16(size, _mm256_sign_epi8(left, right));
                    row[half] = _mm256_add_epi32(row[half], _mm256_madd_epi16(products, ones));
                }
            }
        }
        for half in 0..2 {
            // SAFETY: inside the scales.
            let scale =
                unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.scales.as_ptr().add(at * NR + 8 * half).cast())) };
            for (r, row) in acc.iter_mut().enumerate() {
                // SAFETY: inside the rows' scales.
                let left = _mm256_set1_ps(unsafe { *p.d.as_ptr().add((i + r) * blocks + block) });
                let sum = _mm256_cvtepi32_ps(dots[r][half]);
                row[half] = _mm256_fmadd_ps(sum, _mm256_mul_ps(scale, left), row[half]);
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// Widens half precision; both slices are of one length, a multiple of 16.
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
