// Sums of squares in f64, and in-place scaling, for all gradients.

#include "math.cuh"
#include "tensor_list.cuh"

constexpr int THREADS = 256;
// Packs that a thread loads at a time. With more than 4 blocks per multiprocessor, the compiler
// would load them one at a time to save registers.
constexpr int IN_FLIGHT = 8;

// A gradient in the list. For the squares it has at most THREADS blocks. Each writes a partial sum,
// and a block with a thread per part adds them.
struct Gradient {
    void *gradient;
    uint64_t n;
    uint32_t first_block, blocks;
    uint32_t dtype, unused;
};
static_assert(sizeof(Gradient) == 32, "a row has 4 words");

template <typename T> __device__ __forceinline__ double squares(const T *gradient, uint64_t n, uint64_t thread, uint64_t threads) {
    double sum = 0.0;
    uint64_t done = 0;
    if (is_aligned(gradient)) {
        const uint4 *from = reinterpret_cast<const uint4 *>(gradient);
        const uint64_t packs = n / PACK<T>;
        const auto add = [&](uint4 pack) {
            float values[PACK<T>];
            unpack<T>(pack, values);
#pragma unroll
            for (int k = 0; k < PACK<T>; k++) sum += (double)values[k] * (double)values[k];
        };
        uint64_t i = thread;
        for (; i + (IN_FLIGHT - 1) * threads < packs; i += IN_FLIGHT * threads) {
            uint4 loaded[IN_FLIGHT];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++) loaded[k] = load_streaming(from + i + k * threads);
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++) add(loaded[k]);
        }
        for (; i < packs; i += threads) add(load_streaming(from + i));
        done = packs * PACK<T>;
    }
    for (uint64_t i = done + thread; i < n; i += threads) {
        const double x = (double)to_float(gradient[i]);
        sum += x * x;
    }
    return sum;
}

// Writes parts[blockIdx.x], a gradient's partial sum of squares.
extern "C" __global__ void __launch_bounds__(THREADS, 4) gradient_squares(const uint64_t *list, uint32_t count, double *parts) {
    const Gradient row = row_of_block<Gradient>(list, count);
    const uint64_t thread = (uint64_t)(blockIdx.x - row.first_block) * THREADS + threadIdx.x;
    double sum = 0.0;
    with_dtype(row.dtype, [&](auto *of) {
        sum = squares(static_cast<decltype(of)>(row.gradient), row.n, thread, (uint64_t)row.blocks * THREADS);
    });
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// Writes sums[blockIdx.x], the sum over a gradient's parts.
extern "C" __global__ void __launch_bounds__(THREADS) gradient_sum_parts(const uint64_t *list, const double *parts, double *sums) {
    const Gradient row = reinterpret_cast<const Gradient *>(list)[blockIdx.x];
    const double sum = block_sum<THREADS>(threadIdx.x < row.blocks ? parts[row.first_block + threadIdx.x] : 0.0);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <typename T> __device__ __forceinline__ void scale(T *gradient, uint64_t n, uint64_t thread, float factor) {
    const uint64_t first = thread * PACK<T>;
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

extern "C" __global__ void __launch_bounds__(THREADS) gradient_scale(const uint64_t *list, uint32_t count, float factor) {
    const Gradient row = row_of_block<Gradient>(list, count);
    const uint64_t thread = (uint64_t)(blockIdx.x - row.first_block) * THREADS + threadIdx.x;
    with_dtype(row.dtype, [&](auto *of) { scale(static_cast<decltype(of)>(row.gradient), row.n, thread, factor); });
}
