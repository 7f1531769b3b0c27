// Replaces NVIDIA's header of this name, for kernels of Candle that mention the type. No operation
// of this project uses it.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

struct __half_raw { unsigned short x; };
enum __nv_fp8_interpretation_t { __NV_E4M3 };

static inline float __half2float(__half_raw x) { return __half::from_bits(x.x); }

static inline __half_raw __nv_cvt_fp8_to_halfraw(unsigned char, __nv_fp8_interpretation_t) {
    cuda_host::fail("8-bit floats are not emulated");
}

struct __nv_fp8_e4m3 {
    unsigned char __x;
    __nv_fp8_e4m3() = default;
    template <class T>
    explicit __nv_fp8_e4m3(T) { cuda_host::fail("8-bit floats are not emulated"); }
    explicit operator float() const { cuda_host::fail("8-bit floats are not emulated"); }
};
