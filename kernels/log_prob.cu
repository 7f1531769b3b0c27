// Selected log-probs, entropy and log-sum-exp of logits [n, vocab] / temperature, forward and backward, one pass each.
// One block for each row. A row whose mask is 0 gives zeros and reads no logits. A null mask keeps every row.

#include "element.cuh"

#include <cstdint>

// Sums over entries of a row relative to the largest: with d = (x - largest) * inverse_temperature, the sums of exp(d)
// and of d * exp(d).
struct Sums {
    float largest;
    float exp;
    float weighted;
};

__device__ __forceinline__ Sums merge(Sums a, Sums b, float inverse_temperature) {
    if (b.largest > a.largest) {
        Sums c = a;
        a = b;
        b = c;
    }
    // Nothing but minus infinity in the smaller one: it adds nothing, unless there was a NaN.
    if (b.exp == 0.0f) return a;
    float shift = (b.largest - a.largest) * inverse_temperature;
    float factor = __expf(shift);
    a.weighted += factor * (b.weighted + shift * b.exp);
    a.exp += factor * b.exp;
    return a;
}

__device__ __forceinline__ void add(Sums &sums, float x, float inverse_temperature) {
    if (x > sums.largest) {
        if (sums.exp > 0.0f) {
            float shift = (sums.largest - x) * inverse_temperature;
            float factor = __expf(shift);
            sums.weighted = factor * (sums.weighted + shift * sums.exp);
            sums.exp *= factor;
        }
        sums.largest = x;
    }
    // Minus infinity is outside the distribution; NaN passes on.
    if (x == -INFINITY) return;
    float d = (x - sums.largest) * inverse_temperature;
    float e = __expf(d);
    sums.exp += e;
    sums.weighted += e == 0.0f ? 0.0f : d * e;
}

template <typename T>
__device__ void forward(const T *logits, const uint32_t *targets, const uint8_t *mask, float *packed, uint64_t n,
                        uint64_t vocab, float inverse_temperature) {
    const uint64_t row = blockIdx.x;
    if (mask != nullptr && mask[row] == 0) {
        if (threadIdx.x < 3) packed[threadIdx.x * n + row] = 0.0f;
        return;
    }
    const T *x = logits + row * vocab;
    Sums sums = {-INFINITY, 0.0f, 0.0f};
    for (uint64_t column = threadIdx.x; column < vocab; column += blockDim.x)
        add(sums, to_float(x[column]), inverse_temperature);

    for (int offset = 16; offset > 0; offset /= 2) {
        Sums other = {__shfl_xor_sync(0xffffffffu, sums.largest, offset),
                      __shfl_xor_sync(0xffffffffu, sums.exp, offset),
                      __shfl_xor_sync(0xffffffffu, sums.weighted, offset)};
        sums = merge(sums, other, inverse_temperature);
    }
    __shared__ Sums warps[32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) warps[warp] = sums;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (unsigned other = 1; other < blockDim.x / 32; other++)
            sums = merge(sums, warps[other], inverse_temperature);
        const float log_sum = logf(sums.exp);
        const uint32_t target = targets[row];
        // A target out of range has no log-prob, and is not read.
        const float x_target = target < vocab ? to_float(x[target]) : NAN;
        packed[row] = (x_target - sums.largest) * inverse_temperature - log_sum;
        packed[n + row] = log_sum - sums.weighted / sums.exp;
        packed[2 * n + row] = sums.largest * inverse_temperature + log_sum;
    }
}

// `gradient` may be `logits`.
template <typename T>
__device__ void backward(const T *logits, const uint32_t *targets, const uint8_t *mask, const float *packed,
                         const float *packed_gradient, T *gradient, uint64_t n, uint64_t vocab,
                         float inverse_temperature) {
    const uint64_t row = blockIdx.x;
    const T *x = logits + row * vocab;
    T *dx = gradient + row * vocab;
    if (mask != nullptr && mask[row] == 0) {
        for (uint64_t column = threadIdx.x; column < vocab; column += blockDim.x) dx[column] = from_float<T>(0.0f);
        return;
    }
    const float entropy = packed[n + row], log_sum_exp = packed[2 * n + row];
    const float d_log_prob = packed_gradient[row], d_entropy = packed_gradient[n + row],
                d_log_sum_exp = packed_gradient[2 * n + row];
    // By z = x / temperature: the log-prob has 1[target] - p, the log-sum-exp p, the entropy -p (log p + entropy).
    const float constant = inverse_temperature * (d_log_sum_exp - d_log_prob - d_entropy * entropy);
    const float slope = -inverse_temperature * d_entropy;
    const uint32_t target = targets[row];
    for (uint64_t column = threadIdx.x; column < vocab; column += blockDim.x) {
        const float log_p = to_float(x[column]) * inverse_temperature - log_sum_exp;
        const float p = __expf(log_p);
        float d = p == 0.0f ? 0.0f : p * (constant + slope * log_p);
        if (column == target) d += inverse_temperature * d_log_prob;
        dx[column] = from_float<T>(d);
    }
}

#define LOG_PROB(T, name)                                                                                              \
    extern "C" __global__ void __launch_bounds__(512)                                                                 \
        log_prob_forward_##name(const T *logits, const uint32_t *targets, const uint8_t *mask, float *packed,         \
                                uint64_t n, uint64_t vocab, float inverse_temperature) {                              \
        forward(logits, targets, mask, packed, n, vocab, inverse_temperature);                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(512) log_prob_backward_##name(                                       \
        const T *logits, const uint32_t *targets, const uint8_t *mask, const float *packed,                           \
        const float *packed_gradient, T *gradient, uint64_t n, uint64_t vocab, float inverse_temperature) {           \
        backward(logits, targets, mask, packed, packed_gradient, gradient, n, vocab, inverse_temperature);            \
    }

LOG_PROB(float, f32)
LOG_PROB(__nv_bfloat16, bf16)
LOG_PROB(__half, f16)
