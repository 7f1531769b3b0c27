// Formulas for norms and rotations, so that all kernels round alike.
#pragma once

#include "element.cuh"

// Returns x * scale * weight, with the first product rounded to T as in a tensor. With an offset,
// the factor is 1 + weight, and nothing is rounded.
template <typename T> __device__ __forceinline__ float weighted_norm(float x, float scale, float weight, bool is_offset) {
    const float normed = x * scale;
    return is_offset ? normed * (1.0f + weight) : to_float(from_float<T>(normed)) * weight;
}

// Rotates the pair (a, b).
__device__ __forceinline__ void rotate_pair(float &a, float &b, float cos, float sin) {
    const float first = a * cos - b * sin;
    b = b * cos + a * sin;
    a = first;
}
