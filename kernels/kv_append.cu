// Finishes queries and keys of new tokens and puts their keys and values into pages.
//
//   q, k: add the bias, normalise each head (Qwen3), rotate the pairs (i, i + head_dim / 2) by the token's position
//   v:    add the bias
//   q goes to `query`, k and v into the token's slot
//
// grid    (ceil((num_heads + 2 * num_kv_heads) / 4), num_tokens, 1): one warp for one head of one token
// block   128 threads, 4 warps
// shared  none
// layout  qkv rows are [num_heads + 2 * num_kv_heads][head_dim], `qkv_stride` elements apart: q heads, k heads, v heads; kv is one
//         layer of the region, [page][k|v][kv_head][slot][head_dim] (README.md); cosines and sines are
//         [positions][head_dim / 2], f32
// bounds  head_dim is even, at most 256; num_tokens <= 65,535
//
// Everything is computed in f32 and rounded once, when it is stored. A token whose slot is kNoSlot is padding: its q is
// written, its k and v are not.

#include "numbers.h"

namespace {

constexpr unsigned kThreads = 128;
constexpr unsigned kWarps = kThreads / kLanes;
constexpr uint32_t kNoSlot = 0xffffffffu;
// Pairs of a head that one lane holds.
constexpr unsigned kMaxPairs = 256 / 2 / kLanes;

struct KvAppendParams {
    void* query;                // [num_tokens, num_heads, head_dim]
    void* kv;                   // one layer of the region
    const void* qkv;            // [num_tokens, qkv_stride]
    const void* bias;           // [num_heads + 2 * num_kv_heads, head_dim] or null
    const void* q_norm;         // [head_dim] or null
    const void* k_norm;         // [head_dim] or null
    const float* cosines;       // [positions, head_dim / 2]
    const float* sines;         // [positions, head_dim / 2]
    const uint32_t* positions;  // [num_tokens]
    const uint32_t* slots;      // [num_tokens]: page * page_size + slot, or kNoSlot
    uint32_t num_heads;
    uint32_t num_kv_heads;
    uint32_t head_dim;
    uint32_t page_size;
    uint32_t qkv_stride;
    float eps;
    float k_scale;  // the KV holds k / k_scale; 1 but for e4m3
    float v_scale;
};

template <class T, class Kv>
__device__ __forceinline__ void kv_append(const KvAppendParams& p) {
    const unsigned lane = threadIdx.x % kLanes;
    const unsigned head = blockIdx.x * kWarps + threadIdx.x / kLanes;
    const unsigned num_heads = p.num_heads + 2 * p.num_kv_heads;
    if (head >= num_heads) return;  // a whole warp
    const size_t token = blockIdx.y;
    const unsigned half = p.head_dim / 2;
    const bool is_query = head < p.num_heads;
    const bool is_key = !is_query && head < p.num_heads + p.num_kv_heads;

    const T* from = static_cast<const T*>(p.qkv) + token * p.qkv_stride + static_cast<size_t>(head) * p.head_dim;
    const T* bias = p.bias == nullptr ? nullptr : static_cast<const T*>(p.bias) + static_cast<size_t>(head) * p.head_dim;
    float low[kMaxPairs], high[kMaxPairs];
    float squares = 0.0f;
    for (unsigned n = 0; n < kMaxPairs; n++) {
        const unsigned i = lane + n * kLanes;
        low[n] = high[n] = 0.0f;
        if (i < half) {
            low[n] = widen(from[i]);
            high[n] = widen(from[i + half]);
            if (bias != nullptr) {
                low[n] += widen(bias[i]);
                high[n] += widen(bias[i + half]);
            }
        }
        squares = fmaf(low[n], low[n], squares);
        squares = fmaf(high[n], high[n], squares);
    }

    const T* norm = static_cast<const T*>(is_query ? p.q_norm : is_key ? p.k_norm : nullptr);
    if (norm != nullptr) {
        const float factor = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(p.head_dim) + p.eps);
        for (unsigned n = 0; n < kMaxPairs; n++) {
            const unsigned i = lane + n * kLanes;
            if (i < half) {
                low[n] = low[n] * factor * widen(norm[i]);
                high[n] = high[n] * factor * widen(norm[i + half]);
            }
        }
    }
    if (is_query || is_key) {
        const size_t angles = static_cast<size_t>(p.positions[token]) * half;
        for (unsigned n = 0; n < kMaxPairs; n++) {
            const unsigned i = lane + n * kLanes;
            if (i < half) {
                const float cosine = p.cosines[angles + i], sine = p.sines[angles + i], a = low[n], b = high[n];
                low[n] = fmaf(a, cosine, -(b * sine));
                high[n] = fmaf(b, cosine, a * sine);
            }
        }
    }

    if (is_query) {
        T* to = static_cast<T*>(p.query) + (token * p.num_heads + head) * p.head_dim;
        for (unsigned n = 0; n < kMaxPairs; n++) {
            const unsigned i = lane + n * kLanes;
            if (i < half) {
                to[i] = narrow<T>(low[n]);
                to[i + half] = narrow<T>(high[n]);
            }
        }
        return;
    }
    const uint32_t place = p.slots[token];
    if (place == kNoSlot) return;
    const size_t page = place / p.page_size, slot = place % p.page_size;
    // Keys lie before values: counted from the first key head, a value head is so many heads further on.
    const size_t kv_head = head - p.num_heads;
    const float scale = is_key ? p.k_scale : p.v_scale;
    Kv* to = static_cast<Kv*>(p.kv) + ((page * 2 * p.num_kv_heads + kv_head) * p.page_size + slot) * p.head_dim;
    for (unsigned n = 0; n < kMaxPairs; n++) {
        const unsigned i = lane + n * kLanes;
        if (i < half) {
            to[i] = narrow<Kv>(low[n] / scale);
            to[i + half] = narrow<Kv>(high[n] / scale);
        }
    }
}

}  // namespace

KERNEL(kv_append_f32, kThreads, KvAppendParams, kv_append<float, float>)
KERNEL(kv_append_f16, kThreads, KvAppendParams, kv_append<__half, __half>)
KERNEL(kv_append_bf16, kThreads, KvAppendParams, kv_append<__nv_bfloat16, __nv_bfloat16>)
KERNEL(kv_append_f16_e4m3, kThreads, KvAppendParams, kv_append<__half, e4m3>)
KERNEL(kv_append_bf16_e4m3, kThreads, KvAppendParams, kv_append<__nv_bfloat16, e4m3>)
