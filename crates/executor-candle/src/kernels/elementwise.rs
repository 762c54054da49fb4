//! The steps between products, one row at a time.
//!
//! They are written once, over sixteen explicit lanes, and compiled once per instruction level. Rust neither fuses nor
//! reorders floating-point operations, so each returns the same bits at every level.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use microserving_protocol::KvDtype;

use super::{KernelLevel, Kernels};

/// Lanes of the explicit vectors.
const LANES: usize = 16;

/// Compiles a method of [`Kernels`] once per instruction level and calls the one that the machine has.
macro_rules! per_level {
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        impl Kernels {
            $(#[$meta])*
            pub(crate) fn $name(self, $($arg: $ty),*) $(-> $ret)? {
                #[inline(always)]
                fn body($($arg: $ty),*) $(-> $ret)? $body

                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }

                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }

                match self.level() {
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: `Kernels` proves that the machine has the instructions.
                    KernelLevel::Avx2 => unsafe { avx2($($arg),*) },
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: as above.
                    KernelLevel::Avx512 => unsafe { avx512($($arg),*) },
                    _ => body($($arg),*),
                }
            }
        }
    };
}

pub(super) use per_level;

per_level! {
    /// `out = x / sqrt(mean(x^2) + eps) * weight`, the squares summed in sixteen lanes and then as a tree.
    fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let factor = rms_factor(x, eps);
        for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * factor * weight;
        }
    }
}

per_level! {
    /// [`Self::rms_norm`] in place.
    fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
        let factor = rms_factor(x, eps);
        for (x, &weight) in x.iter_mut().zip(weight) {
            *x = *x * factor * weight;
        }
    }
}

per_level! {
    /// `x += y`.
    fn add(x: &mut [f32], y: &[f32]) {
        for (x, &y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

per_level! {
    /// `gate = silu(gate) * up`.
    fn silu_mul(gate: &mut [f32], up: &[f32]) {
        for (gate, &up) in gate.iter_mut().zip(up) {
            *gate = *gate / (1.0 + exp(-*gate)) * up;
        }
    }
}

per_level! {
    /// Rotates the pairs `(x[i], x[i + half])` by the angles whose cosines and sines are given.
    fn rope(x: &mut [f32], cos: &[f32], sin: &[f32]) {
        let (low, high) = x.split_at_mut(cos.len());
        for (((low, high), &cos), &sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            let (a, b) = (*low, *high);
            *low = a * cos - b * sin;
            *high = b * cos + a * sin;
        }
    }
}

per_level! {
    /// Rounds a row to bfloat16, padding `out` with zeros past the row's end.
    fn to_bf16(x: &[f32], out: &mut [u16]) {
        let (whole, padding) = out.split_at_mut(x.len());
        for (out, &x) in whole.iter_mut().zip(x) {
            *out = bf16_bits(x);
        }
        padding.fill(0);
    }
}

per_level! {
    /// One step of the online softmax for one row: `scores` of `valid` positions become weights relative to the running
    /// maximum, the rest zero; `values` (the weighted sum so far) is rescaled if the maximum grew.
    fn softmax_step(scores: &mut [f32], valid: usize, max: &mut f32, sum: &mut f32, values: &mut [f32]) {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for (part, chunk) in scores.chunks_exact_mut(LANES).enumerate() {
            for (j, (lane, score)) in lanes.iter_mut().zip(chunk).enumerate() {
                *score = if part * LANES + j < valid { *score } else { f32::NEG_INFINITY };
                *lane = if *score > *lane { *score } else { *lane };
            }
        }
        let tile_max = max_of(&lanes);
        let new_max = if tile_max > *max { tile_max } else { *max };
        if new_max > *max {
            // `exp(-inf)` is 0: the first tile rescales zeros.
            let factor = exp(*max - new_max);
            *sum *= factor;
            for value in values {
                *value *= factor;
            }
            *max = new_max;
        }
        let mut sums = [0.0; LANES];
        for chunk in scores.chunks_exact_mut(LANES) {
            for (lane, score) in sums.iter_mut().zip(chunk) {
                *score = exp(*score - new_max);
                *lane += *score;
            }
        }
        *sum += sum_of(&sums);
    }
}

/// Returns `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
fn rms_factor(x: &[f32], eps: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let chunks = x.chunks_exact(LANES);
    for (lane, &x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = x * x;
    }
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += x * x;
        }
    }
    1.0 / (sum_of(&lanes) / x.len() as f32 + eps).sqrt()
}

/// Adds the lanes as a tree.
#[inline(always)]
fn sum_of(lanes: &[f32; LANES]) -> f32 {
    let mut lanes = *lanes;
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// Returns the largest lane.
#[inline(always)]
fn max_of(lanes: &[f32; LANES]) -> f32 {
    let mut lanes = *lanes;
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] = if lanes[i + width] > lanes[i] { lanes[i + width] } else { lanes[i] };
        }
    }
    lanes[0]
}

/// `e^x` to about one unit in the last place; 0 below -87.3, saturating above 88.3.
///
/// Own code rather than the C library's, so that the bits do not depend on the machine's libm. The polynomial is the
/// Taylor series to degree 7 over [-ln 2 / 2, ln 2 / 2], whose remainder is below 2^-26.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > 88.3 { 88.3 } else { x };
    let clamped = if clamped > -87.3 { clamped } else { -87.3 };
    let shifted = clamped * std::f32::consts::LOG2_E + 12_582_912.0;
    let n = shifted - 12_582_912.0;
    let r = clamped - n * LN2_HIGH;
    let r = r - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    // The low bits of `shifted` are n as an integer; moving them to the exponent makes 2^n.
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    // A NaN comes out as one, so that a broken model shows instead of sampling nonsense.
    let finite = if x < -87.3 { 0.0 } else { p * power };
    if x.is_nan() { x } else { finite }
}

/// Rounds to bfloat16, to nearest, halves to even; a NaN stays one.
#[inline(always)]
pub(crate) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { bits >> 16 | 0x40 } else { rounded }) as u16
}

impl Kernels {
    /// Turns `num_rows` rows of `width` elements into columns: `out[d * out_stride + j] = rows[j * width + d]`. What else
    /// lies in the first `num_rows`, rounded up to 16, columns of `out` may be overwritten.
    pub(crate) fn transpose(
        self,
        rows: &[f32],
        (num_rows, width): (usize, usize),
        out: &mut [f32],
        out_stride: usize,
    ) {
        #[cfg(target_arch = "x86_64")]
        if self.level() == KernelLevel::Avx512 && width.is_multiple_of(LANES) {
            let whole = num_rows.next_multiple_of(LANES);
            if rows.len() >= whole * width && out.len() >= (width - 1) * out_stride + whole {
                // SAFETY: `Kernels` proves the instructions, and the sizes were just checked.
                unsafe { super::avx512::transpose(rows, width, whole, out, out_stride) };
                return;
            }
        }
        for (j, row) in rows.chunks_exact(width).take(num_rows).enumerate() {
            for (d, &x) in row.iter().enumerate() {
                out[d * out_stride + j] = x;
            }
        }
    }

    /// Widens half precision, exactly.
    fn widen_f16(self, from: &[u16], to: &mut [f32]) {
        let whole = from.len().min(to.len()) / LANES * LANES;
        let (from, from_rest) = from.split_at(whole);
        let (to, to_rest) = to.split_at_mut(whole);
        match self.level() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Kernels` proves the instructions; both are of one length, a multiple of 16.
            KernelLevel::Avx2 => unsafe { super::avx2::widen_f16(from, to) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            KernelLevel::Avx512 => unsafe { super::avx512::widen_f16(from, to) },
            _ => from.reinterpret_cast::<f16>().convert_to_f32_slice(to),
        }
        for (to, &from) in to_rest.iter_mut().zip(from_rest) {
            *to = f16::from_bits(from).to_f32();
        }
    }

    /// Rounds to half precision, to nearest, halves to even.
    fn narrow_f16(self, from: &[f32], to: &mut [u16]) {
        let whole = from.len().min(to.len()) / LANES * LANES;
        let (from, from_rest) = from.split_at(whole);
        let (to, to_rest) = to.split_at_mut(whole);
        match self.level() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Kernels` proves the instructions; both are of one length, a multiple of 16.
            KernelLevel::Avx2 => unsafe { super::avx2::narrow_f16(from, to) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            KernelLevel::Avx512 => unsafe { super::avx512::narrow_f16(from, to) },
            _ => to.reinterpret_cast_mut::<f16>().convert_from_f32_slice(from),
        }
        for (to, &from) in to_rest.iter_mut().zip(from_rest) {
            *to = f16::from_f32(from).to_bits();
        }
    }

    /// Stores a row of KV at `to`, rounded to the cache's element type.
    ///
    /// # Safety
    /// `to` points at `row.len()` elements of `dtype`, aligned to them, that no one else accesses meanwhile.
    pub(crate) unsafe fn store_kv(self, row: &[f32], dtype: KvDtype, to: *mut u8) {
        match dtype {
            // SAFETY: as the caller promises.
            KvDtype::F32 => unsafe { to.cast::<f32>().copy_from_nonoverlapping(row.as_ptr(), row.len()) },
            KvDtype::F16 => {
                // SAFETY: as the caller promises.
                self.narrow_f16(row, unsafe { std::slice::from_raw_parts_mut(to.cast::<u16>(), row.len()) });
            }
            KvDtype::Bf16 => {
                // SAFETY: as the caller promises.
                self.to_bf16(row, unsafe { std::slice::from_raw_parts_mut(to.cast::<u16>(), row.len()) });
            }
            KvDtype::U64 => unreachable!("refused when the executor is loaded"),
        }
    }

    /// Loads a row of KV from `from`.
    ///
    /// # Safety
    /// `from` points at `row.len()` written elements of `dtype`, aligned to them, that no one writes meanwhile.
    pub(crate) unsafe fn load_kv(self, from: *const u8, dtype: KvDtype, row: &mut [f32]) {
        match dtype {
            // SAFETY: as the caller promises.
            KvDtype::F32 => unsafe { row.as_mut_ptr().copy_from_nonoverlapping(from.cast(), row.len()) },
            KvDtype::F16 => {
                // SAFETY: as the caller promises.
                self.widen_f16(unsafe { std::slice::from_raw_parts(from.cast::<u16>(), row.len()) }, row);
            }
            KvDtype::Bf16 => {
                // SAFETY: as the caller promises; any bits are a bf16.
                let from = unsafe { std::slice::from_raw_parts(from.cast::<bf16>(), row.len()) };
                for (to, &from) in row.iter_mut().zip(from) {
                    *to = f32::from_bits(u32::from(from.to_bits()) << 16);
                }
            }
            KvDtype::U64 => unreachable!("refused when the executor is loaded"),
        }
    }
}
