// Attention over paged KV (paged_attention.h) in plain arithmetic, and the merging of splits.
//
// paged_attention_{types}_r{R}: R rows a block
//   grid    (num_kv_heads * ceil(max_rows / R), max(num_splits, 1), num_seqs), max_rows = the most new tokens of a sequence *
//           num_heads / num_kv_heads; blocks past a sequence's rows end at once
//   block   128 threads
//   shared  (2 R * head_dim + R * 256 + 6 R + 1024 R) * 4 bytes: queries, values so far, weights of a split, maxima, sums and
//           factors, values to be added up
//   bounds  head_dim is a multiple of 8, at most 256; num_splits = 0 or ceil(longest context / 256), <= 65,535; num_seqs <= 65,535
//
// paged_attention_combine_{type}
//   grid    (num_heads, num_tokens, 1), block 128 threads, shared none
//   bounds  num_tokens <= 65,535, head_dim <= 256
//
// Keys are read by eight lanes each, values by head_dim / 8 threads each, eight elements at a time. That R differs does not show:
// rows do not meet.

#include "paged_attention.h"

namespace {

constexpr unsigned kThreads = 128;
constexpr unsigned kWarps = kThreads / kLanes;
// Positions that are computed by themselves.
constexpr unsigned kSplit = 256;
constexpr unsigned kLanesPerKey = 8;

// Shared memory of a block.
template <unsigned kRows>
struct Shared {
    float* queries;  // [rows][head_dim], scaled
    float* totals;   // [rows][head_dim], values of the splits so far
    float* values;   // [threads / (head_dim / 8)][rows][head_dim]
    float* weights;  // [rows][kSplit], scores first
    float* stats;    // [rows][2]: maximum, sum of weights
    Merged* merged;  // [rows]
    Merged::Factors* factors;  // [rows]

    __device__ Shared(float* shared, unsigned head_dim)
        : queries(shared), totals(queries + kRows * head_dim), values(totals + kRows * head_dim),
          weights(values + kThreads * 8 * kRows), stats(weights + kRows * kSplit),
          merged(reinterpret_cast<Merged*>(stats + 2 * kRows)), factors(reinterpret_cast<Merged::Factors*>(merged + kRows)) {}
};

// Computes positions begin .. end, at most kSplit, for all rows of the block: (maximum, sum) in shared.stats, and in
// shared.values what split_value adds up.
template <class Kv, unsigned kRows>
__device__ __forceinline__ void attend_split(const PagedAttentionParams& p, const AttentionBlock& block,
                                             const Shared<kRows>& shared, const unsigned (&limits)[kRows], unsigned begin,
                                             unsigned end) {
    const Kv* kv = static_cast<const Kv*>(p.kv);
    const unsigned lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    const unsigned count = end - begin;

    const unsigned part = threadIdx.x % kLanesPerKey;
#pragma unroll 1
    for (unsigned first = 0; first < count; first += kThreads / kLanesPerKey) {
        const unsigned at = first + threadIdx.x / kLanesPerKey;
        float dots[kRows] = {};
        if (at < count) {
            const Kv* key = kv + block.key(p, begin + at);
#pragma unroll 1
            for (unsigned d = part * 8; d < p.head_dim; d += kLanesPerKey * 8) {
                float k[8];
                load_eight(key + d, k);
#pragma unroll
                for (unsigned row = 0; row < kRows; row++) {
                    float q[8];
                    load_eight(shared.queries + row * p.head_dim + d, q);
                    for (unsigned i = 0; i < 8; i++) dots[row] = fmaf(q[i], k[i], dots[row]);
                }
            }
        }
#pragma unroll
        for (unsigned row = 0; row < kRows; row++) {
            for (int step = kLanesPerKey / 2; step > 0; step /= 2) dots[row] += __shfl_xor_sync(0xffffffffu, dots[row], step);
            if (at < count && part == 0) {
                shared.weights[row * kSplit + at] = begin + at < limits[row] ? dots[row] : -INFINITY;
            }
        }
    }
    // Every score is there.
    __syncthreads();

    for (unsigned row = warp; row < kRows; row += kWarps) {
        float* weights = shared.weights + row * kSplit;
        float maximum = -INFINITY;
        for (unsigned at = lane; at < count; at += kLanes) maximum = fmaxf(maximum, weights[at]);
        maximum = warp_max(maximum);
        float sum = 0.0f;
        for (unsigned at = lane; at < count; at += kLanes) {
            const float weight = weights[at] == -INFINITY ? 0.0f : exponential(weights[at] - maximum);
            weights[at] = weight;
            sum += weight;
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            shared.stats[row * 2] = maximum;
            shared.stats[row * 2 + 1] = sum;
        }
    }
    // Every weight is there.
    __syncthreads();

    const unsigned vectors = p.head_dim / 8;
    const unsigned stride = kThreads / vectors;  // positions at once
    const unsigned which = threadIdx.x / vectors, d = threadIdx.x % vectors * 8;
    if (which < stride) {
        const Kv* values = kv + kv_values_after(p) + d;
        float acc[kRows][8] = {};
#pragma unroll 2
        for (unsigned at = which; at < count; at += stride) {
            float v[8];
            load_eight(values + block.key(p, begin + at), v);
#pragma unroll
            for (unsigned row = 0; row < kRows; row++) {
                const float weight = shared.weights[row * kSplit + at];
                // A position that a row does not see is not even multiplied: it may hold anything.
                if (weight != 0.0f) {
                    for (unsigned i = 0; i < 8; i++) acc[row][i] = fmaf(weight, v[i], acc[row][i]);
                }
            }
        }
#pragma unroll
        for (unsigned row = 0; row < kRows; row++) {
            store_eight(shared.values + (which * kRows + row) * p.head_dim + d, acc[row]);
        }
    }
    // Every thread's values are there.
    __syncthreads();
}

// Element `d` of a row's weighted values of the split.
template <unsigned kRows>
__device__ __forceinline__ float split_value(const PagedAttentionParams& p, const Shared<kRows>& shared, unsigned row, unsigned d) {
    float value = 0.0f;
#pragma unroll 1
    for (unsigned which = 0; which < kThreads / (p.head_dim / 8); which++) {
        value += shared.values[(which * kRows + row) * p.head_dim + d];
    }
    return value;
}

template <class T, class Kv, unsigned kRows>
__device__ __forceinline__ void paged_attention(const PagedAttentionParams& p) {
    DYNAMIC_SHARED(float, dynamic);
    const Shared<kRows> shared(dynamic, p.head_dim);
    const unsigned tile = blockIdx.x / p.num_kv_heads;
    const AttentionBlock block(p, blockIdx.z, blockIdx.x % p.num_kv_heads);
    const unsigned first_row = tile * kRows;
    if (first_row >= block.num_rows()) return;

    unsigned limits[kRows];
    unsigned num_rows = 0;
    for (unsigned row = 0; row < kRows; row++) {
        limits[row] = block.limit(first_row + row);
        num_rows += limits[row] > 0;
    }
    const unsigned context = limits[num_rows - 1];

#pragma unroll 1
    for (unsigned at = threadIdx.x; at < kRows * p.head_dim; at += kThreads) {
        const unsigned row = at / p.head_dim, d = at % p.head_dim;
        float q = 0.0f;
        if (row < num_rows) q = widen(static_cast<const T*>(p.query)[block.place(p, first_row + row) * p.head_dim + d]);
        shared.queries[at] = q * p.scale * p.k_scale;
    }
    // The queries are there.
    __syncthreads();

    const unsigned elements = num_rows * p.head_dim;
    if (p.num_splits > 0) {
        const unsigned split = blockIdx.y, begin = split * kSplit;
        const bool sees_any = begin < context;
        if (sees_any) attend_split<Kv, kRows>(p, block, shared, limits, begin, min(begin + kSplit, context));
#pragma unroll 1
        for (unsigned at = threadIdx.x; at < elements; at += kThreads) {
            const unsigned row = at / p.head_dim, d = at % p.head_dim;
            float* to = p.partials + (block.place(p, first_row + row) * p.num_splits + split) * (p.head_dim + 2);
            if (d < 2) to[p.head_dim + d] = sees_any ? shared.stats[row * 2 + d] : d == 0 ? -INFINITY : 0.0f;
            if (sees_any) to[d] = split_value(p, shared, row, d);
        }
        return;
    }

    // Each thread has its own elements of the totals.
#pragma unroll 1
    for (unsigned at = threadIdx.x; at < elements; at += kThreads) shared.totals[at] = 0.0f;
    if (threadIdx.x < kRows) shared.merged[threadIdx.x] = Merged();
    for (unsigned begin = 0; begin < context; begin += kSplit) {
        attend_split<Kv, kRows>(p, block, shared, limits, begin, min(begin + kSplit, context));
        if (threadIdx.x < kRows) {
            const float* stats = shared.stats + threadIdx.x * 2;
            shared.factors[threadIdx.x] = shared.merged[threadIdx.x].take(stats[0], stats[1]);
        }
        // The factors are there.
        __syncthreads();
#pragma unroll 1
        for (unsigned at = threadIdx.x; at < elements; at += kThreads) {
            const unsigned row = at / p.head_dim;
            const float value = split_value(p, shared, row, at % p.head_dim);
            shared.totals[at] = merge_value(shared.totals[at], value, shared.factors[row]);
        }
    }
#pragma unroll 1
    for (unsigned at = threadIdx.x; at < elements; at += kThreads) {
        const unsigned row = at / p.head_dim;
        const float value = finish_value(shared.totals[at], shared.merged[row].sum, p.v_scale);
        static_cast<T*>(p.out)[block.place(p, first_row + row) * p.head_dim + at % p.head_dim] = narrow<T>(value);
    }
}

template <class T>
__device__ __forceinline__ void combine(const PagedAttentionCombineParams& p) {
    const size_t row = static_cast<size_t>(blockIdx.y) * p.num_heads + blockIdx.x;
    for (unsigned d = threadIdx.x; d < p.head_dim; d += kThreads) {
        Merged merged;
        float value = 0.0f;
        for (unsigned split = 0; split < p.num_splits; split++) {
            const float* from = p.partials + (row * p.num_splits + split) * (p.head_dim + 2);
            value = merge_value(value, from[d], merged.take(from[p.head_dim], from[p.head_dim + 1]));
        }
        static_cast<T*>(p.out)[row * p.head_dim + d] = narrow<T>(finish_value(value, merged.sum, p.v_scale));
    }
}

}  // namespace

#define ATTENTION_OF(types, T, Kv)                                                                          \
    KERNEL(paged_attention_##types##_r1, kThreads, PagedAttentionParams, paged_attention<T, Kv, 1>) \
    KERNEL(paged_attention_##types##_r4, kThreads, PagedAttentionParams, paged_attention<T, Kv, 4>) \
    KERNEL(paged_attention_##types##_r8, kThreads, PagedAttentionParams, paged_attention<T, Kv, 8>)

ATTENTION_OF(f32, float, float)
ATTENTION_OF(f16, __half, __half)
ATTENTION_OF(bf16, __nv_bfloat16, __nv_bfloat16)
ATTENTION_OF(f16_e4m3, __half, e4m3)
ATTENTION_OF(bf16_e4m3, __nv_bfloat16, e4m3)

KERNEL(paged_attention_combine_f32, kThreads, PagedAttentionCombineParams, combine<float>)
KERNEL(paged_attention_combine_f16, kThreads, PagedAttentionCombineParams, combine<__half>)
KERNEL(paged_attention_combine_bf16, kThreads, PagedAttentionCombineParams, combine<__nv_bfloat16>)
