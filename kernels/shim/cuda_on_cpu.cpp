// The scheduler behind cuda_on_cpu.h, and the functions by which a test drives it.

#include "cuda_on_cpu.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "context_switch.h"

namespace cuda_on_cpu {

thread_local Block block;

namespace {

constexpr size_t kStackBytes = 64 * 1024;
// Written before and after the block's shared memory, and looked at when it ends.
constexpr size_t kGuardBytes = 256;
// All bits set is a NaN in every floating-point format.
constexpr unsigned char kPoison = 0xff;
constexpr unsigned char kGuard = 0xa5;

enum State : int { kReady, kAtWarpBarrier, kAtBlockBarrier, kFinished };

using Entry = void (*)(const void* params);

// What a launch needs beside the block; kept from one launch to the next, as stacks are large.
struct Scheduler {
    std::vector<Thread> threads;
    std::vector<std::unique_ptr<char[]>> stacks;
    std::vector<unsigned char> shared;
    void* stack_pointer = nullptr;
    Entry entry = nullptr;
    const void* params = nullptr;
    int order = kForward;
    uint64_t random = 1;
    bool has_failed = false;
    char message[256] = {};

    unsigned draw(unsigned below) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        return static_cast<unsigned>(random >> 33) % below;
    }
};

thread_local Scheduler scheduler;

// One barrier of the sources, left out of every launch in this process.
const char* skipped_file = nullptr;
unsigned skipped_line = 0;

bool is_skipped(const char* file, unsigned line) {
    if (line != skipped_line) return false;
    const size_t all = std::strlen(file), end = std::strlen(skipped_file);
    return all >= end && std::strcmp(file + all - end, skipped_file) == 0;
}

void park(State state) {
    block.current->state = state;
    switch_context(&block.current->stack_pointer, scheduler.stack_pointer);
}

void fiber() {
    scheduler.entry(scheduler.params);
    park(kFinished);
    std::abort();  // a finished thread is not continued
}

void record_failure(const char* what) {
    if (scheduler.has_failed) return;
    scheduler.has_failed = true;
    const dim3 at = block.index;
    std::snprintf(scheduler.message, sizeof scheduler.message, "%s in block (%u, %u, %u)", what, at.x, at.y, at.z);
}

// Lets every ready lane of a warp run to its next barrier, and lets the warp go on if all wait for each other. Returns
// whether the warp can run again.
bool run_warp(unsigned first, unsigned end) {
    const unsigned count = end - first;
    unsigned lanes[kWarpSize];
    for (unsigned at = 0; at < count; at++) lanes[at] = scheduler.order == kBackward ? count - 1 - at : at;
    if (scheduler.order == kShuffled) {
        for (unsigned at = count; at > 1; at--) {
            const unsigned other = scheduler.draw(at), kept = lanes[at - 1];
            lanes[at - 1] = lanes[other];
            lanes[other] = kept;
        }
    }
    for (unsigned at = 0; at < count; at++) {
        Thread& thread = block.threads[first + lanes[at]];
        if (thread.state != kReady) continue;
        block.current = &thread;
        switch_context(&scheduler.stack_pointer, thread.stack_pointer);
        if (scheduler.has_failed) return false;
    }
    unsigned waiting = 0;
    for (unsigned at = first; at < end; at++) waiting += block.threads[at].state == kAtWarpBarrier;
    if (waiting == 0) return false;
    if (waiting != count) {
        record_failure("a warp barrier was not reached by all lanes");
        return false;
    }
    for (unsigned at = first; at < end; at++) block.threads[at].state = kReady;
    return true;
}

// Runs every warp to the next block barrier or its end.
void run_to_barrier(unsigned num_threads) {
    const unsigned num_warps = (num_threads + kWarpSize - 1) / kWarpSize;
    std::vector<unsigned> runnable(num_warps);
    // Backwards, since the last of the list is taken.
    for (unsigned at = 0; at < num_warps; at++) runnable[at] = scheduler.order == kBackward ? at : num_warps - 1 - at;
    while (!runnable.empty() && !scheduler.has_failed) {
        const size_t last = runnable.size() - 1;
        if (scheduler.order == kShuffled) std::swap(runnable[last], runnable[scheduler.draw(static_cast<unsigned>(last) + 1)]);
        const unsigned first = runnable[last] * kWarpSize;
        const unsigned end = first + kWarpSize < num_threads ? first + kWarpSize : num_threads;
        if (!run_warp(first, end)) runnable.pop_back();
    }
}

void run_block(unsigned num_threads, size_t shared_bytes) {
    unsigned char* guarded = scheduler.shared.data();
    guarded += 64 - reinterpret_cast<uintptr_t>(guarded) % 64;
    std::memset(guarded, kGuard, kGuardBytes);
    block.shared = guarded + kGuardBytes;
    std::memset(block.shared, kPoison, shared_bytes);
    std::memset(block.shared + shared_bytes, kGuard, kGuardBytes);
    for (unsigned at = 0; at < num_threads; at++) {
        Thread& thread = block.threads[at];
        thread.state = kReady;
        thread.num_copies = 0;
        thread.open_group = 0;
        thread.stack_pointer = make_context(scheduler.stacks[at].get(), kStackBytes, fiber);
    }
    for (;;) {
        run_to_barrier(num_threads);
        if (scheduler.has_failed) return;
        unsigned waiting = 0;
        for (unsigned at = 0; at < num_threads; at++) waiting += block.threads[at].state == kAtBlockBarrier;
        if (waiting == 0) break;
        if (waiting != num_threads) return record_failure("__syncthreads was not reached by all threads");
        for (unsigned at = 0; at < num_threads; at++) block.threads[at].state = kReady;
    }
    for (size_t at = 0; at < kGuardBytes; at++) {
        if (guarded[at] != kGuard || block.shared[shared_bytes + at] != kGuard) {
            return record_failure("shared memory was written out of its bounds");
        }
    }
}

}  // namespace

void sync_threads(const char* file, unsigned line) {
    if (!is_skipped(file, line)) park(kAtBlockBarrier);
}

void sync_warp(const char* file, unsigned line) {
    if (!is_skipped(file, line)) park(kAtWarpBarrier);
}

void meet_warp() { park(kAtWarpBarrier); }

void fail(const char* what) {
    record_failure(what);
    park(kFinished);
    std::abort();
}

void copy_async(void* to, const void* from, unsigned bytes) {
    Thread& thread = *block.current;
    if (thread.num_copies == Thread::kMaxCopies) fail("more asynchronous copies than the shim keeps");
    thread.copies[thread.num_copies++] = {to, from, bytes, thread.open_group};
}

void commit_copies() { block.current->open_group++; }

void wait_copies(unsigned groups_left, const char* file, unsigned line) {
    if (is_skipped(file, line)) return;
    Thread& thread = *block.current;
    unsigned kept = 0;
    for (unsigned at = 0; at < thread.num_copies; at++) {
        const Thread::Copy copy = thread.copies[at];
        if (copy.group + groups_left >= thread.open_group) {
            thread.copies[kept++] = copy;
            continue;
        }
        std::memset(copy.to, 0, 16);
        std::memcpy(copy.to, copy.from, copy.bytes);
    }
    thread.num_copies = kept;
}

}  // namespace cuda_on_cpu

float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float(static_cast<uint32_t>(value.bits) << 16); }

__nv_bfloat16 __float2bfloat16(float value) {
    uint32_t bits = __float_as_uint(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    // Round to nearest, ties to even; a NaN stays one.
    if (!is_nan) bits += 0x7fffu + ((bits >> 16) & 1u);
    return {static_cast<uint16_t>(is_nan ? 0x7fffu : bits >> 16)};
}

float __half2float(__half value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    const uint32_t exponent = value.bits >> 10 & 0x1fu, mantissa = value.bits & 0x3ffu;
    if (exponent == 0) {
        // Zero, or so many 2^-24.
        const float size = static_cast<float>(mantissa) * 0x1p-24f;
        return __uint_as_float(__float_as_uint(size) | sign);
    }
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
    return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

__half __float2half(float value) {
    const uint32_t bits = __float_as_uint(value), size = bits & 0x7fffffffu;
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    if (size > 0x7f800000u) return {0x7fff};
    // 65,520 and above round to infinity.
    if (size >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
    if (size < 0x38800000u) {
        // Below 2^-14 the steps are 2^-24: adding 1/2 puts them into the lowest bits, rounded to nearest, ties to even.
        const uint32_t stepped = __float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u;
        return {static_cast<uint16_t>(sign | stepped)};
    }
    const uint32_t rounded = size + 0xfffu + (size >> 13 & 1u) - 0x38000000u;
    return {static_cast<uint16_t>(sign | rounded >> 13)};
}

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Runs a kernel, one block after the other. Returns null, or what went wrong, valid until this thread's next launch.
EXPORTED const char* cuda_on_cpu_launch(void (*entry)(const void*), const unsigned grid[3], unsigned num_threads,
                                        size_t shared_bytes, const void* params, int order) {
    using namespace cuda_on_cpu;
    scheduler.entry = entry;
    scheduler.params = params;
    scheduler.order = order;
    scheduler.random = 1;
    scheduler.has_failed = false;
    while (scheduler.stacks.size() < num_threads) scheduler.stacks.emplace_back(new char[kStackBytes]);
    if (scheduler.threads.size() < num_threads) scheduler.threads.resize(num_threads);
    scheduler.shared.resize(shared_bytes + 2 * kGuardBytes + 64);
    block.grid = {grid[0], grid[1], grid[2]};
    block.size = {num_threads, 1, 1};
    block.threads = scheduler.threads.data();
    for (unsigned at = 0; at < num_threads; at++) {
        Thread& thread = block.threads[at];
        thread.index = {at, 0, 0};
        thread.warp = at / kWarpSize;
        thread.lane = at % kWarpSize;
    }
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                block.index = {x, y, z};
                run_block(num_threads, shared_bytes);
                if (scheduler.has_failed) return scheduler.message;
            }
    return nullptr;
}

// Leaves the barrier (or wait) at this line of a file out of every launch from now on.
EXPORTED void cuda_on_cpu_skip_barrier(const char* file, unsigned line) {
    cuda_on_cpu::skipped_file = file;
    cuda_on_cpu::skipped_line = line;
}
