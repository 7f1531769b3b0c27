// The passes in log_prob.cu, in vocabulary tiles: f32 logits [n, columns] starting at
// `first_column`. One block per row. A row with mask 0 gives zeros without reading its logits. A
// null mask keeps every row.

#include "log_prob.cuh"

// `state` [4, n] holds the sums over previous tiles and the target's logit. The first tile does not
// read it, and the last tile writes the results.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    linear_log_prob_tile(const float *logits, const uint32_t *targets, const uint8_t *mask, float *state, float *packed,
                         uint64_t n, uint64_t columns, uint32_t first_column, uint64_t vocab, float inverse_temperature) {
    const uint64_t row = blockIdx.x;
    const bool is_last = first_column + columns == vocab;
    if (mask != nullptr && mask[row] == 0) {
        if (is_last && threadIdx.x < 3) packed[threadIdx.x * n + row] = 0.0f;
        return;
    }
    const float scale = inverse_temperature * LOG2_E;
    const float *x = logits + row * columns;
    Sums sums;
    if (!sums_of_row(x, (int)columns, scale, sums)) return;
    float target = NAN;
    if (first_column > 0) {
        sums.merge({state[row], state[n + row], state[2 * n + row]}, scale);
        target = state[3 * n + row];
    }
    // Unsigned: out of range if the target is in a previous tile.
    const uint32_t column = targets[row] - first_column;
    if (column < columns) target = x[column];
    if (is_last) {
        finish(sums, target, scale, packed, n, row);
    } else {
        state[row] = sums.largest;
        state[n + row] = sums.exp;
        state[2 * n + row] = sums.weighted;
        state[3 * n + row] = target;
    }
}

// Logit gradient, in the dtype that products use. `gradient` may be `logits`, because a thread
// reads elements before it writes them.
template <typename T>
__device__ __forceinline__ void backward(const float *logits, const uint32_t *targets, const uint8_t *mask,
                                         const float *packed, const float *packed_gradient, T *gradient, uint64_t n,
                                         uint64_t columns, uint32_t first_column, float inverse_temperature) {
    const uint64_t row = blockIdx.x;
    const float *x = logits + row * columns;
    T *dx = gradient + row * columns;
    const bool is_dropped = mask != nullptr && mask[row] == 0;
    const Coefficients row_of(packed, packed_gradient, n, row, inverse_temperature);
    // Unsigned: out of range if the target is in another tile.
    const uint32_t target = targets[row] - first_column;
    const uint64_t fours = is_aligned_for_four(x) && is_aligned_for_four(dx) ? columns / 4 : 0;
    constexpr int IN_FLIGHT = 4;
    for (uint64_t first = threadIdx.x; first < fours; first += IN_FLIGHT * THREADS) {
        float values[IN_FLIGHT][4];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (!is_dropped && first + i * THREADS < fours) load_four(x + 4 * (first + i * THREADS), values[i]);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const uint64_t index = first + i * THREADS;
            if (index >= fours) break;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float d = row_of.gradient(values[i][k]);
                values[i][k] = is_dropped ? 0.0f : 4 * index + k == target ? d + row_of.at_target : d;
            }
            store_four(dx + 4 * index, values[i]);
        }
    }
    for (uint64_t column = 4 * fours + threadIdx.x; column < columns; column += THREADS) {
        float d = 0.0f;
        if (!is_dropped) {
            d = row_of.gradient(x[column]);
            if (column == target) d += row_of.at_target;
        }
        dx[column] = from_float<T>(d);
    }
}

#define LINEAR_LOG_PROB(T, name)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) linear_log_prob_gradient_##name(                         \
        const float *logits, const uint32_t *targets, const uint8_t *mask, const float *packed,                       \
        const float *packed_gradient, T *gradient, uint64_t n, uint64_t columns, uint32_t first_column,               \
        float inverse_temperature) {                                                                                   \
        backward(logits, targets, mask, packed, packed_gradient, gradient, n, columns, first_column,                  \
                 inverse_temperature);                                                                                 \
    }

LINEAR_LOG_PROB(float, f32)
LINEAR_LOG_PROB(__nv_bfloat16, bf16)
LINEAR_LOG_PROB(__half, f16)
