//! Packed matrices: products of every form, packing and reading back.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::quantized::GgmlDType;
use half::{bf16, f16};

use super::super::*;
use super::{Random, all_kernels};
use crate::weights::{Arena, Form, Matrix, Plan, Row};
use microserving_checkpoint::TensorType;

/// Activation rows in the form of a matrix.
struct Rows {
    activation: Activation,
    f32: Vec<f32>,
    bf16: Vec<u16>,
    blocks: Vec<Q8Block>,
    /// Elements and blocks between rows.
    stride: (usize, usize),
}

impl Rows {
    fn new(kernels: Kernels, matrix: &Matrix, k: usize, x: &[f32]) -> Self {
        let (rows, padded) = (x.len() / k, matrix.padded_k());
        let stride = (padded, row_stride(padded));
        let mut all = Self {
            activation: matrix.activation(kernels),
            f32: vec![7.0; rows * padded],
            bf16: vec![7; rows * padded],
            blocks: vec![Q8Block { scale: 7.0, sum: 7.0, ..Q8Block::default() }; rows * stride.1],
            stride,
        };
        for (row, x) in x.chunks_exact(k).enumerate() {
            let floats = &mut all.f32[row * padded..][..padded];
            match all.activation {
                Activation::F32 => floats.copy_from_slice(x),
                Activation::Rounded => kernels.round_to_bf16(x, floats),
                Activation::Bf16 => kernels.to_bf16(x, &mut all.bf16[row * padded..][..padded]),
                Activation::Q8 => kernels.quantise(x, &mut all.blocks[row * stride.1..][..stride.1]),
            }
        }
        all
    }

    fn get(&self) -> RowsRef<'_> {
        match self.activation {
            Activation::F32 | Activation::Rounded => RowsRef::F32(&self.f32),
            Activation::Bf16 => RowsRef::Bf16(&self.bf16),
            Activation::Q8 => RowsRef::Q8 { blocks: &self.blocks, stride: self.stride.1 },
        }
    }

    /// The row as the kernels understand it.
    fn widened(&self, row: usize, k: usize) -> Vec<f64> {
        (0..k)
            .map(|x| match self.activation {
                Activation::F32 | Activation::Rounded => f64::from(self.f32[row * self.stride.0 + x]),
                Activation::Bf16 => f64::from(bf16::from_bits(self.bf16[row * self.stride.0 + x])),
                Activation::Q8 => {
                    let block = &self.blocks[row * self.stride.1 + x / BLOCK];
                    f64::from(block.quants[x % BLOCK]) * f64::from(block.scale)
                }
            })
            .collect()
    }
}

/// What a file holds for a row: values, or random blocks of a quantised type.
fn file_row(random: &mut Random, form: Form, k: usize) -> (Vec<f32>, Vec<u8>) {
    let Form::Quantised(quants) = form else { return (random.vec(k), Vec::new()) };
    let (inputs, bytes, scales) = file_layout(quants);
    let mut row = Vec::new();
    for _ in 0..k / inputs {
        let start = row.len();
        row.extend((0..bytes).map(|_| (random.next() * 128.0) as i8 as u8));
        for &at in scales {
            let scale = f16::from_f32(random.next() * 0.1).to_le_bytes();
            row[start + at..start + at + 2].copy_from_slice(&scale);
        }
    }
    (Vec::new(), row)
}

/// Inputs and bytes of a block in a file, and where in it the half-precision numbers are.
fn file_layout(quants: Quants) -> (usize, usize, &'static [usize]) {
    match quants {
        Quants::Q8_0 => (32, 34, &[0]),
        Quants::Q4_0 => (32, 18, &[0]),
        Quants::Q4_1 => (32, 20, &[0, 2]),
        Quants::Q4K => (256, 144, &[0, 2]),
        Quants::Q6K => (256, 210, &[208]),
    }
}

/// Packs `n` rows, each as [`file_row`] makes it.
fn packed_parts(random: &mut Random, parts: &[(Form, usize)], k: usize) -> (Arena, Matrix) {
    let mut plan = Plan::default();
    let matrix = Matrix::plan_parts(&mut plan, parts, k);
    let mut arena = Arena::new(&plan).unwrap();
    let mut first = 0;
    for &(form, n) in parts {
        for i in first..first + n {
            let (values, blocks) = file_row(random, form, k);
            let row = if values.is_empty() { Row::Blocks(&blocks) } else { Row::F32(&values) };
            assert!(pack(&mut arena, &matrix, i, row));
        }
        first += n;
    }
    (arena, matrix)
}

fn forms() -> Vec<Form> {
    let quantised = Quants::ALL.into_iter().map(Form::Quantised);
    [Form::F32, Form::F16, Form::Bf16].into_iter().chain(quantised).collect()
}

/// Multiplies all tiles with all rows; whatever is not written stays NaN.
fn product(
    kernels: Kernels,
    arena: &Arena,
    matrix: &Matrix,
    rows: &Rows,
    m: usize,
    tiles: Range<usize>,
) -> Vec<f32> {
    let stride = matrix.padded_outputs();
    let mut out = vec![f32::NAN; m * stride];
    let output = Output::new(&mut out, stride);
    matrix.for_parts(arena, tiles, |weights, tiles, first| {
        // SAFETY: the output is this test's alone.
        unsafe { kernels.matmul(weights, rows.get(), m, tiles, output.skip_tiles(first)) };
    });
    out
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Checks every element against f64 and, bit for bit, against the product of one row and one tile.
fn check_product(random: &mut Random, parts: &[(Form, usize)], k: usize, rows: &[usize]) {
    let (arena, matrix) = packed_parts(random, parts, k);
    let n = parts.iter().map(|part| part.1).sum();
    let mut row = vec![0.0; k];
    let unpacked: Vec<Vec<f64>> = (0..n)
        .map(|i| {
            matrix.unpack(&arena, i, &mut row);
            row.iter().copied().map(f64::from).collect()
        })
        .collect();
    let most = rows.iter().copied().max().unwrap();
    let x = random.vec(most * k);
    let with_bf16 = parts.iter().any(|part| part.0 == Form::Bf16);
    let mut bits_of_levels = HashMap::new();
    for kernels in all_kernels() {
        let name = format!("{parts:?} of {k} {kernels:?}");
        let tiles = matrix.num_tiles();
        let singles: Vec<Vec<f32>> = x
            .chunks_exact(k)
            .map(|x| {
                let one = Rows::new(kernels, &matrix, k, x);
                let mut all = Vec::new();
                for tile in 0..tiles {
                    let out = product(kernels, &arena, &matrix, &one, 1, tile..tile + 1);
                    all.extend_from_slice(&out[tile * NR..(tile + 1) * NR]);
                }
                all
            })
            .collect();
        let same =
            bits_of_levels.entry(kernels.level().arithmetic(with_bf16)).or_insert_with(|| singles.clone());
        assert!(
            same.iter().zip(&singles).all(|(a, b)| bits(&a[..n]) == bits(&b[..n])),
            "another level's bits, {name}"
        );
        for &m in rows {
            let rows = Rows::new(kernels, &matrix, k, &x[..m * k]);
            let out = product(kernels, &arena, &matrix, &rows, m, 0..tiles);
            for (i, out) in out.chunks_exact(tiles * NR).enumerate() {
                assert_eq!(bits(&singles[i][..n]), bits(&out[..n]), "row {i} of {m}, {name}");
                let left = rows.widened(i, k);
                for (j, right) in unpacked.iter().enumerate() {
                    let exact: f64 = left.iter().zip(right).map(|(a, b)| a * b).sum();
                    let size: f64 = left.iter().zip(right).map(|(a, b)| (a * b).abs()).sum();
                    let got = f64::from(out[j]);
                    assert!(
                        (got - exact).abs() <= 3e-6 * size + 1e-6,
                        "{got} for {exact} at {i},{j}, {name}"
                    );
                }
            }
        }
    }
}

#[test]
fn products_agree_with_f64_and_shapes_with_each_other() {
    let mut random = Random(1);
    for form in forms() {
        // The inputs that a file of the type can have, around the units of tiles and the stretches of kernels.
        let inputs: &[usize] = match form {
            Form::Quantised(Quants::Q4K | Quants::Q6K) => &[256, 512, 768],
            Form::Quantised(_) => &[32, 64, 96, 512, 544, 1056],
            _ => &[1, 31, 32, 33, 64, 255, 256, 257, 515],
        };
        for (&k, n) in inputs.iter().zip([1, 16, 17, 31, 48, 80, 33, 16, 15]) {
            check_product(
                &mut random,
                &[(form, n)],
                k,
                &[1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 23, 24, 31, 40],
            );
        }
    }
}

#[test]
fn parts_of_several_types_share_their_rows() {
    let mut random = Random(7);
    let [q8_0, q4_0, q4_1, q4_k, q6_k] = Quants::ALL.map(Form::Quantised);
    check_product(&mut random, &[(q4_k, 32), (q6_k, 16), (q8_0, 5)], 512, &[1, 4, 11]);
    check_product(&mut random, &[(q4_0, 16), (q4_1, 16), (q4_0, 16)], 96, &[1, 4, 11]);
}

/// What the kernels take for a weight is what candle takes for it.
#[test]
fn blocks_are_read_as_candle_reads_them() {
    let mut random = Random(8);
    for quants in Quants::ALL {
        let kind = match quants {
            Quants::Q8_0 => GgmlDType::Q8_0,
            Quants::Q4_0 => GgmlDType::Q4_0,
            Quants::Q4_1 => GgmlDType::Q4_1,
            Quants::Q4K => GgmlDType::Q4K,
            Quants::Q6K => GgmlDType::Q6K,
        };
        let form = Form::Quantised(quants);
        let (k, n) = (1024, 19);
        let mut plan = Plan::default();
        let matrix = Matrix::plan(&mut plan, form, n, k);
        let mut arena = Arena::new(&plan).unwrap();
        let rows: Vec<Vec<u8>> = (0..n).map(|_| file_row(&mut random, form, k).1).collect();
        for (i, row) in rows.iter().enumerate() {
            assert!(pack(&mut arena, &matrix, i, Row::Blocks(row)));
        }
        let (mut ours, mut theirs) = (vec![0.0; k], vec![0.0; k]);
        for (i, row) in rows.iter().enumerate() {
            matrix.unpack(&arena, i, &mut ours);
            TensorType::Quantised(kind).widen(row, &mut theirs, &mut Vec::new()).unwrap();
            assert_eq!(ours, theirs, "{quants:?} row {i}");
        }
    }
}

#[test]
fn broken_scales_are_refused() {
    for quants in Quants::ALL {
        let (inputs, bytes, scales) = file_layout(quants);
        let mut tile = vec![0; quants.tile_bytes(inputs.next_multiple_of(quants.unit()))];
        let mut row = vec![0; bytes];
        assert!(quants.pack(&mut tile, 3, &row));
        for &at in scales {
            row[at..at + 2].copy_from_slice(&f16::INFINITY.to_le_bytes());
            assert!(!quants.pack(&mut tile, 3, &row), "{quants:?}");
            row[at..at + 2].fill(0);
        }
    }
}

/// Largest weights against largest activations of either sign: sums of sixteen bits hold, and the one byte that has no
/// negative is no exception.
#[test]
fn integer_products_do_not_saturate() {
    for quants in Quants::ALL {
        let (inputs, bytes, scales) = file_layout(quants);
        for fill in [0x00, 0x7f, 0x80, 0xff] {
            let mut block = vec![fill; bytes];
            for &at in scales {
                block[at..at + 2].copy_from_slice(&f16::from_f32(0.5).to_le_bytes());
            }
            let k = inputs.next_multiple_of(quants.unit());
            let row = block.repeat(k / inputs);
            let mut plan = Plan::default();
            let matrix = Matrix::plan(&mut plan, Form::Quantised(quants), 16, k);
            let mut arena = Arena::new(&plan).unwrap();
            assert!(quants.pack(arena.bytes_mut(), 3, &row));
            let mut weights = vec![0.0; k];
            matrix.unpack(&arena, 3, &mut weights);
            // The sign of an activation by its place: all of one, halves, pairs, neighbours, and as the weights'.
            for signs in 0..6 {
                let x: Vec<f32> = (0..k)
                    .map(|x| match signs {
                        0 => 127.0,
                        1 => -127.0,
                        2 => [127.0, -127.0][x / 16 % 2],
                        3 => [127.0, -127.0][x / 2 % 2],
                        4 => [127.0, -127.0][x % 2],
                        _ => {
                            if weights[x] < 0.0 {
                                -127.0
                            } else {
                                127.0
                            }
                        }
                    })
                    .collect();
                let exact: f64 = weights.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                let size: f64 = weights.iter().map(|&w| f64::from(w.abs()) * 127.0).sum();
                for kernels in all_kernels() {
                    for m in [1, 12] {
                        let rows = Rows::new(kernels, &matrix, k, &x.repeat(m));
                        let out = product(kernels, &arena, &matrix, &rows, m, 0..1);
                        for row in out.chunks_exact(16) {
                            let got = f64::from(row[3]);
                            let near = (got - exact).abs() <= 1e-5 * size;
                            assert!(near, "{quants:?} {fill} {signs} {kernels:?}: {got} for {exact}");
                            assert_eq!(row[4], 0.0, "an empty lane");
                        }
                    }
                }
            }
        }
    }
}

const Q8_0: Form = Form::Quantised(Quants::Q8_0);

/// Packs rows of values.
fn packed(form: Form, k: usize, weights: &[f32]) -> (Arena, Matrix) {
    let mut plan = Plan::default();
    let matrix = Matrix::plan(&mut plan, form, weights.len() / k, k);
    let mut arena = Arena::new(&plan).unwrap();
    for (i, row) in weights.chunks_exact(k).enumerate() {
        assert!(pack(&mut arena, &matrix, i, Row::F32(row)));
    }
    (arena, matrix)
}

fn pack(arena: &mut Arena, matrix: &Matrix, index: usize, row: Row<'_>) -> bool {
    let (form, tile) = matrix.tile(index / NR);
    form.pack(&mut arena.bytes_mut()[tile], index % NR, row)
}

#[test]
fn packing_keeps_what_the_form_can_hold() {
    let mut random = Random(7);
    let (n, k) = (37, 75);
    let weights = random.vec(n * k);
    for form in [Form::F32, Form::F16, Form::Bf16, Q8_0] {
        let (arena, matrix) = packed(form, k, &weights);
        let mut row = vec![0.0; k];
        for (i, exact) in weights.chunks_exact(k).enumerate() {
            matrix.unpack(&arena, i, &mut row);
            for (x, (&got, &exact)) in row.iter().zip(exact).enumerate() {
                match form {
                    Form::F32 => assert_eq!(got, exact),
                    Form::F16 => assert_eq!(got, f16::from_f32(exact).to_f32()),
                    Form::Bf16 => assert_eq!(got, bf16::from_f32(exact).to_f32()),
                    Form::Quantised(_) => {
                        assert!((got - exact).abs() <= 0.0041, "{x}: {got} for {exact}");
                    }
                }
            }
        }
    }
    for (form, value) in [(Form::F16, 70_000.0), (Form::Bf16, f32::MAX), (Q8_0, 1e8), (Form::F32, f32::NAN)] {
        let (mut arena, matrix) = packed(form, 32, &[0.0; 32]);
        let mut row = [0.0; 32];
        row[9] = value;
        assert!(!pack(&mut arena, &matrix, 0, Row::F32(&row)), "{form:?}");
    }
}
