//! The steps between products, one row at a time.
//!
//! They are written once, over sixteen explicit lanes, and compiled once per instruction level. Rust neither fuses nor
//! reorders floating-point operations, so each returns the same bits at every level.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
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
                    KernelLevel::Avx512 | KernelLevel::Avx512Bf16 | KernelLevel::Amx => unsafe { avx512($($arg),*) },
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
            KernelLevel::Avx512 | KernelLevel::Avx512Bf16 | KernelLevel::Amx => unsafe {
                super::avx512::narrow_f16(from, to);
            },
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
}
