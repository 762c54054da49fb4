//! Attention by its formula in f64, and the laying out of contexts in pages.

use microserving_kernels::{Arithmetic, DevicePtr, Dtype, KvType, PagedAttention, PagedAttentionCombine};

use crate::numbers::{Numbers, kv_from_bytes, kv_to_bytes, rounded, to_bytes};
use crate::rig::Rig;

/// The sizes of attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) page_size: usize,
    pub(crate) dtype: Dtype,
    pub(crate) kv_type: KvType,
}

pub(crate) const K_SCALE: f32 = 0.75;
pub(crate) const V_SCALE: f32 = 1.5;

impl Shape {
    fn scales(&self) -> (f32, f32) {
        if self.kv_type == KvType::E4m3 { (K_SCALE, V_SCALE) } else { (1.0, 1.0) }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    pub(crate) fn row_bytes(&self) -> usize {
        self.num_heads * self.head_dim * self.dtype.num_bytes()
    }
}

/// A sequence: its context as the KV holds it, and the queries of its last tokens.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) context: usize,
    pub(crate) num_new: usize,
    /// `[context][k|v][num_kv_heads][head_dim]`, rounded to the KV's type, without scales.
    kv: Vec<f32>,
    /// `[num_new][num_heads][head_dim]`, rounded.
    query: Vec<f32>,
}

impl Sequence {
    /// A sequence whose numbers depend on the seed and the position, not on how many tokens are new or how many there are.
    pub(crate) fn new(shape: &Shape, seed: u64, num_new: usize, context: usize) -> Self {
        let per_token = 2 * shape.num_kv_heads * shape.head_dim;
        let kv = Numbers::new(seed * 7919 + 1).take(context * per_token);
        let query = Numbers::new(seed * 7919 + 2).take(context * shape.num_heads * shape.head_dim);
        let query = &query[(context - num_new) * shape.num_heads * shape.head_dim..];
        Self {
            context,
            num_new,
            kv: kv_from_bytes(shape.dtype, shape.kv_type, &kv_to_bytes(shape.dtype, shape.kv_type, &kv)),
            query: rounded(shape.dtype, query),
        }
    }

    /// The output of the new tokens: `[num_new][num_heads][head_dim]`.
    pub(crate) fn reference(&self, shape: &Shape) -> Vec<f64> {
        let dim = shape.head_dim;
        let (k_scale, v_scale) = shape.scales();
        let group = shape.num_heads / shape.num_kv_heads;
        let mut out = Vec::new();
        for token in 0..self.num_new {
            let limit = self.context - self.num_new + token + 1;
            for head in 0..shape.num_heads {
                let at = |position: usize, which: usize, d: usize| {
                    f64::from(self.kv[((position * 2 + which) * shape.num_kv_heads + head / group) * dim + d])
                };
                let query = &self.query[(token * shape.num_heads + head) * dim..][..dim];
                let scores: Vec<f64> = (0..limit)
                    .map(|position| {
                        let dot: f64 = (0..dim).map(|d| f64::from(query[d]) * at(position, 0, d)).sum();
                        dot * f64::from(shape.scale()) * f64::from(k_scale)
                    })
                    .collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                let sum: f64 = weights.iter().sum();
                out.extend((0..dim).map(|d| {
                    let value: f64 = (0..limit).map(|position| weights[position] * at(position, 1, d)).sum();
                    value / sum * f64::from(v_scale)
                }));
            }
        }
        out
    }
}

/// How a batch is laid out and computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    pub(crate) arithmetic: Arithmetic,
    /// One block a split, and merging; else one block for all splits.
    pub(crate) is_split: bool,
    /// Decides which pages the sequences get.
    pub(crate) stride: usize,
}

/// Runs a batch and returns the output as bytes: `[tokens][num_heads][head_dim]`.
pub(crate) fn run(rig: &dyn Rig, shape: &Shape, sequences: &[Sequence], way: Way) -> Vec<u8> {
    let num_pages_of = |sequence: &Sequence| sequence.context.div_ceil(shape.page_size);
    let max_pages = sequences.iter().map(num_pages_of).max().unwrap_or(0).max(1);
    // More than needed; the odd number keeps most strides coprime to it.
    let num_pages = 2 * sequences.iter().map(num_pages_of).sum::<usize>() + 17;
    let page_elements = 2 * shape.num_kv_heads * shape.page_size * shape.head_dim;
    let element_bytes = shape.kv_type.num_bytes(shape.dtype);
    // What no sequence owns, slots behind a context included, holds NaNs.
    let mut region = vec![0xff; num_pages * page_elements * element_bytes];
    let mut taken = vec![false; num_pages];
    let mut next = way.stride % num_pages;
    let mut table = vec![u32::MAX; sequences.len() * max_pages];
    for (number, sequence) in sequences.iter().enumerate() {
        let bytes = kv_to_bytes(shape.dtype, shape.kv_type, &sequence.kv);
        let row = shape.head_dim * element_bytes;
        for position in 0..sequence.context {
            let slot = position % shape.page_size;
            let entry = &mut table[number * max_pages + position / shape.page_size];
            if slot == 0 {
                while taken[next] {
                    next = (next + 1) % num_pages;
                }
                taken[next] = true;
                *entry = next as u32;
                next = (next + way.stride) % num_pages;
            }
            for head in 0..2 * shape.num_kv_heads {
                let to = ((*entry as usize * 2 * shape.num_kv_heads + head) * shape.page_size + slot) * row;
                let from = (position * 2 * shape.num_kv_heads + head) * row;
                region[to..to + row].copy_from_slice(&bytes[from..from + row]);
            }
        }
    }
    let mut starts = vec![0_u32];
    for sequence in sequences {
        starts.push(starts[starts.len() - 1] + sequence.num_new as u32);
    }
    let num_tokens = starts[sequences.len()];
    let query: Vec<f32> = sequences.iter().flat_map(|sequence| sequence.query.iter().copied()).collect();
    let contexts: Vec<u32> = sequences.iter().map(|sequence| sequence.context as u32).collect();
    let max_new = sequences.iter().map(|sequence| sequence.num_new as u32).max().unwrap_or(0);
    let num_splits =
        if way.is_split { way.arithmetic.num_splits((max_pages * shape.page_size) as u32) } else { 0 };
    let (k_scale, v_scale) = shape.scales();

    let out = rig.unwritten(num_tokens as usize * shape.row_bytes());
    let partials_len = num_tokens as usize * shape.num_heads * num_splits as usize * (shape.head_dim + 2) * 4;
    let partials = rig.unwritten(partials_len);
    let attention = PagedAttention {
        out: if way.is_split { DevicePtr::NULL } else { out.ptr },
        partials: if way.is_split { partials.ptr } else { DevicePtr::NULL },
        query: rig.upload(&to_bytes(shape.dtype, &query)).ptr,
        kv: rig.upload(&region).ptr,
        page_table: rig.upload_u32(&table).ptr,
        query_starts: rig.upload_u32(&starts).ptr,
        context_lens: rig.upload_u32(&contexts).ptr,
        num_heads: shape.num_heads as u32,
        num_kv_heads: shape.num_kv_heads as u32,
        head_dim: shape.head_dim as u32,
        page_size: shape.page_size as u32,
        max_pages: max_pages as u32,
        num_splits,
        scale: shape.scale(),
        k_scale,
        v_scale,
        reserved: 0,
    };
    let types = (shape.dtype, shape.kv_type);
    let sizes = (sequences.len() as u32, max_new);
    // SAFETY: the buffers are of these sizes and nobody else's; pages are in bounds.
    unsafe { attention.launch(rig.device(), way.arithmetic, types, sizes) }.expect("a good launch");
    if way.is_split {
        let combine = PagedAttentionCombine {
            out: out.ptr,
            partials: partials.ptr,
            num_heads: shape.num_heads as u32,
            head_dim: shape.head_dim as u32,
            num_splits,
            v_scale,
        };
        // SAFETY: as above.
        unsafe { combine.launch(rig.device(), shape.dtype, num_tokens) }.expect("a good launch");
        // Guards.
        rig.download(&partials);
    }
    rig.download(&out)
}
