// The few names that a kernel needs beside plain CUDA C++, so that one source is compiled by nvcc and by a C++ compiler.
//
//   DYNAMIC_SHARED(type, name)                     the block's dynamic shared memory, as an array of `type`
//   LAUNCH(kernel, grid, block, bytes, stream, …)  runs a kernel with so many bytes of it; arguments follow
//
// A kernel may use: threadIdx, blockIdx, blockDim, gridDim; static and dynamic shared memory; __syncthreads, __syncwarp;
// __shfl_xor_sync and __shfl_sync with a full mask; bfloat16 by __bfloat162float and __float2bfloat16; the functions of
// <cmath>. Nothing else: no tensor cores, no asynchronous copies, no inline PTX. Faster variants that need those belong
// behind `#ifdef __CUDACC__`, beside the plain one that they are compared with.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cstdint>
#define DYNAMIC_SHARED(type, name)                                  \
    extern __shared__ __align__(16) unsigned char shared_##name[]; \
    type* name = reinterpret_cast<type*>(shared_##name)
#define LAUNCH(kernel, grid, block, bytes, stream, ...) kernel<<<grid, block, bytes, stream>>>(__VA_ARGS__)
#else
#include "shim/cuda_on_cpu.h"
#endif
