// The sum of two tensors, element by element.

#include "element.cuh"

constexpr int THREADS = 256;
// Packs of a thread, at a distance of the number of threads.
constexpr int IN_FLIGHT = 2;

template <typename T> __device__ __forceinline__ void add(const T *a, const T *b, T *sum, uint64_t n) {
    constexpr uint64_t PER_BLOCK = (uint64_t)THREADS * IN_FLIGHT * PACK<T>;
    const uint64_t first = blockIdx.x * PER_BLOCK, last = first + PER_BLOCK < n ? first + PER_BLOCK : n;
    uint64_t done = first;
    if (is_aligned(a) && is_aligned(b) && is_aligned(sum)) {
        const int packs = (int)((last - first) / PACK<T>);
        uint4 left[IN_FLIGHT], right[IN_FLIGHT];
        // All loads start before the first sum.
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const int index = (int)threadIdx.x + i * THREADS;
            if (index >= packs) break;
            left[i] = reinterpret_cast<const uint4 *>(a + first)[index];
            right[i] = reinterpret_cast<const uint4 *>(b + first)[index];
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const int index = (int)threadIdx.x + i * THREADS;
            if (index >= packs) break;
            float x[PACK<T>], y[PACK<T>];
            unpack<T>(left[i], x);
            unpack<T>(right[i], y);
#pragma unroll
            for (int k = 0; k < PACK<T>; k++) x[k] += y[k];
            reinterpret_cast<uint4 *>(sum + first)[index] = pack<T>(x);
        }
        done = first + (uint64_t)packs * PACK<T>;
    }
    for (uint64_t i = done + threadIdx.x; i < last; i += THREADS) sum[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
}

#define ADD(T, name)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        add_forward_##name(const T *a, const T *b, T *sum, uint64_t n) {                                               \
        add(a, b, sum, n);                                                                                             \
    }

ADD(float, f32)
ADD(__nv_bfloat16, bf16)
ADD(__half, f16)
