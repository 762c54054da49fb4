//! All kernels together: a tiny model of Qwen3's kind, computed as an executor would, against its formulas in f64; and its logits
//! must not depend on how the tokens were computed.

use microserving_kernels::{
    Arithmetic, DevicePtr, Dtype, Embedding, KvAppend, KvType, Matmul, Order, PagedAttention,
    PagedAttentionCombine, RmsNorm, SamplingBest, Swiglu,
};

use crate::model_reference::{
    EPS, HEAD_DIM, HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, VOCAB_SIZE, Weights,
};
use crate::numbers::{from_bytes, to_bytes};
use crate::rig::{Buffer, Rig, host};

const PAGE_SIZE: usize = 4;
const NUM_PAGES: usize = 32;
const Q_WIDTH: usize = NUM_HEADS * HEAD_DIM;
const KV_WIDTH: usize = NUM_KV_HEADS * HEAD_DIM;

/// New tokens of one sequence: behind `position` others, which its pages hold.
struct Item<'a> {
    tokens: &'a [u32],
    position: usize,
    pages: &'a [u32],
}

/// The model on a device.
struct Model<'a> {
    rig: &'a dyn Rig,
    dtype: Dtype,
    arithmetic: Arithmetic,
    weights: &'a Weights,
    region: Buffer,
}

impl<'a> Model<'a> {
    fn new(rig: &'a dyn Rig, (dtype, arithmetic): (Dtype, Arithmetic), weights: &'a Weights) -> Self {
        let elements = NUM_LAYERS * NUM_PAGES * 2 * PAGE_SIZE * KV_WIDTH;
        Self { rig, dtype, arithmetic, weights, region: rig.unwritten(elements * dtype.num_bytes()) }
    }

    fn upload(&self, values: &[f32]) -> DevicePtr {
        self.rig.upload(&to_bytes(self.dtype, values)).ptr
    }

    fn room(&self, elements: usize) -> Buffer {
        self.rig.unwritten(elements * self.dtype.num_bytes())
    }

    fn matmul(
        &self,
        x: &Buffer,
        (weight, out_features): (&[f32], usize),
        num_rows: usize,
        out_is_f32: bool,
    ) -> Buffer {
        let width = if out_is_f32 { 4 } else { self.dtype.num_bytes() };
        let out = self.rig.unwritten(num_rows * out_features * width);
        let matmul = Matmul {
            out: out.ptr,
            x: x.ptr,
            weight: self.upload(weight),
            num_rows: num_rows as u32,
            out_features: out_features as u32,
            in_features: (weight.len() / out_features) as u32,
            out_is_f32: out_is_f32.into(),
        };
        // SAFETY: the buffers are of these sizes and nobody else's.
        unsafe { matmul.launch(self.rig.device(), self.arithmetic, self.dtype) }.expect("a good launch");
        out
    }

    /// Adds `delta` to the stream, if there is one, and normalises it.
    fn norm(&self, stream: &Buffer, delta: Option<&Buffer>, weight: &[f32], num_rows: usize) -> Buffer {
        let out = self.room(num_rows * HIDDEN);
        let norm = RmsNorm {
            out: out.ptr,
            x: delta.map_or(stream.ptr, |delta| delta.ptr),
            residual: delta.map_or(DevicePtr::NULL, |_| stream.ptr),
            weight: self.upload(weight),
            hidden: HIDDEN as u32,
            eps: EPS,
        };
        // SAFETY: the buffers are of these sizes and nobody else's.
        unsafe { norm.launch(self.rig.device(), self.dtype, num_rows as u32) }.expect("a good launch");
        out
    }

    /// Computes a step and returns the logits of every item's last token, as bits, and the best token of each.
    fn step(&self, items: &[Item<'_>], by_splits: bool) -> Vec<(Vec<f32>, u32)> {
        let (rig, device) = (self.rig, self.rig.device());
        let mut starts = vec![0_u32];
        let (mut tokens, mut positions, mut slots, mut table) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let max_pages = items.iter().map(|item| item.pages.len()).max().expect("an item");
        for item in items {
            tokens.extend(item.tokens);
            for position in item.position..item.position + item.tokens.len() {
                positions.push(position as u32);
                slots.push(
                    item.pages[position / PAGE_SIZE] * PAGE_SIZE as u32 + (position % PAGE_SIZE) as u32,
                );
            }
            starts.push(tokens.len() as u32);
            table.extend((0..max_pages).map(|at| item.pages.get(at).copied().unwrap_or(u32::MAX)));
        }
        let rows = tokens.len();
        let contexts: Vec<u32> =
            items.iter().map(|item| (item.position + item.tokens.len()) as u32).collect();
        let max_new = items.iter().map(|item| item.tokens.len() as u32).max().expect("an item");
        let (positions, slots) = (rig.upload_u32(&positions).ptr, rig.upload_u32(&slots).ptr);
        let (starts_on, contexts) = (rig.upload_u32(&starts).ptr, rig.upload_u32(&contexts).ptr);
        let table = rig.upload_u32(&table).ptr;
        let (cosines, sines) = self.weights.angles(NUM_PAGES * PAGE_SIZE);
        let (cosines, sines) = (rig.upload_f32(&cosines).ptr, rig.upload_f32(&sines).ptr);

        let stream = self.room(rows * HIDDEN);
        let embedding = Embedding {
            out: stream.ptr,
            table: self.upload(&self.weights.embedding),
            tokens: rig.upload_u32(&tokens).ptr,
            hidden: HIDDEN as u32,
            vocab_size: VOCAB_SIZE as u32,
        };
        // SAFETY: the buffers are of these sizes and nobody else's; so are those below.
        unsafe { embedding.launch(device, self.dtype, rows as u32) }.expect("a good launch");
        let mut delta: Option<Buffer> = None;
        for (number, layer) in self.weights.layers.iter().enumerate() {
            let normed = self.norm(&stream, delta.as_ref(), &layer.attention_norm, rows);
            let qkv = self.matmul(&normed, (&layer.qkv, Q_WIDTH + 2 * KV_WIDTH), rows, false);
            let query = self.room(rows * Q_WIDTH);
            let layer_bytes = NUM_PAGES * 2 * PAGE_SIZE * KV_WIDTH * self.dtype.num_bytes();
            let kv = DevicePtr(self.region.ptr.0 + (number * layer_bytes) as u64);
            let append = KvAppend {
                query: query.ptr,
                kv,
                qkv: qkv.ptr,
                bias: DevicePtr::NULL,
                q_norm: self.upload(&layer.q_norm),
                k_norm: self.upload(&layer.k_norm),
                cosines,
                sines,
                positions,
                slots,
                num_heads: NUM_HEADS as u32,
                num_kv_heads: NUM_KV_HEADS as u32,
                head_dim: HEAD_DIM as u32,
                page_size: PAGE_SIZE as u32,
                qkv_stride: (Q_WIDTH + 2 * KV_WIDTH) as u32,
                eps: EPS,
                k_scale: 1.0,
                v_scale: 1.0,
            };
            // SAFETY: as above.
            unsafe { append.launch(device, self.dtype, KvType::Same, rows as u32) }.expect("a good launch");
            let num_splits =
                if by_splits { self.arithmetic.num_splits((max_pages * PAGE_SIZE) as u32) } else { 0 };
            let attended = self.room(rows * Q_WIDTH);
            let partials = rig.unwritten(rows * NUM_HEADS * num_splits as usize * (HEAD_DIM + 2) * 4);
            let attention = PagedAttention {
                out: attended.ptr,
                partials: partials.ptr,
                query: query.ptr,
                kv,
                page_table: table,
                query_starts: starts_on,
                context_lens: contexts,
                num_heads: NUM_HEADS as u32,
                num_kv_heads: NUM_KV_HEADS as u32,
                head_dim: HEAD_DIM as u32,
                page_size: PAGE_SIZE as u32,
                max_pages: max_pages as u32,
                num_splits,
                scale: 1.0 / (HEAD_DIM as f32).sqrt(),
                k_scale: 1.0,
                v_scale: 1.0,
                reserved: 0,
            };
            let (types, sizes) = ((self.dtype, KvType::Same), (items.len() as u32, max_new));
            // SAFETY: as above.
            unsafe { attention.launch(device, self.arithmetic, types, sizes) }.expect("a good launch");
            if by_splits {
                let combine = PagedAttentionCombine {
                    out: attended.ptr,
                    partials: partials.ptr,
                    num_heads: NUM_HEADS as u32,
                    head_dim: HEAD_DIM as u32,
                    num_splits,
                    v_scale: 1.0,
                };
                // SAFETY: as above.
                unsafe { combine.launch(device, self.dtype, rows as u32) }.expect("a good launch");
            }
            let added = self.matmul(&attended, (&layer.output, HIDDEN), rows, false);
            let normed = self.norm(&stream, Some(&added), &layer.mlp_norm, rows);
            let gate_up = self.matmul(&normed, (&layer.gate_up, 2 * INTERMEDIATE), rows, false);
            let gated = self.room(rows * INTERMEDIATE);
            let swiglu = Swiglu {
                out: gated.ptr,
                gate: gate_up.ptr,
                up: DevicePtr(gate_up.ptr.0 + (INTERMEDIATE * self.dtype.num_bytes()) as u64),
                intermediate: INTERMEDIATE as u32,
                in_stride: 2 * INTERMEDIATE as u32,
            };
            // SAFETY: as above.
            unsafe { swiglu.launch(device, self.dtype, rows as u32) }.expect("a good launch");
            delta = Some(self.matmul(&gated, (&layer.down, HIDDEN), rows, false));
        }
        let normed = self.norm(&stream, delta.as_ref(), &self.weights.final_norm, rows);
        let logits = self.matmul(&normed, (&self.weights.embedding, VOCAB_SIZE), rows, true);
        let [best, best_logits, not_finite] = std::array::from_fn(|_| rig.unwritten(rows * 4));
        let sampling = SamplingBest {
            logits: logits.ptr,
            tokens: best.ptr,
            best: best_logits.ptr,
            not_finite: not_finite.ptr,
            vocab_size: VOCAB_SIZE as u32,
            row_stride: VOCAB_SIZE as u32,
        };
        // SAFETY: as above.
        unsafe { sampling.launch(device, Dtype::F32, rows as u32) }.expect("a good launch");
        let (logits, best) = (from_bytes(Dtype::F32, &rig.download(&logits)), rig.words(&best));
        starts[1..]
            .iter()
            .map(|&end| end as usize - 1)
            .map(|last| (logits[last * VOCAB_SIZE..(last + 1) * VOCAB_SIZE].to_vec(), best[last]))
            .collect()
    }
}

const PROMPT: [u32; 18] = [5, 71, 2, 90, 33, 33, 8, 54, 19, 0, 95, 61, 7, 44, 12, 83, 27, 3];
const OTHER: [u32; 5] = [17, 4, 88, 21, 60];

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Generates greedily and returns the tokens with the logits that they were chosen by.
fn generate(kind: (Dtype, Arithmetic), bound: f64) {
    let weights = Weights::new(kind.0);
    let pages: Vec<u32> = (0..8).collect();
    let rig = host(Order::Forward);
    let model = Model::new(&*rig, kind, &weights);

    // The prompt at once, then token by token.
    let mut tokens = PROMPT.to_vec();
    let mut steps = Vec::new();
    let mut position = 0;
    for _ in 0..5 {
        let step = model.step(&[Item { tokens: &tokens[position..], position, pages: &pages }], false);
        position = tokens.len();
        tokens.push(step[0].1);
        steps.push(bits(&step[0].0));
        let expected = weights.logits(&tokens[..position]);
        let scale = expected.iter().fold(0.0_f64, |largest, x| largest.max(x.abs()));
        for (&got, &expected) in step[0].0.iter().zip(&expected) {
            let off = (f64::from(got) - expected).abs() / scale;
            assert!(off <= bound, "{kind:?}: a logit is {got}, not {expected}");
        }
    }

    // The prompt in chunks, on other pages, beside another sequence, then by splits; on threads that take turns otherwise.
    let rig = host(Order::Shuffled);
    let model = Model::new(&*rig, kind, &weights);
    let (pages, others): (Vec<u32>, Vec<u32>) = ((0..8).map(|at| 30 - 3 * at).collect(), vec![1, 2, 31]);
    model.step(&[Item { tokens: &tokens[..7], position: 0, pages: &pages }], true);
    let chunk = Item { tokens: &tokens[7..18], position: 7, pages: &pages };
    let other = Item { tokens: &OTHER, position: 0, pages: &others };
    let mut found = vec![bits(&model.step(&[other, chunk], false)[1].0)];
    for position in 18..22 {
        let other = Item { tokens: &OTHER[..1], position: position - 13, pages: &others };
        let one = Item { tokens: &tokens[position..=position], position, pages: &pages };
        found.push(bits(&model.step(&[one, other], true)[0].0));
    }
    assert!(found == steps, "{kind:?}: logits depend on how they were computed");

    // All at once, as after a loss.
    let again = model.step(&[Item { tokens: &tokens[..22], position: 0, pages: &pages }], false);
    assert!(bits(&again[0].0) == steps[4], "{kind:?}: computing again gives something else");
}

#[test]
fn plain_model_in_f32() {
    generate((Dtype::F32, Arithmetic::Plain), 2e-6);
}

#[test]
fn tensor_core_model_in_bf16() {
    generate((Dtype::Bf16, Arithmetic::TensorCore), 0.03);
}

#[test]
fn tensor_core_model_in_f16() {
    generate((Dtype::F16, Arithmetic::TensorCore), 0.004);
}
