// Products with weights (matmul.h) in plain arithmetic: k from 0 up, each product fused with its addition.
//
// grid    (ceil(out_features / 64), ceil(num_rows / 16), 1)
// block   128 threads: 16 rows, eight columns each
// shared  80 * 33 * 4 bytes: 32 elements of each row and each column, padded by one
// layout  rows are contiguous and 16-byte aligned
// bounds  in_features and out_features are multiples of 8; num_rows <= 1,048,560

#include "matmul.h"

namespace {

constexpr unsigned kThreads = 128;
constexpr unsigned kRows = 16;
constexpr unsigned kColumns = 64;
constexpr unsigned kDepth = 32;
constexpr unsigned kStride = kDepth + 1;
constexpr unsigned kPerThread = kRows * kColumns / kThreads;

// Loads kDepth elements, from k on, of `count` rows into shared memory; what is out of bounds becomes zeros.
template <class T, unsigned kCount>
__device__ __forceinline__ void load(float* to, const T* from, unsigned first, unsigned count, unsigned k, unsigned features) {
    for (unsigned at = threadIdx.x; at < kCount * (kDepth / 8); at += kThreads) {
        const unsigned row = at / (kDepth / 8), d = at % (kDepth / 8) * 8;
        float values[8] = {};
        if (first + row < count && k + d < features) {
            load_eight(from + static_cast<size_t>(first + row) * features + k + d, values);
        }
        for (unsigned i = 0; i < 8; i++) to[row * kStride + d + i] = values[i];
    }
}

template <class T>
__device__ __forceinline__ void matmul(const MatmulParams& p) {
    DYNAMIC_SHARED(float, x);             // [kRows][kStride]
    float* weight = x + kRows * kStride;  // [kColumns][kStride]
    const unsigned first_row = blockIdx.y * kRows, first_column = blockIdx.x * kColumns;
    const unsigned row = threadIdx.x / (kColumns / kPerThread), column = threadIdx.x % (kColumns / kPerThread) * kPerThread;
    float sums[kPerThread] = {};
    for (unsigned k = 0; k < p.in_features; k += kDepth) {
        load<T, kRows>(x, static_cast<const T*>(p.x), first_row, p.num_rows, k, p.in_features);
        load<T, kColumns>(weight, static_cast<const T*>(p.weight), first_column, p.out_features, k, p.in_features);
        // The elements are there.
        __syncthreads();
        for (unsigned d = 0; d < kDepth; d++) {
            for (unsigned i = 0; i < kPerThread; i++) {
                sums[i] = fmaf(x[row * kStride + d], weight[(column + i) * kStride + d], sums[i]);
            }
        }
        // The elements have been used.
        __syncthreads();
    }
    if (first_row + row >= p.num_rows || first_column + column >= p.out_features) return;
    const size_t to = static_cast<size_t>(first_row + row) * p.out_features + first_column + column;
    if (p.out_is_f32 != 0) {
        store_eight(static_cast<float*>(p.out) + to, sums);
    } else {
        store_eight(static_cast<T*>(p.out) + to, sums);
    }
}

}  // namespace

KERNEL(matmul_f32, kThreads, MatmulParams, matmul<float>)
KERNEL(matmul_f16, kThreads, MatmulParams, matmul<__half>)
KERNEL(matmul_bf16, kThreads, MatmulParams, matmul<__nv_bfloat16>)
