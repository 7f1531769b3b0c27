// y = x + bias for rows x [n, columns], from up to three matrices with the same n. Also the bias
// gradient, which is the row sum.

#include "column_sum.cuh"
#include "element.cuh"

// Rows per block, a warp each.
constexpr int ROWS = 8;
// Packs per thread, a warp apart.
constexpr int IN_FLIGHT = 4;
// Warps per block in the row sum.
constexpr int WARPS = 32;

template <typename T>
__device__ __forceinline__ void add(const T *x, const T *bias, T *y, uint32_t n, uint32_t columns) {
    constexpr uint32_t slice = 32 * IN_FLIGHT * PACK<T>;
    const uint32_t row = blockIdx.x * ROWS + threadIdx.y, first = blockIdx.y * slice;
    if (row >= n || first >= columns) return;
    const uint64_t start = (uint64_t)row * columns;
    if (columns % PACK<T> != 0 || !is_aligned(x) || !is_aligned(bias) || !is_aligned(y)) {
        const uint32_t last = columns - first < slice ? columns : first + slice;
        for (uint32_t column = first + threadIdx.x; column < last; column += 32)
            y[start + column] = from_float<T>(to_float(x[start + column]) + to_float(bias[column]));
        return;
    }
    uint4 rows[IN_FLIGHT], biases[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
        const uint32_t column = first + (threadIdx.x + 32 * i) * PACK<T>;
        if (column >= columns) break;
        rows[i] = *reinterpret_cast<const uint4 *>(x + start + column);
        biases[i] = *reinterpret_cast<const uint4 *>(bias + column);
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
        const uint32_t column = first + (threadIdx.x + 32 * i) * PACK<T>;
        if (column >= columns) break;
        float a[PACK<T>], b[PACK<T>];
        unpack<T>(rows[i], a);
        unpack<T>(biases[i], b);
#pragma unroll
        for (int k = 0; k < PACK<T>; k++) a[k] += b[k];
        *reinterpret_cast<uint4 *>(y + start + column) = pack<T>(a);
    }
}

// Adds the row sum of `gradient` [n, columns] to `sum`.
template <typename T>
__device__ __forceinline__ void add_rows(const T *gradient, float *sum, uint64_t n, int columns) {
    float total;
    const int column = column_sum<WARPS>(gradient, n, columns, &total);
    if (column >= 0) sum[column] += total;
}

#define ADD_BIAS(T, name)                                                                                              \
    extern "C" __global__ void __launch_bounds__(ROWS * 32)                                                           \
        add_bias_##name(const T *x0, const T *x1, const T *x2, const T *bias0, const T *bias1, const T *bias2, T *y0,  \
                        T *y1, T *y2, uint32_t n, uint32_t columns0, uint32_t columns1, uint32_t columns2) {          \
        if (blockIdx.z == 0) add(x0, bias0, y0, n, columns0);                                                          \
        if (blockIdx.z == 1) add(x1, bias1, y1, n, columns1);                                                          \
        if (blockIdx.z == 2) add(x2, bias2, y2, n, columns2);                                                          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                          \
        add_bias_gradient_##name(const T *gradient, float *sum, uint64_t n, int columns) {                            \
        add_rows(gradient, sum, n, columns);                                                                           \
    }

ADD_BIAS(float, f32)
ADD_BIAS(__nv_bfloat16, bf16)
ADD_BIAS(__half, f16)
