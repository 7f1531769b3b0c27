// Sums of the parts that the blocks of other kernels leave, in a deterministic order.

#include "column_sum.cuh"

// Warps per block.
constexpr int WARPS = 32;

// Sums rows of `parts` [first_rows + second_rows, columns]: blocks with y = 0 sum the first ones,
// those with y = 1 the others. `sums` is [gridDim.y, columns].
template <typename T>
__device__ __forceinline__ void sum_rows(const float *parts, T *sums, int first_rows, int second_rows, int columns) {
    const bool is_first = blockIdx.y == 0;
    const float *rows = parts + (is_first ? 0 : (uint64_t)first_rows * (uint64_t)columns);
    float sum;
    const int column = column_sum<WARPS>(rows, (uint64_t)(is_first ? first_rows : second_rows), columns, &sum);
    if (column >= 0) sums[(uint64_t)blockIdx.y * (uint64_t)columns + (uint64_t)column] = from_float<T>(sum);
}

#define COLUMN_SUMS(T, name)                                                                                           \
    extern "C" __global__ void __launch_bounds__(32 * WARPS)                                                           \
        column_sums_##name(const float *parts, T *sums, int first_rows, int second_rows, int columns) {                \
        sum_rows(parts, sums, first_rows, second_rows, columns);                                                       \
    }

COLUMN_SUMS(float, f32)
COLUMN_SUMS(__nv_bfloat16, bf16)
COLUMN_SUMS(__half, f16)
