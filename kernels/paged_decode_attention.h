// Attention of one new token per sequence over its paged context: the parameters.
#pragma once

#include <cstdint>

// What a call of paged_decode_attention needs. All pointers are device memory (host memory under the shim).
struct PagedDecodeParams {
    // [num_seqs, num_heads, head_dim], f32, contiguous; written.
    float* out;
    // [num_seqs, num_heads, head_dim], f32, contiguous.
    const float* query;
    // One layer of the KV region: [page][k|v][kv_head][slot][head_dim], f32 or bf16.
    const void* kv;
    // [num_seqs, max_pages]: the sequence's pages in order; entries past the context are not read.
    const uint32_t* page_table;
    // [num_seqs]: tokens to attend to, the new one included (its key and value are in the region already).
    const uint32_t* context_lens;
    uint32_t num_seqs;
    uint32_t num_heads;     // a multiple of num_kv_heads
    uint32_t num_kv_heads;
    uint32_t head_dim;      // at most 256
    uint32_t page_size;     // tokens, at most 64
    uint32_t max_pages;     // columns of page_table
    float scale;            // usually 1 / sqrt(head_dim)
};

enum PagedKvDtype { kPagedKvF32 = 0, kPagedKvBf16 = 1 };

enum PagedDecodeStatus {
    kPagedDecodeOk = 0,
    // A size is 0 or above its bound, or num_heads is not a multiple of num_kv_heads; nothing was launched.
    kPagedDecodeBadShape = -1,
    // kv_dtype is neither of the two.
    kPagedDecodeBadDtype = -2,
};

// Launches the kernel on `stream` (a cudaStream_t). Returns a PagedDecodeStatus, or the CUDA error (above 0) of the launch.
extern "C" int paged_decode_attention(const PagedDecodeParams* params, int kv_dtype, void* stream);
