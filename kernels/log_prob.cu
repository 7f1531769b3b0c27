// Selected log-probs, entropy and log-sum-exp of logits [n, vocab] / temperature, forward and backward, one pass each; of whole
// rows, or of tiles of the vocabulary one after another. One block for each row. A row whose mask is 0 gives zeros and reads no logits. A null mask keeps every row.
//
// Both passes are bound by memory: 16-byte loads, several in flight for each thread, and one exponential for each logit.
// Exponentials are of base 2, so that the scale of the temperature takes the logarithm's base with it.

#include "element.cuh"
#include "math.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
// The log2 of a weight that is 0 in f32: in the place of minus infinity, whose product with that 0 would be NaN.
constexpr float NO_WEIGHT = -200.0f;

// Sums over logits x of a row, relative to the largest one: with d = x * scale - largest, which is log2 of a weight, the
// sums of exp2(d) and of d * exp2(d). `largest` is scaled; it is minus infinity as long as every logit was.
struct Sums {
    float largest;
    float exp;
    float weighted;

    // Makes the sums relative to `other`, which is larger.
    __device__ __forceinline__ void raise(float other) {
        const float shift = largest - other;
        const float factor = exp2_approx(shift);
        // A shift that is infinite, as that of an empty sum is, would give NaN.
        weighted = factor == 0.0f ? 0.0f : factor * (weighted + shift * exp);
        exp *= factor;
        largest = other;
    }

    __device__ __forceinline__ void merge(Sums other) {
        if (other.largest > largest) raise(other.largest);
        else if (other.largest < largest) other.raise(largest);
        exp += other.exp;
        weighted += other.weighted;
    }

    // Adds `count` logits.
    template <int count> __device__ __forceinline__ void add(const float (&x)[count], float scale) {
        float largest_x = x[0];
#pragma unroll
        for (int i = 1; i < count; i++) largest_x = fmaxf(largest_x, x[i]);
        if (largest_x * scale > largest) raise(largest_x * scale);
        // Minus infinity is outside of the distribution, and relative to itself it would be NaN.
        const float subtract = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
        for (int i = 0; i < count; i++) {
            const float d = x[i] * scale - subtract;
            const float e = exp2_approx(d);
            exp += e;
            weighted += fmaxf(d, NO_WEIGHT) * e;
        }
    }

    // What the warp has, in every lane.
    __device__ __forceinline__ void merge_lanes() {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
            merge({__shfl_xor_sync(0xffffffffu, largest, offset), __shfl_xor_sync(0xffffffffu, exp, offset),
                   __shfl_xor_sync(0xffffffffu, weighted, offset)});
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

// The sums over `length` logits from `x` on, in thread 0; the other threads of the block get false.
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

    sums.merge_lanes();
    __shared__ Sums warps[WARPS];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sums;
    __syncthreads();
    if (threadIdx.x >= 32) return false;
    sums = {-INFINITY, 0.0f, 0.0f};
    if (threadIdx.x < WARPS) sums = warps[threadIdx.x];
    sums.merge_lanes();
    return threadIdx.x == 0;
}

// Writes the results of a row; `target` is the scaled logit of its target.
__device__ __forceinline__ void finish(Sums sums, float target, float *packed, uint64_t n, uint64_t row) {
    const float log2_sum = log2f(sums.exp);
    packed[row] = LN_2 * (target - sums.largest - log2_sum);
    packed[n + row] = LN_2 * (log2_sum - sums.weighted / sums.exp);
    packed[2 * n + row] = LN_2 * (sums.largest + log2_sum);
}

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
    // A target out of range has no log-prob, and is not read.
    finish(sums, target < vocab ? to_float(x[target]) * scale : NAN, packed, n, row);
}

// A tile of the vocabulary: logits [n, columns] from `first_column` on. `state` [4, n] holds the sums of the tiles before and
// the scaled logit of the target, once it was seen; the first tile reads nothing of it, and the last one gives the results.
template <typename T>
__device__ __forceinline__ void forward_tile(const T *logits, const uint32_t *targets, const uint8_t *mask, float *state,
                                             float *packed, uint64_t n, uint64_t columns, uint32_t first_column,
                                             uint64_t vocab, float inverse_temperature) {
    const uint64_t row = blockIdx.x;
    const bool is_last = first_column + columns == vocab;
    if (mask != nullptr && mask[row] == 0) {
        if (is_last && threadIdx.x < 3) packed[threadIdx.x * n + row] = 0.0f;
        return;
    }
    const float scale = inverse_temperature * LOG2_E;
    const T *x = logits + row * columns;
    Sums sums;
    if (!sums_of_row(x, (int)columns, scale, sums)) return;
    float target = NAN;
    if (first_column > 0) {
        sums.merge({state[row], state[n + row], state[2 * n + row]});
        target = state[3 * n + row];
    }
    // Out of range, since it is not signed, where the target was in a tile before.
    const uint32_t column = targets[row] - first_column;
    if (column < columns) target = to_float(x[column]) * scale;
    if (is_last) {
        finish(sums, target, packed, n, row);
    } else {
        state[row] = sums.largest;
        state[n + row] = sums.exp;
        state[2 * n + row] = sums.weighted;
        state[3 * n + row] = target;
    }
}

// How the gradient of a row follows from its logits.
struct Coefficients {
    float scale;
    float log2_sum_exp;
    float constant;
    float slope;
    float at_target;

    // All but the share of the target.
    __device__ __forceinline__ float gradient(float x) const {
        const float log2_p = x * scale - log2_sum_exp;
        return exp2_approx(log2_p) * (constant + slope * fmaxf(log2_p, NO_WEIGHT));
    }
};

// Of the logits [n, columns] from `first_column` of the vocabulary on. `gradient` may be `logits`: each thread reads what it
// writes, before it does.
template <typename T>
__device__ __forceinline__ void backward(const T *logits, const uint32_t *targets, const uint8_t *mask,
                                         const float *packed, const float *packed_gradient, T *gradient, uint64_t n,
                                         uint64_t columns, uint32_t first_column, float inverse_temperature) {
    const uint64_t row = blockIdx.x;
    const T *x = logits + row * columns;
    T *dx = gradient + row * columns;
    const Row<T> parts(dx, (int)columns);
    uint4 *packs = reinterpret_cast<uint4 *>(dx + parts.head);
    const int thread = (int)threadIdx.x;

    if (mask != nullptr && mask[row] == 0) {
        for (int index = thread; index < parts.packs; index += THREADS) packs[index] = make_uint4(0, 0, 0, 0);
        if (thread < parts.head) dx[thread] = from_float<T>(0.0f);
        if (thread < parts.tail) dx[columns - 1 - thread] = from_float<T>(0.0f);
        return;
    }

    // By z = x / temperature: the log-prob has 1[target] - p, the log-sum-exp p, the entropy -p (log p + entropy).
    const float entropy = packed[n + row];
    const float d_log_prob = packed_gradient[row], d_entropy = packed_gradient[n + row];
    const Coefficients row_of = {
        inverse_temperature * LOG2_E,
        packed[2 * n + row] * LOG2_E,
        inverse_temperature * (packed_gradient[2 * n + row] - d_log_prob - d_entropy * entropy),
        -inverse_temperature * d_entropy * LN_2,
        inverse_temperature * d_log_prob,
    };
    // Of another tile, it is no column of this one: of one before it is out of range, since it is not signed.
    const uint32_t target = targets[row] - first_column;
    auto one = [&](uint64_t column) {
        const float d = row_of.gradient(to_float(x[column]));
        dx[column] = from_float<T>(column == target ? d + row_of.at_target : d);
    };
    if (!same_alignment(x, dx)) {
        for (uint64_t column = threadIdx.x; column < columns; column += THREADS) one(column);
        return;
    }

    constexpr int IN_FLIGHT = 4;
    const uint4 *from = reinterpret_cast<const uint4 *>(x + parts.head);
    // The target's pack and its place there, of which one is negative for a target before the packs.
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
    if (thread < parts.tail) one(columns - 1 - thread);
}

#define LOG_PROB(T, name)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                          \
        log_prob_forward_##name(const T *logits, const uint32_t *targets, const uint8_t *mask, float *packed,         \
                                uint64_t n, uint64_t vocab, float inverse_temperature) {                              \
        forward(logits, targets, mask, packed, n, vocab, inverse_temperature);                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) log_prob_forward_tile_##name(                            \
        const T *logits, const uint32_t *targets, const uint8_t *mask, float *state, float *packed, uint64_t n,       \
        uint64_t columns, uint32_t first_column, uint64_t vocab, float inverse_temperature) {                         \
        forward_tile(logits, targets, mask, state, packed, n, columns, first_column, vocab, inverse_temperature);     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) log_prob_backward_##name(                                \
        const T *logits, const uint32_t *targets, const uint8_t *mask, const float *packed,                           \
        const float *packed_gradient, T *gradient, uint64_t n, uint64_t columns, uint32_t first_column,               \
        float inverse_temperature) {                                                                                   \
        backward(logits, targets, mask, packed, packed_gradient, gradient, n, columns, first_column,                  \
                 inverse_temperature);                                                                                 \
    }

LOG_PROB(float, f32)
LOG_PROB(__nv_bfloat16, bf16)
LOG_PROB(__half, f16)
