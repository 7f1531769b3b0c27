// y = x / sqrt(mean(x^2) + epsilon) * weight over rows [n, width], forward and backward. The factor
// is offset + weight, where the offset is 0 or 1. blockDim.x
// threads share a row: 8, 16 or a multiple of 32. A block has blockDim.y rows. Blocks loop over the
// rows with a grid stride. A thread keeps its part of a row in registers between its two passes.

#include "element.cuh"
#include "math.cuh"
#include "norm_rope.cuh"

#include <type_traits>

// Elements that a thread accesses at a time: a pack if all pointers and the width are aligned, else
// a single element.
template <bool packed, typename T> using Elements = std::conditional_t<packed, uint4, T>;

template <bool packed, typename T> __device__ __forceinline__ Elements<packed, T> load_elements(const T *from) {
    return *reinterpret_cast<const Elements<packed, T> *>(from);
}

template <bool packed, typename T>
__device__ __forceinline__ void to_floats(Elements<packed, T> elements, float (&values)[packed ? PACK<T> : 1]) {
    if constexpr (packed) unpack<T>(elements, values);
    else values[0] = to_float(elements);
}

template <bool packed, typename T>
__device__ __forceinline__ void load(const T *from, float (&values)[packed ? PACK<T> : 1]) {
    to_floats<packed, T>(load_elements<packed>(from), values);
}

template <bool packed, typename T>
__device__ __forceinline__ void store(T *to, const float (&values)[packed ? PACK<T> : 1]) {
    if constexpr (packed) *reinterpret_cast<uint4 *>(to) = pack<T>(values);
    else *to = from_float<T>(values[0]);
}

// Returns the sums over a row's threads to each of them. `scratch` has two numbers per warp.
__device__ __forceinline__ float2 row_sums(float a, float b, float2 *scratch) {
    for (int offset = min((int)blockDim.x, 32) / 2; offset > 0; offset /= 2) {
        a += __shfl_xor_sync(0xffffffffu, a, offset);
        b += __shfl_xor_sync(0xffffffffu, b, offset);
    }
    const int warps = (int)blockDim.x / 32;
    if (warps <= 1) return make_float2(a, b);
    float2 *row = scratch + (int)threadIdx.y * warps;
    // All threads have read the previous values.
    __syncthreads();
    if (threadIdx.x % 32 == 0) row[threadIdx.x / 32] = make_float2(a, b);
    __syncthreads();
    float2 sum = row[0];
    for (int i = 1; i < warps; i++) {
        sum.x += row[i].x;
        sum.y += row[i].y;
    }
    return sum;
}

constexpr int THREADS = 256;

// Elements in an aligned row that a thread keeps in registers between its two passes over the row.
constexpr int KEPT = 32;

// If it `adds`, normalizes sum = x + change, rounded to T, and writes it too.
template <bool packed, bool adds, typename T>
__device__ __forceinline__ void forward(const T *x, const T *change, const T *weight, T *sum, T *y, uint64_t n, int width,
                                        float epsilon, float offset) {
    constexpr int count = packed ? PACK<T> : 1, rounds = packed ? KEPT / count : 0;
    __shared__ float2 scratch[THREADS / 32];
    const uint64_t stride = (uint64_t)gridDim.x * blockDim.y;
    const int first_column = (int)threadIdx.x * count, step = (int)blockDim.x * count;
    // The same number of iterations in each thread, because the sum has a barrier.
    for (uint64_t first = (uint64_t)blockIdx.x * blockDim.y; first < n; first += stride) {
        const uint64_t row = first + threadIdx.y;
        const bool is_row = row < n;
        const uint64_t start = row * (uint64_t)width;
        float squares = 0.0f;
        const auto read = [&](int column, float(&values)[count]) {
            load<packed, T>(x + start + column, values);
            if constexpr (adds) {
                float changes[count];
                load<packed, T>(change + start + column, changes);
#pragma unroll
                for (int i = 0; i < count; i++) values[i] = to_float(from_float<T>(values[i] + changes[i]));
                store<packed, T>(sum + start + column, values);
            }
#pragma unroll
            for (int i = 0; i < count; i++) squares += values[i] * values[i];
        };
        float kept[rounds + 1][count];
        if (is_row) {
#pragma unroll
            for (int round = 0; round < rounds; round++) {
                const int column = first_column + round * step;
                if (column < width) read(column, kept[round]);
            }
            for (int column = first_column + rounds * step; column < width; column += step) {
                float values[count];
                read(column, values);
            }
        }
        const float scale = norm_scale(row_sums(squares, 0.0f, scratch).x, width, epsilon);
        if (!is_row) continue;
        const auto write = [&](int column, float(&values)[count]) {
            float weights[count];
            load<packed, T>(weight + column, weights);
#pragma unroll
            for (int i = 0; i < count; i++) values[i] = weighted_norm<T>(values[i], scale, weights[i], offset);
            store<packed, T>(y + start + column, values);
        };
#pragma unroll
        for (int round = 0; round < rounds; round++) {
            const int column = first_column + round * step;
            if (column < width) write(column, kept[round]);
        }
        // A wide row: the second read comes from the caches.
        for (int column = first_column + rounds * step; column < width; column += step) {
            float values[count];
            load<packed, T>((adds ? sum : x) + start + column, values);
            write(column, values);
        }
    }
}

// Computes dx for the factor offset + weight, and the weight gradient summed over the rows in each
// block: `partial` [gridDim.x, width]. `weight_sums` is shared memory with blockDim.y * width
// floats.
template <bool packed, typename T>
__device__ __forceinline__ void backward(const T *x, const T *weight, const T *gradient, T *dx, float *partial, uint64_t n,
                                         int width, float epsilon, float offset, float *weight_sums) {
    constexpr int count = packed ? PACK<T> : 1, rounds = packed ? KEPT / count : 0;
    __shared__ float2 scratch[THREADS / 32];
    const int first_column = (int)threadIdx.x * count, step = (int)blockDim.x * count;
    // Element i in pack p is at i * packs + p, so that a warp accesses adjacent memory.
    const int packs = width / count;
    float *sums = weight_sums + (int)threadIdx.y * width;
    for (int column = first_column; column < width; column += step)
#pragma unroll
        for (int i = 0; i < count; i++) sums[i * packs + column / count] = 0.0f;
    const uint64_t stride = (uint64_t)gridDim.x * blockDim.y;
    for (uint64_t first = (uint64_t)blockIdx.x * blockDim.y; first < n; first += stride) {
        const uint64_t row = first + threadIdx.y;
        const bool is_row = row < n;
        const T *x_row = x + row * (uint64_t)width, *gradient_row = gradient + row * (uint64_t)width;
        Elements<packed, T> kept_x[rounds + 1], kept_gradient[rounds + 1];
        const auto for_row = [&](auto each) {
#pragma unroll
            for (int round = 0; round < rounds; round++) {
                const int column = first_column + round * step;
                if (column < width) each(column, kept_x[round], kept_gradient[round]);
            }
            // A wide row: the second read comes from the caches.
            for (int column = first_column + rounds * step; column < width; column += step)
                each(column, load_elements<packed>(x_row + column), load_elements<packed>(gradient_row + column));
        };
        float squares = 0.0f, products = 0.0f;
        if (is_row) {
            // All loads start before the first sum.
#pragma unroll
            for (int round = 0; round < rounds; round++) {
                const int column = first_column + round * step;
                if (column >= width) continue;
                kept_x[round] = load_elements<packed>(x_row + column);
                kept_gradient[round] = load_elements<packed>(gradient_row + column);
            }
            for_row([&](int column, Elements<packed, T> of_x, Elements<packed, T> of_gradient) {
                float values[count], gradients[count], weights[count];
                to_floats<packed, T>(of_x, values);
                to_floats<packed, T>(of_gradient, gradients);
                load<packed, T>(weight + column, weights);
#pragma unroll
                for (int i = 0; i < count; i++) {
                    squares += values[i] * values[i];
                    products += gradients[i] * (offset + weights[i]) * values[i];
                }
            });
        }
        const float2 both = row_sums(squares, products, scratch);
        const NormGradient norm(both.x, both.y, width, epsilon);
        if (!is_row) continue;
        T *to = dx + row * (uint64_t)width;
        for_row([&](int column, Elements<packed, T> of_x, Elements<packed, T> of_gradient) {
            float values[count], gradients[count], weights[count];
            to_floats<packed, T>(of_x, values);
            to_floats<packed, T>(of_gradient, gradients);
            load<packed, T>(weight + column, weights);
#pragma unroll
            for (int i = 0; i < count; i++) {
                const float scaled = gradients[i] * norm.scale;
                sums[i * packs + column / count] += scaled * values[i];
                values[i] = norm.of_x(scaled, offset + weights[i], values[i]);
            }
            store<packed, T>(to + column, values);
        });
    }
    __syncthreads();
    const int thread = (int)(threadIdx.y * blockDim.x + threadIdx.x);
    for (int column = thread; column < width; column += (int)(blockDim.x * blockDim.y)) {
        float sum = 0.0f;
        for (int row = 0; row < (int)blockDim.y; row++)
            sum += weight_sums[row * width + column % count * packs + column / count];
        partial[(uint64_t)blockIdx.x * (uint64_t)width + (uint64_t)column] = sum;
    }
}

#define RMS_NORM(T, name)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        rms_norm_forward_##name(const T *x, const T *weight, T *y, uint64_t n, int width, float epsilon,               \
                                float offset) {                                                                        \
        if (width % PACK<T> == 0 && is_aligned(x) && is_aligned(weight) && is_aligned(y))                              \
            forward<true, false, T>(x, nullptr, weight, nullptr, y, n, width, epsilon, offset);                               \
        else                                                                                                           \
            forward<false, false, T>(x, nullptr, weight, nullptr, y, n, width, epsilon, offset);                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        rms_norm_add_forward_##name(const T *x, const T *change, const T *weight, T *sum, T *y, uint64_t n,            \
                                    int width, float epsilon, float offset) {                                          \
        if (width % PACK<T> == 0 && is_aligned(x) && is_aligned(change) && is_aligned(weight) && is_aligned(sum) &&    \
            is_aligned(y))                                                                                             \
            forward<true, true, T>(x, change, weight, sum, y, n, width, epsilon, offset);                                    \
        else                                                                                                           \
            forward<false, true, T>(x, change, weight, sum, y, n, width, epsilon, offset);                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        rms_norm_backward_##name(const T *x, const T *weight, const T *gradient, T *dx, float *partial, uint64_t n,    \
                                 int width, float epsilon, float offset) {                                             \
        DYNAMIC_SHARED(float, weight_sums, 16);                                                                        \
        if (width % PACK<T> == 0 && is_aligned(x) && is_aligned(weight) && is_aligned(gradient) && is_aligned(dx))     \
            backward<true>(x, weight, gradient, dx, partial, n, width, epsilon, offset, weight_sums);                  \
        else                                                                                                           \
            backward<false>(x, weight, gradient, dx, partial, n, width, epsilon, offset, weight_sums);                 \
    }

RMS_NORM(float, f32)
RMS_NORM(__nv_bfloat16, bf16)
RMS_NORM(__half, f16)
