// Numbers as kernels read, compute and write them: stored in f32, f16, bf16 or e4m3, computed in f32.
#pragma once

#include "portable.h"

constexpr unsigned kLanes = 32;

// FP8 with four bits of exponent and three of mantissa, as OCP's E4M3: no infinities, 0x7f and 0xff are NaN, the largest is 448.
struct e4m3 {
    uint8_t bits;
};

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float widen(e4m3 value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x80u) << 24, size = value.bits & 0x7fu;
    if (size == 0x7fu) return __uint_as_float(0x7fffffffu);
    // Below 2^-6 the steps are 2^-9.
    if (size < 8) return __uint_as_float(__float_as_uint(static_cast<float>(size) * 0x1p-9f) | sign);
    return __uint_as_float(sign | ((size << 20) + 0x3c000000u));
}

// Rounds to nearest, halves to even. E4M3 saturates: an outlier must not become a NaN.
template <class T>
__device__ T narrow(float value);
template <>
__device__ __forceinline__ float narrow<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float value) {
    return __float2half(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
    return __float2bfloat16(value);
}
template <>
__device__ __forceinline__ e4m3 narrow<e4m3>(float value) {
    const uint32_t bits = __float_as_uint(value), size = bits & 0x7fffffffu;
    const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
    if (size > 0x7f800000u) return {0x7f};
    if (size >= 0x43e00000u) return {static_cast<uint8_t>(sign | 0x7eu)};
    // Below 2^-6 the steps are 2^-9: adding 2^14 puts them into the lowest bits.
    if (size < 0x3c800000u) {
        const uint32_t stepped = __float_as_uint(__uint_as_float(size) + 16384.0f) - 0x46800000u;
        return {static_cast<uint8_t>(sign | stepped)};
    }
    const uint32_t rounded = (size + 0x7ffffu + (size >> 20 & 1u) - 0x3c000000u) >> 20;
    return {static_cast<uint8_t>(sign | (rounded > 0x7eu ? 0x7eu : rounded))};
}

// Eight numbers in a row, so that a thread moves 16 bytes of a 16-bit type at once. Addresses are multiples of its alignment.
template <class T>
struct alignas(sizeof(T) >= 2 ? 16 : 8) Eight {
    T at[8];
};

template <class T>
__device__ __forceinline__ void load_eight(const T* from, float (&to)[8]) {
    const Eight<T> eight = *reinterpret_cast<const Eight<T>*>(from);
    for (unsigned i = 0; i < 8; i++) to[i] = widen(eight.at[i]);
}

template <class T>
__device__ __forceinline__ void store_eight(T* to, const float (&from)[8]) {
    Eight<T> eight;
    for (unsigned i = 0; i < 8; i++) eight.at[i] = narrow<T>(from[i]);
    *reinterpret_cast<Eight<T>*>(to) = eight;
}

// e^x to about one unit in the last place for x <= 88; 0 below -87.3. In plain arithmetic, so that the bits are those of every
// machine: Taylor's series to degree 7 over [-ln 2 / 2, ln 2 / 2], whose remainder is below 2^-26.
__device__ __forceinline__ float exponential(float x) {
    if (x < -87.3f) return 0.0f;
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the lowest bits.
    const float shifted = fmaf(x, 1.44269504f, 12582912.0f);
    const float n = shifted - 12582912.0f;
    float r = fmaf(n, -0.693359375f, x);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.0f / 5040;
    p = fmaf(p, r, 1.0f / 720);
    p = fmaf(p, r, 1.0f / 120);
    p = fmaf(p, r, 1.0f / 24);
    p = fmaf(p, r, 1.0f / 6);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    const float power = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
    return p * power;  // a NaN stays one, by p
}

// The sum over the lanes of a warp, known to each: as a tree, so that the order depends on nothing.
__device__ __forceinline__ float warp_sum(float value) {
    for (unsigned step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, static_cast<int>(step));
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
    for (unsigned step = kLanes / 2; step > 0; step /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, static_cast<int>(step)));
    }
    return value;
}
