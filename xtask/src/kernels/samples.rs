//! Launches as an 8B model makes them, to tell what shared memory the kernels take.

use std::collections::BTreeMap;

use microserving_kernels::{
    Arithmetic, DevicePtr, Dtype, KvType, Launch, Matmul, PagedAttention, RmsNorm, SamplingBest,
    SamplingCandidates, SamplingWeights,
};

const PTR: DevicePtr = DevicePtr(256);
const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// Returns the shared bytes of a block by kernel; kernels that are not in it have none.
pub(crate) fn shared_bytes() -> BTreeMap<&'static str, u32> {
    let attention = attention().into_iter();
    attention.chain(matmul()).chain(rows()).map(|launch| (launch.kernel, launch.shared_bytes)).collect()
}

fn attention() -> Vec<Launch> {
    let call = |head_dim| PagedAttention {
        out: PTR,
        partials: PTR,
        query: PTR,
        kv: PTR,
        page_table: PTR,
        query_starts: PTR,
        context_lens: PTR,
        num_heads: 8,
        num_kv_heads: 8,
        head_dim,
        page_size: 16,
        max_pages: 128,
        num_splits: 0,
        scale: 1.0,
        k_scale: 1.0,
        v_scale: 1.0,
        reserved: 0,
    };
    let mut launches = Vec::new();
    for dtype in DTYPES {
        for (arithmetic, head_dims) in
            [(Arithmetic::Plain, &[128][..]), (Arithmetic::TensorCore, &[64, 80, 96, 128, 256])]
        {
            for kv_type in [KvType::Same, KvType::E4m3] {
                for &head_dim in head_dims {
                    // Rows of one token, of few and of many choose between the kernels; not all have every type.
                    let sizes = [(1, 1), (1, 4), (1, 100)];
                    launches.extend(
                        sizes.into_iter().filter_map(|sizes| {
                            call(head_dim).plan(arithmetic, (dtype, kv_type), sizes).ok()
                        }),
                    );
                }
            }
        }
    }
    launches
}

fn matmul() -> Vec<Launch> {
    let call = |num_rows| Matmul {
        out: PTR,
        x: PTR,
        weight: PTR,
        num_rows,
        out_features: 4096,
        in_features: 4096,
        out_is_f32: 0,
    };
    let mut launches = Vec::new();
    for dtype in DTYPES {
        for arithmetic in [Arithmetic::Plain, Arithmetic::TensorCore] {
            launches
                .extend([16, 64, 128].into_iter().filter_map(|rows| call(rows).plan(arithmetic, dtype).ok()));
        }
    }
    launches
}

fn rows() -> Vec<Launch> {
    let (logits, vocab_size, row_stride) = (PTR, 151_936, 151_936);
    DTYPES
        .into_iter()
        .flat_map(|dtype| {
            let norm = RmsNorm { out: PTR, x: PTR, residual: PTR, weight: PTR, hidden: 4096, eps: 1e-6 };
            let best =
                SamplingBest { logits, tokens: PTR, best: PTR, not_finite: PTR, vocab_size, row_stride };
            let weights = SamplingWeights {
                logits,
                best: PTR,
                temperatures: PTR,
                weights: PTR,
                sums: PTR,
                vocab_size,
                row_stride,
            };
            let candidates = SamplingCandidates {
                logits,
                best: PTR,
                temperatures: PTR,
                top_ks: PTR,
                top_ps: PTR,
                total_weights: PTR,
                tokens: PTR,
                candidate_logits: PTR,
                weights: PTR,
                counts: PTR,
                kept: PTR,
                vocab_size,
                row_stride,
                max_candidates: 256,
                reserved: 0,
            };
            [norm.plan(dtype, 1), best.plan(dtype, 1), weights.plan(dtype, 1), candidates.plan(dtype, 1)]
        })
        .filter_map(Result::ok)
        .collect()
}
