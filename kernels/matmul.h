// Products of activations with weights: what the kernels share.
//
//   out[row][n] = sum_k x[row][k] * weight[n][k]
//
// Every element is added up over k in one order, by one thread or in one accumulator: no split of k. So a row does not depend
// on the batch, nor on which of the kernels of one kind took it. What a library's choice of algorithm by shape would cost is that.
#pragma once

#include "numbers.h"

struct MatmulParams {
    void* out;           // [num_rows, out_features], of the type of x, or f32 if out_is_f32
    const void* x;       // [num_rows, in_features]
    const void* weight;  // [out_features, in_features]
    uint32_t num_rows;
    uint32_t out_features;
    uint32_t in_features;
    uint32_t out_is_f32;
};
