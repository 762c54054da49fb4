// Copies pages out of the KV region into one run, and back.
//
//   gather   run[layer][i] = region[first_layer + layer][pages[i]]
//   scatter  region[first_layer + layer][pages[i]] = run[layer][i]
//
// grid    (num_listed, num_layers, 1): one block for one page of one layer
// block   256 threads, 16 bytes at a time
// shared  none
// layout  region is [layer][page][page_bytes] (README.md), run is [num_layers][num_listed][page_bytes]; both 16-byte aligned
// bounds  page_bytes is a multiple of 16; pages are below num_pages, and scatter's differ from each other; num_layers <= 65,535
//
// For transports that want one run, or whose peer has other pages. No element is looked at, so there is one for all types.

#include "numbers.h"

namespace {

constexpr unsigned kThreads = 256;

struct alignas(16) Vector {
    uint32_t words[4];
};

struct KvPagesParams {
    void* region;           // [layers of the model, num_pages, page_bytes]
    void* run;              // [num_layers, num_listed, page_bytes]
    const uint32_t* pages;  // [num_listed]
    uint32_t num_listed;
    uint32_t num_pages;
    uint32_t page_bytes;
    uint32_t first_layer;
};

template <bool kGather>
__device__ __forceinline__ void copy_page(const KvPagesParams& p) {
    const unsigned listed = blockIdx.x, layer = blockIdx.y;
    const size_t vectors = p.page_bytes / sizeof(Vector);
    const size_t page = static_cast<size_t>(p.first_layer + layer) * p.num_pages + p.pages[listed];
    Vector* in_region = static_cast<Vector*>(p.region) + page * vectors;
    Vector* in_run = static_cast<Vector*>(p.run) + (static_cast<size_t>(layer) * p.num_listed + listed) * vectors;
    for (size_t at = threadIdx.x; at < vectors; at += kThreads) {
        if (kGather) {
            in_run[at] = in_region[at];
        } else {
            in_region[at] = in_run[at];
        }
    }
}

}  // namespace

KERNEL(kv_pages_gather, kThreads, KvPagesParams, copy_page<true>)
KERNEL(kv_pages_scatter, kThreads, KvPagesParams, copy_page<false>)
