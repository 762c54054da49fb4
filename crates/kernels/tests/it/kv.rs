//! Appending to pages, and copying pages.

use microserving_kernels::{DevicePtr, Dtype, KvAppend, KvPages, KvType, NO_SLOT};

use crate::numbers::{
    DTYPES, Numbers, assert_close, from_bytes, kv_from_bytes, kv_to_bytes, rounded, rounding, to_bytes,
    to_e4m3,
};
use crate::rig::{Rig, agreed};

const EPS: f32 = 1e-6;
const PAGE_SIZE: u32 = 4;
const NUM_PAGES: u32 = 5;

/// A call of `kv_append` as numbers, rounded to their types already.
struct Append {
    dtype: Dtype,
    kv_type: KvType,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    /// `[token][stride]`.
    qkv: Vec<f32>,
    stride: usize,
    bias: Option<Vec<f32>>,
    norms: Option<(Vec<f32>, Vec<f32>)>,
    cosines: Vec<f32>,
    sines: Vec<f32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    k_scale: f32,
    v_scale: f32,
}

impl Append {
    fn new(
        dtype: Dtype,
        kv_type: KvType,
        (num_heads, num_kv_heads, head_dim): (usize, usize, usize),
        with_all: bool,
    ) -> Self {
        let mut numbers = Numbers::new((num_heads * 1000 + head_dim) as u64);
        let stride = (num_heads + 2 * num_kv_heads) * head_dim + 8;
        // Further than one page, out of order, one token of padding.
        let slots = vec![7, 2, NO_SLOT, 19, 0];
        let positions = vec![3, 0, 9, 11, 4];
        let half = head_dim / 2;
        let angle = |at: usize| (at / half) as f64 * 10_000_f64.powf(-((at % half) as f64) / half as f64);
        let mut norm = || rounded(dtype, &numbers.take(head_dim));
        let norms = with_all.then(|| (norm(), norm()));
        let bias = with_all.then(|| rounded(dtype, &numbers.take((num_heads + 2 * num_kv_heads) * head_dim)));
        let is_scaled = kv_type == KvType::E4m3;
        Self {
            dtype,
            kv_type,
            num_heads,
            num_kv_heads,
            head_dim,
            qkv: rounded(dtype, &numbers.take(slots.len() * stride)),
            stride,
            bias,
            norms,
            cosines: (0..12 * half).map(|at| angle(at).cos() as f32).collect(),
            sines: (0..12 * half).map(|at| angle(at).sin() as f32).collect(),
            positions,
            slots,
            k_scale: if is_scaled { 0.02 } else { 1.0 },
            v_scale: if is_scaled { 0.0078125 } else { 1.0 },
        }
    }

    fn region_elements(&self) -> usize {
        (NUM_PAGES * 2 * PAGE_SIZE) as usize * self.num_kv_heads * self.head_dim
    }

    /// Returns (query, region) of some of the tokens as bytes.
    fn run(&self, rig: &dyn Rig, tokens: std::ops::Range<usize>) -> (Vec<u8>, Vec<u8>) {
        let count = tokens.len();
        let dtype = self.dtype;
        let query = rig.unwritten(count * self.num_heads * self.head_dim * dtype.num_bytes());
        let region = rig.unwritten(self.region_elements() * self.kv_type.num_bytes(dtype));
        let optional = |values: Option<&[f32]>| {
            values.map_or(DevicePtr::NULL, |values| rig.upload(&to_bytes(dtype, values)).ptr)
        };
        let append = KvAppend {
            query: query.ptr,
            kv: region.ptr,
            qkv: rig
                .upload(&to_bytes(dtype, &self.qkv[tokens.start * self.stride..tokens.end * self.stride]))
                .ptr,
            bias: optional(self.bias.as_deref()),
            q_norm: optional(self.norms.as_ref().map(|norms| &norms.0[..])),
            k_norm: optional(self.norms.as_ref().map(|norms| &norms.1[..])),
            cosines: rig.upload_f32(&self.cosines).ptr,
            sines: rig.upload_f32(&self.sines).ptr,
            positions: rig.upload_u32(&self.positions[tokens.clone()]).ptr,
            slots: rig.upload_u32(&self.slots[tokens]).ptr,
            num_heads: self.num_heads as u32,
            num_kv_heads: self.num_kv_heads as u32,
            head_dim: self.head_dim as u32,
            page_size: PAGE_SIZE,
            qkv_stride: self.stride as u32,
            eps: EPS,
            k_scale: self.k_scale,
            v_scale: self.v_scale,
        };
        // SAFETY: the buffers are of these sizes and nobody else's; slots and positions are in bounds.
        unsafe { append.launch(rig.device(), dtype, self.kv_type, count as u32) }.expect("a good launch");
        (rig.download(&query), rig.download(&region))
    }

    /// A head of a token after bias, norm and rotation.
    fn head(&self, token: usize, head: usize) -> Vec<f64> {
        let dim = self.head_dim;
        let from = &self.qkv[token * self.stride + head * dim..][..dim];
        let mut x: Vec<f64> = from.iter().map(|&x| f64::from(x)).collect();
        if let Some(bias) = &self.bias {
            // Added in f32, as a sum of two numbers is rounded once.
            for (x, &bias) in x.iter_mut().zip(&bias[head * dim..]) {
                *x = f64::from(*x as f32 + bias);
            }
        }
        if head >= self.num_heads + self.num_kv_heads {
            return x;
        }
        if let Some((q_norm, k_norm)) = &self.norms {
            let factor = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / dim as f64 + f64::from(EPS)).sqrt();
            let norm = if head < self.num_heads { q_norm } else { k_norm };
            for (x, &norm) in x.iter_mut().zip(norm) {
                *x *= factor * f64::from(norm);
            }
        }
        let angles = self.positions[token] as usize * (dim / 2);
        for i in 0..dim / 2 {
            let (cosine, sine) = (f64::from(self.cosines[angles + i]), f64::from(self.sines[angles + i]));
            let (a, b) = (x[i], x[i + dim / 2]);
            (x[i], x[i + dim / 2]) = (a * cosine - b * sine, b * cosine + a * sine);
        }
        x
    }
}

#[test]
fn append_agrees_with_its_formula_and_writes_nothing_else() {
    let types = DTYPES.map(|dtype| (dtype, KvType::Same));
    for (dtype, kv_type) in types.into_iter().chain([(Dtype::F16, KvType::E4m3), (Dtype::Bf16, KvType::E4m3)])
    {
        for shape in [(4, 4, 64), (6, 2, 80), (7, 1, 96), (8, 2, 128), (2, 1, 256), (1, 1, 2)] {
            for with_all in [false, true] {
                let append = Append::new(dtype, kv_type, shape, with_all);
                let what = format!("{dtype:?}, {kv_type:?}, {shape:?}, bias and norms {with_all}");
                let num_tokens = append.slots.len();
                let (query, region) = agreed(&what, |rig| append.run(rig, 0..num_tokens));

                let (dim, heads, kv_heads) = (append.head_dim, append.num_heads, append.num_kv_heads);
                let expected: Vec<f64> = (0..num_tokens)
                    .flat_map(|token| (0..heads).map(move |head| (token, head)))
                    .flat_map(|(token, head)| append.head(token, head))
                    .collect();
                // A rotation may cancel: rounding in f32 is relative to what is added.
                let bound = (rounding(dtype) * 1.001 + 1e-6, 4e-6);
                assert_close(&what, &from_bytes(dtype, &query), &expected, bound.0, bound.1);

                let untouched = kv_from_bytes(
                    dtype,
                    kv_type,
                    &vec![0xff; append.region_elements() * kv_type.num_bytes(dtype)],
                );
                assert!(untouched.iter().all(|x| x.is_nan()));
                let mut want: Vec<f64> = vec![f64::NAN; append.region_elements()];
                for token in (0..num_tokens).filter(|&token| append.slots[token] != NO_SLOT) {
                    let (page, slot) = (append.slots[token] / PAGE_SIZE, append.slots[token] % PAGE_SIZE);
                    for head in 0..2 * kv_heads {
                        let row = (page as usize * 2 * kv_heads + head) * PAGE_SIZE as usize + slot as usize;
                        let scale = if head < kv_heads { append.k_scale } else { append.v_scale };
                        for (want, x) in
                            want[row * dim..][..dim].iter_mut().zip(append.head(token, heads + head))
                        {
                            *want = x / f64::from(scale);
                        }
                    }
                }
                let got = kv_from_bytes(dtype, kv_type, &region);
                for (at, (&got, &want)) in got.iter().zip(&want).enumerate() {
                    if want.is_nan() {
                        assert!(got.is_nan(), "{what}: element {at} of the region was written");
                    } else if kv_type == KvType::E4m3 {
                        // Saturates; else off by half a step, which is at most 2^-4 of the number, or 2^-10.
                        let want = want.clamp(-448.0, 448.0);
                        assert!(
                            (f64::from(got) - want).abs() <= want.abs() / 15.9 + 1e-3,
                            "{what}: {at}: {got} {want}"
                        );
                    } else {
                        assert_close(&what, &[got], &[want], bound.0, bound.1);
                    }
                }

                for token in 0..num_tokens {
                    let (alone, _) = append
                        .run(&*crate::rig::host(microserving_kernels::Order::Forward), token..token + 1);
                    let row = heads * dim * dtype.num_bytes();
                    assert!(alone == query[token * row..][..row], "{what}: a token depends on the batch");
                }
            }
        }
    }
}

#[test]
fn e4m3_rounds_to_the_nearest() {
    let mut append = Append::new(Dtype::F16, KvType::E4m3, (1, 1, 256), false);
    append.k_scale = 1.0;
    append.v_scale = 1.0;
    // Values pass as they are; every size of f16 that e4m3 can hold, and beyond.
    let from: Vec<f32> = (0..5 * 256_u16).map(|at| half::f16::from_bits(at * 17 + 0x1000).to_f32()).collect();
    for (token, values) in from.chunks(256).enumerate() {
        append.qkv[token * append.stride + 512..][..256].copy_from_slice(values);
    }
    let (_, region) = agreed("e4m3", |rig| append.run(rig, 0..5));
    for (token, values) in from.chunks(256).enumerate().filter(|(token, _)| append.slots[*token] != NO_SLOT) {
        let (page, slot) = (append.slots[token] / PAGE_SIZE, append.slots[token] % PAGE_SIZE);
        let row = ((page * 2 + 1) * PAGE_SIZE + slot) as usize * 256;
        let expected: Vec<u8> = values.iter().map(|&x| to_e4m3(x)).collect();
        assert_eq!(&region[row..row + 256], expected, "token {token}");
        assert_eq!(kv_to_bytes(Dtype::F16, KvType::E4m3, values), expected);
    }
}

#[test]
fn pages_are_gathered_and_scattered() {
    for page_bytes in [16_u32, 4096, 4112] {
        let (layers, num_pages) = (3_u32, 7_u32);
        let bytes: Vec<u8> = (0..layers * num_pages * page_bytes).map(|at| (at * 31 % 251) as u8).collect();
        let page = |layer: u32, page: u32| ((layer * num_pages + page) * page_bytes) as usize..;
        let listed = [5_u32, 0, 3];
        let (first_layer, num_layers) = (1, 2);
        let (run, copy) = agreed("pages", |rig| {
            let run = rig.unwritten(listed.len() * (num_layers * page_bytes) as usize);
            let copy = rig.unwritten(bytes.len());
            let mut pages = KvPages {
                region: rig.upload(&bytes).ptr,
                run: run.ptr,
                pages: rig.upload_u32(&listed).ptr,
                num_listed: listed.len() as u32,
                num_pages,
                page_bytes,
                first_layer,
            };
            // SAFETY: the buffers are of these sizes and nobody else's; pages and layers are in bounds.
            unsafe { pages.gather(rig.device(), num_layers) }.expect("a good launch");
            pages.region = copy.ptr;
            // SAFETY: as above.
            unsafe { pages.scatter(rig.device(), num_layers) }.expect("a good launch");
            (rig.download(&run), rig.download(&copy))
        });
        let mut expected = vec![0xff; bytes.len()];
        let mut parts = run.chunks(page_bytes as usize);
        for layer in first_layer..first_layer + num_layers {
            for &number in &listed {
                let from = &bytes[page(layer, number)][..page_bytes as usize];
                assert_eq!(parts.next(), Some(from));
                expected[page(layer, number)][..page_bytes as usize].copy_from_slice(from);
            }
        }
        assert!(copy == expected, "scatter wrote elsewhere");
    }
}

#[test]
fn scales_belong_to_e4m3() {
    let ptr = DevicePtr(16);
    let append = KvAppend {
        query: ptr,
        kv: ptr,
        qkv: ptr,
        bias: DevicePtr::NULL,
        q_norm: DevicePtr::NULL,
        k_norm: DevicePtr::NULL,
        cosines: ptr,
        sines: ptr,
        positions: ptr,
        slots: ptr,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 64,
        page_size: 16,
        qkv_stride: 512,
        eps: EPS,
        k_scale: 0.5,
        v_scale: 1.0,
    };
    assert!(append.plan(Dtype::F16, KvType::E4m3, 1).is_ok());
    assert!(append.plan(Dtype::F16, KvType::Same, 1).is_err());
    assert!(append.plan(Dtype::F32, KvType::E4m3, 1).is_err());
    assert!(KvAppend { qkv_stride: 511, k_scale: 1.0, ..append }.plan(Dtype::F16, KvType::Same, 1).is_err());
}
