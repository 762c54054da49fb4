//! The products with AVX-512 and VNNI, and with BF16 where rows are in pairs.
//!
//! One register holds the sixteen columns of a tile; `MR` rows by `NT` tiles of accumulators are kept in registers while
//! `k` runs once. The per-element order is that of every other shape: see the module docs.

mod quants;

use std::arch::x86_64::*;
use std::ops::Range;

use super::quants::Product;
use super::{F32Product, MatrixRef, NR, Output, RowsRef};

/// Rows up to which a product is a matter of streaming weights. One tile at a time is one stream, which a Zen 4 prefetches best alone (31
/// GB/s for one q8_0 row, against 21 with our hints and 12 with tiles in pairs). A Sapphire Rapids wants hints, and for floating point
/// pairs, whose chains of additions overlap.
const STREAM_ROWS: usize = 3;

/// Rows up to which single tiles beat pairs, whose two streams disturb each other until there is work enough to hide it.
const SINGLE_ROWS: usize = 8;

/// How far ahead weights are prefetched, in bytes.
const AHEAD: usize = 2048;

/// Calls `$kernel::<rows, 1, $ahead>` tile by tile, over the rows in the tallest blocks that fit.
macro_rules! singles {
    ($rows:expr, $tiles:expr, $ahead:expr, |$i:ident, $t:ident| $kernel:ident $args:tt, [$($mr:literal),+]) => {
        for $t in $tiles {
            let mut $i = $rows.start;
            while $i < $rows.end {
                $(while $rows.end - $i >= $mr {
                    // SAFETY: row and tile lie inside what the caller checked; the instructions are there.
                    unsafe { $kernel::<$mr, 1, { $ahead }> $args };
                    $i += $mr;
                })+
            }
        }
    };
}

/// Calls `$kernel::<rows, 2, $ahead>` for pairs of tiles, and the like for a last single one.
macro_rules! pairs {
    ($rows:expr, $tiles:expr, $ahead:expr, |$i:ident, $t:ident| $kernel:ident $args:tt, [$($mr:literal),+]) => {{
        let mut $t = $tiles.start;
        while $t + 2 <= $tiles.end {
            let mut $i = $rows.start;
            while $i < $rows.end {
                $(while $rows.end - $i >= $mr {
                    // SAFETY: rows and tiles lie inside what the caller checked; the instructions are there.
                    unsafe { $kernel::<$mr, 2, { $ahead }> $args };
                    $i += $mr;
                })+
            }
            $t += 2;
        }
        singles!($rows, $t..$tiles.end, $ahead, |$i, $t| $kernel $args, [$($mr),+]);
    }};
}

/// The choice between them for weights of floating point.
macro_rules! streamed {
    ($rows:expr, $tiles:expr, $hints:expr, |$i:ident, $t:ident| $kernel:ident $args:tt) => {
        if $rows.len() <= STREAM_ROWS && $hints {
            pairs!($rows, $tiles, AHEAD, |$i, $t| $kernel $args, [3, 2, 1]);
        } else if $rows.len() <= STREAM_ROWS {
            singles!($rows, $tiles, 0, |$i, $t| $kernel $args, [3, 2, 1]);
        } else if $rows.len() <= SINGLE_ROWS {
            singles!($rows, $tiles, AHEAD, |$i, $t| $kernel $args, [8, 6, 4, 2, 1]);
        } else {
            pairs!($rows, $tiles, AHEAD, |$i, $t| $kernel $args, [12, 8, 4, 2, 1]);
        }
    };
}

/// See `Kernels::matmul`.
///
/// # Safety
/// As there; the sizes are checked by the caller, and the machine has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn matmul(
    matrix: MatrixRef<'_>,
    rows: RowsRef<'_>,
    range: Range<usize>,
    tiles: Range<usize>,
    out: Output<'_>,
    hints: bool,
) {
    match (matrix, rows) {
        (MatrixRef::F32 { data, k }, RowsRef::F32(a)) => {
            let p = F32Product { a, lda: k, w: data, tile: k * NR, ldw: NR, k, accumulate: false };
            streamed!(range, tiles, hints, |i, t| f32_block(&p, i, t, out));
        }
        (MatrixRef::F16 { data, k }, RowsRef::F32(a)) => {
            streamed!(range, tiles, hints, |i, t| f16_block(data, k, a, i, t, out));
        }
        (MatrixRef::Bf16 { data, k }, RowsRef::Bf16(a)) => {
            streamed!(range, tiles, hints, |i, t| bf16_pairs_block(data, k, a, i, t, out));
        }
        (MatrixRef::Bf16 { data, k }, RowsRef::F32(a)) => {
            streamed!(range, tiles, hints, |i, t| bf16_block(data, k, a, i, t, out));
        }
        (MatrixRef::Quantised { quants, data, k }, RowsRef::Q8 { blocks, stride }) => {
            let product = Product { quants, data, k, blocks, stride };
            // SAFETY: as the caller promises.
            unsafe { quants::matmul(&product, range, tiles, out, hints) };
        }
        _ => unreachable!("rows are prepared for the matrix they meet"),
    }
}

/// Stores `MR x NT` accumulators.
///
/// # Safety
/// The rows `i..i + MR` and tiles `t..t + NT` lie inside the output, exclusively the caller's.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store<const MR: usize, const NT: usize>(
    acc: &[[__m512; NT]; MR],
    i: usize,
    t: usize,
    out: Output<'_>,
) {
    for (r, row) in acc.iter().enumerate() {
        for (n, &lanes) in row.iter().enumerate() {
            // SAFETY: inside the output, as the caller promises.
            unsafe { _mm512_storeu_ps(out.base.add((i + r) * out.stride + (t + n) * NR), lanes) };
        }
    }
}

/// # Safety
/// Rows `i..i + MR` and tiles `t..t + NT` lie inside the product's slices and the output.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn f32_block<const MR: usize, const NT: usize, const AHEAD: usize>(
    p: &F32Product<'_>,
    i: usize,
    t: usize,
    out: Output<'_>,
) {
    let mut acc = [[_mm512_setzero_ps(); NT]; MR];
    if p.accumulate {
        for (r, row) in acc.iter_mut().enumerate() {
            for (n, lanes) in row.iter_mut().enumerate() {
                // SAFETY: inside the output, as the caller promises.
                *lanes = unsafe { _mm512_loadu_ps(out.base.add((i + r) * out.stride + (t + n) * NR)) };
            }
        }
    }
    let (a, w) = (p.a.as_ptr(), p.w.as_ptr());
    for x in 0..p.k {
        let mut right = [_mm512_setzero_ps(); NT];
        for (n, right) in right.iter_mut().enumerate() {
            // SAFETY: inside the right tiles; prefetching may point anywhere.
            unsafe {
                let at = w.add((t + n) * p.tile + x * p.ldw);
                if AHEAD > 0 {
                    _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(AHEAD));
                }
                *right = _mm512_loadu_ps(at);
            }
        }
        for (r, row) in acc.iter_mut().enumerate() {
            // SAFETY: inside the left rows.
            let left = _mm512_set1_ps(unsafe { *a.add((i + r) * p.lda + x) });
            for (lanes, &right) in row.iter_mut().zip(&right) {
                *lanes = _mm512_fmadd_ps(left, right, *lanes);
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// # Safety
/// Rows `i..i + MR` and tiles `t..t + NT` lie inside the slices and the output.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn f16_block<const MR: usize, const NT: usize, const AHEAD: usize>(
    data: &[u16],
    k: usize,
    a: &[f32],
    i: usize,
    t: usize,
    out: Output<'_>,
) {
    let mut acc = [[_mm512_setzero_ps(); NT]; MR];
    let (a, w) = (a.as_ptr(), data.as_ptr());
    for x in 0..k {
        let mut right = [_mm512_setzero_ps(); NT];
        for (n, right) in right.iter_mut().enumerate() {
            // SAFETY: inside the right tiles; prefetching may point anywhere.
            unsafe {
                let at = w.add(((t + n) * k + x) * NR);
                if AHEAD > 0 {
                    _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(AHEAD));
                }
                *right = _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()));
            }
        }
        for (r, row) in acc.iter_mut().enumerate() {
            // SAFETY: inside the left rows.
            let left = _mm512_set1_ps(unsafe { *a.add((i + r) * k + x) });
            for (lanes, &right) in row.iter_mut().zip(&right) {
                *lanes = _mm512_fmadd_ps(left, right, *lanes);
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// # Safety
/// Rows `i..i + MR` and tiles `t..t + NT` lie inside the slices and the output; `k` is even.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn bf16_pairs_block<const MR: usize, const NT: usize, const AHEAD: usize>(
    data: &[u16],
    k: usize,
    a: &[u16],
    i: usize,
    t: usize,
    out: Output<'_>,
) {
    let mut acc = [[_mm512_setzero_ps(); NT]; MR];
    let (a, w) = (a.as_ptr(), data.as_ptr());
    for x in 0..k / 2 {
        let mut right = [_mm512_setzero_si512(); NT];
        for (n, right) in right.iter_mut().enumerate() {
            // SAFETY: inside the right tiles; prefetching may point anywhere.
            unsafe {
                let at = w.add(((t + n) * (k / 2) + x) * 2 * NR);
                if AHEAD > 0 {
                    _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(AHEAD));
                }
                *right = _mm512_loadu_si512(at.cast());
            }
        }
        for (r, row) in acc.iter_mut().enumerate() {
            // SAFETY: inside the left rows; two neighbours are read as one word.
            let left =
                _mm512_set1_epi32(unsafe { a.add((i + r) * k + 2 * x).cast::<i32>().read_unaligned() });
            for (lanes, &right) in row.iter_mut().zip(&right) {
                // SAFETY: both are vectors of 512 bits, plain data.
                let (left, right) = unsafe {
                    (
                        std::mem::transmute::<__m512i, __m512bh>(left),
                        std::mem::transmute::<__m512i, __m512bh>(right),
                    )
                };
                *lanes = _mm512_dpbf16_ps(*lanes, right, left);
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// A pair in one 32-bit lane is the even element in the low and the odd one in the high half; moving either to the top
/// gives its f32.
///
/// # Safety
/// Rows `i..i + MR` and tiles `t..t + NT` lie inside the slices and the output; `k` is even.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn bf16_block<const MR: usize, const NT: usize, const AHEAD: usize>(
    data: &[u16],
    k: usize,
    a: &[f32],
    i: usize,
    t: usize,
    out: Output<'_>,
) {
    let mut acc = [[_mm512_setzero_ps(); NT]; MR];
    let (a, w) = (a.as_ptr(), data.as_ptr());
    let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    for x in 0..k / 2 {
        let mut right = [[_mm512_setzero_ps(); NT]; 2];
        #[allow(clippy::needless_range_loop, reason = "two rows are written at once")]
        for n in 0..NT {
            // SAFETY: inside the right tiles; prefetching may point anywhere.
            let pairs = unsafe {
                let at = w.add(((t + n) * (k / 2) + x) * 2 * NR);
                if AHEAD > 0 {
                    _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(AHEAD));
                }
                _mm512_loadu_si512(at.cast())
            };
            right[0][n] = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs));
            right[1][n] = _mm512_castsi512_ps(_mm512_and_si512(pairs, high));
        }
        for (r, row) in acc.iter_mut().enumerate() {
            for (half, right) in right.iter().enumerate() {
                // SAFETY: inside the left rows.
                let left = _mm512_set1_ps(unsafe { *a.add((i + r) * k + 2 * x + half) });
                for (lanes, &right) in row.iter_mut().zip(right) {
                    *lanes = _mm512_fmadd_ps(left, right, *lanes);
                }
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe { store(&acc, i, t, out) };
}

/// Rounds to half precision; both slices are of one length, a multiple of 16.
#[target_feature(enable = "avx512f")]
pub(super) fn narrow_f16(from: &[f32], to: &mut [u16]) {
    for (from, to) in from.chunks_exact(16).zip(to.chunks_exact_mut(16)) {
        // SAFETY: both chunks hold 16 elements.
        unsafe {
            let narrow = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(from.as_ptr()));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), narrow);
        }
    }
}
