// Root-mean-square normalisation of rows, with the residual stream's addition in front.
//
//   r = x + residual (written back, if there is one);  out = r / sqrt(mean(r^2) + eps) * weight
//
// grid    (num_rows, 1, 1): one block for one row
// block   256 threads
// shared  hidden * 4 + 32 bytes: the row in f32, and one partial sum a warp
// layout  rows of x, residual and out are `hidden` elements, contiguous, 16-byte aligned
// bounds  hidden is a multiple of 8, at most 16,384
//
// The sum of squares is taken by thread, lane and warp in an order that only `hidden` decides, so a row does not depend on
// its batch. The residual is rounded to its type before it is normalised: what the next layer reads is what was normalised.

#include "numbers.h"

namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kWarps = kThreads / kLanes;

struct RmsNormParams {
    void* out;           // [num_rows, hidden]; may be x
    const void* x;       // [num_rows, hidden]
    void* residual;      // [num_rows, hidden] or null; read and written
    const void* weight;  // [hidden]
    uint32_t hidden;
    float eps;
};

template <class T>
__device__ __forceinline__ void rms_norm(const RmsNormParams& p) {
    DYNAMIC_SHARED(float, row);         // [hidden]
    float* partial = row + p.hidden;  // [warps]
    const size_t first = static_cast<size_t>(blockIdx.x) * p.hidden;
    const T* x = static_cast<const T*>(p.x) + first;
    const T* weight = static_cast<const T*>(p.weight);
    T* out = static_cast<T*>(p.out) + first;

    float sum = 0.0f;
    for (unsigned at = threadIdx.x * 8; at < p.hidden; at += kThreads * 8) {
        float values[8];
        load_eight(x + at, values);
        if (p.residual != nullptr) {
            T* residual = static_cast<T*>(p.residual) + first + at;
            float others[8];
            load_eight(residual, others);
            for (unsigned i = 0; i < 8; i++) values[i] = widen(narrow<T>(values[i] + others[i]));
            store_eight(residual, values);
        }
        for (unsigned i = 0; i < 8; i++) {
            row[at + i] = values[i];
            sum = fmaf(values[i], values[i], sum);
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % kLanes == 0) partial[threadIdx.x / kLanes] = sum;
    // Every warp's sum is there.
    __syncthreads();
    float total = 0.0f;
    for (unsigned warp = 0; warp < kWarps; warp++) total += partial[warp];
    const float factor = 1.0f / sqrtf(total / static_cast<float>(p.hidden) + p.eps);

    // A thread reads of the row what it wrote itself.
    for (unsigned at = threadIdx.x * 8; at < p.hidden; at += kThreads * 8) {
        float weights[8], values[8];
        load_eight(weight + at, weights);
        for (unsigned i = 0; i < 8; i++) values[i] = row[at + i] * factor * weights[i];
        store_eight(out + at, values);
    }
}

}  // namespace

KERNEL(rms_norm_f32, kThreads, RmsNormParams, rms_norm<float>)
KERNEL(rms_norm_f16, kThreads, RmsNormParams, rms_norm<__half>)
KERNEL(rms_norm_bf16, kThreads, RmsNormParams, rms_norm<__nv_bfloat16>)
