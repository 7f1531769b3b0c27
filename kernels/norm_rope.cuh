// Formulas for norms and rotations, so that all kernels round alike.
#pragma once

#include "element.cuh"

// Returns x * scale * (offset + weight). Without an offset, the first product is rounded to T as in
// a tensor.
template <typename T> __device__ __forceinline__ float weighted_norm(float x, float scale, float weight, float offset) {
    const float normed = x * scale;
    return (offset == 0.0f ? to_float(from_float<T>(normed)) : normed) * (offset + weight);
}

// Rotates the pair (a, b).
__device__ __forceinline__ void rotate_pair(float &a, float &b, float cos, float sin) {
    const float first = a * cos - b * sin;
    b = b * cos + a * sin;
    a = first;
}
