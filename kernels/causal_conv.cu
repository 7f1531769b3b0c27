// Causal depthwise convolution and silu, over rows that may share prefixes.

#include "element.cuh"
#include "math.cuh"
#include "prefix_tree.cuh"
#include "slots.cuh"

// Warps per block in both passes. A warp has adjacent rows, and each thread four channels.
constexpr int WARPS = 4;
constexpr int COLUMNS = 32 * 4;
// Up to this many taps, the passes keep rows in registers. For more, they load them again.
constexpr int NEAR = 4;
// Rows per thread whose loads overlap. There are no branches between them: beyond the last row, it
// is loaded again.
template <typename T> constexpr int IN_FLIGHT = PACK<T> / 2;
// Threads per block in the other kernels.
constexpr int THREADS = 256;

// The slope of silu at x.
__device__ __forceinline__ float silu_slope(float x) {
    const float s = sigmoid(x);
    return s + x * s * (1.0f - s);
}

__device__ __forceinline__ void add_products(const float (&a)[4], const float (&b)[4], float (&sums)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = fmaf(a[i], b[i], sums[i]);
}

// The channels of a thread, from `column`. If they are packed, four elements are one access.
template <bool packed, typename T> struct Channels {
    const T *x, *weight;
    const uint32_t *before;
    int channels, taps, column;

    __device__ __forceinline__ void load(const T *from, uint64_t row, float (&values)[4]) const {
        from += row * (uint64_t)channels + (uint64_t)column;
        if constexpr (packed) load_four(from, values);
        else
#pragma unroll
            for (int i = 0; i < 4; i++) values[i] = column + i < channels ? to_float(from[i]) : 0.0f;
    }

    __device__ __forceinline__ void store(T *to, uint64_t row, const float (&values)[4]) const {
        to += row * (uint64_t)channels + (uint64_t)column;
        if constexpr (packed) store_four(to, values);
        else
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (column + i < channels) to[i] = from_float<T>(values[i]);
    }

    // The weights of the row that is `distance` rows before. The last tap is the row itself.
    __device__ __forceinline__ void load_weights(int distance, float (&values)[4]) const {
        const T *from = weight + (uint64_t)column * taps + (taps - 1 - distance);
#pragma unroll
        for (int i = 0; i < 4; i++) values[i] = column + i < channels ? to_float(from[(uint64_t)i * taps]) : 0.0f;
    }

    // The sums of a row before silu.
    __device__ __forceinline__ void sum(uint64_t row, float (&sums)[4]) const {
        uint32_t at = (uint32_t)row;
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] = 0.0f;
        for (int distance = 0; distance < taps && at != NONE; distance++) {
            float values[4], weights[4];
            load(x, at, values);
            load_weights(distance, weights);
            add_products(values, weights, sums);
            at = before[at];
        }
    }

    // The gradients of these sums.
    __device__ __forceinline__ void of_sum(const T *gradient, uint64_t row, float (&of_sums)[4]) const {
        float sums[4];
        sum(row, sums);
        load(gradient, row, of_sums);
#pragma unroll
        for (int i = 0; i < 4; i++) of_sums[i] *= silu_slope(sums[i]);
    }
};

// Values of adjacent rows of a sequence, by their distance to the last.
using Window = float[NEAR][4];

__device__ __forceinline__ void append(Window &window, const float (&values)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int distance = NEAR - 1; distance > 0; distance--) window[distance][i] = window[distance - 1][i];
        window[0][i] = values[i];
    }
}

// The weights and the last rows of a thread, for at most NEAR taps.
template <bool packed, typename T> struct Near {
    Window weights, x;
    int taps;

    __device__ __forceinline__ explicit Near(const Channels<packed, T> &own) : taps(own.taps) {
#pragma unroll
        for (int distance = 0; distance < NEAR; distance++)
            if (distance < taps) own.load_weights(distance, weights[distance]);
    }

    // Loads the rows before `row`. Those before the sequence are 0.
    __device__ __forceinline__ void start(const Channels<packed, T> &own, uint64_t row) {
        uint32_t at = own.before[row];
#pragma unroll
        for (int distance = 1; distance < NEAR; distance++) {
#pragma unroll
            for (int i = 0; i < 4; i++) x[distance - 1][i] = 0.0f;
            if (distance < taps && at != NONE) {
                own.load(own.x, at, x[distance - 1]);
                at = own.before[at];
            }
        }
    }

    // Moves to the next row, and returns its sums before silu.
    __device__ __forceinline__ void advance(const float (&values)[4], float (&sums)[4]) {
        append(x, values);
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] = 0.0f;
#pragma unroll
        for (int distance = 0; distance < NEAR; distance++)
            if (distance < taps) add_products(x[distance], weights[distance], sums);
    }
};

// Adjacent rows of a segment.
struct Run {
    uint32_t segment;
    uint64_t first;
    int count;
    // Rows from the first to the end of the segment.
    int64_t rest;
};

__device__ __forceinline__ bool has_children(const uint32_t *segments, uint32_t index) {
    return segment_at(segments, index).first_child < segment_at(segments, index + 1).first_child;
}

// The rows of a warp.
struct Rows {
    const uint32_t *segments, *segment_of;
    uint64_t first, last;

    __device__ __forceinline__ Rows(const uint32_t *segments, const uint32_t *segment_of, uint64_t n, uint32_t rows)
        : segments(segments), segment_of(segment_of) {
        first = ((uint64_t)blockIdx.y * WARPS + threadIdx.y) * rows;
        last = first + rows < n ? first + rows : n;
    }

    template <typename Of> __device__ __forceinline__ void for_runs(Of of) const {
        for (uint64_t row = first; row < last;) {
            const uint32_t index = segment_of[row];
            const Segment segment = segment_at(segments, index);
            const int64_t rest = (int64_t)segment.first + (int64_t)segment.rows - (int64_t)row, left = (int64_t)(last - row);
            const int count = (int)(rest < left ? rest : left);
            of(Run{index, row, count, rest});
            row += (uint64_t)count;
        }
    }

    // The number of rows of a run that are alone: no other segment follows within `taps` rows.
    __device__ __forceinline__ int alone(const Run &run, int taps) const {
        const int64_t alone = has_children(segments, run.segment) ? run.rest - taps + 1 : run.rest;
        return alone < 0 ? 0 : alone < run.count ? (int)alone : run.count;
    }
};

template <bool packed, typename T>
__device__ __forceinline__ void forward(const Channels<packed, T> &own, const Rows &rows, T *y) {
    if (own.column >= own.channels) return;
    const auto write = [&](uint64_t row, float(&sums)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] *= sigmoid(sums[i]);
        own.store(y, row, sums);
    };
    float sums[4];
    if (own.taps > NEAR) {
        for (uint64_t row = rows.first; row < rows.last; row++) {
            own.sum(row, sums);
            write(row, sums);
        }
        return;
    }
    Near<packed, T> near(own);
    rows.for_runs([&](const Run &run) {
        near.start(own, run.first);
        for (int done = 0; done < run.count; done += IN_FLIGHT<T>) {
            float x[IN_FLIGHT<T>][4];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT<T>; k++) own.load(own.x, run.first + min(done + k, run.count - 1), x[k]);
#pragma unroll
            for (int k = 0; k < IN_FLIGHT<T>; k++) {
                if (done + k >= run.count) break;
                near.advance(x[k], sums);
                write(run.first + done + k, sums);
            }
        }
    });
}

// Calls `each(i, of_sums)` for at least `end` rows from `first`, with the gradients of their sums.
// Those of rows from `count` on are 0.
template <bool packed, typename T, typename Each>
__device__ __forceinline__ void for_sums(const Channels<packed, T> &own, Near<packed, T> &near, const T *gradient, uint64_t first,
                                         int count, int end, Each each) {
    near.start(own, first);
    for (int done = 0; done < end; done += IN_FLIGHT<T>) {
        float x[IN_FLIGHT<T>][4], of_sums[IN_FLIGHT<T>][4];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT<T>; k++) {
            const uint64_t row = first + min(done + k, count - 1);
            own.load(own.x, row, x[k]);
            own.load(gradient, row, of_sums[k]);
#pragma unroll
            for (int i = 0; i < 4; i++) of_sums[k][i] = done + k < count ? of_sums[k][i] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT<T>; k++) {
            float sums[4];
            near.advance(x[k], sums);
#pragma unroll
            for (int i = 0; i < 4; i++) of_sums[k][i] *= silu_slope(sums[i]);
            each(done + k, of_sums[k]);
        }
    }
}

// The gradients of a run, for at most NEAR taps: of the weight, and of x in its rows alone.
template <bool packed, typename T>
__device__ __forceinline__ void of_run(const Channels<packed, T> &own, Near<packed, T> &near, const Rows &rows, const Run &run,
                                       const T *gradient, T *of_x, Window &of_weight) {
    const int alone = rows.alone(run, own.taps), end = run.count + NEAR - 1;
    const int in_reach = run.rest < end ? (int)run.rest : end;
    Window window;
    for_sums(own, near, gradient, run.first, in_reach, end, [&](int at, const float(&of_sums)[4]) {
        append(window, of_sums);
        if (at < run.count)
#pragma unroll
            for (int distance = 0; distance < NEAR; distance++) add_products(near.x[distance], of_sums, of_weight[distance]);
        const int row = at - (NEAR - 1);
        if (row < 0 || row >= alone) return;
        float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int distance = 0; distance < NEAR; distance++)
            if (distance < own.taps) add_products(near.weights[distance], window[NEAR - 1 - distance], total);
        own.store(of_x, run.first + row, total);
    });
}

// The gradient of the weight over `rows`, for the NEAR taps from a distance.
template <bool packed, typename T>
__device__ __forceinline__ void of_far_weight(const Channels<packed, T> &own, const Rows &rows, const T *gradient, int nearest,
                                              Window &of_weight) {
    for (uint64_t row = rows.first; row < rows.last; row++) {
        uint32_t at = (uint32_t)row;
        for (int i = 0; i < nearest && at != NONE; i++) at = own.before[at];
        if (at == NONE) continue;
        float of_sums[4];
        own.of_sum(gradient, row, of_sums);
#pragma unroll
        for (int distance = 0; distance < NEAR; distance++) {
            if (at == NONE) break;
            float x[4];
            own.load(own.x, at, x);
            add_products(x, of_sums, of_weight[distance]);
            at = own.before[at];
        }
    }
}

// Adds the sums of the warps of a block, in order. A thread returns those of one channel.
__device__ __forceinline__ void add_warps(const Window &sums, float (&totals)[NEAR]) {
    __shared__ float shared[WARPS][NEAR][COLUMNS];
    static_assert(COLUMNS == 32 * WARPS);
    const int channel = (int)(threadIdx.y * 32 + threadIdx.x);
#pragma unroll
    for (int i = 0; i < NEAR; i++) store_four(&shared[threadIdx.y][i][threadIdx.x * 4], sums[i]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < NEAR; i++) {
        totals[i] = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) totals[i] += shared[warp][i][channel];
    }
}

__device__ __forceinline__ void set_zero(Window &window) {
#pragma unroll
    for (int distance = 0; distance < NEAR; distance++)
#pragma unroll
        for (int i = 0; i < 4; i++) window[distance][i] = 0.0f;
}

// Calls `visit(first, count, distance)` for adjacent rows that follow a row within `reach` rows.
// They start with the row itself, and go level by level of the tree. The descendants of a segment
// in a level are adjacent.
template <typename Visit>
__device__ __forceinline__ void for_following(const uint32_t *segments, uint32_t segment_of_row, uint64_t row, int reach, Visit visit) {
    uint32_t begin = segment_of_row, end = begin + 1;
    const Segment own = segment_at(segments, begin);
    const int64_t position = (int64_t)own.position + (int64_t)row - (int64_t)own.first;
    bool in_reach = true;
    while (in_reach) {
        in_reach = false;
        for (uint32_t at = begin; at < end; at++) {
            const Segment segment = segment_at(segments, at);
            // The distances of the rows of the segment, from the row on.
            const int64_t start = (int64_t)segment.position - position, last = start + (int64_t)segment.rows;
            const int64_t distance = start < 0 ? 0 : start, count = (last < reach ? last : reach) - distance;
            in_reach = in_reach || last < reach;
            if (count > 0) visit((uint64_t)segment.first + (uint64_t)(distance - start), (int)count, (int)distance);
        }
        const uint32_t next = segment_at(segments, begin).first_child;
        end = segment_at(segments, end).first_child;
        begin = next;
        in_reach = in_reach && begin < end;
    }
}

// The gradient of x in the rows of a segment that are not alone, for 2 to NEAR taps. A block has a
// segment, and its warps divide the segments that follow.
template <bool packed, typename T>
__device__ __forceinline__ void of_last_rows(const Channels<packed, T> &own, const uint32_t *segments, const T *gradient, T *of_x) {
    const uint32_t index = blockIdx.x;
    if (!has_children(segments, index)) return;
    const Segment segment = segment_at(segments, index);
    const int rows = (int)min(segment.rows, (uint32_t)own.taps - 1);
    const uint64_t first = (uint64_t)segment.first + segment.rows - rows;
    Window of_rows;
    set_zero(of_rows);
    if (own.column < own.channels) {
        Near<packed, T> near(own);
        uint32_t visits = 0;
        for_following(segments, index, first, own.taps + rows - 1, [&](uint64_t following, int count, int distance) {
            if (visits++ % WARPS != threadIdx.y) return;
            for_sums(own, near, gradient, following, count, count, [&](int at, const float(&of_sums)[4]) {
#pragma unroll
                for (int row = 0; row < NEAR - 1; row++) {
                    const int apart = distance + at - row;
                    if (apart < 0 || apart >= own.taps) continue;
                    float weights[4];
                    own.load_weights(apart, weights);
                    add_products(weights, of_sums, of_rows[row]);
                }
            });
        });
    }
    float totals[NEAR];
    add_warps(of_rows, totals);
    const int column = (int)(blockIdx.y * COLUMNS + threadIdx.y * 32 + threadIdx.x);
    if (column >= own.channels) return;
#pragma unroll
    for (int row = 0; row < NEAR - 1; row++)
        if (row < rows) of_x[(first + row) * own.channels + column] = from_float<T>(totals[row]);
}

// The gradient of a row of x, for any number of taps.
template <bool packed, typename T>
__device__ __forceinline__ void of_row(const Channels<packed, T> &own, const uint32_t *segments, uint32_t segment, uint64_t row,
                                       const T *gradient, T *of_x) {
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for_following(segments, segment, row, own.taps, [&](uint64_t first, int count, int distance) {
        for (int i = 0; i < count; i++) {
            float weights[4], of_sums[4];
            own.load_weights(distance + i, weights);
            own.of_sum(gradient, first + i, of_sums);
            add_products(weights, of_sums, total);
        }
    });
    own.store(of_x, row, total);
}

// The gradient of x, and that of the weight summed over the rows of a block, in `parts`
// [gridDim.y, taps, channels]. Blocks with the same blockIdx.z have the same NEAR taps. For at most
// NEAR taps, of_last_rows has the rows of x that are not alone.
template <bool packed, typename T>
__device__ __forceinline__ void backward(const Channels<packed, T> &own, const Rows &rows, const T *gradient, T *of_x, float *parts) {
    const int nearest = (int)blockIdx.z * NEAR;
    Window of_weight;
    set_zero(of_weight);
    if (own.column < own.channels) {
        if (own.taps <= NEAR) {
            Near<packed, T> near(own);
            rows.for_runs([&](const Run &run) { of_run(own, near, rows, run, gradient, of_x, of_weight); });
        } else {
            of_far_weight(own, rows, gradient, nearest, of_weight);
            for (uint64_t row = rows.first; row < rows.last && nearest == 0; row++)
                of_row(own, rows.segments, rows.segment_of[row], row, gradient, of_x);
        }
    }
    float totals[NEAR];
    add_warps(of_weight, totals);
    const int column = (int)(blockIdx.x * COLUMNS + threadIdx.y * 32 + threadIdx.x);
    if (column >= own.channels) return;
#pragma unroll
    for (int distance = 0; distance < NEAR; distance++) {
        const int tap = own.taps - 1 - nearest - distance;
        if (tap >= 0) parts[((uint64_t)blockIdx.y * own.taps + tap) * own.channels + column] = totals[distance];
    }
}

template <typename T>
__device__ __forceinline__ void of_weight(const float *parts, T *of_weight, int count, int channels, int taps) {
    const uint64_t index = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    const uint64_t elements = (uint64_t)channels * taps;
    if (index >= elements) return;
    const uint64_t column = index / taps, tap = index % taps;
    float sum = 0.0f;
#pragma unroll 8
    for (int part = 0; part < count; part++) sum += parts[(uint64_t)part * elements + tap * channels + column];
    of_weight[index] = from_float<T>(sum);
}

// Rows of decoding. A thread has a channel of a sequence: `windows` [slots, taps - 1, channels] has
// the rows before. A sequence with the slot NO_SLOT has zeros before it, and leaves no state.
template <typename T>
__device__ __forceinline__ void step(const T *x, const T *weight, const uint32_t *sequences, float *windows, T *y, int channels,
                                     int taps) {
    const int column = (int)(blockIdx.y * THREADS + threadIdx.x);
    if (column >= channels) return;
    const uint32_t *sequence = sequences + 3 * (uint64_t)blockIdx.x;
    const uint64_t slot = sequence[0], first = sequence[1];
    const int64_t rows = sequence[2], past = taps - 1;
    const bool has_slot = slot != NO_SLOT;
    float *window = windows + slot * (uint64_t)past * channels + column;
    // Row `at` of the window and the rows after it.
    const auto value = [&](int64_t at) {
        if (at < past && !has_slot) return 0.0f;
        return at < past ? window[at * channels] : to_float(x[(first + (uint64_t)(at - past)) * channels + column]);
    };
    for (int64_t row = 0; row < rows; row++) {
        float sum = 0.0f;
        for (int tap = taps - 1; tap >= 0; tap--) sum = fmaf(value(row + tap), to_float(weight[(uint64_t)column * taps + tap]), sum);
        y[(first + (uint64_t)row) * channels + column] = from_float<T>(sum * sigmoid(sum));
    }
    for (int64_t at = 0; at < past && has_slot; at++) window[at * channels] = value(rows + at);
}

#define CAUSAL_CONV(T, name)                                                                                           \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 4)                                                         \
        causal_conv_forward_##name(const T *x, const T *weight, const uint32_t *before, const uint32_t *segments,     \
                                   const uint32_t *segment_of, T *y, uint64_t n, uint32_t rows, int channels,         \
                                   int taps) {                                                                         \
        const int column = (int)(blockIdx.x * COLUMNS + threadIdx.x * 4);                                              \
        const Rows own_rows(segments, segment_of, n, rows);                                                            \
        if (channels % 4 == 0 && is_aligned_for_four(x) && is_aligned_for_four(y))                                     \
            forward<true, T>({x, weight, before, channels, taps, column}, own_rows, y);                                \
        else                                                                                                           \
            forward<false, T>({x, weight, before, channels, taps, column}, own_rows, y);                               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 4)                                                         \
        causal_conv_backward_##name(const T *x, const T *weight, const T *gradient, const uint32_t *before,           \
                                    const uint32_t *segments, const uint32_t *segment_of, T *of_x, float *parts,      \
                                    uint64_t n, uint32_t rows, int channels, int taps) {                               \
        const int column = (int)(blockIdx.x * COLUMNS + threadIdx.x * 4);                                              \
        const Rows own_rows(segments, segment_of, n, rows);                                                            \
        if (channels % 4 == 0 && is_aligned_for_four(x) && is_aligned_for_four(gradient) && is_aligned_for_four(of_x)) \
            backward<true, T>({x, weight, before, channels, taps, column}, own_rows, gradient, of_x, parts);           \
        else                                                                                                           \
            backward<false, T>({x, weight, before, channels, taps, column}, own_rows, gradient, of_x, parts);          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 4)                                                       \
        causal_conv_of_last_rows_##name(const T *x, const T *weight, const T *gradient, const uint32_t *before,       \
                                        const uint32_t *segments, T *of_x, int channels, int taps) {                   \
        const int column = (int)(blockIdx.y * COLUMNS + threadIdx.x * 4);                                              \
        if (channels % 4 == 0 && is_aligned_for_four(x) && is_aligned_for_four(gradient))                              \
            of_last_rows<true, T>({x, weight, before, channels, taps, column}, segments, gradient, of_x);              \
        else                                                                                                           \
            of_last_rows<false, T>({x, weight, before, channels, taps, column}, segments, gradient, of_x);             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        causal_conv_of_weight_##name(const float *parts, T *gradient, int count, int channels, int taps) {            \
        of_weight(parts, gradient, count, channels, taps);                                                             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        causal_conv_step_##name(const T *x, const T *weight, const uint32_t *sequences, float *windows, T *y,         \
                                int channels, int taps) {                                                              \
        step(x, weight, sequences, windows, y, channels, taps);                                                        \
    }

CAUSAL_CONV(float, f32)
CAUSAL_CONV(__nv_bfloat16, bf16)
CAUSAL_CONV(__half, f16)
