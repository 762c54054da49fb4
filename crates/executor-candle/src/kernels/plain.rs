//! The products in portable scalar code: the reference of the vector kernels, and what runs on machines without them.

use std::ops::Range;

use half::f16;

use super::quants::BLOCK;
use super::{MatrixRef, NR, Output, Q8Block, Quants, RowsRef};

/// See `Kernels::matmul`.
///
/// # Safety
/// As there; the sizes are checked by the caller.
pub(super) unsafe fn matmul(
    matrix: MatrixRef<'_>,
    rows: RowsRef<'_>,
    range: Range<usize>,
    tiles: Range<usize>,
    out: Output<'_>,
) {
    if let (MatrixRef::Quantised { quants, data, k }, RowsRef::Q8 { blocks, stride }) = (matrix, rows) {
        for tile in tiles {
            let data = &data[tile * quants.tile_bytes(k)..][..quants.tile_bytes(k)];
            // SAFETY: as the caller promises.
            unsafe { quantised(quants, data, k, (blocks, stride), range.clone(), tile, out) };
        }
        return;
    }
    for i in range {
        for tile in tiles.clone() {
            // SAFETY: the caller checked that this row's lanes lie inside the output and has exclusive access to them.
            let c = unsafe { lanes(out, i, tile) };
            *c = match (matrix, rows) {
                (MatrixRef::F32 { data, k }, RowsRef::F32(a)) => {
                    dot(k, &a[i * k..], |x, j| data[(tile * k + x) * NR + j])
                }
                (MatrixRef::F16 { data, k }, RowsRef::F32(a)) => {
                    dot(k, &a[i * k..], |x, j| f16::from_bits(data[(tile * k + x) * NR + j]).to_f32())
                }
                (MatrixRef::Bf16 { data, k }, RowsRef::F32(a)) => dot(k, &a[i * k..], |x, j| {
                    let bits = data[(tile * (k / 2) + x / 2) * 2 * NR + 2 * j + x % 2];
                    f32::from_bits(u32::from(bits) << 16)
                }),
                _ => unreachable!("rows are prepared for the matrix they meet"),
            };
        }
    }
}

/// One tile of quantised weights for a range of rows: block by block, so that each is taken apart once.
///
/// # Safety
/// As [`matmul`], for the tile.
unsafe fn quantised(
    quants: Quants,
    data: &[u8],
    k: usize,
    (rows, stride): (&[Q8Block], usize),
    range: Range<usize>,
    tile: usize,
    out: Output<'_>,
) {
    for block in 0..k / BLOCK {
        let weights = quants.decode(data, block, 0..NR);
        for i in range.clone() {
            // SAFETY: as the caller promises.
            let c = unsafe { lanes(out, i, tile) };
            if block == 0 {
                *c = [0.0; NR];
            }
            let row = &rows[i * stride + block];
            let mut dots = [0_i32; NR];
            for (q, &left) in weights.q.iter().zip(&row.quants) {
                for (dot, &q) in dots.iter_mut().zip(q) {
                    *dot += q * i32::from(left);
                }
            }
            for (j, sum) in c.iter_mut().enumerate() {
                *sum += dots[j] as f32 * (weights.d[j] * row.scale);
                *sum += weights.m[j] * row.sum;
            }
        }
    }
}

/// Sums `a[x] * w(x, lane)` over `x < k` for each lane.
#[inline(always)]
fn dot(k: usize, a: &[f32], w: impl Fn(usize, usize) -> f32) -> [f32; NR] {
    let mut sums = [0.0; NR];
    for (x, &left) in a[..k].iter().enumerate() {
        for (j, sum) in sums.iter_mut().enumerate() {
            *sum += left * w(x, j);
        }
    }
    sums
}

/// Borrows the sixteen output lanes of a row and tile.
///
/// # Safety
/// They must lie inside the output, and no one else may access them meanwhile.
unsafe fn lanes<'a>(out: Output<'a>, row: usize, tile: usize) -> &'a mut [f32; NR] {
    // SAFETY: in bounds and exclusive, as the caller promises; an array of f32 has the alignment of f32.
    unsafe { &mut *out.base.add(row * out.stride + tile * NR).cast::<[f32; NR]>() }
}
