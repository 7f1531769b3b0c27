// Lists of tensors that one launch processes. Each row in a list has the field `first_block`, the
// tensor's first block. Rows ascend by it.
#pragma once

#include "element.cuh"

// A listed tensor's dtype.
enum Dtype : uint32_t { F32, BF16, F16 };

// Returns this block's row.
template <typename Row> __device__ __forceinline__ Row row_of_block(const uint64_t *list, uint32_t count) {
    const Row *rows = reinterpret_cast<const Row *>(list);
    uint32_t low = 0, high = count;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (rows[middle].first_block <= blockIdx.x) low = middle;
        else high = middle;
    }
    return rows[low];
}

// Calls `of` with a null pointer in a dtype's type.
template <typename Of> __device__ __forceinline__ void with_dtype(uint32_t dtype, Of of) {
    if (dtype == F32) of((float *)nullptr);
    else if (dtype == BF16) of((__nv_bfloat16 *)nullptr);
    else of((__half *)nullptr);
}
