// The few names that a kernel needs beside plain CUDA C++, so that one source is compiled by nvcc and by a C++ compiler.
//
//   KERNEL(name, threads, Params, body)  the kernel `name`: blocks of at most `threads` threads, one parameter, and `body(params)`
//   DYNAMIC_SHARED(type, name)           the block's shared memory, 16-byte aligned, as an array of `type`
//
// A kernel may use: threadIdx, blockIdx, blockDim, gridDim; dynamic shared memory, all of it in one array; __syncthreads,
// __syncwarp(); __shfl_xor_sync with a full mask; atomicAdd on unsigned integers, where the order of adding
// does not show; the numbers of numbers.h; the tensor-core operations of tensor_core.h. Nothing else.
//
// A kernel has one parameter, a struct that its caller fills byte by byte: pointers first, then 4-byte fields. Nothing here
// launches anything: who does so (a driver, the shim's cuda_on_cpu_launch) gives grid, threads and shared bytes.
//
// Products and sums are compiled as written (-fmad=false, -ffp-contract=off): what shall be fused says fmaf. So a kernel that
// uses no operation of the hardware's own rounding returns the same bits from both compilers.
#pragma once

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define KERNEL(name, threads, Params, ...)                                                                  \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ Params params) { \
        __VA_ARGS__(params);                                                                                \
    }
#define DYNAMIC_SHARED(type, name)                                 \
    extern __shared__ __align__(16) unsigned char dynamic_shared[]; \
    type* name = reinterpret_cast<type*>(dynamic_shared)

#else

#include "shim/cuda_on_cpu.h"

// Exported by name, with the size of its parameters beside it.
#define KERNEL(name, threads, Params, ...)                                                              \
    extern "C" {                                                                                        \
    __attribute__((visibility("default"))) void name(const void* params);                              \
    void name(const void* params) { __VA_ARGS__(*static_cast<const Params*>(params)); }                 \
    __attribute__((visibility("default"))) extern const uint32_t name##_params_bytes;                   \
    const uint32_t name##_params_bytes = sizeof(Params);                                                \
    __attribute__((visibility("default"))) extern const uint32_t name##_max_threads;                        \
    const uint32_t name##_max_threads = (threads);                                                          \
    }
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(cuda_on_cpu::block.shared)

#endif
