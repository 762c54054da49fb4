// Attention of one new token per sequence over its paged context, with grouped heads.
//
//   out[s, h] = sum_t softmax_t(scale * query[s, h] . key[t]) value[t],   t over the pages of sequence s
//
// grid    (num_heads, num_seqs): one block for one query head of one sequence
// block   128 threads, 4 warps
// shared  (head_dim + page_size) * 4 bytes: the query, and the scores of one page
// layout  kv is [page][k|v][kv_head][slot][head_dim], so that keys of one head in one page are page_size * head_dim
//         elements in a row, and its values so many again num_kv_heads runs further on
//
// A page is one tile. The block walks the context page by page from position 0 and keeps a running maximum, sum and
// weighted value, rescaled when the maximum grows (the online softmax of Milakov and Gimelshein, arXiv 1805.02867).
// So shared memory does not grow with the context, and the order of every addition depends on positions only: not on the
// batch, not on which pages the context has, and not on how it was prefilled. The price of that is parallelism: with few
// sequences of few heads most of a GPU is idle. Splitting the context over blocks must keep the splits at fixed positions.

#include "paged_decode_attention.h"

#include "portable.h"

namespace {

constexpr unsigned kThreads = 128;
constexpr unsigned kLanes = 32;
constexpr unsigned kWarps = kThreads / kLanes;
constexpr unsigned kMaxHeadDim = 256;
constexpr unsigned kMaxPageSize = 64;
// Elements of the head that one thread accumulates.
constexpr unsigned kDimsPerThread = kMaxHeadDim / kThreads;

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class Kv>
__global__ void __launch_bounds__(kThreads) decode(PagedDecodeParams p) {
    DYNAMIC_SHARED(float, shared);
    float* query = shared;                // [head_dim]
    float* scores = shared + p.head_dim;  // [page_size]

    const unsigned head = blockIdx.x;
    const unsigned seq = blockIdx.y;
    const unsigned kv_head = head / (p.num_heads / p.num_kv_heads);
    const unsigned thread = threadIdx.x;
    const unsigned warp = thread / kLanes;
    const unsigned lane = thread % kLanes;
    const unsigned context = p.context_lens[seq];
    const size_t row = (static_cast<size_t>(seq) * p.num_heads + head) * p.head_dim;
    // Elements of one head's keys (or values) in one page.
    const size_t run = static_cast<size_t>(p.page_size) * p.head_dim;
    const Kv* layer = static_cast<const Kv*>(p.kv);

    for (unsigned d = thread; d < p.head_dim; d += kThreads) query[d] = p.query[row + d] * p.scale;

    float maximum = -INFINITY;
    float sum = 0.0f;
    float acc[kDimsPerThread] = {};

    for (unsigned begin = 0; begin < context; begin += p.page_size) {
        const unsigned slots = context - begin < p.page_size ? context - begin : p.page_size;
        const size_t page = p.page_table[static_cast<size_t>(seq) * p.max_pages + begin / p.page_size];
        const Kv* keys = layer + (page * 2 * p.num_kv_heads + kv_head) * run;
        const Kv* values = keys + p.num_kv_heads * run;

        // The query is there, or the last page's scores have been read by everybody.
        __syncthreads();
        for (unsigned slot = warp; slot < slots; slot += kWarps) {
            const Kv* key = keys + static_cast<size_t>(slot) * p.head_dim;
            float dot = 0.0f;
            for (unsigned d = lane; d < p.head_dim; d += kLanes) dot += query[d] * widen(key[d]);
            for (int step = kLanes / 2; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
            if (lane == 0) scores[slot] = dot;
        }
        // Every score of the page is there.
        __syncthreads();

        // Every thread does the same few additions in the same order, so all agree to the bit without telling each other.
        float page_maximum = scores[0];
        for (unsigned slot = 1; slot < slots; slot++) page_maximum = fmaxf(page_maximum, scores[slot]);
        const float new_maximum = fmaxf(maximum, page_maximum);
        const float rescale = expf(maximum - new_maximum);
        maximum = new_maximum;
        sum *= rescale;
        for (unsigned i = 0; i < kDimsPerThread; i++) acc[i] *= rescale;
        for (unsigned slot = 0; slot < slots; slot++) {
            const float weight = expf(scores[slot] - maximum);
            sum += weight;
            const Kv* value = values + static_cast<size_t>(slot) * p.head_dim;
            for (unsigned i = 0; i < kDimsPerThread; i++) {
                const unsigned d = thread + i * kThreads;
                if (d < p.head_dim) acc[i] += weight * widen(value[d]);
            }
        }
    }

    for (unsigned i = 0; i < kDimsPerThread; i++) {
        const unsigned d = thread + i * kThreads;
        // A sequence without context has nothing to attend to.
        if (d < p.head_dim) p.out[row + d] = context == 0 ? 0.0f : acc[i] / sum;
    }
}

bool has_good_shape(const PagedDecodeParams& p) {
    return p.num_seqs > 0 && p.num_seqs <= 65535 && p.num_heads > 0 && p.num_kv_heads > 0 &&
           p.num_heads % p.num_kv_heads == 0 && p.head_dim > 0 && p.head_dim <= kMaxHeadDim && p.page_size > 0 &&
           p.page_size <= kMaxPageSize && p.max_pages > 0;
}

}  // namespace

extern "C" int paged_decode_attention(const PagedDecodeParams* params, int kv_dtype, void* stream) {
    const PagedDecodeParams p = *params;
    if (!has_good_shape(p)) return kPagedDecodeBadShape;
    const dim3 grid(p.num_heads, p.num_seqs);
    const dim3 block(kThreads);
    const size_t bytes = (p.head_dim + p.page_size) * sizeof(float);
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    switch (kv_dtype) {
        case kPagedKvF32:
            LAUNCH(decode<float>, grid, block, bytes, on, p);
            break;
        case kPagedKvBf16:
            LAUNCH(decode<__nv_bfloat16>, grid, block, bytes, on, p);
            break;
        default:
            return kPagedDecodeBadDtype;
    }
    return static_cast<int>(cudaGetLastError());
}
