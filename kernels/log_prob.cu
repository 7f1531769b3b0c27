// Selected log-probs, entropy and log-sum-exp of logits [n, vocab] / temperature, forward and
// backward with one pass each. One block per row. A row with mask 0 gives zeros without reading its
// logits. A null mask keeps every row.

#include "log_prob.cuh"

template <typename T>
__device__ __forceinline__ void forward(const T *logits, const uint32_t *targets, const uint8_t *mask, float *packed,
                                        uint64_t n, uint64_t vocab, float inverse_temperature) {
    const uint64_t row = blockIdx.x;
    if (mask != nullptr && mask[row] == 0) {
        if (threadIdx.x < 3) packed[threadIdx.x * n + row] = 0.0f;
        return;
    }
    const float scale = inverse_temperature * LOG2_E;
    const T *x = logits + row * vocab;
    Sums sums;
    if (!sums_of_row(x, (int)vocab, scale, sums)) return;
    const uint32_t target = targets[row];
    // A target out of range is not read, and has no log-prob.
    finish(sums, target < vocab ? to_float(x[target]) : NAN, scale, packed, n, row);
}

// Logit gradient. `gradient` may be `logits`, because a thread reads an element before it writes
// it.
template <typename T>
__device__ __forceinline__ void backward(const T *logits, const uint32_t *targets, const uint8_t *mask,
                                         const float *packed, const float *packed_gradient, T *gradient, uint64_t n,
                                         uint64_t vocab, float inverse_temperature) {
    const uint64_t row = blockIdx.x;
    const T *x = logits + row * vocab;
    T *dx = gradient + row * vocab;
    const Row<T> parts(dx, (int)vocab);
    uint4 *packs = reinterpret_cast<uint4 *>(dx + parts.head);
    const int thread = (int)threadIdx.x;

    if (mask != nullptr && mask[row] == 0) {
        for (int index = thread; index < parts.packs; index += THREADS) packs[index] = make_uint4(0, 0, 0, 0);
        if (thread < parts.head) dx[thread] = from_float<T>(0.0f);
        if (thread < parts.tail) dx[vocab - 1 - thread] = from_float<T>(0.0f);
        return;
    }

    const Coefficients row_of(packed, packed_gradient, n, row, inverse_temperature);
    const uint32_t target = targets[row];
    auto one = [&](uint64_t column) {
        const float d = row_of.gradient(to_float(x[column]));
        dx[column] = from_float<T>(column == target ? d + row_of.at_target : d);
    };
    if (!same_alignment(x, dx)) {
        for (uint64_t column = threadIdx.x; column < vocab; column += THREADS) one(column);
        return;
    }

    constexpr int IN_FLIGHT = 4;
    const uint4 *from = reinterpret_cast<const uint4 *>(x + parts.head);
    // The target's pack and its position there. One is negative if the target is before the packs.
    const int in_packs = (int)target - parts.head;
    const int target_pack = in_packs / PACK<T>, target_place = in_packs % PACK<T>;
    for (int first = thread; first < parts.packs; first += IN_FLIGHT * THREADS) {
        uint4 loaded[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (first + i * THREADS < parts.packs) loaded[i] = load_streaming(from + first + i * THREADS);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const int index = first + i * THREADS;
            if (index >= parts.packs) break;
            float values[PACK<T>];
            unpack<T>(loaded[i], values);
#pragma unroll
            for (int k = 0; k < PACK<T>; k++) values[k] = row_of.gradient(values[k]);
            if (index == target_pack) {
#pragma unroll
                for (int k = 0; k < PACK<T>; k++)
                    if (k == target_place) values[k] += row_of.at_target;
            }
            packs[index] = pack<T>(values);
        }
    }
    if (thread < parts.head) one(thread);
    if (thread < parts.tail) one(vocab - 1 - thread);
}

#define LOG_PROB(T, name)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                          \
        log_prob_forward_##name(const T *logits, const uint32_t *targets, const uint8_t *mask, float *packed,         \
                                uint64_t n, uint64_t vocab, float inverse_temperature) {                              \
        forward(logits, targets, mask, packed, n, vocab, inverse_temperature);                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) log_prob_backward_##name(                                \
        const T *logits, const uint32_t *targets, const uint8_t *mask, const float *packed,                           \
        const float *packed_gradient, T *gradient, uint64_t n, uint64_t vocab, float inverse_temperature) {           \
        backward(logits, targets, mask, packed, packed_gradient, gradient, n, vocab, inverse_temperature);             \
    }

LOG_PROB(float, f32)
LOG_PROB(__nv_bfloat16, bf16)
LOG_PROB(__half, f16)
