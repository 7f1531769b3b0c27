// The forward pass of log_prob.cu in tiles of the vocabulary: f32 logits [n, columns] from
// `first_column`. One block for each row. A row with a mask of 0 gives zeros without a read of its
// logits. A null mask keeps every row. The backward pass is log_prob_backward.

#include "log_prob.cuh"

// `state` [4, n] holds the sums of the previous tiles and the logit of the target. The first tile
// does not read it, and the last tile writes the results.
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
