// Shared code for passes over logits: a block per row, its sums, and the results.
//
// The passes are memory-bound: 16-byte loads, several in flight per thread, and one exponential per
// logit. Exponentials use base 2, and the temperature factor includes the base.

#pragma once

#include "element.cuh"
#include "math.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
// log2 of a weight that is 0 in f32. Replaces minus infinity, whose product with 0 would be NaN.
constexpr float NO_WEIGHT = -200.0f;

// Sums over logits x in a row, relative to the largest: exp2(d) and d * exp2(d), with d = (x -
// largest) * scale. `largest` is minus infinity if all logits are.
struct Sums {
    float largest;
    float exp;
    float weighted;

    // Rescales the sums to `other`, which is larger.
    __device__ __forceinline__ void raise(float other, float scale) {
        const float shift = (largest - other) * scale;
        const float factor = exp2_approx(shift);
        // An infinite shift, as for an empty sum, would give NaN.
        weighted = factor == 0.0f ? 0.0f : factor * (weighted + shift * exp);
        exp *= factor;
        largest = other;
    }

    __device__ __forceinline__ void merge(Sums other, float scale) {
        if (other.largest > largest) raise(other.largest, scale);
        else if (other.largest < largest) other.raise(largest, scale);
        exp += other.exp;
        weighted += other.weighted;
    }

    // Adds `count` logits.
    template <int count> __device__ __forceinline__ void add(const float (&x)[count], float scale) {
        float largest_x = x[0];
#pragma unroll
        for (int i = 1; i < count; i++) largest_x = fmaxf(largest_x, x[i]);
        if (largest_x > largest) raise(largest_x, scale);
        // Minus infinity has probability 0. The difference of two would be NaN.
        const float subtract = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
        for (int i = 0; i < count; i++) {
            // The difference first: it is exact for nearby numbers.
            const float d = (x[i] - subtract) * scale;
            const float e = exp2_approx(d);
            exp += e;
            weighted += fmaxf(d, NO_WEIGHT) * e;
        }
    }

    // Combines the lanes' sums in a warp, in each lane.
    __device__ __forceinline__ void merge_lanes(float scale) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
            merge({__shfl_xor_sync(0xffffffffu, largest, offset), __shfl_xor_sync(0xffffffffu, exp, offset),
                   __shfl_xor_sync(0xffffffffu, weighted, offset)}, scale);
    }
};

template <typename T> __device__ __forceinline__ uint4 minus_infinities();
template <> __device__ __forceinline__ uint4 minus_infinities<float>() {
    return make_uint4(0xff800000u, 0xff800000u, 0xff800000u, 0xff800000u);
}
template <> __device__ __forceinline__ uint4 minus_infinities<__nv_bfloat16>() {
    return make_uint4(0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u);
}
template <> __device__ __forceinline__ uint4 minus_infinities<__half>() {
    return make_uint4(0xfc00fc00u, 0xfc00fc00u, 0xfc00fc00u, 0xfc00fc00u);
}

// Sums `length` logits starting at `x`. Returns true in thread 0, which has the result.
template <typename T> __device__ __forceinline__ bool sums_of_row(const T *x, int length, float scale, Sums &sums) {
    const Row<T> parts(x, length);
    sums = {-INFINITY, 0.0f, 0.0f};

    constexpr int IN_FLIGHT = 4;
    const uint4 *packs = reinterpret_cast<const uint4 *>(x + parts.head);
    for (int first = (int)threadIdx.x; first < parts.packs; first += IN_FLIGHT * THREADS) {
        uint4 loaded[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const int index = first + i * THREADS;
            loaded[i] = index < parts.packs ? load_streaming(packs + index) : minus_infinities<T>();
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            float values[PACK<T>];
            unpack<T>(loaded[i], values);
            sums.add(values, scale);
        }
    }
    const int rest = (int)threadIdx.x;
    if (rest < parts.head) sums.add({to_float(x[rest])}, scale);
    if (rest < parts.tail) sums.add({to_float(x[length - 1 - rest])}, scale);

    sums.merge_lanes(scale);
    __shared__ Sums warps[WARPS];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sums;
    __syncthreads();
    if (threadIdx.x >= 32) return false;
    sums = {-INFINITY, 0.0f, 0.0f};
    if (threadIdx.x < WARPS) sums = warps[threadIdx.x];
    sums.merge_lanes(scale);
    return threadIdx.x == 0;
}

// Writes a row's results. `target` is its target's logit.
__device__ __forceinline__ void finish(Sums sums, float target, float scale, float *packed, uint64_t n, uint64_t row) {
    const float log2_sum = log2f(sums.exp);
    packed[row] = LN_2 * ((target - sums.largest) * scale - log2_sum);
    packed[n + row] = LN_2 * (log2_sum - sums.weighted / sums.exp);
    packed[2 * n + row] = LN_2 * (sums.largest * scale + log2_sum);
}

// Coefficients for the gradient of a row of logits.
struct Coefficients {
    float scale;
    float log2_sum_exp;
    float constant;
    float slope;
    float at_target;

    // Derivatives with respect to z = x / temperature: 1[target] - p for the log-prob, p for the
    // log-sum-exp, and -p (log p + entropy) for the entropy.
    __device__ __forceinline__ Coefficients(const float *packed, const float *packed_gradient, uint64_t n, uint64_t row,
                                            float inverse_temperature) {
        const float entropy = packed[n + row];
        const float d_log_prob = packed_gradient[row], d_entropy = packed_gradient[n + row];
        scale = inverse_temperature * LOG2_E;
        log2_sum_exp = packed[2 * n + row] * LOG2_E;
        constant = inverse_temperature * (packed_gradient[2 * n + row] - d_log_prob - d_entropy * entropy);
        slope = -inverse_temperature * d_entropy * LN_2;
        at_target = inverse_temperature * d_log_prob;
    }

    // The gradient without the target's term.
    __device__ __forceinline__ float gradient(float x) const {
        const float log2_p = x * scale - log2_sum_exp;
        return exp2_approx(log2_p) * (constant + slope * fmaxf(log2_p, NO_WEIGHT));
    }
};
