// Replaces NVIDIA's header of this name: the type, its conversions and its arithmetic.
#pragma once

#include "cuda_arithmetic.h"

static inline float cuda_host_from_f16(uint16_t bits) {
    int exponent = bits >> 10 & 31;
    float fraction = (float)(bits & 1023);
    float size = exponent == 31  ? (fraction == 0.0f ? INFINITY : NAN)
                 : exponent == 0 ? fraction * 0x1p-24f
                                 : cuda_host::from_bits<float>((uint32_t)(exponent + 112) << 23 | (uint32_t)(bits & 1023) << 13);
    return bits & 0x8000 ? -size : size;
}

// Rounds to the nearest, ties to even. Beyond the largest number the result is infinity.
static inline uint16_t cuda_host_to_f16(float x) {
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    if (isnan(x)) return 0x7fff;
    float size = fabsf(x);
    if (size >= 65520.0f) return (uint16_t)(sign | 0x7c00);
    // A subnormal number is a multiple of 2^-24.
    if (size < 0x1p-14f) return (uint16_t)(sign | (uint16_t)nearbyintf(size * 0x1p24f));
    uint32_t number = (uint32_t)cuda_host::to_bits(size);
    return (uint16_t)(sign | (number - (112u << 23) + 0xfff + (number >> 13 & 1)) >> 13);
}

CUDA_HOST_HALF(__half, cuda_host_from_f16, cuda_host_to_f16)

static inline float __half2float(__half x) { return x; }
static inline __half __float2half(float x) { return __half(x); }
static inline __half __float2half_rn(float x) { return __half(x); }
static inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
static inline float2 __half22float2(__half2 x) { return make_float2(x.x, x.y); }
static inline unsigned short __half_as_ushort(__half x) { return x.bits; }
static inline __half __ushort_as_half(unsigned short bits) { return __half::from_bits(bits); }
