// Elementwise operators on tensors with equal shapes.
#pragma once

#include "element.cuh"

constexpr int THREADS = 256;
// Packs per thread, as far apart as there are threads.
constexpr int IN_FLIGHT = 2;

// Calls `pack(first, count)` for the packs of this block from element `first`, if all pointers are
// aligned, and `one(i)` for its other elements.
template <typename T, typename Pack, typename One>
__device__ __forceinline__ void for_elements(uint64_t n, bool aligned, Pack pack, One one) {
    const uint64_t per_block = (uint64_t)THREADS * IN_FLIGHT * PACK<T>;
    const uint64_t first = blockIdx.x * per_block;
    const uint64_t last = first + per_block < n ? first + per_block : n;
    uint64_t done = first;
    if (aligned) {
        const int packs = (int)((last - first) / PACK<T>);
        pack(first, packs);
        done = first + (uint64_t)packs * PACK<T>;
    }
    for (uint64_t i = done + threadIdx.x; i < last; i += THREADS) one(i);
}

// Writes y[i] = of(a[i], b[i]).
template <typename T, typename Of>
__device__ __forceinline__ void combine(const T *a, const T *b, T *y, uint64_t n, Of of) {
    auto packs = [&](uint64_t first, int count) {
        const uint4 *from_a = reinterpret_cast<const uint4 *>(a + first), *from_b = reinterpret_cast<const uint4 *>(b + first);
        uint4 *to = reinterpret_cast<uint4 *>(y + first);
        uint4 left[IN_FLIGHT], right[IN_FLIGHT];
        // All loads start before the first result.
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const int index = (int)threadIdx.x + i * THREADS;
            if (index < count) {
                left[i] = load_streaming(from_a + index);
                right[i] = load_streaming(from_b + index);
            }
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const int index = (int)threadIdx.x + i * THREADS;
            if (index >= count) break;
            float x[PACK<T>], z[PACK<T>];
            unpack<T>(left[i], x);
            unpack<T>(right[i], z);
#pragma unroll
            for (int k = 0; k < PACK<T>; k++) x[k] = of(x[k], z[k]);
            to[index] = pack<T>(x);
        }
    };
    for_elements<T>(n, is_aligned(a) && is_aligned(b) && is_aligned(y), packs,
                    [&](uint64_t i) { y[i] = from_float<T>(of(to_float(a[i]), to_float(b[i]))); });
}
