//! The products in portable scalar code: the reference of the vector kernels, and what runs on machines without them.

use std::ops::Range;

use half::{bf16, f16};

use super::{F32Product, MatrixRef, NR, Output, Q8_BLOCK, RowsRef};

/// See `Kernels::f32_product`.
///
/// # Safety
/// As there; the sizes are checked by the caller.
pub(super) unsafe fn f32_product(
    p: &F32Product<'_>,
    rows: Range<usize>,
    tiles: Range<usize>,
    out: Output<'_>,
) {
    for i in rows {
        let a = &p.a[i * p.lda..][..p.k];
        for tile in tiles.clone() {
            // SAFETY: the caller checked that this row's lanes lie inside the output and has exclusive access to them.
            let c = unsafe { lanes(out, i, tile) };
            let mut sums = if p.accumulate { *c } else { [0.0; NR] };
            for (x, &left) in a.iter().enumerate() {
                let w = &p.w[tile * p.tile + x * p.ldw..][..NR];
                for (sum, &right) in sums.iter_mut().zip(w) {
                    *sum += left * right;
                }
            }
            *c = sums;
        }
    }
}

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
                (MatrixRef::Bf16 { data, k }, RowsRef::Bf16(a)) => {
                    let w = |x: usize, j: usize| {
                        bf16::from_bits(data[(tile * (k / 2) + x / 2) * 2 * NR + 2 * j + x % 2]).to_f32()
                    };
                    let mut sums = [0.0; NR];
                    for (x, &left) in a[i * k..][..k].iter().enumerate() {
                        let left = bf16::from_bits(left).to_f32();
                        for (j, sum) in sums.iter_mut().enumerate() {
                            *sum += left * w(x, j);
                        }
                    }
                    sums
                }
                (
                    MatrixRef::Q8 { quants, scales, k },
                    RowsRef::Q8 { quants: a, scales: row_scales, corrections },
                ) => {
                    let blocks = k / Q8_BLOCK;
                    let mut sums = [0.0; NR];
                    for block in 0..blocks {
                        let a = &a[i * k + block * Q8_BLOCK..][..Q8_BLOCK];
                        let at = tile * blocks + block;
                        let (w, d) = (&quants[at * Q8_BLOCK * NR..], &scales[at * NR..]);
                        for (j, sum) in sums.iter_mut().enumerate() {
                            let mut dot = corrections[i * blocks + block];
                            for (x, &left) in a.iter().enumerate() {
                                dot += i32::from(w[(x / 4) * 4 * NR + 4 * j + x % 4]) * i32::from(left);
                            }
                            let scale = f16::from_bits(d[j]).to_f32() * row_scales[i * blocks + block];
                            *sum += dot as f32 * scale;
                        }
                    }
                    sums
                }
                _ => unreachable!("rows are prepared for the matrix they meet"),
            };
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
