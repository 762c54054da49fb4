// Looks tokens up in the embedding table.
//
//   out[row] = table[tokens[row]]
//
// grid    (num_rows, 1, 1): one block for one token
// block   128 threads, eight elements at a time
// shared  none
// layout  rows of table and out are `hidden` elements, contiguous, 16-byte aligned
// bounds  hidden is a multiple of 8; a token that is not below vocab_size becomes a row of NaNs, so that it shows

#include "numbers.h"

namespace {

constexpr unsigned kThreads = 128;

struct EmbeddingParams {
    void* out;               // [num_rows, hidden]
    const void* table;       // [vocab_size, hidden]
    const uint32_t* tokens;  // [num_rows]
    uint32_t hidden;
    uint32_t vocab_size;
};

template <class T>
__device__ __forceinline__ void embedding(const EmbeddingParams& p) {
    const uint32_t token = p.tokens[blockIdx.x];
    const Eight<T>* from = reinterpret_cast<const Eight<T>*>(static_cast<const T*>(p.table) + static_cast<size_t>(token) * p.hidden);
    Eight<T>* to = reinterpret_cast<Eight<T>*>(static_cast<T*>(p.out) + static_cast<size_t>(blockIdx.x) * p.hidden);
    Eight<T> broken;
    for (unsigned i = 0; i < 8; i++) broken.at[i] = narrow<T>(NAN);
    for (unsigned at = threadIdx.x; at < p.hidden / 8; at += kThreads) to[at] = token < p.vocab_size ? from[at] : broken;
}

}  // namespace

KERNEL(embedding_f32, kThreads, EmbeddingParams, embedding<float>)
KERNEL(embedding_f16, kThreads, EmbeddingParams, embedding<__half>)
KERNEL(embedding_bf16, kThreads, EmbeddingParams, embedding<__nv_bfloat16>)
