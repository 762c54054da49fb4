//! The arithmetic: packed matrix products and the element-wise steps of a transformer, at the instruction levels of [`KernelLevel`].
//!
//! # Fixed order
//!
//! Every output element of a product is one accumulator that runs over `k` from 0 upwards, whatever the number of rows,
//! the tile shape or the thread. Columns sit in vector lanes, so a kernel for one row and a kernel for twelve do the very
//! same additions in the very same order, and batches, chunks and threads cannot change a bit of the result. A dot product
//! spread over lanes and folded at the end would be as fast, but only as long as every variant folds alike.
//!
//! Weights lie in tiles of [`NR`] output columns:
//!
//! ```text
//! f32   [n/16][k][16]              f16   [n/16][k][16]
//! bf16  [n/16][k/2][16][2]         k padded to even
//! ```
//!
//! and the quantised types as [`quants`] draws them.

#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod elementwise;
mod lanes;
mod level;
mod matmul;
mod plain;
mod quants;
mod rows;
#[cfg(test)]
mod tests;

pub(crate) use attention::{KvHead, Queries, SEGMENT, WIDE_ROWS, WideState, is_narrow, partial_len};
pub(crate) use elementwise::bf16_bits;
pub use level::KernelLevel;
pub(crate) use level::Kernels;
#[cfg(target_arch = "x86_64")]
use matmul::F32Product;
pub(crate) use matmul::{MatrixRef, Output, RowsRef};
pub(crate) use quants::{BLOCK, Quants};
pub(crate) use rows::{Activation, Q8Block, row_stride};

/// Output columns in a tile of packed weights.
pub(crate) const NR: usize = 16;
