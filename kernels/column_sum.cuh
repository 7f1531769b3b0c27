// Row sum of a matrix, in a deterministic order.
#pragma once

#include "element.cuh"

// Sums the rows of `x` [n, columns]. A block with 32 by WARPS threads has 32 columns. Returns the
// column whose sum this thread has in `total`, or -1.
template <int WARPS, typename T>
__device__ __forceinline__ int column_sum(const T *x, uint64_t n, int columns, float *total) {
    __shared__ float shared[WARPS][32];
    const int column = (int)(blockIdx.x * 32 + threadIdx.x);
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 4
        for (uint64_t row = threadIdx.y; row < n; row += WARPS) sum += to_float(x[row * (uint64_t)columns + (uint64_t)column]);
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= columns) return -1;
    for (int i = 1; i < WARPS; i++) sum += shared[i][threadIdx.x];
    *total = sum;
    return column;
}
