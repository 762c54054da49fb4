// Runs CUDA C++ on a CPU, to test kernels where there is no GPU: one fiber a CUDA thread, one block at a time, cooperatively
// scheduled.
//
// What it finds:
// - wrong indices and arithmetic;
// - reads of shared memory that nobody has written (every block starts with NaN patterns in it), and writes past its end;
// - missing barriers: warps and lanes take turns in an order that the caller chooses (Order), and a correct kernel must not
//   notice. A barrier can be left out by file and line (cuda_on_cpu_skip_barrier), to see that a test would find it missing;
// - asynchronous copies that nobody waited for: they happen when they are waited for, not before;
// - barriers that not all threads reach: an error that names the block.
// What it cannot find: anything about speed, memory ordering, or what lockstep and hardware's own rounding would change.
//
// Shared memory is dynamic only (DYNAMIC_SHARED in portable.h): __shared__ is not defined, so that all of it is poisoned.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline
#define __restrict__ __restrict

struct dim3 {
    unsigned x, y, z;
};

namespace cuda_on_cpu {

// How warps, and the lanes of a warp, take turns between barriers.
enum Order : int { kForward = 0, kBackward = 1, kShuffled = 2 };

constexpr unsigned kWarpSize = 32;
// Words that a lane can show to the others of its warp at once.
constexpr unsigned kExchangeWords = 12;

struct Thread {
    void* stack_pointer = nullptr;
    int state = 0;
    dim3 index{};
    unsigned warp = 0;
    unsigned lane = 0;
    // Asynchronous copies that were not waited for yet.
    struct Copy {
        void* to;
        const void* from;
        unsigned bytes;  // the rest of the 16 becomes zeros
        unsigned group;
    };
    static constexpr unsigned kMaxCopies = 256;
    Copy copies[kMaxCopies];
    unsigned num_copies = 0;
    unsigned open_group = 0;
    uint32_t exchange[kExchangeWords] = {};
};

// The block that is running, as its threads see it.
struct Block {
    dim3 index{}, size{}, grid{};
    Thread* threads = nullptr;
    Thread* current = nullptr;
    unsigned char* shared = nullptr;
};

// Blocks run on the thread that launches them, so several may run at once.
extern thread_local Block block;

void sync_threads(const char* file, unsigned line);
void sync_warp(const char* file, unsigned line);
// As sync_warp, for the warp-wide operations themselves: cannot be left out.
void meet_warp();
[[noreturn]] void fail(const char* what);

void copy_async(void* to, const void* from, unsigned bytes);
void commit_copies();
void wait_copies(unsigned groups_left, const char* file, unsigned line);

// What `lane` of the same warp showed last.
inline const uint32_t* shown_by(unsigned lane) {
    return block.threads[block.current->warp * kWarpSize + lane % kWarpSize].exchange;
}

template <class T>
T from_lane(T value, unsigned lane) {
    static_assert(sizeof(T) <= sizeof(uint32_t) * kExchangeWords, "too large to show");
    std::memcpy(block.current->exchange, &value, sizeof value);
    meet_warp();
    T other;
    std::memcpy(&other, shown_by(lane), sizeof other);
    // Nobody may show its next value before everybody has read this one.
    meet_warp();
    return other;
}

}  // namespace cuda_on_cpu

#define threadIdx (cuda_on_cpu::block.current->index)
#define blockIdx (cuda_on_cpu::block.index)
#define blockDim (cuda_on_cpu::block.size)
#define gridDim (cuda_on_cpu::block.grid)

#define __syncthreads() cuda_on_cpu::sync_threads(__FILE__, __LINE__)
#define __syncwarp() cuda_on_cpu::sync_warp(__FILE__, __LINE__)

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return cuda_on_cpu::from_lane(value, cuda_on_cpu::block.current->lane ^ static_cast<unsigned>(mask));
}

// One thread runs at a time.
inline unsigned atomicAdd(unsigned* at, unsigned value) {
    const unsigned before = *at;
    *at += value;
    return before;
}

// 16-bit numbers, as CUDA's headers name them.
struct __nv_bfloat16 {
    uint16_t bits;
};
struct __half {
    uint16_t bits;
};

float __bfloat162float(__nv_bfloat16 value);
__nv_bfloat16 __float2bfloat16(float value);
float __half2float(__half value);
__half __float2half(float value);

inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline double __longlong_as_double(long long bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline long long __double_as_longlong(double value) {
    long long bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
