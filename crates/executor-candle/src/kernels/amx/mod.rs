//! Products with AMX: one instruction multiplies up to sixteen rows with the sixteen columns of a tile.
//!
//! Packed tiles are what the instructions want on their right-hand side: four bytes, or a pair of bf16, of each column side by side. Integer
//! sums are exact, so quantised weights give the very bits of `avx512`, whose kernels take the rows that are too few for this. bf16 has an
//! order of its own, in which every row is summed alike, however many there are.

mod bf16;
mod quants;
mod tile;

use std::ops::Range;

use super::quants::Product;
use super::{MatrixRef, Output, RowsRef, avx512};

pub(super) use tile::is_available;

/// See `Kernels::matmul`.
///
/// # Safety
/// As there; the sizes are checked by the caller, and the machine has AMX beside what `avx512` needs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn matmul(
    matrix: MatrixRef<'_>,
    rows: RowsRef<'_>,
    range: Range<usize>,
    tiles: Range<usize>,
    out: Output<'_>,
    hints: bool,
) {
    // SAFETY: as the caller promises.
    unsafe {
        match (matrix, rows) {
            (MatrixRef::Bf16 { data, k }, RowsRef::Bf16(a)) => bf16::matmul(data, k, a, range, tiles, out),
            (MatrixRef::Quantised { quants, data, k }, RowsRef::Q8 { blocks, stride }) => {
                let product = Product { quants, data, k, blocks, stride };
                let rest = quants::matmul(&product, range, tiles.clone(), out);
                avx512::matmul(matrix, rows, rest, tiles, out, hints);
            }
            _ => avx512::matmul(matrix, rows, range, tiles, out, hints),
        }
    }
}
