//! Rows on their way into a product, and the product over the pool's threads.

use std::ops::Range;

use crate::kernels::{Activation, Kernels, NR, Output, Q8Block, RowsRef, row_stride};
use crate::pool::{Parts, Pool};
use crate::weights::{Arena, Matrix};

/// Products of numbers in a piece of a matrix product, about: ten microseconds of the slowest form.
const PIECE_PRODUCTS: usize = 1 << 20;

/// Activation rows in whichever form the weights want.
#[derive(Debug, Default)]
pub(crate) struct Inputs {
    f32: Vec<f32>,
    bf16: Vec<u16>,
    blocks: Vec<Q8Block>,
}

/// [`Inputs`] in the hands of several threads.
pub(crate) struct InputParts<'a> {
    activation: Activation,
    /// Elements of a row, padded.
    k: usize,
    f32: Parts<'a, f32>,
    bf16: Parts<'a, u16>,
    blocks: Parts<'a, Q8Block>,
}

impl Inputs {
    /// Makes room for `rows` inputs of `matrix`.
    pub(crate) fn parts(&mut self, kernels: Kernels, matrix: &Matrix, rows: usize) -> InputParts<'_> {
        let (activation, k) = (matrix.activation(kernels), matrix.padded_k());
        match activation {
            Activation::F32 | Activation::Rounded => grow(&mut self.f32, rows * k),
            Activation::Bf16 => grow(&mut self.bf16, rows * k),
            Activation::Q8 => grow(&mut self.blocks, rows * row_stride(k)),
        }
        InputParts {
            activation,
            k,
            f32: Parts::new(&mut self.f32),
            bf16: Parts::new(&mut self.bf16),
            blocks: Parts::new(&mut self.blocks),
        }
    }

    /// Returns what was put in for `matrix`.
    pub(crate) fn rows(&self, kernels: Kernels, matrix: &Matrix) -> RowsRef<'_> {
        match matrix.activation(kernels) {
            Activation::F32 | Activation::Rounded => RowsRef::F32(&self.f32),
            Activation::Bf16 => RowsRef::Bf16(&self.bf16),
            Activation::Q8 => RowsRef::Q8 { blocks: &self.blocks, stride: row_stride(matrix.padded_k()) },
        }
    }
}

impl InputParts<'_> {
    /// Writes row `row`.
    ///
    /// # Safety
    /// No one else accesses that row.
    pub(crate) unsafe fn put(&self, kernels: Kernels, row: usize, x: &[f32]) {
        let (k, stride) = (self.k, row_stride(self.k));
        // SAFETY: rows are disjoint and this one is the caller's.
        unsafe {
            match self.activation {
                Activation::F32 => self.f32.get(row * k..(row + 1) * k).copy_from_slice(x),
                Activation::Rounded => kernels.round_to_bf16(x, self.f32.get(row * k..(row + 1) * k)),
                Activation::Bf16 => kernels.to_bf16(x, self.bf16.get(row * k..(row + 1) * k)),
                Activation::Q8 => kernels.quantise(x, self.blocks.get(row * stride..(row + 1) * stride)),
            }
        }
    }
}

/// Makes `vec` at least `len` long.
pub(crate) fn grow<T: Clone + Default>(vec: &mut Vec<T>, len: usize) {
    if vec.len() < len {
        vec.resize(len, T::default());
    }
}

/// Returns piece `piece` of `0..total` cut into `pieces`.
pub(crate) fn cut(total: usize, pieces: usize, piece: usize) -> Range<usize> {
    total * piece / pieces..total * (piece + 1) / pieces
}

/// Multiplies `rows` input rows with a matrix, tiles spread over the threads. `outputs: [rows][padded outputs]`.
pub(crate) fn multiply(
    kernels: Kernels,
    pool: &mut Pool,
    arena: &Arena,
    matrix: &Matrix,
    inputs: &Inputs,
    rows: usize,
    outputs: &mut Vec<f32>,
) {
    grow(outputs, rows * matrix.padded_outputs());
    let output = Output::new(outputs, matrix.padded_outputs());
    let inputs = inputs.rows(kernels, matrix);
    let pairs = matrix.num_tiles().div_ceil(2);
    let pieces = if pool.num_threads() == 1 {
        1
    } else {
        // Short pieces, that no thread waits long for another's last one; but not so short that claiming them shows, and some a
        // thread to even out those that are held up. Pairs of tiles are the kernels' stride.
        let pairs_a_piece = (PIECE_PRODUCTS / (rows * matrix.padded_k() * 2 * NR)).max(1);
        pairs.div_ceil(pairs_a_piece).max(pairs.min(6 * pool.num_threads()))
    };
    pool.run(pieces, &|piece, _| {
        let pairs = cut(pairs, pieces, piece);
        let tiles = 2 * pairs.start..(2 * pairs.end).min(matrix.num_tiles());
        matrix.for_parts(arena, tiles, |weights, tiles, first_tile| {
            // SAFETY: the pieces share no tile.
            unsafe { kernels.matmul(weights, inputs, rows, tiles, output.skip_tiles(first_tile)) };
        });
    });
}
