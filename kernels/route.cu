// The router of a mixture of experts: the experts with the largest logits in each row, and their
// gates. Each warp has a row.

#include "element.cuh"
#include "math.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;

// A logit and its expert as one number, in the order in which experts are chosen: the largest logit
// first, then the first expert. NaN is below all logits.
__device__ __forceinline__ uint64_t to_place(float logit, uint32_t expert) {
    const uint32_t key = logit == logit ? to_key(logit) : 0;
    return (uint64_t)key << 32 | (uint32_t)~expert;
}

// `logits` is [n, experts], and `chosen` and `gates` are [n, top_k]. Gates are a softmax over the
// chosen experts if `normalize` is not 0, else over all experts.
template <typename T>
__device__ __forceinline__ void choose(const T *logits, uint32_t *chosen, float *gates, uint32_t n, uint32_t experts,
                                       uint32_t top_k, uint32_t normalize) {
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t row = (uint64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= n) return;
    logits += row * experts;
    chosen += row * top_k;
    gates += row * top_k;
    float greatest = 0.0f, sum = 0.0f;
    uint64_t last = ~(uint64_t)0;
    for (uint32_t k = 0; k < top_k; k++) {
        // The next in order. No place is 0.
        uint64_t next = 0;
        for (uint32_t expert = lane; expert < experts; expert += 32) {
            const uint64_t place = to_place(to_float(logits[expert]), expert);
            if (place < last && place > next) next = place;
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            const uint64_t other = __shfl_xor_sync(0xffffffffu, next, distance);
            if (other > next) next = other;
        }
        last = next;
        const uint32_t expert = ~(uint32_t)next;
        const float logit = to_float(logits[expert]);
        if (k == 0) greatest = logit;
        sum += exp2_approx((logit - greatest) * LOG2_E);
        // The lane that computes the gate.
        if (k % 32 == lane) chosen[k] = expert;
    }
    if (!normalize) {
        sum = 0.0f;
        for (uint32_t expert = lane; expert < experts; expert += 32)
            sum += exp2_approx((to_float(logits[expert]) - greatest) * LOG2_E);
        sum = warp_sum(sum);
    }
    for (uint32_t k = lane; k < top_k; k += 32)
        gates[k] = exp2_approx((to_float(logits[chosen[k]]) - greatest) * LOG2_E) / sum;
}

#define ROUTE(T, name)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        route_##name(const T *logits, uint32_t *chosen, float *gates, uint32_t n, uint32_t experts, uint32_t top_k,    \
                     uint32_t normalize) {                                                                             \
        choose(logits, chosen, gates, n, experts, top_k, normalize);                                                   \
    }

ROUTE(float, f32)
ROUTE(__nv_bfloat16, bf16)
ROUTE(__half, f16)
