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

/// Activations no larger than this are zero: what they would be divided by is not finite.
const LEAST: f32 = 1e-36;

/// Adding 1.5 * 2^23 rounds to the nearest integer, halves to even, and leaves it in the low bits: those above this.
const ROUND: (f32, i32) = (12_582_912.0, 0x4b40_0000);

impl Kernels {
    /// Quantises a row in blocks of 32 with the scale `max|x| / 127`; `out` is padded with zeros past the row's end.
    pub(crate) fn quantise(self, x: &[f32], out: &mut [Q8Block]) {
        match self.level() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Kernels` proves that the machine has the instructions, which AVX-512 includes.
            KernelLevel::Avx2 | KernelLevel::Avx512 | KernelLevel::Avx512Bf16 | KernelLevel::Amx => unsafe {
                quantise_avx2(x, out);
            },
            _ => {
                for (block, out) in out.iter_mut().enumerate() {
                    *out = quantise_block(&padded_block(x, block));
                }
            }
        }
    }
}

/// Returns a block of a row, zeros past its end.
#[inline(always)]
fn padded_block(x: &[f32], block: usize) -> [f32; BLOCK] {
    let x = x.get(block * BLOCK..).unwrap_or(&[]);
    if let Some(whole) = x.first_chunk() {
        return *whole;
    }
    let mut padded = [0.0; BLOCK];
    padded[..x.len()].copy_from_slice(x);
    padded
}

/// Returns the scale of a block and what its activations are multiplied with.
#[inline(always)]
fn scales(max: f32, broken: f32) -> (f32, f32) {
    let (scale, inverse) = if max > LEAST { (max / 127.0, 127.0 / max) } else { (0.0, 0.0) };
    // Integers cannot carry a NaN or an infinity, so the scale does: adding zero times every activation.
    (scale + broken, inverse)
}

/// One block in portable code, the reference of [`quantise_avx2`].
fn quantise_block(x: &[f32; BLOCK]) -> Q8Block {
    let max = x.iter().fold(0.0_f32, |max, x| if x.abs() > max { x.abs() } else { max });
    let (scale, inverse) = scales(max, x.iter().map(|x| x * 0.0).sum());
    let mut block = Q8Block { scale, ..Q8Block::default() };
    let (mut total, mut sums) = (0_i32, [[0_i32; 2]; 2]);
    for (i, &x) in x.iter().enumerate() {
        let quant = ((x * inverse + ROUND.0).to_bits() as i32).wrapping_sub(ROUND.1).clamp(-127, 127);
        block.quants[i] = quant as i8;
        sums[i / 16][i % 4 / 2] += quant;
        total += quant;
    }
    block.sum = scale * total as f32;
    block.correction = -128 * total;
    block.halves = sums.map(|pairs| pairs.map(|sum| (-32 * sum) as i16));
    block
}

/// See [`Kernels::quantise`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn quantise_avx2(x: &[f32], out: &mut [Q8Block]) {
    use std::arch::x86_64::*;

    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (block, out) in out.iter_mut().enumerate() {
        let x = padded_block(x, block);
        let mut parts = [_mm256_setzero_ps(); 4];
        let (mut most, mut broken) = (_mm256_setzero_ps(), _mm256_setzero_ps());
        for (i, part) in parts.iter_mut().enumerate() {
            // SAFETY: eight of the block's 32 activations.
            *part = unsafe { _mm256_loadu_ps(x.as_ptr().add(8 * i)) };
            // Of a NaN and a number the second operand is taken.
            most = _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0), *part), most);
            broken = _mm256_add_ps(broken, _mm256_mul_ps(*part, _mm256_setzero_ps()));
        }
        let most = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps::<1>(most));
        let most = _mm_max_ps(most, _mm_movehl_ps(most, most));
        let most = _mm_max_ss(most, _mm_movehdup_ps(most));
        let broken = _mm_add_ps(_mm256_castps256_ps128(broken), _mm256_extractf128_ps::<1>(broken));
        let broken = _mm_add_ps(broken, _mm_movehl_ps(broken, broken));
        let broken = _mm_add_ss(broken, _mm_movehdup_ps(broken));
        let (scale, inverse) = scales(_mm_cvtss_f32(most), _mm_cvtss_f32(broken));

        let mut quants = [_mm256_setzero_si256(); 4];
        for (quants, &part) in quants.iter_mut().zip(&parts) {
            let shifted =
                _mm256_add_ps(_mm256_mul_ps(part, _mm256_set1_ps(inverse)), _mm256_set1_ps(ROUND.0));
            *quants = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(ROUND.1));
        }
        let [a, b, c, d] = quants;
        let bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        let bytes = _mm256_permutevar8x32_epi32(bytes, order);
        // Of each sixteen the sums by place in a word, then of pairs of places.
        let first = _mm256_add_epi32(a, b);
        let first = _mm_add_epi32(_mm256_castsi256_si128(first), _mm256_extracti128_si256::<1>(first));
        let second = _mm256_add_epi32(c, d);
        let second = _mm_add_epi32(_mm256_castsi256_si128(second), _mm256_extracti128_si256::<1>(second));
        let pairs = _mm_hadd_epi32(first, second);
        let total = _mm_hadd_epi32(pairs, pairs);
        let total = _mm_cvtsi128_si32(_mm_hadd_epi32(total, total));
        let halves = _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32::<5>(pairs));
        // SAFETY: 32 bytes and four numbers of 16 bits.
        unsafe {
            _mm256_storeu_si256(out.quants.as_mut_ptr().cast(), bytes);
            _mm_storel_epi64(out.halves.as_mut_ptr().cast(), _mm_packs_epi32(halves, halves));
        }
        out.scale = scale;
        out.sum = scale * total as f32;
        out.correction = total.wrapping_mul(-128);
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
