// Replaces NVIDIA's header of this name: the type and its conversions.
#pragma once

#include "cuda_host.h"

struct __nv_bfloat16 { uint16_t bits; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };

static inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }

// Rounds to the nearest, ties to even.
static inline __nv_bfloat16 __float2bfloat16(float x) {
    unsigned bits = __float_as_uint(x);
    if (isnan(x)) return {0x7fff};
    return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __float2bfloat16(x); }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16(x), __float2bfloat16(y)}; }
