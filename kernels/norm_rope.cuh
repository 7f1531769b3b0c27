// Formulas for norms and rotations, so that all kernels round alike.
#pragma once

#include "element.cuh"

// Returns the scale of a row whose squares have this sum.
__device__ __forceinline__ float norm_scale(float squares, int width, float epsilon) {
    return rsqrtf(squares / (float)width + epsilon);
}

// The backward pass over a row: dx = scale g - x scale^3 mean(g x), where g is the gradient times
// the factor. `squares` and `products` are the sums of x^2 and of g x.
struct NormGradient {
    float scale, along_x;

    __device__ __forceinline__ NormGradient(float squares, float products, int width, float epsilon)
        : scale(norm_scale(squares, width, epsilon)), along_x(-scale * scale * scale * products / (float)width) {}

    // `scaled` is the gradient times the scale.
    __device__ __forceinline__ float of_x(float scaled, float factor, float x) const { return scaled * factor + x * along_x; }
};

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
