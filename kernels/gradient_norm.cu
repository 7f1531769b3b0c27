// Sums of squares in f64, and scaling in place.

#include "element.cuh"
#include "math.cuh"

constexpr int THREADS = 256;
// Partial sums of one gradient, one for each block. A block with a thread for each part adds them.
constexpr int PARTS = THREADS;

// Writes parts[blockIdx.x], for at most PARTS blocks.
template <typename T> __device__ __forceinline__ void squares(const T *gradient, double *parts, uint64_t n) {
    double sum = 0.0;
    const uint64_t thread = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    const uint64_t threads = (uint64_t)gridDim.x * THREADS;
    uint64_t done = 0;
    if (is_aligned(gradient)) {
        const uint64_t packs = n / PACK<T>;
        for (uint64_t i = thread; i < packs; i += threads) {
            float values[PACK<T>];
            unpack<T>(reinterpret_cast<const uint4 *>(gradient)[i], values);
#pragma unroll
            for (int k = 0; k < PACK<T>; k++) sum += (double)values[k] * (double)values[k];
        }
        done = packs * PACK<T>;
    }
    for (uint64_t i = done + thread; i < n; i += threads) {
        const double x = (double)to_float(gradient[i]);
        sum += x * x;
    }
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// Writes sums[blockIdx.x], the sum of the PARTS parts of a gradient.
extern "C" __global__ void __launch_bounds__(THREADS) gradient_sum_parts(const double *parts, double *sums) {
    const double sum = block_sum<THREADS>(parts[(uint64_t)blockIdx.x * PARTS + threadIdx.x]);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <typename T> __device__ __forceinline__ void scale(T *gradient, uint64_t n, float factor) {
    const uint64_t first = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * PACK<T>;
    if (first >= n) return;
    if (first + PACK<T> <= n && is_aligned(gradient)) {
        uint4 *at = reinterpret_cast<uint4 *>(gradient + first);
        float values[PACK<T>];
        unpack<T>(*at, values);
#pragma unroll
        for (int k = 0; k < PACK<T>; k++) values[k] *= factor;
        *at = pack<T>(values);
    } else {
        const uint64_t last = first + PACK<T> < n ? first + PACK<T> : n;
        for (uint64_t i = first; i < last; i++) gradient[i] = from_float<T>(to_float(gradient[i]) * factor);
    }
}

#define GRADIENT_NORM(T, name)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        gradient_squares_##name(const T *gradient, double *parts, uint64_t n) {                                       \
        squares(gradient, parts, n);                                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        gradient_scale_##name(T *gradient, uint64_t n, float factor) {                                                \
        scale(gradient, n, factor);                                                                                    \
    }

GRADIENT_NORM(float, f32)
GRADIENT_NORM(__nv_bfloat16, bf16)
GRADIENT_NORM(__half, f16)
