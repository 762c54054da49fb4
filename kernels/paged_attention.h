// Attention of new tokens over their sequences' paged context, grouped heads: what its kernels share.
//
//   out[row] = sum_t softmax_t(scale * query[row] . key[t]) value[t],   t over the positions that the row's token sees
//
// A call has a ragged batch of sequences, each with any number of new tokens behind what its pages hold already (their own keys
// and values included): one for decode, many for prefill, mixed. The new tokens of a sequence and the query heads that share a
// KV head are rows, token by token:
//
//   rows       [ token 0: head 0, head 1, .. ][ token 1: head 0, .. ] ...        one list a sequence and KV head
//   limit      position(token) + 1: the positions before it are seen
//
//   positions  0          kSplit      2 kSplit     3 kSplit
//   splits     [ split 0  ][ split 1  ][ split 2  ]                    always at these places, whatever the batch
//
// A split is computed by itself, as (maximum, sum of weights, weighted values), and splits are merged from the first to the last.
// Either one block walks all splits of its rows and writes the output (num_splits = 0: prefill), or every split has its own
// block, which writes a partial result, and paged_attention_combine merges (num_splits > 0: decode, where there are too few rows
// to fill a GPU). Both do the same operations in the same order, so a token's result is the same to the bit: it depends on
// positions, and not on the batch, on how a prompt was cut into chunks, on pages, nor on which of the two ways it went. This
// holds within one kind of kernel (plain, or tensor cores), not between kinds.
#pragma once

#include "numbers.h"

struct PagedAttentionParams {
    void* out;                     // [num_tokens, num_heads, head_dim]; written if num_splits == 0
    float* partials;               // [num_tokens, num_heads, num_splits, head_dim + 2]; written if num_splits > 0
    const void* query;             // [num_tokens, num_heads, head_dim]
    const void* kv;                // one layer of the region: [page][k|v][kv_head][slot][head_dim]
    const uint32_t* page_table;    // [num_seqs, max_pages]; entries past the context are not read
    const uint32_t* query_starts;  // [num_seqs + 1]: the tokens of sequence s are query_starts[s] .. query_starts[s + 1]
    const uint32_t* context_lens;  // [num_seqs]: tokens of the sequence, the new ones included
    uint32_t num_heads;            // a multiple of num_kv_heads
    uint32_t num_kv_heads;
    uint32_t head_dim;
    uint32_t page_size;
    uint32_t max_pages;
    uint32_t num_splits;
    float scale;    // usually 1 / sqrt(head_dim)
    float k_scale;  // keys are what the KV holds times this; 1 but for e4m3
    float v_scale;
};

struct PagedAttentionCombineParams {
    void* out;              // [num_tokens, num_heads, head_dim]
    const float* partials;  // [num_tokens, num_heads, num_splits, head_dim + 2]
    uint32_t num_heads;
    uint32_t head_dim;
    uint32_t num_splits;
    float v_scale;
};

// The sequence and KV head that a block works for.
struct AttentionBlock {
    const uint32_t* pages;  // of the sequence
    unsigned first_token;   // of the batch
    unsigned num_tokens;
    unsigned first_position;  // of the sequence's first new token
    unsigned kv_head;
    unsigned group;  // query heads that share it

    __device__ AttentionBlock(const PagedAttentionParams& p, unsigned seq, unsigned kv_head)
        : pages(p.page_table + static_cast<size_t>(seq) * p.max_pages),
          first_token(p.query_starts[seq]),
          num_tokens(p.query_starts[seq + 1] - first_token),
          first_position(p.context_lens[seq] - num_tokens),
          kv_head(kv_head),
          group(p.num_heads / p.num_kv_heads) {}

    __device__ unsigned num_rows() const { return num_tokens * group; }
    // Positions that a row sees; 0 for a row that there is not.
    __device__ unsigned limit(unsigned row) const { return row < num_rows() ? first_position + row / group + 1 : 0; }
    // The row's place among [num_tokens, num_heads] of the batch.
    __device__ size_t place(const PagedAttentionParams& p, unsigned row) const {
        return static_cast<size_t>(first_token + row / group) * p.num_heads + kv_head * group + row % group;
    }
    // Element 0 of the key at a position; the value lies kv_values_after elements further on.
    __device__ size_t key(const PagedAttentionParams& p, unsigned position) const {
        const size_t page = pages[position / p.page_size];
        return ((page * 2 * p.num_kv_heads + kv_head) * p.page_size + position % p.page_size) * p.head_dim;
    }
};

__device__ __forceinline__ size_t kv_values_after(const PagedAttentionParams& p) {
    return static_cast<size_t>(p.num_kv_heads) * p.page_size * p.head_dim;
}

// What is known of a row after some splits; of one element of its output, as many threads hold the same maximum and sum.
struct Merged {
    float maximum = -INFINITY;
    float sum = 0.0f;

    // Takes the next split in and returns the factors of the values so far and of the split's.
    struct Factors {
        float before, split;
    };
    __device__ Factors take(float split_maximum, float split_sum) {
        // A split of which the row sees nothing.
        if (split_maximum == -INFINITY && split_sum == 0.0f) return {1.0f, 0.0f};
        const float larger = fmaxf(maximum, split_maximum);
        const Factors factors{exponential(maximum - larger), exponential(split_maximum - larger)};
        sum = fmaf(sum, factors.before, split_sum * factors.split);
        maximum = larger;
        return factors;
    }
};

__device__ __forceinline__ float merge_value(float before, float split, Merged::Factors factors) {
    // What a skipped split left in memory is not looked at.
    return factors.split == 0.0f && factors.before == 1.0f ? before : fmaf(before, factors.before, split * factors.split);
}

// A row without context has nothing to attend to.
__device__ __forceinline__ float finish_value(float value, float sum, float v_scale) {
    return sum == 0.0f ? 0.0f : value / sum * v_scale;
}
