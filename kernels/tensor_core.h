// Tensor-core products, the loads that feed them, and asynchronous copies: PTX on a GPU, and under the shim the same by the
// layouts that the PTX ISA documents (sections "Matrix Fragments for mma.m16n8k16", "ldmatrix", "cp.async").
//
// The shim's products add in f32, in the order of k; a GPU's order and rounding are its own. So results agree to rounding, not
// to the bit.
//
//   fragments of m16n8k16; group = lane / 4, pair = lane % 4, a word holds two 16-bit numbers, the first in its low half
//   a[0] (row group,     k 2 pair ..)   a[1] (row group + 8, k 2 pair ..)   a[2], a[3] the same at k + 8
//   b[0] (k 2 pair ..,     column group)   b[1] the same at k + 8
//   d[0], d[1] (row group, columns 2 pair, 2 pair + 1)   d[2], d[3] the same at row group + 8
#pragma once

#include "numbers.h"

#if defined(__CUDACC__)

__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void multiply_add<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit numbers; lanes 8 i .. 8 i + 8 give the addresses of the rows of matrix i, 16 bytes each.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Begins to copy 16 bytes to shared memory, the bytes past `bytes` as zeros.
__device__ __forceinline__ void copy_async(void* shared, const void* global, unsigned bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes) : "memory");
}

// Makes the copies begun since the last call a group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's own copies, but for those of the last `groups` groups. A barrier then tells the others.
#define WAIT_COPIES(groups) asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory")

__device__ __forceinline__ float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

#else

inline float half_of(__half, uint32_t word, unsigned half) {
    return __half2float(__half{static_cast<uint16_t>(word >> 16 * half)});
}
inline float half_of(__nv_bfloat16, uint32_t word, unsigned half) {
    return __bfloat162float(__nv_bfloat16{static_cast<uint16_t>(word >> 16 * half)});
}

template <class T>
void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    cuda_on_cpu::Thread& self = *cuda_on_cpu::block.current;
    const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    float mine[12];
    for (unsigned i = 0; i < 12; i++) mine[i] = half_of(T{}, words[i / 2], i % 2);
    std::memcpy(self.exchange, mine, sizeof mine);
    cuda_on_cpu::meet_warp();
    const unsigned group = self.lane / 4, pair = self.lane % 4;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned row = group + i / 2 * 8, column = 2 * pair + i % 2;
        for (unsigned k = 0; k < 16; k++) {
            const uint32_t* of_row = cuda_on_cpu::shown_by(row % 8 * 4 + k % 8 / 2);
            const uint32_t* of_column = cuda_on_cpu::shown_by(column * 4 + k % 8 / 2);
            d[i] = fmaf(__uint_as_float(of_row[(row / 8 + k / 8 * 2) * 2 + k % 2]),
                        __uint_as_float(of_column[(4 + k / 8) * 2 + k % 2]), d[i]);
        }
    }
    cuda_on_cpu::meet_warp();
}

inline const uint16_t* row_of_matrix(unsigned matrix, unsigned row) {
    const uint16_t* address;
    std::memcpy(&address, cuda_on_cpu::shown_by(matrix * 8 + row), sizeof address);
    return address;
}

template <bool kTransposed>
void load_matrices_by(uint32_t (&to)[4], const void* row) {
    cuda_on_cpu::Thread& self = *cuda_on_cpu::block.current;
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) cuda_on_cpu::fail("a row of a matrix is not aligned to 16 bytes");
    std::memcpy(self.exchange, &row, sizeof row);
    cuda_on_cpu::meet_warp();
    const unsigned group = self.lane / 4, pair = self.lane % 4;
    for (unsigned matrix = 0; matrix < 4; matrix++) {
        const auto element = [&](unsigned i) -> uint32_t {
            return kTransposed ? row_of_matrix(matrix, 2 * pair + i)[group] : row_of_matrix(matrix, group)[2 * pair + i];
        };
        to[matrix] = element(0) | element(1) << 16;
    }
    cuda_on_cpu::meet_warp();
}

inline void load_matrices(uint32_t (&to)[4], const void* row) { load_matrices_by<false>(to, row); }
inline void load_matrices_transposed(uint32_t (&to)[4], const void* row) { load_matrices_by<true>(to, row); }

inline void copy_async(void* shared, const void* global, unsigned bytes) { cuda_on_cpu::copy_async(shared, global, bytes); }
inline void commit_copies() { cuda_on_cpu::commit_copies(); }
#define WAIT_COPIES(groups) cuda_on_cpu::wait_copies(groups, __FILE__, __LINE__)

inline float power_of_two(float x) { return std::exp2(x); }

#endif

// Two numbers as one word, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    const T two[2] = {narrow<T>(low), narrow<T>(high)};
    uint32_t word;
    static_assert(sizeof word == sizeof two, "two 16-bit numbers");
    memcpy(&word, two, sizeof word);
    return word;
}
