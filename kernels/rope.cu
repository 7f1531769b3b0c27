// Angles for rotary position embedding. `head_transform.cu` rotates.

#include <cuda_runtime.h>

#include <cstdint>

constexpr int THREADS = 256;
constexpr double INVERSE_PI = 0.31830988618379067154;

// Cosines and sines [n, pairs] for positions times inverse frequencies, times `factor`.
extern "C" __global__ void __launch_bounds__(THREADS)
    rope_angles(const uint32_t *positions, const float *inverse_frequencies, float *cos, float *sin, uint64_t n, uint32_t pairs,
                float factor) {
    const uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n * pairs) return;
    const float angle = (float)positions[i / pairs] * inverse_frequencies[i % pairs];
    // cosf needs local memory for large angles.
    double sine, cosine;
    sincospi((double)angle * INVERSE_PI, &sine, &cosine);
    cos[i] = (float)cosine * factor;
    sin[i] = (float)sine * factor;
}
