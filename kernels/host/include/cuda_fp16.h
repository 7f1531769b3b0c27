// Replaces NVIDIA's header of this name: the type and its conversions.
#pragma once

#include "cuda_host.h"

struct __half { uint16_t bits; };
struct alignas(4) __half2 { __half x, y; };

static inline float __half2float(__half x) {
    int exponent = x.bits >> 10 & 31;
    float fraction = (float)(x.bits & 1023);
    float size = exponent == 31  ? (fraction == 0.0f ? INFINITY : NAN)
                 : exponent == 0 ? ldexpf(fraction, -24)
                                 : ldexpf(1024.0f + fraction, exponent - 25);
    return x.bits & 0x8000 ? -size : size;
}

// Rounds to the nearest, ties to even. Beyond the largest number the result is infinity.
static inline __half __float2half(float x) {
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    if (isnan(x)) return {0x7fff};
    float size = fabsf(x);
    if (size == 0.0f) return {sign};
    if (size >= 65520.0f) return {(uint16_t)(sign | 0x7c00)};
    int exponent = 0;
    frexpf(size, &exponent);
    int step = (exponent < -13 ? -13 : exponent) - 11;  // of the last bit, a power of two
    uint32_t steps = (uint32_t)nearbyintf(ldexpf(size, -step));
    // A subnormal number is a multiple of the step. Above, the exponent adds 1024 for each
    // doubling.
    return {(uint16_t)(sign | (steps + ((uint32_t)(step + 24) << 10)))};
}
static inline __half __float2half_rn(float x) { return __float2half(x); }
static inline __half2 __floats2half2_rn(float x, float y) { return {__float2half(x), __float2half(y)}; }
static inline float2 __half22float2(__half2 x) { return make_float2(__half2float(x.x), __half2float(x.y)); }
