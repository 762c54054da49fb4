// The kernel, under the CPU shim, against a plain reading of its formula in double precision; and the invariances that the
// equality of tokens between orchestration patterns rests on.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../paged_decode_attention.h"
#include "../portable.h"

namespace {

int failures = 0;

#define CHECK(condition, ...)                                    \
    do {                                                         \
        if (!(condition)) {                                      \
            failures++;                                          \
            std::printf("FAILED %s:%d: ", __FILE__, __LINE__);   \
            std::printf(__VA_ARGS__);                            \
            std::printf("\n");                                   \
        }                                                        \
    } while (0)

// Numbers in [-2, 2), the same in every run.
struct Numbers {
    uint64_t state;
    float next() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<float>(static_cast<double>(state >> 40) / (1 << 22) - 2.0);
    }
};

struct Shape {
    unsigned num_heads, num_kv_heads, head_dim, page_size;
};

// Some sequences' contexts, independent of where they lie.
struct Contexts {
    Shape shape;
    std::vector<unsigned> lens;
    // [seq]: [position][kv_head][k|v][head_dim], already rounded to the KV's type.
    std::vector<std::vector<float>> kv;
    // [seq]: [num_heads][head_dim]
    std::vector<std::vector<float>> query;

    float at(unsigned seq, unsigned position, unsigned kv_head, unsigned which, unsigned d) const {
        return kv[seq][((position * shape.num_kv_heads + kv_head) * 2 + which) * shape.head_dim + d];
    }
};

Contexts make(Shape shape, std::vector<unsigned> lens, int dtype) {
    Contexts contexts{shape, lens, {}, {}};
    for (size_t seq = 0; seq < lens.size(); seq++) {
        Numbers numbers{seq * 977 + lens[seq] * 31 + shape.head_dim};
        std::vector<float> kv(static_cast<size_t>(lens[seq]) * shape.num_kv_heads * 2 * shape.head_dim);
        for (float& x : kv) {
            x = numbers.next();
            if (dtype == kPagedKvBf16) x = __bfloat162float(__float2bfloat16(x));
        }
        std::vector<float> query(shape.num_heads * shape.head_dim);
        for (float& x : query) x = numbers.next();
        contexts.kv.push_back(kv);
        contexts.query.push_back(query);
    }
    return contexts;
}

// Lays the contexts out in pages and runs the kernel. `stride` decides which pages they get; all others hold NaNs.
std::vector<float> run(const Contexts& contexts, int dtype, unsigned stride) {
    const Shape& s = contexts.shape;
    const unsigned num_seqs = static_cast<unsigned>(contexts.lens.size());
    unsigned max_pages = 1, total = 0;
    for (unsigned len : contexts.lens) {
        const unsigned pages = (len + s.page_size - 1) / s.page_size;
        max_pages = std::max(max_pages, pages);
        total += pages;
    }
    const unsigned num_pages = total * 2 + 17;  // more than needed; 17 keeps most strides coprime to it
    const size_t page_elements = size_t{2} * s.num_kv_heads * s.page_size * s.head_dim;
    const size_t width = dtype == kPagedKvBf16 ? 2 : 4;
    std::vector<unsigned char> region(num_pages * page_elements * width, 0xff);
    std::vector<bool> taken(num_pages);
    std::vector<uint32_t> table(num_seqs * max_pages, 0xffffffffu);
    unsigned next = stride % num_pages;
    for (unsigned seq = 0; seq < num_seqs; seq++) {
        for (unsigned position = 0; position < contexts.lens[seq]; position++) {
            const unsigned slot = position % s.page_size;
            uint32_t& page = table[seq * max_pages + position / s.page_size];
            if (slot == 0) {
                while (taken[next]) next = (next + 1) % num_pages;
                page = next;
                taken[next] = true;
                next = (next + stride) % num_pages;
            }
            for (unsigned which = 0; which < 2; which++)
                for (unsigned head = 0; head < s.num_kv_heads; head++)
                    for (unsigned d = 0; d < s.head_dim; d++) {
                        const size_t element =
                            (((size_t{page} * 2 + which) * s.num_kv_heads + head) * s.page_size + slot) * s.head_dim + d;
                        const float x = contexts.at(seq, position, head, which, d);
                        if (dtype == kPagedKvBf16) {
                            const __nv_bfloat16 narrow = __float2bfloat16(x);
                            std::memcpy(&region[element * 2], &narrow, 2);
                        } else {
                            std::memcpy(&region[element * 4], &x, 4);
                        }
                    }
        }
    }
    std::vector<float> query, out(size_t{num_seqs} * s.num_heads * s.head_dim, NAN);
    for (const auto& one : contexts.query) query.insert(query.end(), one.begin(), one.end());
    std::vector<uint32_t> lens(contexts.lens.begin(), contexts.lens.end());
    const PagedDecodeParams params{out.data(), query.data(), region.data(), table.data(), lens.data(), num_seqs,
                                   s.num_heads, s.num_kv_heads, s.head_dim, s.page_size, max_pages,
                                   1.0f / std::sqrt(static_cast<float>(s.head_dim))};
    const int status = paged_decode_attention(&params, dtype, nullptr);
    CHECK(status == kPagedDecodeOk, "status %d", status);
    return out;
}

// The largest relative error of any head of any sequence, against double precision.
double error(const Contexts& contexts, const std::vector<float>& out) {
    const Shape& s = contexts.shape;
    double worst = 0;
    for (unsigned seq = 0; seq < contexts.lens.size(); seq++)
        for (unsigned head = 0; head < s.num_heads; head++) {
            const unsigned kv_head = head / (s.num_heads / s.num_kv_heads), len = contexts.lens[seq];
            std::vector<double> weights(len);
            double maximum = -INFINITY, sum = 0;
            for (unsigned t = 0; t < len; t++) {
                for (unsigned d = 0; d < s.head_dim; d++)
                    weights[t] += double(contexts.query[seq][head * s.head_dim + d]) * contexts.at(seq, t, kv_head, 0, d);
                weights[t] /= std::sqrt(double(s.head_dim));
                maximum = std::max(maximum, weights[t]);
            }
            for (double& weight : weights) sum += weight = std::exp(weight - maximum);
            double difference = 0, norm = 0;
            for (unsigned d = 0; d < s.head_dim; d++) {
                double expected = 0;
                for (unsigned t = 0; t < len; t++) expected += weights[t] / sum * contexts.at(seq, t, kv_head, 1, d);
                const double got = out[(size_t{seq} * s.num_heads + head) * s.head_dim + d];
                difference += (got - expected) * (got - expected);
                norm += expected * expected;
            }
            const double relative = norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
            if (!(relative <= worst)) worst = relative;  // also when it is not a number
        }
    return worst;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

int main() {
    using cuda_on_cpu::Order;
    const Shape shapes[] = {{4, 4, 64, 16}, {8, 2, 128, 16}, {6, 1, 80, 16}, {2, 2, 256, 4}, {3, 3, 8, 64}};
    double worst = 0;
    int runs = 0;
    for (const Shape& shape : shapes)
        for (int dtype : {kPagedKvF32, kPagedKvBf16}) {
            if (failures > 9) return 1;
            const unsigned page = shape.page_size;
            // Nothing, one token, and both sides of page edges.
            const std::vector<unsigned> lens = {0, 1, page - 1, page, page + 1, 2 * page, 5 * page + 3};
            const Contexts contexts = make(shape, lens, dtype);
            cuda_on_cpu::thread_order = Order::kForward;
            const std::vector<float> out = run(contexts, dtype, 1);
            const double relative = error(contexts, out);
            CHECK(relative < 2e-6, "head_dim %u, page %u, dtype %d: relative error %g", shape.head_dim, page, dtype, relative);
            worst = std::max(worst, relative);
            CHECK(same_bits(out, run(contexts, dtype, 7)), "the result depends on which pages a context has");
            for (Order order : {Order::kBackward, Order::kShuffled}) {
                cuda_on_cpu::thread_order = order;
                CHECK(same_bits(out, run(contexts, dtype, 1)), "the result depends on the order of threads");
            }
            cuda_on_cpu::thread_order = Order::kForward;
            const size_t row = size_t{shape.num_heads} * shape.head_dim;
            for (size_t seq = 0; seq < lens.size(); seq++) {
                Contexts alone{shape, {lens[seq]}, {contexts.kv[seq]}, {contexts.query[seq]}};
                const std::vector<float> expected(out.begin() + seq * row, out.begin() + (seq + 1) * row);
                CHECK(same_bits(run(alone, dtype, 3), expected), "the result of %u tokens depends on the batch", lens[seq]);
                runs++;
            }
            runs += 4;
        }

    PagedDecodeParams bad{};
    CHECK(paged_decode_attention(&bad, kPagedKvF32, nullptr) == kPagedDecodeBadShape, "no sequences");
    bad = {nullptr, nullptr, nullptr, nullptr, nullptr, 1, 6, 4, 64, 16, 1, 1.0f};
    CHECK(paged_decode_attention(&bad, kPagedKvF32, nullptr) == kPagedDecodeBadShape, "6 heads over 4");
    bad.num_kv_heads = 3;
    bad.head_dim = 257;
    CHECK(paged_decode_attention(&bad, kPagedKvF32, nullptr) == kPagedDecodeBadShape, "head_dim 257");
    bad.head_dim = 64;
    CHECK(paged_decode_attention(&bad, 2, nullptr) == kPagedDecodeBadDtype, "dtype 2");

    std::printf("%d runs, worst relative error %.2g, %d failures\n", runs, worst, failures);
    return failures == 0 ? 0 : 1;
}
