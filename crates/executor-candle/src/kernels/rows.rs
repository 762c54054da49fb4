//! Activation rows in the forms that matrices multiply with.

use super::elementwise::{bf16_bits, per_level};
use super::quants::BLOCK;
use super::{KernelLevel, Kernels};

/// What a matrix multiplies with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    /// f32 rows as they are.
    F32,
    /// f32 rows rounded to bfloat16: for levels that multiply in single precision.
    Rounded,
    /// bfloat16 rows: for levels that multiply them.
    Bf16,
    /// Rows quantised to eight bits per block of 32.
    Q8,
}

/// Thirty-two quantised activations, with what the products of each weight type need beside them. One cache line, so that
/// a product finds all of a block of a row in one place.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Q8Block {
    pub(crate) quants: [i8; BLOCK],
    /// `max|x| / 127`; not finite if an activation is not.
    pub(crate) scale: f32,
    /// `scale` times the sum of the quants: what a minimum is multiplied with.
    pub(crate) sum: f32,
    /// -128 times the sum of the quants, which undoes the bias of q8_0 weights.
    pub(crate) correction: i32,
    /// What undoes the bias of q6_k weights, for each sixteen: -32 times the sum of the quants whose place in their word of
    /// four is 0 or 1, and of the other two.
    pub(crate) halves: [[i16; 2]; 2],
}

/// Returns the distance between rows in blocks: odd, so that rows of a power of two do not meet in one set of the cache.
pub(crate) const fn row_stride(k: usize) -> usize {
    k.div_ceil(BLOCK) | 1
}

per_level! {
    /// Quantises a row in blocks of 32 with the scale `max|x| / 127`; `out` is padded with zeros past the row's end.
    fn quantise(x: &[f32], out: &mut [Q8Block]) {
        for (block, out) in out.iter_mut().enumerate() {
            let x = x.get(block * BLOCK..).unwrap_or(&[]);
            let mut padded = [0.0; BLOCK];
            let x: &[f32; BLOCK] = if let Some(whole) = x.first_chunk() {
                whole
            } else {
                padded[..x.len()].copy_from_slice(x);
                &padded
            };
            let mut lanes = [0.0_f32; 8];
            let mut broken = [0.0_f32; 8];
            for part in x.as_chunks::<8>().0 {
                for ((lane, broken), &x) in lanes.iter_mut().zip(&mut broken).zip(part) {
                    let size = x.abs();
                    *lane = if size > *lane { size } else { *lane };
                    *broken += x * 0.0;
                }
            }
            let max = lanes.iter().fold(0.0_f32, |max, &lane| if lane > max { lane } else { max });
            let (scale, inverse) = if max > 0.0 { (max / 127.0, 127.0 / max) } else { (0.0, 0.0) };
            // Integers cannot carry a NaN or an infinity, so the scale does: adding zero times every element.
            let scale = scale + broken.iter().sum::<f32>();
            let mut quants = [0_i32; BLOCK];
            for (quant, &x) in quants.iter_mut().zip(x) {
                // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, halves to even; |x * inverse| <= 127.
                *quant = ((x * inverse + 12_582_912.0).to_bits() as i32).wrapping_sub(0x4b40_0000);
            }
            let mut halves = [[0_i32; 4]; 2];
            for (half, quants) in halves.iter_mut().zip(quants.as_chunks::<16>().0) {
                for word in quants.as_chunks::<4>().0 {
                    for (sum, &quant) in half.iter_mut().zip(word) {
                        *sum = sum.wrapping_add(quant);
                    }
                }
            }
            let pairs = halves.map(|[a, b, c, d]| [a.wrapping_add(b), c.wrapping_add(d)]);
            let sum = pairs.iter().flatten().fold(0_i32, |sum, &pair| sum.wrapping_add(pair));
            *out = Q8Block {
                quants: quants.map(|quant| quant as i8),
                scale,
                sum: scale * sum as f32,
                correction: sum.wrapping_mul(-128),
                halves: pairs.map(|pair| pair.map(|sum| sum.wrapping_mul(-32) as i16)),
            };
        }
    }
}

per_level! {
    /// Rounds a row to bfloat16 and keeps it in single precision, padding `out` with zeros past the row's end.
    fn round_to_bf16(x: &[f32], out: &mut [f32]) {
        let (whole, padding) = out.split_at_mut(x.len());
        for (out, &x) in whole.iter_mut().zip(x) {
            *out = f32::from_bits(u32::from(bf16_bits(x)) << 16);
        }
        padding.fill(0.0);
    }
}
