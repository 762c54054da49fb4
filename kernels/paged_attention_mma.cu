// Attention over paged KV (paged_attention.h) on tensor cores, for sm_80 and later.
//
// paged_attention_mma_{type}_d{head_dim}, in blocks of W warps of 16 rows each
//   grid    (num_kv_heads * ceil(max_rows / (16 W)), max(num_splits, 1), num_seqs), max_rows = the most new tokens of a sequence
//           * num_heads / num_kv_heads; blocks past a sequence's rows end at once
//   block   32 W threads, W = 1 to 4: one for decode, four for prefill
//   shared  (16 W + 2 kTile) * (head_dim + 8) * 2 bytes: queries, a tile of keys, a tile of values, rows padded by 16 bytes so that
//           ldmatrix meets no bank twice; for head_dim 256 also 16 W * head_dim * 4: what the splits so far made
//   bounds  num_splits = 0 or ceil(longest context / 512), <= 65,535; num_seqs <= 65,535
//
// Tiles of kTile positions begin at multiples of kTile. Within a split the softmax is online over tiles (FlashAttention-2,
// arXiv 2307.08691), with scores, weights and values in registers:
//
//   copies   K0 | V0 ........ | K1 ............... | V1 ...
//   compute       S0 = Q K0^T | softmax, O += P V0 | S1 ...
//
// W does not show: a warp's rows meet no others. A position that a row does not see has weight zero, and is multiplied: values
// past the block's last position are read as zeros, so that what lies there does not matter.

#include "paged_attention.h"
#include "tensor_core.h"

namespace {

// Positions that are computed by themselves.
constexpr unsigned kSplit = 512;
constexpr unsigned kWarpRows = 16;
constexpr unsigned kMaxThreads = 4 * kLanes;
constexpr float kLog2E = 1.44269504f;

template <class T, unsigned kHeadDim>
struct Attention {
    static constexpr unsigned kTile = kHeadDim > 128 ? 16 : 64;
    static constexpr unsigned kStride = kHeadDim + 8;
    // More accumulators than registers: what the splits so far made lies in shared memory.
    static constexpr bool kMergesInShared = kHeadDim > 128;

    const PagedAttentionParams& p;
    const AttentionBlock block;
    const unsigned num_threads = blockDim.x, num_rows = num_threads / kLanes * kWarpRows;
    T* queries;  // [num_rows][kStride]
    T* keys;     // [kTile][kStride]
    T* values;   // [kTile][kStride]
    float* merged_values;  // [kHeadDim / 2][num_threads], if kMergesInShared
    const unsigned warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    unsigned first_row;  // of the block
    unsigned context;    // positions that the block's last row sees
    // Of this thread's two rows, group and group + 8.
    unsigned rows[2];
    unsigned limits[2];
    // Within the split, in units of scaled scores times log2(e).
    float maximum[2];
    float sum[2];
    float out[kHeadDim / 8][4];

    __device__ Attention(const PagedAttentionParams& p, T* shared)
        : p(p), block(p, blockIdx.z, blockIdx.x % p.num_kv_heads),
          queries(shared), keys(queries + num_rows * kStride), values(keys + kTile * kStride),
          merged_values(reinterpret_cast<float*>(values + kTile * kStride)) {
        first_row = blockIdx.x / p.num_kv_heads * num_rows;
        const unsigned end = min(first_row + num_rows, block.num_rows());
        context = first_row < end ? block.limit(end - 1) : 0;
        for (unsigned i = 0; i < 2; i++) {
            rows[i] = first_row + warp * kWarpRows + lane / 4 + i * 8;
            limits[i] = block.limit(rows[i]);
        }
    }

    __device__ __forceinline__ void load_queries() {
        constexpr unsigned kVectors = kHeadDim / 8;
        for (unsigned at = threadIdx.x; at < num_rows * kVectors; at += num_threads) {
            const unsigned row = at / kVectors, d = at % kVectors * 8;
            const bool is_there = first_row + row < block.num_rows();
            const size_t place = is_there ? block.place(p, first_row + row) * kHeadDim + d : 0;
            copy_async(queries + row * kStride + d, static_cast<const T*>(p.query) + place, is_there ? 16 : 0);
        }
    }

    // Begins to copy a tile of keys (after = 0) or values.
    __device__ __forceinline__ void load_tile(T* to, unsigned begin, size_t after) {
        constexpr unsigned kVectors = kHeadDim / 8;
        const T* kv = static_cast<const T*>(p.kv) + after;
        for (unsigned at = threadIdx.x; at < kTile * kVectors; at += num_threads) {
            const unsigned slot = at / kVectors, d = at % kVectors * 8;
            const bool is_there = begin + slot < context;
            const size_t place = is_there ? block.key(p, begin + slot) + d : 0;
            copy_async(to + slot * kStride + d, kv + place, is_there ? 16 : 0);
        }
        commit_copies();
    }

    // scores = queries . keys, of this warp's rows.
    __device__ __forceinline__ void score(float (&scores)[kTile / 8][4]) const {
#pragma unroll
        for (unsigned n = 0; n < kTile / 8; n++) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
#pragma unroll
        for (unsigned k = 0; k < kHeadDim; k += 16) {
            uint32_t a[4];
            load_matrices(a, queries + (warp * kWarpRows + lane % 16) * kStride + k + lane / 16 * 8);
#pragma unroll
            for (unsigned n = 0; n < kTile; n += 16) {
                uint32_t b[4];
                load_matrices(b, keys + (n + lane % 8 + lane / 16 * 8) * kStride + k + lane / 8 % 2 * 8);
                multiply_add<T>(scores[n / 8], a, b[0], b[1]);
                multiply_add<T>(scores[n / 8 + 1], a, b[2], b[3]);
            }
        }
    }

    // Turns scores into weights, and brings the split's maximum, sum and values up to them.
    __device__ __forceinline__ void weigh(float (&scores)[kTile / 8][4], unsigned begin) {
        const float scale = p.scale * kLog2E;
#pragma unroll
        for (unsigned i = 0; i < 2; i++) {
            float larger = maximum[i];
#pragma unroll
            for (unsigned n = 0; n < kTile / 8; n++) {
#pragma unroll
                for (unsigned j = 0; j < 2; j++) {
                    const unsigned position = begin + n * 8 + lane % 4 * 2 + j;
                    float& score = scores[n][i * 2 + j];
                    score = position < limits[i] ? score * scale : -INFINITY;
                    larger = fmaxf(larger, score);
                }
            }
            // The four lanes of a row.
            larger = fmaxf(larger, __shfl_xor_sync(0xffffffffu, larger, 1));
            larger = fmaxf(larger, __shfl_xor_sync(0xffffffffu, larger, 2));
            const float base = larger == -INFINITY ? 0.0f : larger;
            const float rescale = power_of_two(maximum[i] - base);
            maximum[i] = larger;
            sum[i] *= rescale;
#pragma unroll
            for (unsigned n = 0; n < kTile / 8; n++) {
#pragma unroll
                for (unsigned j = 0; j < 2; j++) {
                    float& score = scores[n][i * 2 + j];
                    score = power_of_two(score - base);
                    sum[i] += score;
                }
            }
#pragma unroll
            for (unsigned n = 0; n < kHeadDim / 8; n++) {
                out[n][i * 2] *= rescale;
                out[n][i * 2 + 1] *= rescale;
            }
        }
    }

    // out += weights . values.
    __device__ __forceinline__ void add_values(const float (&weights)[kTile / 8][4]) {
#pragma unroll
        for (unsigned k = 0; k < kTile / 16; k++) {
            // The layout of sums is the layout of the left factor.
            const uint32_t a[4] = {
                pack<T>(weights[2 * k][0], weights[2 * k][1]), pack<T>(weights[2 * k][2], weights[2 * k][3]),
                pack<T>(weights[2 * k + 1][0], weights[2 * k + 1][1]), pack<T>(weights[2 * k + 1][2], weights[2 * k + 1][3])};
#pragma unroll
            for (unsigned n = 0; n < kHeadDim; n += 16) {
                uint32_t b[4];
                load_matrices_transposed(b, values + (k * 16 + lane % 16) * kStride + n + lane / 16 * 8);
                multiply_add<T>(out[n / 8], a, b[0], b[1]);
                multiply_add<T>(out[n / 8 + 1], a, b[2], b[3]);
            }
        }
    }

    // Computes positions begin .. end by themselves. The first tile of keys is on its way; that of `next`, if there is one, is
    // on its way afterwards.
    __device__ __forceinline__ void attend_split(unsigned begin, unsigned end, unsigned next) {
        for (unsigned i = 0; i < 2; i++) {
            maximum[i] = -INFINITY;
            sum[i] = 0.0f;
        }
#pragma unroll
        for (unsigned n = 0; n < kHeadDim / 8; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
        for (unsigned tile = begin; tile < end; tile += kTile) {
            WAIT_COPIES(0);
            // The tile's keys are there, and the last tile's values have been used.
            __syncthreads();
            load_tile(values, tile, kv_values_after(p));
            float scores[kTile / 8][4];
            score(scores);
            WAIT_COPIES(0);
            // The tile's values are there, and its keys have been used.
            __syncthreads();
            const unsigned following = tile + kTile < end ? tile + kTile : next;
            if (following < context) load_tile(keys, following, 0);
            weigh(scores, tile);
            add_values(scores);
        }
        for (unsigned i = 0; i < 2; i++) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
            // As scaled scores again, which is what splits are merged by.
            maximum[i] = maximum[i] / kLog2E;
        }
    }

    // One block for one split.
    __device__ __forceinline__ void write_partial(unsigned split, bool sees_any) const {
#pragma unroll
        for (unsigned i = 0; i < 2; i++) {
            if (limits[i] == 0) continue;
            float* to = p.partials + (block.place(p, rows[i]) * p.num_splits + split) * (kHeadDim + 2);
            if (lane % 4 == 0) {
                to[kHeadDim] = sees_any ? maximum[i] : -INFINITY;
                to[kHeadDim + 1] = sees_any ? sum[i] : 0.0f;
            }
            if (!sees_any) continue;
#pragma unroll
            for (unsigned n = 0; n < kHeadDim / 8; n++) {
                to[n * 8 + lane % 4 * 2] = out[n][i * 2];
                to[n * 8 + lane % 4 * 2 + 1] = out[n][i * 2 + 1];
            }
        }
    }

    // One block for all splits.
    __device__ __forceinline__ void attend_all() {
        Merged merged[2];
        float total[kMergesInShared ? 1 : kHeadDim / 8][4];
        const auto value = [&](unsigned n, unsigned i) -> float& {
            // Each thread has its own column.
            if constexpr (kMergesInShared) return merged_values[(n * 4 + i) * num_threads + threadIdx.x];
            else return total[n][i];
        };
#pragma unroll
        for (unsigned n = 0; n < kHeadDim / 8; n++) {
#pragma unroll
            for (unsigned i = 0; i < 4; i++) value(n, i) = 0.0f;
        }
        for (unsigned begin = 0; begin < context; begin += kSplit) {
            attend_split(begin, min(begin + kSplit, context), begin + kSplit);
            const Merged::Factors factors[2] = {merged[0].take(maximum[0], sum[0]), merged[1].take(maximum[1], sum[1])};
#pragma unroll
            for (unsigned n = 0; n < kHeadDim / 8; n++) {
#pragma unroll
                for (unsigned i = 0; i < 4; i++) value(n, i) = merge_value(value(n, i), out[n][i], factors[i / 2]);
            }
        }
#pragma unroll
        for (unsigned i = 0; i < 2; i++) {
            if (limits[i] == 0) continue;
            T* to = static_cast<T*>(p.out) + block.place(p, rows[i]) * kHeadDim + lane % 4 * 2;
#pragma unroll
            for (unsigned n = 0; n < kHeadDim / 8; n++) {
                *reinterpret_cast<uint32_t*>(to + n * 8) = pack<T>(finish_value(value(n, i * 2), merged[i].sum, p.v_scale),
                                                                   finish_value(value(n, i * 2 + 1), merged[i].sum, p.v_scale));
            }
        }
    }
};

template <class T, unsigned kHeadDim>
__device__ __forceinline__ void attend(const PagedAttentionParams& p) {
    DYNAMIC_SHARED(T, shared);
    Attention<T, kHeadDim> attention(p, shared);
    if (attention.context == 0) return;
    if (p.num_splits == 0) {
        attention.load_queries();
        attention.load_tile(attention.keys, 0, 0);
        attention.attend_all();
        return;
    }
    const unsigned begin = blockIdx.y * kSplit;
    const bool sees_any = begin < attention.context;
    if (sees_any) {
        attention.load_queries();
        attention.load_tile(attention.keys, begin, 0);
        attention.attend_split(begin, min(begin + kSplit, attention.context), attention.context);
    }
    attention.write_partial(blockIdx.y, sees_any);
}

}  // namespace

#define ATTENTION_OF(d)                                                                                   \
    KERNEL(paged_attention_mma_f16_d##d, kMaxThreads, PagedAttentionParams, attend<__half, d>)       \
    KERNEL(paged_attention_mma_bf16_d##d, kMaxThreads, PagedAttentionParams, attend<__nv_bfloat16, d>)

ATTENTION_OF(64)
ATTENTION_OF(80)
ATTENTION_OF(96)
ATTENTION_OF(128)
ATTENTION_OF(256)
