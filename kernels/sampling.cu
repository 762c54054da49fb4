// What a sampler needs of a vocabulary's logits, so that a few candidates leave the device instead of all logits.
//
// sampling_best_{type}        the largest logit, the lowest token that has it, the first logit that is not finite
// sampling_weights_{type}     the sum of integer weights at a temperature, and the sum that log-probabilities divide by
// sampling_candidates_{type}  the k largest logits with tokens and weights, and how many of them top_p keeps
//
// grid    (num_rows, 1, 1): one block for one row of logits
// block   512 threads
// shared  best 192, weights 256, candidates 1,072 + max_candidates rounded up to a power of two * 16
// layout  rows of logits are row_stride elements apart; per row one entry of the other arrays
// bounds  vocab_size < 2^32, max_candidates <= 1,024
//
// A weight is round(2^44 * e^((logit - best) / temperature)), by the same additions and multiplications in f64 as the sampler of
// `microserving-executor`: integers add up to the same sum in any order, so a draw among them gives the token that it gives
// there. A logit of -FLT_MAX or below is masked: it is no candidate. Order is by weight, largest first, lowest token first among
// equals.

#include "numbers.h"

#include <cfloat>

namespace {

constexpr unsigned kThreads = 512;
constexpr unsigned kWarps = kThreads / kLanes;
constexpr unsigned kDigits = 256;
constexpr uint32_t kNone = 0xffffffffu;

struct SamplingBestParams {
    const void* logits;    // [num_rows, vocab_size]
    uint32_t* tokens;      // [num_rows]; written, as all below
    float* best;           // [num_rows]
    uint32_t* not_finite;  // [num_rows]: the lowest token whose logit is not finite, or kNone
    uint32_t vocab_size;
    uint32_t row_stride;
};

struct SamplingWeightsParams {
    const void* logits;         // [num_rows, vocab_size]
    const float* best;          // [num_rows], from sampling_best
    const float* temperatures;  // [num_rows], above 0
    uint64_t* weights;          // [num_rows]: the sum of weights; written
    double* sums;               // [num_rows]: the sum of e^(logit - best); written
    uint32_t vocab_size;
    uint32_t row_stride;
};

struct SamplingCandidatesParams {
    const void* logits;             // [num_rows, vocab_size]
    const float* best;              // [num_rows], from sampling_best
    const float* temperatures;      // [num_rows], above 0
    const uint32_t* top_ks;         // [num_rows]; 0 for no bound
    const float* top_ps;            // [num_rows], 1 for no bound
    const uint64_t* total_weights;  // [num_rows], from sampling_weights
    uint32_t* tokens;               // [num_rows, max_candidates]; written, as all below
    float* candidate_logits;        // [num_rows, max_candidates]
    uint64_t* weights;              // [num_rows, max_candidates]
    uint32_t* counts;               // [num_rows]: candidates written
    uint32_t* kept;                 // [num_rows]: how many top_p keeps, or kNone if that may be more than were written
    uint32_t vocab_size;
    uint32_t row_stride;
    uint32_t max_candidates;
};

// Larger logits have larger keys; 0.0 and -0.0 the same.
__device__ __forceinline__ uint32_t ordered(float logit) {
    const uint32_t bits = __float_as_uint(logit + 0.0f);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit_of(uint32_t key) {
    return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// One order of logits and tokens: largest logit first, lowest token first among equals. 0 for what is no candidate.
__device__ __forceinline__ uint64_t key_of(float logit, uint32_t token) {
    return logit > -FLT_MAX ? static_cast<uint64_t>(ordered(logit)) << 32 | (kNone - token) : 0;
}

// e^x for x <= 0, to within two units in the last place; below -700 it is e^-700.
__device__ __forceinline__ double exponential_f64(double x) {
    x = x > -700.0 ? x : -700.0;
    const double shifted = x * 1.4426950408889634 + 6755399441055744.0;
    const double n = shifted - 6755399441055744.0;
    const double r = (x - n * 6.931471803691238e-1) - n * 1.9082149292705877e-10;
    double series = 1.0 / 6227020800.0;
    series = series * r + 1.0 / 479001600.0;
    series = series * r + 1.0 / 39916800.0;
    series = series * r + 1.0 / 3628800.0;
    series = series * r + 1.0 / 362880.0;
    series = series * r + 1.0 / 40320.0;
    series = series * r + 1.0 / 5040.0;
    series = series * r + 1.0 / 720.0;
    series = series * r + 1.0 / 120.0;
    series = series * r + 1.0 / 24.0;
    series = series * r + 1.0 / 6.0;
    series = series * r + 0.5;
    series = series * r + 1.0;
    series = series * r + 1.0;
    const uint64_t power = (static_cast<uint64_t>(__double_as_longlong(shifted)) + 1023) << 52;
    return series * __longlong_as_double(static_cast<long long>(power));
}

__device__ __forceinline__ uint64_t weight_of(float logit, float best, float temperature) {
    const double delta = (static_cast<double>(logit) - static_cast<double>(best)) / static_cast<double>(temperature);
    // Adding 2^52 leaves the rounded integer in the low bits.
    const double stepped = exponential_f64(delta) * 17592186044416.0 + 4503599627370496.0;
    return static_cast<uint64_t>(__double_as_longlong(stepped)) & ((1ull << 52) - 1);
}

// Adds or compares the values of all threads, in the order of lanes as a tree and then of warps; known to each.
template <class V, class Join>
__device__ __forceinline__ V join_block(V value, V* partial, Join join) {
    for (int step = kLanes / 2; step > 0; step /= 2) value = join(value, __shfl_xor_sync(0xffffffffu, value, step));
    if (threadIdx.x % kLanes == 0) partial[threadIdx.x / kLanes] = value;
    // Every warp's value is there.
    __syncthreads();
    V all = partial[0];
    for (unsigned warp = 1; warp < kWarps; warp++) all = join(all, partial[warp]);
    return all;
}

template <class T>
__device__ __forceinline__ void sampling_best(const SamplingBestParams& p) {
    DYNAMIC_SHARED(unsigned long long, shared);  // [warps], then as many words
    const size_t row = blockIdx.x;
    const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
    unsigned long long best = 0;
    uint32_t broken = kNone;
    for (uint32_t token = threadIdx.x; token < p.vocab_size; token += kThreads) {
        const float logit = widen(logits[token]);
        const bool is_finite = (__float_as_uint(logit) & 0x7fffffffu) < 0x7f800000u;
        if (!is_finite && token < broken) broken = token;
        const unsigned long long key = static_cast<unsigned long long>(ordered(logit)) << 32 | (kNone - token);
        if (is_finite && key > best) best = key;
    }
    best = join_block(best, shared, [](unsigned long long a, unsigned long long b) { return a > b ? a : b; });
    broken = join_block(broken, reinterpret_cast<uint32_t*>(shared + kWarps), [](uint32_t a, uint32_t b) { return a < b ? a : b; });
    if (threadIdx.x == 0) {
        p.tokens[row] = best == 0 ? kNone : kNone - static_cast<uint32_t>(best);
        p.best[row] = best == 0 ? -INFINITY : logit_of(static_cast<uint32_t>(best >> 32));
        p.not_finite[row] = broken;
    }
}

template <class T>
__device__ __forceinline__ void sampling_weights(const SamplingWeightsParams& p) {
    DYNAMIC_SHARED(unsigned long long, shared);  // [warps], then as many doubles
    const size_t row = blockIdx.x;
    const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
    const float best = p.best[row], temperature = p.temperatures[row];
    unsigned long long weights = 0;
    double sum = 0.0;
    for (uint32_t token = threadIdx.x; token < p.vocab_size; token += kThreads) {
        const float logit = widen(logits[token]);
        weights += weight_of(logit, best, temperature);
        sum += exponential_f64(static_cast<double>(logit) - static_cast<double>(best));
    }
    weights = join_block(weights, shared, [](unsigned long long a, unsigned long long b) { return a + b; });
    sum = join_block(sum, reinterpret_cast<double*>(shared + kWarps), [](double a, double b) { return a + b; });
    if (threadIdx.x == 0) {
        p.weights[row] = weights;
        p.sums[row] = sum;
    }
}

// Finds the k-th largest key of a row, digit by digit from the highest; keys differ, so exactly k are as large. Returns it with
// its undecided lower digits zero, and lowers k to the number of candidates that there are.
template <class T>
__device__ __forceinline__ uint64_t find_threshold(const T* logits, uint32_t vocab_size, uint32_t* k, uint32_t* digits, uint64_t* found) {
    uint64_t prefix = 0;
    uint32_t missing = *k;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (unsigned at = threadIdx.x; at < kDigits; at += kThreads) digits[at] = 0;
        // The counts are zero.
        __syncthreads();
        for (uint32_t token = threadIdx.x; token < vocab_size; token += kThreads) {
            const uint64_t key = key_of(widen(logits[token]), token);
            const bool matches = shift == 56 || (key ^ prefix) >> (shift + 8) == 0;
            if (key != 0 && matches) atomicAdd(&digits[key >> shift & (kDigits - 1)], 1u);
        }
        // All are counted.
        __syncthreads();
        if (threadIdx.x == 0) {
            uint32_t left = missing, digit = kDigits - 1;
            // On the first digit all candidates are counted, and may be fewer than k.
            uint32_t all = 0;
            for (unsigned at = 0; at < kDigits; at++) all += digits[at];
            if (left > all) left = all;
            found[2] = left;
            while (digit > 0 && digits[digit] < left) left -= digits[digit--];
            found[0] = prefix | static_cast<uint64_t>(digit) << shift;
            found[1] = left;
            found[3] = digits[digit] == left;
        }
        // The digit is known to all.
        __syncthreads();
        if (shift == 56) *k = static_cast<uint32_t>(found[2]);
        prefix = found[0];
        missing = static_cast<uint32_t>(found[1]);
        if (found[3] != 0) break;
    }
    return prefix;
}

struct Candidate {
    uint64_t weight;
    uint32_t token;
    float logit;

    __device__ bool is_before(const Candidate& other) const {
        return weight != other.weight ? weight > other.weight : token < other.token;
    }
};

// Sorts `size` candidates, a power of two: a bitonic network.
__device__ __forceinline__ void sort(Candidate* candidates, unsigned size) {
    for (unsigned run = 2; run <= size; run *= 2) {
        for (unsigned step = run / 2; step > 0; step /= 2) {
            for (unsigned at = threadIdx.x; at < size; at += kThreads) {
                const unsigned other = at ^ step;
                if (other <= at) continue;
                const Candidate a = candidates[at], b = candidates[other];
                const bool wants_a_first = (at & run) == 0;
                if (wants_a_first ? b.is_before(a) : a.is_before(b)) {
                    candidates[at] = b;
                    candidates[other] = a;
                }
            }
            // The step is done.
            __syncthreads();
        }
    }
}

// Returns how many of the sorted candidates top_p keeps.
__device__ __forceinline__ uint32_t find_kept(const Candidate* candidates, uint32_t count, bool are_all, float top_p, uint64_t total) {
    if (top_p >= 1.0f) return are_all ? count : kNone;
    const double share = ceil(static_cast<double>(top_p) * static_cast<double>(total));
    uint64_t target = static_cast<uint64_t>(share);
    if (target > total) target = total;
    if (target < 1) target = 1;
    uint64_t sum = 0;
    uint32_t kept = 0;
    while (kept < count && sum < target) sum += candidates[kept++].weight;
    // Of those that weigh as little as the last one, some may not have been written: which of them belongs here is not known.
    const bool is_certain = are_all || (sum >= target && kept > 0 && candidates[kept - 1].weight > candidates[count - 1].weight);
    return is_certain ? kept : kNone;
}

template <class T>
__device__ __forceinline__ void sampling_candidates(const SamplingCandidatesParams& p) {
    DYNAMIC_SHARED(uint64_t, shared);
    uint64_t* found = shared;                                       // [4]
    uint32_t* num_collected = reinterpret_cast<uint32_t*>(found + 4);  // and three more words for alignment's sake
    uint32_t* digits = num_collected + 4;                           // [kDigits]
    Candidate* candidates = reinterpret_cast<Candidate*>(digits + kDigits);

    const size_t row = blockIdx.x;
    const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
    const float best = p.best[row], temperature = p.temperatures[row];
    const uint32_t top_k = p.top_ks[row];
    const bool by_rank = top_k > 0 && top_k < p.vocab_size;
    uint32_t count = by_rank ? min(top_k, p.max_candidates) : p.max_candidates;
    const uint32_t asked = count;
    if (threadIdx.x == 0) *num_collected = 0;
    const uint64_t threshold = find_threshold(logits, p.vocab_size, &count, digits, found);

    unsigned size = 1;
    while (size < count) size *= 2;
    for (unsigned at = threadIdx.x; at < size; at += kThreads) candidates[at] = {0, kNone, 0.0f};
    // The places are empty.
    __syncthreads();
    for (uint32_t token = threadIdx.x; token < p.vocab_size; token += kThreads) {
        const float logit = widen(logits[token]);
        const uint64_t key = key_of(logit, token);
        if (key == 0 || key < threshold || count == 0) continue;
        candidates[atomicAdd(num_collected, 1u)] = {weight_of(logit, best, temperature), token, logit};
    }
    // All have a place.
    __syncthreads();
    sort(candidates, size);

    for (unsigned at = threadIdx.x; at < count; at += kThreads) {
        const size_t to = row * p.max_candidates + at;
        p.tokens[to] = candidates[at].token;
        p.candidate_logits[to] = candidates[at].logit;
        p.weights[to] = candidates[at].weight;
    }
    if (threadIdx.x == 0) {
        // Nothing that may be drawn is missing: fewer than asked for means that there are no more.
        const bool are_all = (by_rank && top_k <= p.max_candidates) || count < asked || count == p.vocab_size;
        uint64_t total = by_rank ? 0 : p.total_weights[row];
        for (unsigned at = 0; by_rank && at < count; at++) total += candidates[at].weight;
        p.counts[row] = count;
        p.kept[row] = find_kept(candidates, count, are_all, p.top_ps[row], total);
    }
}

}  // namespace

#define SAMPLING_OF(type, T)                                                                       \
    KERNEL(sampling_best_##type, kThreads, SamplingBestParams, sampling_best<T>)          \
    KERNEL(sampling_weights_##type, kThreads, SamplingWeightsParams, sampling_weights<T>) \
    KERNEL(sampling_candidates_##type, kThreads, SamplingCandidatesParams, sampling_candidates<T>)

SAMPLING_OF(f32, float)
SAMPLING_OF(f16, __half)
SAMPLING_OF(bf16, __nv_bfloat16)
