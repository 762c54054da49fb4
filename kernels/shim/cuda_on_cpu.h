// Runs plain CUDA C++ on a CPU, to test kernels where there is no GPU: one ucontext fiber per CUDA thread, one block at a
// time, cooperatively scheduled.
//
// What it finds: wrong indices and arithmetic; reads of shared memory that nobody has written (every block starts with
// NaN patterns in it); missing barriers, because the order in which threads run between barriers can be changed
// (cuda_on_cpu::thread_order) and a correct kernel must not notice; barriers that not all threads reach (an abort that
// names the block). What it cannot find: races inside one warp's lockstep, and anything about speed or memory ordering.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
// One block runs at a time, so what all blocks share is what the threads of this one share.
#define __shared__ static

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

struct __nv_bfloat16 {
    uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline __nv_bfloat16 __float2bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    // Round to nearest, ties to even; a NaN stays one.
    if (!is_nan) bits += 0x7fffu + ((bits >> 16) & 1u);
    return {static_cast<uint16_t>(is_nan ? 0x7fffu : bits >> 16)};
}

namespace cuda_on_cpu {

enum class Order { kForward, kBackward, kShuffled };

// How threads take turns between barriers.
inline Order thread_order = Order::kForward;

constexpr unsigned kWarpSize = 32;
constexpr size_t kStackBytes = 64 * 1024;

enum class State { kReady, kAtWarpBarrier, kAtBlockBarrier, kFinished };

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    State state = State::kReady;
    dim3 index;
    unsigned warp = 0;
    unsigned lane = 0;
};

// The block that is running.
struct Block {
    dim3 grid, size, index;
    std::vector<Thread> threads;
    Thread* current = nullptr;
    ucontext_t scheduler;
    std::function<void()> body;
    std::vector<unsigned char> shared;
    std::vector<uint64_t> exchange;  // one word per thread, for shuffles
    uint64_t shuffle_state = 1;

    [[noreturn]] void fail(const char* what) const {
        std::fprintf(stderr, "cuda_on_cpu: %s in block (%u, %u, %u)\n", what, index.x, index.y, index.z);
        std::abort();
    }

    void park(State state) {
        current->state = state;
        swapcontext(&current->context, &scheduler);
    }

    void run_ready(const std::vector<unsigned>& order) {
        for (unsigned number : order) {
            if (threads[number].state != State::kReady) continue;
            current = &threads[number];
            swapcontext(&scheduler, &current->context);
        }
    }

    // Lets go on what can: whole warps first, then the whole block. Returns false when every thread has finished.
    bool release() {
        const unsigned count = static_cast<unsigned>(threads.size());
        bool released = false;
        for (unsigned first = 0; first < count; first += kWarpSize) {
            const unsigned end = std::min(first + kWarpSize, count);
            unsigned waiting = 0;
            for (unsigned at = first; at < end; at++) waiting += threads[at].state == State::kAtWarpBarrier;
            if (waiting == 0) continue;
            if (waiting != end - first) fail("a warp barrier was not reached by all lanes");
            for (unsigned at = first; at < end; at++) threads[at].state = State::kReady;
            released = true;
        }
        if (released) return true;
        unsigned waiting = 0;
        for (const Thread& thread : threads) waiting += thread.state == State::kAtBlockBarrier;
        if (waiting == 0) return false;
        if (waiting != count) fail("__syncthreads was not reached by all threads");
        for (Thread& thread : threads) thread.state = State::kReady;
        return true;
    }

    void next_order(std::vector<unsigned>& order) {
        if (thread_order == Order::kBackward) {
            std::sort(order.begin(), order.end(), std::greater<unsigned>());
        } else if (thread_order == Order::kShuffled) {
            for (size_t at = order.size(); at > 1; at--) {
                shuffle_state = shuffle_state * 6364136223846793005u + 1442695040888963407u;
                std::swap(order[at - 1], order[(shuffle_state >> 33) % at]);
            }
        }
    }
};

inline Block* block = nullptr;

inline void fiber() {
    block->body();
    block->park(State::kFinished);
}

// A function of its own, because getcontext may return twice as far as the compiler knows.
__attribute__((noinline)) inline void start(Thread& thread) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, fiber, 0);
    thread.state = State::kReady;
}

template <class Body>
void launch(dim3 grid, dim3 size, size_t shared_bytes, Body body) {
    Block running;
    running.grid = grid;
    running.size = size;
    running.body = body;
    const unsigned count = size.x * size.y * size.z;
    running.threads = std::vector<Thread>(count);
    running.exchange.resize(count);
    block = &running;
    std::vector<unsigned> order(count);
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                running.index = dim3(x, y, z);
                // All bits set is a NaN in every floating-point format.
                running.shared.assign(shared_bytes + 16, 0xff);
                for (unsigned number = 0; number < count; number++) {
                    order[number] = number;
                    Thread& thread = running.threads[number];
                    thread.index = dim3(number % size.x, number / size.x % size.y, number / (size.x * size.y));
                    thread.warp = number / kWarpSize;
                    thread.lane = number % kWarpSize;
                    start(thread);
                }
                do {
                    running.next_order(order);
                    running.run_ready(order);
                } while (running.release());
            }
    block = nullptr;
}

inline void* dynamic_shared() {
    const auto address = reinterpret_cast<uintptr_t>(block->shared.data());
    return reinterpret_cast<void*>((address + 15) & ~uintptr_t{15});
}

template <class T>
T from_lane(T value, unsigned lane) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves at most 8 bytes");
    const unsigned first = block->current->warp * kWarpSize;
    std::memcpy(&block->exchange[first + block->current->lane], &value, sizeof value);
    block->park(State::kAtWarpBarrier);
    T other;
    std::memcpy(&other, &block->exchange[first + lane % kWarpSize], sizeof other);
    // Nobody may write its next value before everybody has read this one.
    block->park(State::kAtWarpBarrier);
    return other;
}

}  // namespace cuda_on_cpu

#define threadIdx (cuda_on_cpu::block->current->index)
#define blockIdx (cuda_on_cpu::block->index)
#define blockDim (cuda_on_cpu::block->size)
#define gridDim (cuda_on_cpu::block->grid)

inline void __syncthreads() { cuda_on_cpu::block->park(cuda_on_cpu::State::kAtBlockBarrier); }
inline void __syncwarp(unsigned = 0xffffffffu) { cuda_on_cpu::block->park(cuda_on_cpu::State::kAtWarpBarrier); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return cuda_on_cpu::from_lane(value, cuda_on_cpu::block->current->lane ^ static_cast<unsigned>(mask));
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    return cuda_on_cpu::from_lane(value, static_cast<unsigned>(lane));
}

#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(cuda_on_cpu::dynamic_shared())
#define LAUNCH(kernel, grid, block_size, bytes, stream, ...) \
    ((void)(stream), cuda_on_cpu::launch(grid, block_size, bytes, [=] { kernel(__VA_ARGS__); }))
