// One AdamW step of one parameter, in place. With an f32 master the kernel updates the master and
// rounds it to the parameter. Without a master (null) it updates the parameter in f32 and rounds
// it.

#include "element.cuh"
#include "math.cuh"

constexpr int THREADS = 256;

struct Step {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, keep, step_size, inverse_root_correction;

    __device__ __forceinline__ void update(float &p, float &m, float &v, float g) const {
        m = m * beta1 + g * one_minus_beta1;
        v = v * beta2 + g * g * one_minus_beta2;
        p = p * keep - step_size * (m / (sqrtf(v) * inverse_root_correction + epsilon));
    }
};

template <typename P, typename G>
__device__ __forceinline__ void step_all(P *parameter, float *master, float *average, float *square, const G *gradient,
                                         uint64_t n, Step step) {
    const uint64_t first = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * 4;
    if (first >= n) return;
    const bool packed = first + 4 <= n && is_aligned_for_four(parameter) && is_aligned_for_four(gradient) &&
                        is_aligned_for_four(average) && is_aligned_for_four(square) && is_aligned_for_four(master);
    if (packed) {
        float p[4], m[4], v[4], g[4];
        if (master != nullptr) load_four(master + first, p);
        else load_four(parameter + first, p);
        load_four(average + first, m);
        load_four(square + first, v);
        load_four(gradient + first, g);
#pragma unroll
        for (int i = 0; i < 4; i++) step.update(p[i], m[i], v[i], g[i]);
        if (master != nullptr) store_four(master + first, p);
        store_four(parameter + first, p);
        store_four(average + first, m);
        store_four(square + first, v);
    } else {
        const uint64_t last = first + 4 < n ? first + 4 : n;
        for (uint64_t i = first; i < last; i++) {
            float p = master != nullptr ? master[i] : to_float(parameter[i]);
            step.update(p, average[i], square[i], to_float(gradient[i]));
            if (master != nullptr) master[i] = p;
            parameter[i] = from_float<P>(p);
        }
    }
}

// The gradient is in f32 (adamw) or in the dtype of the parameter (adamw_like).
#define ADAMW(T, name)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                             \
        adamw_##name(T *parameter, float *master, float *average, float *square, const float *gradient, uint64_t n,   \
                     float beta1, float one_minus_beta1, float beta2, float one_minus_beta2, float epsilon, float keep, \
                     float step_size, float inverse_root_correction) {                                                 \
        step_all(parameter, master, average, square, gradient, n,                                                      \
                 {beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, keep, step_size, inverse_root_correction}); \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                             \
        adamw_like_##name(T *parameter, float *master, float *average, float *square, const T *gradient, uint64_t n,  \
                          float beta1, float one_minus_beta1, float beta2, float one_minus_beta2, float epsilon,       \
                          float keep, float step_size, float inverse_root_correction) {                                \
        step_all(parameter, master, average, square, gradient, n,                                                      \
                 {beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, keep, step_size, inverse_root_correction}); \
    }

ADAMW(float, f32)
ADAMW(__nv_bfloat16, bf16)
ADAMW(__half, f16)
