// silu(gate) * up and gelu(gate) * up, element by element, forward and backward.

#include "elements.cuh"
#include "math.cuh"

// The activations are x * sigmoid(t(x)). `slope` is the derivative of t.
struct Silu {
    __device__ __forceinline__ static float t(float x) { return x; }
    __device__ __forceinline__ static float slope(float) { return 1.0f; }
};

// The approximation with tanh: (1 + tanh(u)) / 2 is sigmoid(2 u).
struct Gelu {
    static constexpr float CUBIC = 0.044715f, TWICE_ROOT = 1.59576912160573071176f;

    // Beyond, the sigmoid is 0 or 1, and powers could overflow.
    __device__ __forceinline__ static float clamp(float x) { return fminf(fmaxf(x, -20.0f), 20.0f); }
    __device__ __forceinline__ static float t(float x) {
        const float z = clamp(x);
        return TWICE_ROOT * (z + CUBIC * z * z * z);
    }
    __device__ __forceinline__ static float slope(float x) {
        const float z = clamp(x);
        return TWICE_ROOT * (1.0f + 3.0f * CUBIC * z * z);
    }
};

__device__ __forceinline__ float geglu(float gate, float up) { return gate * sigmoid(Gelu::t(gate)) * up; }

// Computes the gradients with respect to gate and up.
template <typename Activation> __device__ __forceinline__ float2 backward(float gate, float up, float gradient) {
    const float s = sigmoid(Activation::t(gate)), activated = gate * s;
    return make_float2(gradient * up * (s + activated * (1.0f - s) * Activation::slope(gate)), gradient * activated);
}

template <typename Activation, typename T>
__device__ __forceinline__ void backward_all(const T *gate, const T *up, const T *gradient, T *dgate, T *dup, uint64_t n) {
    auto packs = [&](uint64_t first, int count) {
        const uint4 *gates = reinterpret_cast<const uint4 *>(gate + first), *ups = reinterpret_cast<const uint4 *>(up + first),
                    *gradients = reinterpret_cast<const uint4 *>(gradient + first);
        uint4 *to_gate = reinterpret_cast<uint4 *>(dgate + first), *to_up = reinterpret_cast<uint4 *>(dup + first);
        uint4 a[IN_FLIGHT], b[IN_FLIGHT], c[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const int index = (int)threadIdx.x + i * THREADS;
            if (index < count) {
                a[i] = load_streaming(gates + index);
                b[i] = load_streaming(ups + index);
                c[i] = load_streaming(gradients + index);
            }
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const int index = (int)threadIdx.x + i * THREADS;
            if (index >= count) break;
            float x[PACK<T>], u[PACK<T>], g[PACK<T>];
            unpack<T>(a[i], x);
            unpack<T>(b[i], u);
            unpack<T>(c[i], g);
#pragma unroll
            for (int k = 0; k < PACK<T>; k++) {
                const float2 d = backward<Activation>(x[k], u[k], g[k]);
                x[k] = d.x;
                u[k] = d.y;
            }
            to_gate[index] = pack<T>(x);
            to_up[index] = pack<T>(u);
        }
    };
    const bool aligned = is_aligned(gate) && is_aligned(up) && is_aligned(gradient) && is_aligned(dgate) && is_aligned(dup);
    for_elements<T>(n, aligned, packs, [&](uint64_t i) {
        const float2 d = backward<Activation>(to_float(gate[i]), to_float(up[i]), to_float(gradient[i]));
        dgate[i] = from_float<T>(d.x);
        dup[i] = from_float<T>(d.y);
    });
}

#define GATED(T, name)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        swiglu_forward_##name(const T *gate, const T *up, T *y, uint64_t n) {                                          \
        combine(gate, up, y, n, swiglu);                                                                               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        swiglu_backward_##name(const T *gate, const T *up, const T *gradient, T *dgate, T *dup, uint64_t n) {          \
        backward_all<Silu>(gate, up, gradient, dgate, dup, n);                                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        geglu_forward_##name(const T *gate, const T *up, T *y, uint64_t n) {                                           \
        combine(gate, up, y, n, geglu);                                                                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        geglu_backward_##name(const T *gate, const T *up, const T *gradient, T *dgate, T *dup, uint64_t n) {           \
        backward_all<Gelu>(gate, up, gradient, dgate, dup, n);                                                         \
    }

GATED(float, f32)
GATED(__nv_bfloat16, bf16)
GATED(__half, f16)
