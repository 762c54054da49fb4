//! Products with weights, plain and on tensor cores.

use microserving_kernels::{Arithmetic, DevicePtr, Dtype, Matmul, Order};

use crate::numbers::{DTYPES, Numbers, from_bytes, rounded, to_bytes};
use crate::rig::{Rig, all, gpu, host};

/// Numbers of a product, rounded to their type.
struct Product {
    dtype: Dtype,
    out_features: usize,
    in_features: usize,
    x: Vec<f32>,
    weight: Vec<f32>,
}

impl Product {
    fn new(dtype: Dtype, (num_rows, out_features, in_features): (usize, usize, usize)) -> Self {
        let mut numbers = Numbers::new((out_features * 100 + in_features) as u64);
        let weight = rounded(dtype, &numbers.take(out_features * in_features));
        Self {
            dtype,
            out_features,
            in_features,
            x: rounded(dtype, &numbers.take(num_rows * in_features)),
            weight,
        }
    }

    /// Returns the output of some of the rows as bytes.
    fn run(
        &self,
        rig: &dyn Rig,
        arithmetic: Arithmetic,
        rows: std::ops::Range<usize>,
        out_is_f32: bool,
    ) -> Vec<u8> {
        let width = if out_is_f32 { 4 } else { self.dtype.num_bytes() };
        let out = rig.unwritten(rows.len() * self.out_features * width);
        let x = &self.x[rows.start * self.in_features..rows.end * self.in_features];
        let matmul = Matmul {
            out: out.ptr,
            x: rig.upload(&to_bytes(self.dtype, x)).ptr,
            weight: rig.upload(&to_bytes(self.dtype, &self.weight)).ptr,
            num_rows: rows.len() as u32,
            out_features: self.out_features as u32,
            in_features: self.in_features as u32,
            out_is_f32: out_is_f32.into(),
        };
        // SAFETY: the buffers are of these sizes and nobody else's.
        unsafe { matmul.launch(rig.device(), arithmetic, self.dtype) }.expect("a good launch");
        rig.download(&out)
    }

    fn check(&self, rigs: &[Box<dyn Rig>], arithmetic: Arithmetic) {
        let num_rows = self.x.len() / self.in_features;
        let what = format!(
            "{arithmetic:?}, {:?}, {num_rows} x {} x {}",
            self.dtype, self.out_features, self.in_features
        );
        let wide = self.run(&*rigs[0], arithmetic, 0..num_rows, true);
        for rig in &rigs[1..] {
            assert!(
                self.run(&**rig, arithmetic, 0..num_rows, true) == wide,
                "{what}: {} differs",
                rig.name()
            );
        }
        let got = from_bytes(Dtype::F32, &wide);
        for (at, &got) in got.iter().enumerate() {
            let x = &self.x[at / self.out_features * self.in_features..][..self.in_features];
            let weight = &self.weight[at % self.out_features * self.in_features..][..self.in_features];
            let products = x.iter().zip(weight).map(|(&x, &weight)| f64::from(x) * f64::from(weight));
            let (sum, size) =
                products.fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()));
            assert!((f64::from(got) - sum).abs() <= size * 1e-6, "{what}: element {at} is {got}, not {sum}");
        }
        let narrow = self.run(&*rigs[0], arithmetic, 0..num_rows, false);
        assert!(narrow == to_bytes(self.dtype, &got), "{what}: rounding");
        // Few rows go to another kernel than many.
        for rows in [0..1, num_rows / 2..num_rows, num_rows - 1..num_rows] {
            let row = self.out_features * 4;
            let alone = self.run(&*rigs[0], arithmetic, rows.clone(), true);
            assert!(alone == wide[rows.start * row..rows.end * row], "{what}: {rows:?} depend on the batch");
        }
    }
}

#[test]
fn plain_agrees_with_its_formula_and_rows_are_independent() {
    let rigs = all();
    for dtype in DTYPES {
        for sizes in [(1, 8, 8), (17, 72, 40), (33, 136, 72)] {
            Product::new(dtype, sizes).check(&rigs, Arithmetic::Plain);
        }
    }
}

#[test]
fn tensor_core_agrees_with_its_formula_and_rows_are_independent() {
    // A GPU's products are rounded in their own way, so it is compared with itself.
    let mut sets: Vec<Vec<Box<dyn Rig>>> =
        vec![vec![host(Order::Forward), host(Order::Backward), host(Order::Shuffled)]];
    sets.extend(gpu().map(|gpu| vec![gpu]));
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for sizes in [(1, 8, 8), (16, 40, 520), (17, 72, 264), (64, 32, 200), (130, 136, 72)] {
            for rigs in &sets {
                Product::new(dtype, sizes).check(rigs, Arithmetic::TensorCore);
            }
        }
    }
}

#[test]
fn what_is_not_compiled_or_out_of_bounds_is_refused() {
    let ptr = DevicePtr(16);
    let good = Matmul {
        out: ptr,
        x: ptr,
        weight: ptr,
        num_rows: 65,
        out_features: 136,
        in_features: 64,
        out_is_f32: 0,
    };
    let launch = good.plan(Arithmetic::TensorCore, Dtype::Bf16).expect("a good shape");
    assert_eq!((launch.kernel, launch.grid), ("matmul_mma_bf16_m128", [2, 1, 1]));
    assert!(good.plan(Arithmetic::TensorCore, Dtype::F32).is_err());
    assert!(Matmul { in_features: 60, ..good }.plan(Arithmetic::Plain, Dtype::F32).is_err());
    assert!(Matmul { num_rows: 0, ..good }.plan(Arithmetic::Plain, Dtype::F32).is_err());
}
