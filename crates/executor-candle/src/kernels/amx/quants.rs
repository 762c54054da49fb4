//! Quantised weights with tiles of bytes.
//!
//! ```text
//! unpack    a stretch of a packed tile to signed bytes, scales and minima to single precision, once for all rows
//! multiply  sixteen rows, or eight, of a block with sixteen columns: one instruction, whose sums go to scratch
//! fold      the sums of the block before that one into the accumulators, while the next are being made
//! ```
//!
//! Folding is what takes the time: four instructions a row and block against one of sixteen cycles for all rows.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::quants::Product;
use super::super::{BLOCK, NR, Output, Q8Block, Quants};
use super::tile::{HIGH, Shapes, WIDE, load, multiply, store, zero};

const Q8_0: u8 = Quants::Q8_0 as u8;
const Q4_0: u8 = Quants::Q4_0 as u8;
const Q4_1: u8 = Quants::Q4_1 as u8;
const Q4K: u8 = Quants::Q4K as u8;
const Q6K: u8 = Quants::Q6K as u8;

/// Rows of the lower of two kernels.
const LOW: usize = 8;

/// Blocks of a tile that are unpacked at once: with as many of sixteen rows they fit the L1 cache, and rows of the output, which a power of two often
/// lies between, are not visited more often than that.
const STRETCH: usize = 32;

/// Bytes of an unpacked block.
const BLOCK_BYTES: usize = BLOCK * NR;

/// What a stretch is unpacked to, and where sums pass from tile registers to others.
#[repr(C, align(64))]
struct Scratch {
    /// `[block][input / 4][column][4]`, signed.
    weights: [[u8; BLOCK_BYTES]; STRETCH],
    /// `[block][column]`
    scales: [[f32; NR]; STRETCH],
    /// The same of what is added for each sum of a row's quants; for q6_k the scales of a block's halves.
    minima: [[[f32; NR]; 2]; STRETCH],
    /// `[turn][half of the block][row][column]`
    sums: [[[[i32; NR]; HIGH]; 2]; 2],
}

/// Multiplies all rows but those at the end that are too few for a tile, which it returns.
///
/// # Safety
/// As `Kernels::matmul`; the sizes are checked by the caller, and the machine has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn matmul(
    p: &Product<'_>,
    rows: Range<usize>,
    tiles: Range<usize>,
    out: Output<'_>,
) -> Range<usize> {
    let end = rows.start + rows.len() / LOW * LOW;
    if end > rows.start {
        // SAFETY: as the caller promises.
        unsafe {
            match p.quants {
                Quants::Q8_0 => run::<Q8_0>(p, rows.start..end, tiles, out),
                Quants::Q4_0 => run::<Q4_0>(p, rows.start..end, tiles, out),
                Quants::Q4_1 => run::<Q4_1>(p, rows.start..end, tiles, out),
                Quants::Q4K => run::<Q4K>(p, rows.start..end, tiles, out),
                Quants::Q6K => run::<Q6K>(p, rows.start..end, tiles, out),
            }
        }
    }
    end..rows.end
}

/// # Safety
/// As [`matmul`], for a number of rows that is a multiple of [`LOW`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn run<const KIND: u8>(p: &Product<'_>, rows: Range<usize>, tiles: Range<usize>, out: Output<'_>) {
    // Six bits have a scale for every sixteen, so their instructions multiply half a block.
    let k_bytes = if KIND == Q6K { BLOCK / 2 } else { BLOCK };
    let (sums, low_sums) = ((HIGH, WIDE), (LOW, WIDE));
    let (left, low_left, right) = ((HIGH, k_bytes), (LOW, k_bytes), (k_bytes / 4, WIDE));
    let shapes = Shapes::new([sums, sums, left, left, right, right, low_sums, low_left]);
    // SAFETY: the machine has tiles, as the caller promises; no one up the stack has loaded shapes.
    let _loaded = unsafe { shapes.load() };
    let mut scratch = MaybeUninit::<Scratch>::uninit();
    let scratch = scratch.as_mut_ptr();
    let num_blocks = p.k / BLOCK;
    for tile in tiles {
        for begin in (0..num_blocks).step_by(STRETCH) {
            let blocks = begin..num_blocks.min(begin + STRETCH);
            // SAFETY: tile and blocks lie inside the product, rows and tile inside the output; what is read of the scratch has been written
            // by then.
            unsafe {
                unpack::<KIND>(p, tile, blocks.clone(), scratch);
                for first_row in rows.clone().step_by(HIGH) {
                    let fetches = first_row == rows.start;
                    let work = Work { p, first_row, tile, blocks: blocks.clone(), scratch, out, fetches };
                    if first_row + HIGH <= rows.end {
                        work.multiply_rows::<KIND, HIGH>();
                    } else {
                        work.multiply_rows::<KIND, LOW>();
                    }
                }
            }
        }
    }
}

/// Unpacks some blocks of a tile.
///
/// # Safety
/// They lie inside the product, and are no more than [`STRETCH`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn unpack<const KIND: u8>(p: &Product<'_>, tile: usize, blocks: Range<usize>, scratch: *mut Scratch) {
    let quants = const { kind(KIND) };
    let (low, pair) = (_mm512_set1_epi8(15), _mm512_set1_epi8(0x30));
    for (place, block) in blocks.enumerate() {
        // SAFETY: inside the product and the scratch, as the caller promises.
        unsafe {
            let (unit, within) = p.unit(quants, tile, block);
            let weights = unit.add(quants.header_bytes() + within * quants.block_bytes());
            let to = (&raw mut (*scratch).weights[place]).cast::<u8>();
            let line = |line: usize| _mm512_loadu_si512(weights.add(64 * line).cast());
            let put = |word: usize, line| _mm512_storeu_si512(to.add(64 * word).cast(), line);
            match quants {
                Quants::Q8_0 => {
                    for word in 0..8 {
                        put(word, _mm512_xor_si512(line(word), _mm512_set1_epi8(-128)));
                    }
                }
                Quants::Q4_0 | Quants::Q4_1 | Quants::Q4K => {
                    for word in 0..4 {
                        let both = line(word);
                        put(2 * word, _mm512_and_si512(both, low));
                        put(2 * word + 1, _mm512_and_si512(_mm512_srli_epi16::<4>(both), low));
                    }
                }
                Quants::Q6K => {
                    for half in 0..2 {
                        let (first, second, high) = (line(2 * half), line(2 * half + 1), line(4 + half));
                        // What a shift brings over from the neighbouring byte is outside the mask.
                        let join = |low_bits, high| {
                            let both = _mm512_or_si512(
                                _mm512_and_si512(low_bits, low),
                                _mm512_and_si512(high, pair),
                            );
                            _mm512_sub_epi8(both, _mm512_set1_epi8(32))
                        };
                        put(4 * half, join(first, _mm512_slli_epi16::<4>(high)));
                        put(4 * half + 1, join(_mm512_srli_epi16::<4>(first), _mm512_slli_epi16::<2>(high)));
                        put(4 * half + 2, join(second, high));
                        put(4 * half + 3, join(_mm512_srli_epi16::<4>(second), _mm512_srli_epi16::<2>(high)));
                    }
                }
            }
            unpack_scales::<KIND>(unit, within, scratch, place);
        }
    }
}

/// Unpacks the scales and minima of a block.
///
/// # Safety
/// As [`unpack`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn unpack_scales<const KIND: u8>(unit: *const u8, within: usize, scratch: *mut Scratch, place: usize) {
    // SAFETY: inside the unit's header and the scratch, as the caller promises.
    unsafe {
        let halves = |at: usize| _mm512_cvtph_ps(_mm256_loadu_si256(unit.add(at).cast()));
        let small =
            |at: usize| _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(unit.add(at).cast())));
        let signed =
            |at: usize| _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(unit.add(at).cast())));
        let zero = _mm512_setzero_ps();
        let (scale, [first, second]) = match const { kind(KIND) } {
            Quants::Q8_0 => (halves(within * 32), [zero; 2]),
            Quants::Q4_0 => {
                let scale = halves(within * 32);
                (scale, [_mm512_mul_ps(scale, _mm512_set1_ps(-8.0)), zero])
            }
            Quants::Q4_1 => (halves(0), [halves(32), zero]),
            Quants::Q4K => {
                let minimum = _mm512_mul_ps(halves(32), small(64 + (8 + within) * NR));
                let minimum = _mm512_xor_ps(minimum, _mm512_set1_ps(-0.0));
                (_mm512_mul_ps(halves(0), small(64 + within * NR)), [minimum, zero])
            }
            Quants::Q6K => (halves(0), [0, 1].map(|half| signed(64 + (2 * within + half) * NR))),
        };
        let minima = (&raw mut (*scratch).minima[place]).cast::<f32>();
        _mm512_storeu_ps((&raw mut (*scratch).scales[place]).cast(), scale);
        _mm512_storeu_ps(minima, first);
        if KIND == Q6K {
            _mm512_storeu_ps(minima.add(NR), second);
        }
    }
}

/// Some rows that meet an unpacked stretch of a tile.
struct Work<'a> {
    p: &'a Product<'a>,
    first_row: usize,
    tile: usize,
    blocks: Range<usize>,
    scratch: *mut Scratch,
    out: Output<'a>,
    /// They are the first, and fetch what is unpacked next, a block's bytes a block: a processor that is told of all of it at once waits.
    fetches: bool,
}

impl Work<'_> {
    /// Adds the products of `MR` rows to the output, or begins it with the first block.
    ///
    /// # Safety
    /// Rows, tile and blocks lie inside the product and the output; the blocks are unpacked; shapes are loaded.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn multiply_rows<const KIND: u8, const MR: usize>(self) {
        let Self { p, first_row, tile, blocks, scratch, out, fetches } = self;
        // SAFETY: as the caller promises; what is fetched may be anywhere.
        unsafe {
            let to = out.base.add(first_row * out.stride + tile * NR);
            let mut acc = [_mm512_setzero_ps(); MR];
            if blocks.start > 0 {
                for (r, acc) in acc.iter_mut().enumerate() {
                    *acc = _mm512_loadu_ps(to.add(r * out.stride));
                }
            }
            let quants = const { kind(KIND) };
            let block_bytes = quants.unit_bytes() * BLOCK / quants.unit();
            let next = p.unit(quants, tile, blocks.start).0.wrapping_add(STRETCH * block_bytes);
            let stride = p.stride * size_of::<Q8Block>();
            let num_blocks = blocks.len();
            let left = |place: usize| p.row(first_row, blocks.start + place);
            multiply_block::<KIND, MR>(left(0).cast(), stride, scratch, 0);
            for place in 0..num_blocks {
                if place + 1 < num_blocks {
                    multiply_block::<KIND, MR>(left(place + 1).cast(), stride, scratch, place + 1);
                }
                if fetches {
                    for line in place * block_bytes / 64..(place + 1) * block_bytes / 64 {
                        _mm_prefetch::<_MM_HINT_T1>(next.cast::<i8>().wrapping_add(64 * line));
                    }
                }
                fold::<KIND, MR>(left(place), p.stride, scratch, place, &mut acc);
            }
            for (r, &acc) in acc.iter().enumerate() {
                _mm512_storeu_ps(to.add(r * out.stride), acc);
            }
        }
    }
}

/// Multiplies `MR` rows of a block with an unpacked one; the sums go to the place of its turn.
///
/// # Safety
/// As [`Work::multiply_rows`]; `left` is the block in the first row and rows are `stride` bytes apart.
#[inline(always)]
unsafe fn multiply_block<const KIND: u8, const MR: usize>(
    left: *const u8,
    stride: usize,
    scratch: *mut Scratch,
    place: usize,
) {
    // SAFETY: `MR` rows of the block, the unpacked block, and sums of the turn, in registers of those shapes.
    unsafe {
        let right = (&raw const (*scratch).weights[place]).cast::<u8>();
        let sums = (&raw mut (*scratch).sums[place % 2]).cast::<u8>();
        let halves = if KIND == Q6K { 2 } else { 1 };
        for half in 0..halves {
            let (left, right) = (left.add(half * BLOCK / 2), right.add(half * BLOCK_BYTES / 2));
            let sums = sums.add(half * HIGH * WIDE);
            // Turns take registers in turn, that the processor may overlap them.
            if MR == LOW {
                load!(7, left, stride);
                load!(4, right, WIDE);
                zero!(6);
                multiply!("tdpbssd", 6, 7, 4);
                store!(6, sums, WIDE);
            } else if (place + half).is_multiple_of(2) {
                load!(2, left, stride);
                load!(4, right, WIDE);
                zero!(0);
                multiply!("tdpbssd", 0, 2, 4);
                store!(0, sums, WIDE);
            } else {
                load!(3, left, stride);
                load!(5, right, WIDE);
                zero!(1);
                multiply!("tdpbssd", 1, 3, 5);
                store!(1, sums, WIDE);
            }
        }
    }
}

/// Adds the sums of a block to the accumulators, as the kernels of `avx512` do.
///
/// # Safety
/// As [`Work::multiply_rows`]; `row` is the block in the first row, and the block's sums are there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn fold<const KIND: u8, const MR: usize>(
    row: *const Q8Block,
    stride: usize,
    scratch: *const Scratch,
    place: usize,
    acc: &mut [__m512; MR],
) {
    // SAFETY: inside rows and scratch, as the caller promises.
    unsafe {
        let d = _mm512_loadu_ps((&raw const (*scratch).scales[place]).cast());
        let minima = (&raw const (*scratch).minima[place]).cast::<f32>();
        let sums = (&raw const (*scratch).sums[place % 2]).cast::<i32>();
        let sum = |half: usize, r: usize| {
            _mm512_cvtepi32_ps(_mm512_loadu_si512(sums.add((half * HIGH + r) * NR).cast()))
        };
        let m = _mm512_loadu_ps(minima);
        for (r, acc) in acc.iter_mut().enumerate() {
            let row = row.add(r * stride);
            let scale = _mm512_mul_ps(d, _mm512_set1_ps((*row).scale));
            match const { kind(KIND) } {
                Quants::Q8_0 => *acc = _mm512_fmadd_ps(sum(0, r), scale, *acc),
                Quants::Q4_0 | Quants::Q4_1 | Quants::Q4K => {
                    *acc = _mm512_fmadd_ps(sum(0, r), scale, *acc);
                    *acc = _mm512_fmadd_ps(m, _mm512_set1_ps((*row).sum), *acc);
                }
                // Halves are below 2^16 and their products with scales below 2^23, so this is the integers' sum.
                Quants::Q6K => {
                    let second = _mm512_mul_ps(sum(1, r), _mm512_loadu_ps(minima.add(NR)));
                    *acc = _mm512_fmadd_ps(_mm512_fmadd_ps(sum(0, r), m, second), scale, *acc);
                }
            }
        }
    }
}

const fn kind(kind: u8) -> Quants {
    match kind {
        Q8_0 => Quants::Q8_0,
        Q4_0 => Quants::Q4_0,
        Q4_1 => Quants::Q4_1,
        Q4K => Quants::Q4K,
        _ => Quants::Q6K,
    }
}
