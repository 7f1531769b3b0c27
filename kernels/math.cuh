// Arithmetic and reductions shared by several operators.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LN_2 = 0.69314718055994530942f;

// Returns 2^x in one instruction. Results below the smallest normal number are 0.
__device__ __forceinline__ float exp2_approx(float x) {
#ifdef CUDA_ON_HOST
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// Returns 1 / (1 + exp(-x)).
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + exp2_approx(-x * LOG2_E)); }

// Returns silu(gate) * up.
__device__ __forceinline__ float swiglu(float gate, float up) { return gate * sigmoid(gate) * up; }

// Numbers as integers in the same order. They must not be NaN.
__device__ __forceinline__ uint32_t to_key(float x) {
    // -0 equals 0.
    const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Returns to each thread the sum over the lanes in a warp.
template <typename X> __device__ __forceinline__ X warp_sum(X x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Returns to each thread the sum over the threads in a block, in a deterministic order. The block
// has at most THREADS threads, in `warps` warps.
template <int THREADS> __device__ __forceinline__ double block_sum(double x, int warps = THREADS / 32) {
    __shared__ double sums[THREADS / 32];
    x = warp_sum(x);
    // All threads have read the previous sum.
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = sums[0];
#pragma unroll
    for (int i = 1; i < warps; i++) x += sums[i];
    return x;
}

// The launch's dynamic shared memory, as an array `name` aligned to `bytes`.
#ifdef CUDA_ON_HOST
#define DYNAMIC_SHARED(type, name, bytes) type *name = reinterpret_cast<type *>(cuda_host::dynamic_shared())
#else
#define DYNAMIC_SHARED(type, name, bytes)                                                                              \
    extern __shared__ __align__(bytes) uint4 dynamic_shared[];                                                         \
    type *name = reinterpret_cast<type *>(dynamic_shared)
#endif
