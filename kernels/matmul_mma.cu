// Products with weights (matmul.h) on tensor cores, for sm_80 and later.
//
//   kernel               rows  columns  threads  depth  stages  shared bytes, rows padded by 16 so that ldmatrix meets no bank twice
//   matmul_mma_{t}_m16     16       32       64    128       4   4 *  (16 +  32) * 136 * 2 =  52,224
//   matmul_mma_{t}_m64     64       64      128     64       3   3 *  (64 +  64) *  72 * 2 =  55,296
//   matmul_mma_{t}_m128   128      128      256     32       4   4 * (128 + 128) *  40 * 2 =  81,920
//
// grid    (ceil(out_features / columns), ceil(num_rows / rows), 1)
// layout  rows are contiguous and 16-byte aligned
// bounds  in_features and out_features are multiples of 8; blocks of rows <= 65,535
//
// A block walks k in steps of `depth`, `stages` - 1 of them on their way while one is computed. All three add the same products
// in the same order, 16 of k at a time, so they differ in speed only: few rows read weights once, many rows share them.

#include "matmul.h"
#include "tensor_core.h"

namespace {

// Warps along rows and columns, and what each has: tiles of 16 rows, and of 16 columns.
template <class T, unsigned kRowWarps, unsigned kColumnWarps, unsigned kRowTiles, unsigned kColumnTiles, unsigned kDepth, unsigned kStages>
__device__ __forceinline__ void matmul(const MatmulParams& p) {
    constexpr unsigned kRows = kRowWarps * kRowTiles * 16, kColumns = kColumnWarps * kColumnTiles * 16;
    constexpr unsigned kThreads = kRowWarps * kColumnWarps * kLanes;
    constexpr unsigned kStride = kDepth + 8, kVectors = kDepth / 8;
    constexpr unsigned kStage = (kRows + kColumns) * kStride;
    DYNAMIC_SHARED(T, shared);  // [stages][rows of x, then rows of weight][kStride]
    const unsigned first_row = blockIdx.y * kRows, first_column = blockIdx.x * kColumns;
    const unsigned lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    const unsigned warp_row = warp / kColumnWarps * kRowTiles * 16, warp_column = warp % kColumnWarps * kColumnTiles * 16;
    const unsigned steps = (p.in_features + kDepth - 1) / kDepth;

    const auto load = [&](unsigned step) {
        T* stage = shared + step % kStages * kStage;
        for (unsigned at = threadIdx.x; at < (kRows + kColumns) * kVectors; at += kThreads) {
            const unsigned line = at / kVectors, d = at % kVectors * 8, k = step * kDepth + d;
            const bool is_x = line < kRows;
            const unsigned row = is_x ? first_row + line : first_column + line - kRows;
            const bool is_there = row < (is_x ? p.num_rows : p.out_features) && k < p.in_features;
            const T* from = static_cast<const T*>(is_x ? p.x : p.weight);
            copy_async(stage + line * kStride + d, is_there ? from + static_cast<size_t>(row) * p.in_features + k : from,
                       is_there ? 16 : 0);
        }
    };

    float sums[kRowTiles][kColumnTiles * 2][4] = {};
    for (unsigned step = 0; step < kStages - 1; step++) {
        if (step < steps) load(step);
        commit_copies();
    }
    for (unsigned step = 0; step < steps; step++) {
        WAIT_COPIES(kStages - 2);
        // The step's elements are there, and those of the step before have been used.
        __syncthreads();
        if (step + kStages - 1 < steps) load(step + kStages - 1);
        commit_copies();
        const T* x = shared + step % kStages * kStage + warp_row * kStride;
        const T* weight = shared + step % kStages * kStage + (kRows + warp_column) * kStride;
#pragma unroll
        for (unsigned k = 0; k < kDepth; k += 16) {
            uint32_t a[kRowTiles][4];
#pragma unroll
            for (unsigned i = 0; i < kRowTiles; i++) load_matrices(a[i], x + (i * 16 + lane % 16) * kStride + k + lane / 16 * 8);
#pragma unroll
            for (unsigned j = 0; j < kColumnTiles; j++) {
                uint32_t b[4];
                load_matrices(b, weight + (j * 16 + lane % 8 + lane / 16 * 8) * kStride + k + lane / 8 % 2 * 8);
#pragma unroll
                for (unsigned i = 0; i < kRowTiles; i++) {
                    multiply_add<T>(sums[i][2 * j], a[i], b[0], b[1]);
                    multiply_add<T>(sums[i][2 * j + 1], a[i], b[2], b[3]);
                }
            }
        }
    }

#pragma unroll
    for (unsigned i = 0; i < kRowTiles * 2; i++) {
        const unsigned row = first_row + warp_row + i * 8 + lane / 4;
        if (row >= p.num_rows) continue;
#pragma unroll
        for (unsigned j = 0; j < kColumnTiles * 2; j++) {
            const unsigned column = first_column + warp_column + j * 8 + lane % 4 * 2;
            if (column >= p.out_features) continue;
            const float low = sums[i / 2][j][i % 2 * 2], high = sums[i / 2][j][i % 2 * 2 + 1];
            const size_t to = static_cast<size_t>(row) * p.out_features + column;
            if (p.out_is_f32 != 0) {
                static_cast<float*>(p.out)[to] = low;
                static_cast<float*>(p.out)[to + 1] = high;
            } else {
                *reinterpret_cast<uint32_t*>(static_cast<T*>(p.out) + to) = pack<T>(low, high);
            }
        }
    }
}

}  // namespace

#define MATMUL_OF(type, T)                                                             \
    KERNEL(matmul_mma_##type##_m16, 64, MatmulParams, matmul<T, 1, 2, 1, 1, 128, 4>)  \
    KERNEL(matmul_mma_##type##_m64, 128, MatmulParams, matmul<T, 2, 2, 2, 2, 64, 3>) \
    KERNEL(matmul_mma_##type##_m128, 256, MatmulParams, matmul<T, 2, 4, 4, 2, 32, 4>)

MATMUL_OF(f16, __half)
MATMUL_OF(bf16, __nv_bfloat16)
