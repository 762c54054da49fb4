//! RMSNorm, SwiGLU, embedding.

use microserving_kernels::{DevicePtr, Dtype, Embedding, RmsNorm, Swiglu};

use crate::numbers::{DTYPES, Numbers, assert_close, from_bytes, rounded, rounding, to_bytes};
use crate::rig::{Rig, agreed};

const EPS: f32 = 1e-5;

/// Returns (out, residual) as bytes.
fn rms_norm(
    rig: &dyn Rig,
    dtype: Dtype,
    x: &[f32],
    residual: Option<&[f32]>,
    weight: &[f32],
) -> (Vec<u8>, Vec<u8>) {
    let num_rows = (x.len() / weight.len()) as u32;
    let out = rig.unwritten(x.len() * dtype.num_bytes());
    let sum = residual.map(|residual| rig.upload(&to_bytes(dtype, residual)));
    let norm = RmsNorm {
        out: out.ptr,
        x: rig.upload(&to_bytes(dtype, x)).ptr,
        residual: sum.map_or(DevicePtr::NULL, |sum| sum.ptr),
        weight: rig.upload(&to_bytes(dtype, weight)).ptr,
        hidden: weight.len() as u32,
        eps: EPS,
    };
    // SAFETY: the buffers are of these sizes and nobody else's.
    unsafe { norm.launch(rig.device(), dtype, num_rows) }.expect("a good launch");
    (rig.download(&out), sum.map_or(Vec::new(), |sum| rig.download(&sum)))
}

#[test]
fn rms_norm_agrees_with_its_formula_and_rows_are_independent() {
    for dtype in DTYPES {
        for hidden in [8, 72, 512, 2048, 2056, 4104] {
            let mut numbers = Numbers::new(hidden as u64);
            let weight = rounded(dtype, &numbers.take(hidden));
            let x = rounded(dtype, &numbers.take(3 * hidden));
            let residual = rounded(dtype, &numbers.take(3 * hidden));
            for residual in [None, Some(&residual[..])] {
                let what = format!("{dtype:?}, hidden {hidden}, residual {}", residual.is_some());
                let (out, sum) = agreed(&what, |rig| rms_norm(rig, dtype, &x, residual, &weight));
                let added: Vec<f32> = match residual {
                    Some(residual) => x.iter().zip(residual).map(|(x, residual)| x + residual).collect(),
                    None => x.clone(),
                };
                let added = rounded(dtype, &added);
                if residual.is_some() {
                    assert_eq!(from_bytes(dtype, &sum), added, "{what}");
                }
                let expected: Vec<f64> = added
                    .chunks(hidden)
                    .flat_map(|row| {
                        let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / hidden as f64;
                        let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
                        row.iter()
                            .zip(&weight)
                            .map(move |(&x, &weight)| f64::from(x) * factor * f64::from(weight))
                    })
                    .collect();
                assert_close(
                    &what,
                    &from_bytes(dtype, &out),
                    &expected,
                    rounding(dtype) * 1.001 + 1e-6,
                    1e-7,
                );

                let alone = agreed(&what, |rig| {
                    rms_norm(
                        rig,
                        dtype,
                        &x[hidden..2 * hidden],
                        residual.map(|all| &all[hidden..2 * hidden]),
                        &weight,
                    )
                });
                let row = hidden * dtype.num_bytes();
                assert!(alone.0 == out[row..2 * row], "{what}: a row depends on the batch");
            }
        }
    }
}

#[test]
fn rms_norm_works_in_place() {
    let rig = crate::rig::host(microserving_kernels::Order::Shuffled);
    let x = Numbers::new(1).take(2 * 512);
    let weight = Numbers::new(2).take(512);
    let expected = rms_norm(&*rig, Dtype::F32, &x, None, &weight).0;
    let in_place = rig.upload_f32(&x);
    let weight = rig.upload_f32(&weight);
    let (ptr, residual) = (in_place.ptr, DevicePtr::NULL);
    let norm = RmsNorm { out: ptr, x: ptr, residual, weight: weight.ptr, hidden: 512, eps: EPS };
    // SAFETY: the buffers are of these sizes and nobody else's.
    unsafe { norm.launch(rig.device(), Dtype::F32, 2) }.expect("a good launch");
    assert!(rig.download(&in_place) == expected);
}

#[test]
fn swiglu_agrees_with_its_formula() {
    for dtype in DTYPES {
        for (intermediate, gap) in [(8, 0), (1024, 0), (1032, 8), (2560, 16)] {
            let stride = 2 * intermediate + gap;
            let mut numbers = Numbers::new(intermediate as u64);
            // Gates as large as models have them, and larger.
            let mut both = rounded(dtype, &numbers.take(2 * stride));
            for (at, x) in both.iter_mut().enumerate() {
                *x *= [1.0, 4.0, 16.0, 64.0][at / 3 % 4];
            }
            let both = rounded(dtype, &both);
            let out = agreed("swiglu", |rig| {
                let input = rig.upload(&to_bytes(dtype, &both));
                let out = rig.unwritten(2 * intermediate * dtype.num_bytes());
                let swiglu = Swiglu {
                    out: out.ptr,
                    gate: input.ptr,
                    up: DevicePtr(input.ptr.0 + (intermediate * dtype.num_bytes()) as u64),
                    intermediate: intermediate as u32,
                    in_stride: stride as u32,
                };
                // SAFETY: the buffers are of these sizes and nobody else's.
                unsafe { swiglu.launch(rig.device(), dtype, 2) }.expect("a good launch");
                rig.download(&out)
            });
            let expected: Vec<f64> = both
                .chunks(stride)
                .flat_map(|row| {
                    row[..intermediate].iter().zip(&row[intermediate..]).map(|(&gate, &up)| {
                        let gate = f64::from(gate);
                        gate / (1.0 + (-gate).exp()) * f64::from(up)
                    })
                })
                .collect();
            // The smallest steps of f16 are 2^-24.
            assert_close("swiglu", &from_bytes(dtype, &out), &expected, rounding(dtype) * 1.001 + 1e-6, 6e-8);
        }
    }
}

#[test]
fn embedding_copies_rows_and_shows_what_is_out_of_the_vocabulary() {
    for dtype in DTYPES {
        let (vocab_size, hidden) = (5_u32, 1032_u32);
        let table = to_bytes(dtype, &Numbers::new(3).take((vocab_size * hidden) as usize));
        let tokens = [4, 0, 5, 0, u32::MAX];
        let out = agreed("embedding", |rig| {
            let out = rig.unwritten(tokens.len() * hidden as usize * dtype.num_bytes());
            let (table, tokens_on) = (rig.upload(&table), rig.upload_u32(&tokens));
            let embedding =
                Embedding { out: out.ptr, table: table.ptr, tokens: tokens_on.ptr, hidden, vocab_size };
            // SAFETY: the buffers are of these sizes and nobody else's.
            unsafe { embedding.launch(rig.device(), dtype, tokens.len() as u32) }.expect("a good launch");
            rig.download(&out)
        });
        let row_bytes = hidden as usize * dtype.num_bytes();
        for (row, token) in out.chunks(row_bytes).zip(tokens) {
            if token < vocab_size {
                assert_eq!(row, &table[token as usize * row_bytes..][..row_bytes]);
            } else {
                assert!(from_bytes(dtype, row).iter().all(|x| x.is_nan()));
            }
        }
    }
}

#[test]
fn bad_shapes_are_named() {
    let ptr = DevicePtr(16);
    let norm = RmsNorm { out: ptr, x: ptr, residual: ptr, weight: ptr, hidden: 12, eps: EPS };
    let error = norm.plan(Dtype::F32, 1).expect_err("not a multiple of 8").to_string();
    assert_eq!(error, "rms_norm: hidden is 12, must be a multiple of 8, 8 to 16384");
    let error = RmsNorm { hidden: 8, ..norm }.plan(Dtype::F32, 0).expect_err("no rows").to_string();
    assert_eq!(error, "rms_norm: num_rows is 0, must be 1 to 2147483647");
    let swiglu = Swiglu { out: ptr, gate: ptr, up: ptr, intermediate: 64, in_stride: 56 };
    let error = swiglu.plan(Dtype::F32, 1).expect_err("rows overlap").to_string();
    assert_eq!(error, "swiglu: in_stride is 56, must be a multiple of 8, at least intermediate");
}
