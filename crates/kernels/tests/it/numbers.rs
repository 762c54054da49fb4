//! Test data, and elements as bytes.

use half::{bf16, f16};
use microserving_kernels::{Dtype, KvType};

/// Numbers in [-2, 2), the same in every run.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    pub(crate) fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (f64::from((self.0 >> 40) as u32) / f64::from(1 << 22) - 2.0) as f32
    }

    pub(crate) fn take(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }
}

pub(crate) const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// What an element may be off by, relative to its size, for being rounded once.
pub(crate) fn rounding(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 2.0_f64.powi(-24),
        Dtype::F16 => 2.0_f64.powi(-11),
        Dtype::Bf16 => 2.0_f64.powi(-8),
    }
}

pub(crate) fn to_bytes(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

pub(crate) fn from_bytes(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::F32 => {
            bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().expect("4 bytes"))).collect()
        }
        Dtype::F16 => bytes.chunks_exact(2).map(|x| f16::from_le_bytes([x[0], x[1]]).to_f32()).collect(),
        Dtype::Bf16 => bytes.chunks_exact(2).map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f32()).collect(),
    }
}

/// Rounds to the type and widens again.
pub(crate) fn rounded(dtype: Dtype, values: &[f32]) -> Vec<f32> {
    from_bytes(dtype, &to_bytes(dtype, values))
}

pub(crate) fn kv_to_bytes(dtype: Dtype, kv_type: KvType, values: &[f32]) -> Vec<u8> {
    match kv_type {
        KvType::Same => to_bytes(dtype, values),
        KvType::E4m3 => values.iter().map(|&x| to_e4m3(x)).collect(),
    }
}

pub(crate) fn kv_from_bytes(dtype: Dtype, kv_type: KvType, bytes: &[u8]) -> Vec<f32> {
    match kv_type {
        KvType::Same => from_bytes(dtype, bytes),
        KvType::E4m3 => bytes.iter().map(|&bits| from_e4m3(bits)).collect(),
    }
}

/// E4M3 by its definition.
pub(crate) fn from_e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let size = match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2.0_f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
    };
    if bits & 0x80 == 0 { size } else { -size }
}

/// The nearest number of E4M3, of two the one with the even mantissa; saturating.
pub(crate) fn to_e4m3(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let distance = |bits: u8| (f64::from(from_e4m3(bits)) - f64::from(x.abs())).abs();
    let nearest =
        (0..=0x7e_u8).min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
    sign | nearest.expect("there are numbers")
}

/// Says where two runs of numbers differ by more than `relative` of the expected number or `absolute`.
pub(crate) fn assert_close(what: &str, got: &[f32], expected: &[f64], relative: f64, absolute: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (at, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let difference = (f64::from(got) - expected).abs();
        let bound = absolute + relative * expected.abs();
        assert!(
            difference <= bound,
            "{what}: element {at} is {got}, not {expected}: off by {difference:e}, above {bound:e}"
        );
    }
}
