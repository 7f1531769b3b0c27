// Replaces NVIDIA's header of this name: the type, its conversions and its arithmetic.
#pragma once

#include "cuda_arithmetic.h"

static inline float cuda_host_from_bf16(uint16_t bits) { return __uint_as_float((unsigned)bits << 16); }

// Rounds to the nearest, ties to even.
static inline uint16_t cuda_host_to_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    if (isnan(x)) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

CUDA_HOST_HALF(__nv_bfloat16, cuda_host_from_bf16, cuda_host_to_bf16)

static inline float __bfloat162float(__nv_bfloat16 x) { return x; }
static inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
