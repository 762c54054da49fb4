//! Every kernel against a plain computation in f64, and every shape of a kernel against its one-row shape, bit for bit.

mod products;

use half::{bf16, f16};
use microserving_protocol::KvDtype;

use super::elementwise::{bf16_bits, exp};
use super::*;

/// Uniform numbers in -1..1.
pub(super) struct Random(pub(super) u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / 8_388_608.0 - 1.0
    }

    pub(super) fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }
}

/// Every level of this machine, as processors that want hints take it and as others do.
pub(super) fn all_kernels() -> Vec<Kernels> {
    let levels = KernelLevel::ALL.into_iter().filter_map(Kernels::new);
    levels.flat_map(|kernels| [false, true].map(|hints| kernels.with_hints(hints))).collect()
}

#[test]
fn element_steps_agree_with_f64_and_between_levels() {
    let mut random = Random(3);
    for len in [1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 576] {
        let (x, y) = (random.vec(len), random.vec(len));
        let mut bits_of_levels = Vec::new();
        for kernels in all_kernels() {
            let mut norm = vec![0.0; len];
            kernels.rms_norm(&x, &y, 1e-5, &mut norm);
            let mean = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / len as f64;
            for i in 0..len {
                let exact = f64::from(x[i]) / (mean + 1e-5).sqrt() * f64::from(y[i]);
                assert!((f64::from(norm[i]) - exact).abs() < 1e-5);
            }
            let mut in_place = x.clone();
            kernels.rms_norm_in_place(&mut in_place, &y, 1e-5);
            assert_eq!(norm, in_place);

            let mut gated: Vec<f32> = x.iter().map(|x| x * 20.0).collect();
            kernels.silu_mul(&mut gated, &y);
            for i in 0..len {
                let gate = f64::from(x[i] * 20.0);
                let exact = gate / (1.0 + (-gate).exp()) * f64::from(y[i]);
                assert!((f64::from(gated[i]) - exact).abs() < 1e-5, "{} for {exact}", gated[i]);
            }

            let mut blocks = vec![Q8Block::default(); row_stride(len)];
            kernels.quantise(&x, &mut blocks);
            let mut quantised = Vec::new();
            for (block, got) in blocks.iter().enumerate() {
                for (i, &quant) in got.quants.iter().enumerate() {
                    let exact = x.get(block * BLOCK + i).copied().unwrap_or(0.0);
                    assert!((f32::from(quant) * got.scale - exact).abs() <= got.scale * 0.5001);
                }
                let total = |places: &dyn Fn(usize) -> bool| -> i32 {
                    (0..BLOCK).filter(|&i| places(i)).map(|i| i32::from(got.quants[i])).sum()
                };
                assert_eq!(got.correction, -128 * total(&|_| true));
                assert_eq!(got.sum, got.scale * total(&|_| true) as f32);
                for (half, sums) in got.halves.iter().enumerate() {
                    for (pair, &sum) in sums.iter().enumerate() {
                        let exact = total(&|i| i / 16 == half && i % 4 / 2 == pair);
                        assert_eq!(i32::from(sum), -32 * exact);
                    }
                }
                quantised.extend([got.scale, got.sum]);
                quantised.extend(got.quants.map(f32::from));
            }

            let mut sum = x.clone();
            kernels.add(&mut sum, &y);
            let mut turned = random.vec(0);
            if len % 2 == 0 {
                turned = x.clone();
                let (cos, sin): (Vec<f32>, Vec<f32>) =
                    y[..len / 2].iter().map(|y| (y.cos(), y.sin())).unzip();
                kernels.rope(&mut turned, &cos, &sin);
                for i in 0..len / 2 {
                    let length = |a: f32, b: f32| a.hypot(b);
                    let (a, b) = (x[i], x[i + len / 2]);
                    assert!((length(a, b) - length(turned[i], turned[i + len / 2])).abs() < 1e-6);
                    assert!((turned[i] - (a * cos[i] - b * sin[i])).abs() < 1e-6);
                }
            }
            let all = [norm, gated, quantised, sum, turned].concat();
            bits_of_levels.push(all.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        }
        assert!(bits_of_levels.windows(2).all(|pair| pair[0] == pair[1]), "levels differ at {len}");
    }
}

#[test]
fn broken_numbers_are_not_hidden_by_quantising() {
    for kernels in all_kernels() {
        for broken in [f32::NAN, f32::INFINITY] {
            let mut x = vec![1.0; 64];
            x[40] = broken;
            let mut blocks = [Q8Block::default(); 2];
            kernels.quantise(&x, &mut blocks);
            assert!(blocks[0].scale.is_finite() && !blocks[1].scale.is_finite());
            assert!(blocks[0].sum.is_finite() && !blocks[1].sum.is_finite());
        }
    }
}

#[test]
fn exp_is_close_and_total() {
    let mut worst = 0.0_f64;
    for i in -870_000..=880_000 {
        let x = i as f32 / 10_000.0;
        let exact = f64::from(x).exp();
        worst = worst.max((f64::from(exp(x)) - exact).abs() / exact);
    }
    assert!(worst < 2e-7, "{worst}");
    assert_eq!(exp(0.0), 1.0);
    assert_eq!((exp(f32::NEG_INFINITY), exp(-88.0), exp(-1e30)), (0.0, 0.0, 0.0));
    assert!(exp(f32::NAN).is_nan() && exp(200.0) > 1e38);
}

#[test]
fn rows_of_kv_are_rounded_to_nearest() {
    let mut random = Random(5);
    for kernels in all_kernels() {
        for width in [2, 8, 12, 16, 64, 80, 128] {
            let row = random.vec(width);
            for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16] {
                let mut words = vec![0_u32; width];
                // SAFETY: the buffer is aligned and large enough for each type.
                unsafe { kernels.store_kv(&row, dtype, words.as_mut_ptr().cast()) };
                let halves = words.iter().flat_map(|&word| [word as u16, (word >> 16) as u16]);
                let expected: Vec<u16> = match dtype {
                    KvDtype::F16 => row.iter().map(|&x| f16::from_f32(x).to_bits()).collect(),
                    KvDtype::Bf16 => row.iter().map(|&x| bf16::from_f32(x).to_bits()).collect(),
                    _ => row.iter().flat_map(|x| [x.to_bits() as u16, (x.to_bits() >> 16) as u16]).collect(),
                };
                assert!(halves.take(expected.len()).eq(expected), "{kernels:?} {dtype} {width}");
            }
        }
    }
}

#[test]
fn bf16_rounds_as_the_half_crate() {
    let mut random = Random(6);
    let odd =
        [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1.003_906_2, 1.011_718_8, f32::MIN_POSITIVE];
    for x in odd.into_iter().chain(random.vec(10_000)) {
        assert_eq!(bf16_bits(x), bf16::from_f32(x).to_bits(), "{x}");
    }
    assert!(bf16::from_bits(bf16_bits(f32::NAN)).is_nan());
}
