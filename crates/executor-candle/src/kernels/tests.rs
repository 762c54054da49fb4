//! Every kernel against a plain computation in f64, and every shape of a kernel against its one-row shape, bit for bit.

use half::{bf16, f16};
use microserving_protocol::KvDtype;

use super::elementwise::{bf16_bits, exp};
use super::*;
use crate::weights::{Activation, Arena, Form, Matrix, Plan, Row};

/// Uniform numbers in -1..1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / 8_388_608.0 - 1.0
    }

    fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }
}

fn all_kernels() -> Vec<Kernels> {
    KernelLevel::ALL.into_iter().filter_map(Kernels::new).collect()
}

/// Activation rows in the form of a matrix.
struct Rows {
    activation: Activation,
    f32: Vec<f32>,
    bf16: Vec<u16>,
    quants: Vec<i8>,
    scales: Vec<f32>,
    corrections: Vec<i32>,
}

impl Rows {
    fn new(kernels: Kernels, matrix: &Matrix, k: usize, x: &[f32]) -> Self {
        let (rows, padded) = (x.len() / k, matrix.padded_k());
        let mut all = Self {
            activation: matrix.activation(),
            f32: x.to_vec(),
            bf16: vec![7; rows * padded],
            quants: vec![7; rows * padded],
            scales: vec![7.0; rows * padded / Q8_BLOCK],
            corrections: vec![7; rows * padded / Q8_BLOCK],
        };
        for (row, x) in x.chunks_exact(k).enumerate() {
            match all.activation {
                Activation::F32 => {}
                Activation::Bf16 => kernels.to_bf16(x, &mut all.bf16[row * padded..][..padded]),
                Activation::Q8 => {
                    let blocks = padded / Q8_BLOCK;
                    kernels.quantise(
                        x,
                        &mut all.quants[row * padded..][..padded],
                        &mut all.scales[row * blocks..][..blocks],
                        &mut all.corrections[row * blocks..][..blocks],
                    );
                }
            }
        }
        all
    }

    fn get(&self) -> RowsRef<'_> {
        match self.activation {
            Activation::F32 => RowsRef::F32(&self.f32),
            Activation::Bf16 => RowsRef::Bf16(&self.bf16),
            Activation::Q8 => {
                RowsRef::Q8 { quants: &self.quants, scales: &self.scales, corrections: &self.corrections }
            }
        }
    }

    /// The row as the kernels understand it.
    fn widened(&self, row: usize, k: usize, padded: usize) -> Vec<f64> {
        (0..k)
            .map(|x| match self.activation {
                Activation::F32 => f64::from(self.f32[row * k + x]),
                Activation::Bf16 => f64::from(bf16::from_bits(self.bf16[row * padded + x])),
                Activation::Q8 => {
                    let at = row * padded + x;
                    f64::from(self.quants[at]) * f64::from(self.scales[at / Q8_BLOCK])
                }
            })
            .collect()
    }
}

fn packed(form: Form, n: usize, k: usize, weights: &[f32]) -> (Arena, Matrix) {
    let mut plan = Plan::default();
    let matrix = Matrix::plan(&mut plan, form, n, k);
    let mut arena = Arena::new(&plan).unwrap();
    matrix.clear(&mut arena);
    for (i, row) in weights.chunks_exact(k).enumerate() {
        assert!(matrix.pack(&mut arena, i, Row::F32(row)));
    }
    (arena, matrix)
}

#[test]
fn products_agree_with_f64_and_shapes_with_each_other() {
    let mut random = Random(1);
    for form in [Form::F32, Form::F16, Form::Bf16, Form::Q8] {
        for (n, k) in [(1, 1), (16, 32), (17, 33), (31, 64), (48, 31), (80, 100), (33, 257)] {
            let weights = random.vec(n * k);
            let (arena, matrix) = packed(form, n, k, &weights);
            let mut row = vec![0.0; k];
            let unpacked: Vec<Vec<f64>> = (0..n)
                .map(|i| {
                    matrix.unpack(&arena, i, &mut row);
                    row.iter().copied().map(f64::from).collect()
                })
                .collect();
            for m in [1, 2, 3, 4, 5, 8, 9, 12, 13, 23, 24, 31] {
                let x = random.vec(m * k);
                for kernels in all_kernels() {
                    let rows = Rows::new(kernels, &matrix, k, &x);
                    let stride = matrix.padded_outputs();
                    let mut out = vec![f32::NAN; m * stride];
                    let output = Output::new(&mut out, stride);
                    // SAFETY: the output is this test's alone.
                    unsafe {
                        kernels.matmul(matrix.get(&arena), rows.get(), m, 0..matrix.num_tiles(), output);
                    };
                    for i in 0..m {
                        let left = rows.widened(i, k, matrix.padded_k());
                        for (j, right) in unpacked.iter().enumerate() {
                            let exact: f64 = left.iter().zip(right).map(|(a, b)| a * b).sum();
                            let size: f64 = left.iter().zip(right).map(|(a, b)| (a * b).abs()).sum();
                            let got = f64::from(out[i * stride + j]);
                            assert!(
                                (got - exact).abs() <= 1e-6 * size + 1e-6,
                                "{form:?} {n}x{k} {m} rows {kernels:?} at {i},{j}: {got} for {exact}"
                            );
                        }
                    }
                    for i in 0..m {
                        let one = Rows::new(kernels, &matrix, k, &x[i * k..][..k]);
                        let mut single = vec![f32::NAN; stride];
                        for tile in (0..matrix.num_tiles()).rev() {
                            let output = Output::new(&mut single, stride);
                            // SAFETY: as above.
                            unsafe {
                                kernels.matmul(matrix.get(&arena), one.get(), 1, tile..tile + 1, output);
                            };
                        }
                        let bits = |x: &[f32]| x[..n].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        assert_eq!(bits(&single), bits(&out[i * stride..]), "{form:?} {n}x{k} {kernels:?}");
                    }
                }
            }
        }
    }
}

/// Largest weights against largest activations, and the one value that has no negative.
#[test]
fn eight_bit_products_do_not_saturate() {
    let k = 64;
    let (mut arena, matrix) = packed(Form::Q8, 16, k, &vec![1.0; 16 * k]);
    let mut blocks = Vec::new();
    for _ in 0..2 {
        blocks.extend(f16::from_f32(0.5).to_le_bytes());
        blocks.extend([-128_i8 as u8; 32]);
    }
    assert!(matrix.pack(&mut arena, 3, Row::Q8(&blocks)));
    for kernels in all_kernels() {
        for sign in [1.0, -1.0] {
            let rows = Rows::new(kernels, &matrix, k, &vec![sign * 127.0; k]);
            let mut out = vec![0.0; 16];
            // SAFETY: the output is this test's alone.
            unsafe { kernels.matmul(matrix.get(&arena), rows.get(), 1, 0..1, Output::new(&mut out, 16)) };
            assert_eq!(out[3], sign * 127.0 * -64.0 * 64.0, "{kernels:?}");
            assert!((out[0] - sign * 127.0 * 64.0).abs() < 8.0, "{kernels:?} {}", out[0]);
        }
    }
}

#[test]
fn free_products_agree_and_accumulate() {
    let mut random = Random(2);
    for (m, tiles, k) in [(1, 1, 1), (3, 2, 12), (7, 3, 32), (13, 4, 64), (48, 2, 80)] {
        let (lda, ldw) = (k + 3, 16 * tiles);
        let (a, w, before) = (random.vec(m * lda), random.vec(k * ldw), random.vec(m * (16 * tiles + 5)));
        for kernels in all_kernels() {
            for accumulate in [false, true] {
                let stride = 16 * tiles + 5;
                let product = F32Product { a: &a, lda, w: &w, tile: 16, ldw, k, accumulate };
                let mut out = before.clone();
                let first = m / 3;
                // SAFETY: the output is this test's alone.
                unsafe { kernels.f32_product(&product, first..m, 0..tiles, Output::new(&mut out, stride)) };
                for i in 0..m {
                    for j in 0..stride {
                        let exact = if i < first || j >= 16 * tiles {
                            f64::from(before[i * stride + j])
                        } else {
                            let start = if accumulate { f64::from(before[i * stride + j]) } else { 0.0 };
                            (0..k).fold(start, |sum, x| {
                                sum + f64::from(a[i * lda + x]) * f64::from(w[x * ldw + j])
                            })
                        };
                        let got = f64::from(out[i * stride + j]);
                        assert!((got - exact).abs() < 1e-5, "{kernels:?} {m}x{tiles}x{k}: {got} for {exact}");
                    }
                }
            }
        }
    }
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

            let padded = len.next_multiple_of(Q8_BLOCK);
            let (mut quants, mut scales, mut corrections) =
                (vec![1; padded], vec![1.0; padded / 32], vec![1; padded / 32]);
            kernels.quantise(&x, &mut quants, &mut scales, &mut corrections);
            for (i, &quant) in quants.iter().enumerate() {
                let exact = x.get(i).copied().unwrap_or(0.0);
                assert!((f32::from(quant) * scales[i / 32] - exact).abs() <= scales[i / 32] * 0.5001);
            }
            for (block, quants) in quants.chunks(32).enumerate() {
                assert_eq!(corrections[block], -128 * quants.iter().map(|&q| i32::from(q)).sum::<i32>());
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
            let all = [norm, gated, scales, sum, turned].concat();
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
            let (mut quants, mut scales, mut corrections) = (vec![0; 64], vec![0.0; 2], vec![0; 2]);
            kernels.quantise(&x, &mut quants, &mut scales, &mut corrections);
            assert!(scales[0].is_finite() && !scales[1].is_finite());
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
fn softmax_steps_make_a_softmax() {
    let mut random = Random(4);
    for kernels in all_kernels() {
        for len in [1, 5, 32, 33, 70, 96] {
            let scores: Vec<f32> = random.vec(len).iter().map(|x| x * 10.0).collect();
            let values = random.vec(len);
            let (mut max, mut sum, mut value) = (f32::NEG_INFINITY, 0.0, vec![0.0]);
            for (tile, values) in scores.chunks(32).zip(values.chunks(32)) {
                let mut row = [f32::NAN; 32];
                row[..tile.len()].copy_from_slice(tile);
                kernels.softmax_step(&mut row, tile.len(), &mut max, &mut sum, &mut value);
                assert!(row[tile.len()..].iter().all(|&weight| weight == 0.0));
                value[0] += row.iter().zip(values).map(|(weight, value)| weight * value).sum::<f32>();
            }
            let weights: Vec<f64> = scores.iter().map(|&x| f64::from(x).exp()).collect();
            let total: f64 = weights.iter().sum();
            let exact: f64 = weights.iter().zip(&values).map(|(w, &v)| w / total * f64::from(v)).sum();
            assert!((f64::from(value[0] / sum) - exact).abs() < 1e-5);
        }
    }
}

#[test]
fn transposing_and_kv_rows() {
    let mut random = Random(5);
    for kernels in all_kernels() {
        for (num_rows, width) in [(1, 8), (5, 12), (16, 16), (31, 64), (32, 80), (32, 128)] {
            let rows = random.vec(32 * width);
            let mut out = vec![0.0; width * 32];
            kernels.transpose(&rows, (num_rows, width), &mut out, 32);
            for j in 0..num_rows {
                for d in 0..width {
                    assert_eq!(out[d * 32 + j], rows[j * width + d]);
                }
            }
            for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16] {
                let row = &rows[..width];
                let mut bytes = vec![0_u32; width];
                let mut back = vec![0.0; width];
                // SAFETY: the buffer is aligned and large enough for each type.
                unsafe {
                    kernels.store_kv(row, dtype, bytes.as_mut_ptr().cast());
                    kernels.load_kv(bytes.as_ptr().cast(), dtype, &mut back);
                }
                for (&x, &back) in row.iter().zip(&back) {
                    let exact = match dtype {
                        KvDtype::F16 => f16::from_f32(x).to_f32(),
                        KvDtype::Bf16 => bf16::from_f32(x).to_f32(),
                        _ => x,
                    };
                    assert_eq!(back.to_bits(), exact.to_bits());
                }
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

#[test]
fn packing_keeps_what_the_form_can_hold() {
    let mut random = Random(7);
    let (n, k) = (37, 75);
    let weights = random.vec(n * k);
    for form in [Form::F32, Form::F16, Form::Bf16, Form::Q8] {
        let (arena, matrix) = packed(form, n, k, &weights);
        let mut row = vec![0.0; k];
        for (i, exact) in weights.chunks_exact(k).enumerate() {
            matrix.unpack(&arena, i, &mut row);
            for (x, (&got, &exact)) in row.iter().zip(exact).enumerate() {
                match form {
                    Form::F32 => assert_eq!(got, exact),
                    Form::F16 => assert_eq!(got, f16::from_f32(exact).to_f32()),
                    Form::Bf16 => assert_eq!(got, bf16::from_f32(exact).to_f32()),
                    Form::Q8 => assert!((got - exact).abs() <= 0.0041, "{x}: {got} for {exact}"),
                }
            }
        }
    }
    let (mut arena, matrix) = packed(Form::Q8, 2, 32, &vec![0.0; 64]);
    let mut block = f16::from_f32(0.25).to_le_bytes().to_vec();
    block.extend((0..32).map(|i| (i * 8 - 128) as u8));
    assert!(matrix.pack(&mut arena, 1, Row::Q8(&block)));
    let mut row = vec![0.0; 32];
    matrix.unpack(&arena, 1, &mut row);
    assert_eq!(row, (0..32).map(|i| (i * 8 - 128) as f32 * 0.25).collect::<Vec<_>>());
    matrix.unpack(&arena, 0, &mut row);
    assert_eq!(row, [0.0; 32]);

    for (form, value) in
        [(Form::F16, 70_000.0), (Form::Bf16, f32::MAX), (Form::Q8, 1e8), (Form::F32, f32::NAN)]
    {
        let (mut arena, matrix) = packed(form, 1, 32, &[0.0; 32]);
        let mut row = [0.0; 32];
        row[9] = value;
        assert!(!matrix.pack(&mut arena, 0, Row::F32(&row)), "{form:?}");
    }
}
