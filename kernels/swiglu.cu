// The gated activation of the feed-forward layer.
//
//   out = gate / (1 + e^-gate) * up
//
// grid    (ceil(intermediate / 1024), num_rows, 1)
// block   128 threads, eight elements each
// shared  none
// layout  rows of gate and up are `in_stride` elements apart, so both may lie in the one output of a fused product; rows of out
//         are contiguous; all 16-byte aligned
// bounds  intermediate and in_stride are multiples of 8; num_rows <= 65,535

#include "numbers.h"

namespace {

constexpr unsigned kThreads = 128;

struct SwigluParams {
    void* out;         // [num_rows, intermediate]
    const void* gate;  // [num_rows, intermediate], rows in_stride apart
    const void* up;    // [num_rows, intermediate], rows in_stride apart
    uint32_t intermediate;
    uint32_t in_stride;
};

template <class T>
__device__ __forceinline__ void swiglu(const SwigluParams& p) {
    const unsigned at = (blockIdx.x * kThreads + threadIdx.x) * 8;
    if (at >= p.intermediate) return;
    const size_t row = blockIdx.y;
    float gate[8], up[8];
    load_eight(static_cast<const T*>(p.gate) + row * p.in_stride + at, gate);
    load_eight(static_cast<const T*>(p.up) + row * p.in_stride + at, up);
    for (unsigned i = 0; i < 8; i++) {
        // Far below zero the power overflows to infinity, and the quotient is the zero that it should be.
        const float power = gate[i] < -87.0f ? INFINITY : exponential(-gate[i]);
        up[i] = gate[i] / (1.0f + power) * up[i];
    }
    store_eight(static_cast<T*>(p.out) + row * p.intermediate + at, up);
}

}  // namespace

KERNEL(swiglu_f32, kThreads, SwigluParams, swiglu<float>)
KERNEL(swiglu_f16, kThreads, SwigluParams, swiglu<__half>)
KERNEL(swiglu_bf16, kThreads, SwigluParams, swiglu<__nv_bfloat16>)
