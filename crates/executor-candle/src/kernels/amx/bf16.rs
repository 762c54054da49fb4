//! Weights of bf16 with tiles of pairs.

use std::ops::Range;

use super::super::{NR, Output};
use super::tile::{HIGH, Shapes, WIDE, load, multiply, store, zero};

/// Inputs of an instruction.
const STEP: usize = WIDE / 2;

/// Bytes of a tile's weights for as many inputs.
const STEP_BYTES: usize = STEP * NR * 2;

/// Inputs that many rows meet before they go on, so that weights and rows stay in the L1 cache: a multiple of [`STEP`].
const STRETCH: usize = 8 * STEP;

/// Tiles that share the loading of rows.
const GROUP: usize = 4;

/// How far ahead weights are fetched where they are streamed, in bytes.
const AHEAD: usize = 4096;

/// What is left of `k` behind the last whole step, zeros behind it: adding zero times zero changes no sum.
#[repr(C, align(64))]
struct Tail {
    rows: [[u16; STEP]; HIGH],
    weights: [[u16; STEP * NR]; GROUP],
}

/// Some rows and tiles, and what they are multiplied over.
struct Work<'a> {
    data: &'a [u16],
    k: usize,
    a: &'a [u16],
    out: Output<'a>,
    first_row: usize,
    num_rows: usize,
}

/// Multiplies all rows.
///
/// # Safety
/// As `Kernels::matmul`; the sizes are checked by the caller, and the machine has the instructions.
pub(super) unsafe fn matmul(
    data: &[u16],
    k: usize,
    a: &[u16],
    rows: Range<usize>,
    tiles: Range<usize>,
    out: Output<'_>,
) {
    // Few rows stream the weights, tile by tile from end to end; many use a stretch of some tiles again and again.
    let (group, stretch) = if rows.len() <= HIGH { (1, k.next_multiple_of(STEP)) } else { (GROUP, STRETCH) };
    let whole = rows.start + rows.len() / HIGH * HIGH;
    for (rows, height) in [(rows.start..whole, HIGH), (whole..rows.end, rows.end - whole)] {
        if rows.is_empty() {
            continue;
        }
        let (sums, left, right) = ((height, WIDE), (height, WIDE), (HIGH, WIDE));
        let shapes = Shapes::new([sums, sums, sums, sums, left, right, right, right]);
        // SAFETY: the machine has tiles, as the caller promises; those of the round before are given back.
        let _loaded = unsafe { shapes.load() };
        for first in tiles.clone().step_by(group) {
            let tiles = first..tiles.end.min(first + group);
            for begin in (0..k).step_by(stretch) {
                let inputs = begin..k.min(begin + stretch);
                for first_row in rows.clone().step_by(height) {
                    let work = Work { data, k, a, out, first_row, num_rows: height };
                    // SAFETY: rows, tiles and inputs lie inside the product; shapes are loaded for as many rows.
                    unsafe {
                        match tiles.len() {
                            1 => work.run::<1>(tiles.start, inputs.clone(), group == 1),
                            2 => work.run::<2>(tiles.start, inputs.clone(), false),
                            3 => work.run::<3>(tiles.start, inputs.clone(), false),
                            _ => work.run::<4>(tiles.start, inputs.clone(), false),
                        }
                    }
                }
            }
        }
    }
}

impl Work<'_> {
    /// Adds the products over `inputs` of the rows and `N` tiles to the output, or begins it with the first input.
    ///
    /// # Safety
    /// All of it lies inside the product; `inputs` begins with a whole step; shapes are loaded for the rows.
    #[inline]
    unsafe fn run<const N: usize>(&self, first_tile: usize, inputs: Range<usize>, is_streamed: bool) {
        let &Self { data, k, a, out, first_row, num_rows } = self;
        let out_stride = 4 * out.stride;
        // SAFETY: as the caller promises.
        unsafe {
            let to = |n: usize| out.base.add(first_row * out.stride + (first_tile + n) * NR);
            if inputs.start == 0 {
                zero!(0);
                zero!(1);
                zero!(2);
                zero!(3);
            } else {
                load!(0, to(0), out_stride);
                if N > 1 {
                    load!(1, to(1), out_stride);
                }
                if N > 2 {
                    load!(2, to(2), out_stride);
                }
                if N > 3 {
                    load!(3, to(3), out_stride);
                }
            }
            let left = a.as_ptr().add(first_row * k).cast::<u8>();
            let right = |n: usize| data.as_ptr().add((first_tile + n) * k * NR).cast::<u8>();
            let whole = inputs.start + inputs.len() / STEP * STEP;
            for input in (inputs.start..whole).step_by(STEP) {
                let weights = |n: usize| right(n).add(input / STEP * STEP_BYTES);
                if is_streamed {
                    for line in 0..STEP_BYTES / 64 {
                        fetch(weights(0).wrapping_add(AHEAD + 64 * line));
                    }
                }
                step::<N>(left.add(2 * input), 2 * k, weights);
            }
            if whole < inputs.end {
                let mut tail = Tail { rows: [[0; STEP]; HIGH], weights: [[0; STEP * NR]; GROUP] };
                let rest = inputs.end - whole;
                for (r, row) in tail.rows[..num_rows].iter_mut().enumerate() {
                    row[..rest].copy_from_slice(&a[(first_row + r) * k + whole..][..rest]);
                }
                for (n, weights) in tail.weights[..N].iter_mut().enumerate() {
                    let from = ((first_tile + n) * k + whole) * NR;
                    weights[..rest * NR].copy_from_slice(&data[from..][..rest * NR]);
                }
                step::<N>(tail.rows.as_ptr().cast(), WIDE, |n| tail.weights[n].as_ptr().cast());
            }
            store!(0, to(0), out_stride);
            if N > 1 {
                store!(1, to(1), out_stride);
            }
            if N > 2 {
                store!(2, to(2), out_stride);
            }
            if N > 3 {
                store!(3, to(3), out_stride);
            }
        }
    }
}

/// Adds to the first `N` registers the products of a step.
///
/// # Safety
/// Both sides are there for the shapes that are loaded.
#[inline(always)]
unsafe fn step<const N: usize>(left: *const u8, stride: usize, right: impl Fn(usize) -> *const u8) {
    // SAFETY: as the caller promises.
    unsafe {
        load!(4, left, stride);
        load!(5, right(0), WIDE);
        multiply!("tdpbf16ps", 0, 4, 5);
        if N > 1 {
            load!(6, right(1), WIDE);
            multiply!("tdpbf16ps", 1, 4, 6);
        }
        if N > 2 {
            load!(7, right(2), WIDE);
            multiply!("tdpbf16ps", 2, 4, 7);
        }
        if N > 3 {
            load!(5, right(3), WIDE);
            multiply!("tdpbf16ps", 3, 4, 5);
        }
    }
}

/// Fetches a line, which may be anywhere.
#[inline(always)]
fn fetch(line: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a hint reads nothing.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
}
