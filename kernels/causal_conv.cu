// Causal depthwise convolution and silu, over rows that may share prefixes.

#include "element.cuh"
#include "math.cuh"
#include "prefix_tree.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = 8;

// Returns the sum before silu.
template <typename T>
__device__ __forceinline__ float taps_of(const T *x, const T *weight, const uint32_t *before, uint64_t row, int column, int channels,
                                         int taps) {
    float sum = 0.0f;
    uint32_t at = (uint32_t)row;
    for (int tap = taps - 1; tap >= 0 && at != NONE; tap--) {
        sum = fmaf(to_float(x[(uint64_t)at * channels + column]), to_float(weight[(uint64_t)column * taps + tap]), sum);
        at = before[at];
    }
    return sum;
}

// A thread has a channel of a row.
template <typename T>
__device__ __forceinline__ void forward(const T *x, const T *weight, const uint32_t *before, T *y, uint64_t n, int channels, int taps) {
    const uint64_t index = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (index >= n * (uint64_t)channels) return;
    const float sum = taps_of(x, weight, before, index / channels, (int)(index % channels), channels, taps);
    y[index] = from_float<T>(sum * sigmoid(sum));
}

// The gradient of the sum before silu.
template <typename T>
__device__ __forceinline__ void of_sum(const T *x, const T *weight, const T *gradient, const uint32_t *before, float *sums,
                                       uint64_t n, int channels, int taps) {
    const uint64_t index = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (index >= n * (uint64_t)channels) return;
    const float sum = taps_of(x, weight, before, index / channels, (int)(index % channels), channels, taps);
    const float s = sigmoid(sum);
    sums[index] = to_float(gradient[index]) * (s + sum * s * (1.0f - s));
}

// The gradient of x: adds the rows that follow within `taps` rows, level by level of the tree. The
// descendants of a segment in a level are adjacent.
template <typename T>
__device__ __forceinline__ void of_x(const T *weight, const float *sums, const uint32_t *segments, const uint32_t *segment_of,
                                     T *of_x, uint64_t n, int channels, int taps) {
    const uint64_t index = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (index >= n * (uint64_t)channels) return;
    const uint64_t row = index / channels;
    const int column = (int)(index % channels);
    uint32_t begin = segment_of[row], end = begin + 1;
    const Segment own = segment_at(segments, begin);
    const int64_t position = (int64_t)own.position + (int64_t)row - (int64_t)own.first;
    float total = 0.0f;
    bool in_reach = true;
    while (in_reach) {
        in_reach = false;
        for (uint32_t at = begin; at < end; at++) {
            const Segment segment = segment_at(segments, at);
            // The distance of the first row of the segment.
            const int64_t distance = (int64_t)segment.position - position;
            in_reach = in_reach || distance + (int64_t)segment.rows < taps;
            for (int64_t i = distance < 0 ? -distance : 0; i < (int64_t)segment.rows && distance + i < taps; i++) {
                const float factor = to_float(weight[(uint64_t)column * taps + (taps - 1 - (int)(distance + i))]);
                total = fmaf(factor, sums[((uint64_t)segment.first + (uint64_t)i) * channels + column], total);
            }
        }
        const uint32_t next = segment_at(segments, begin).first_child;
        end = segment_at(segments, end).first_child;
        begin = next;
        in_reach = in_reach && begin < end;
    }
    of_x[index] = from_float<T>(total);
}

// The gradient of a tap of 32 channels, over the rows of a part. A block has 32 by WARPS threads.
template <typename T>
__device__ __forceinline__ void of_weight_parts(const T *x, const float *sums, const uint32_t *before, float *parts, uint64_t n,
                                                uint32_t rows, int channels, int taps) {
    __shared__ float shared[WARPS][32];
    const int column = (int)(blockIdx.x * 32 + threadIdx.x), tap = (int)blockIdx.y;
    const uint64_t first = (uint64_t)blockIdx.z * rows, last = first + rows < n ? first + rows : n;
    float sum = 0.0f;
    if (column < channels) {
        for (uint64_t row = first + threadIdx.y; row < last; row += WARPS) {
            uint32_t at = (uint32_t)row;
            for (int i = taps - 1; i > tap && at != NONE; i--) at = before[at];
            if (at == NONE) continue;
            sum = fmaf(to_float(x[(uint64_t)at * channels + column]), sums[row * channels + column], sum);
        }
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= channels) return;
    for (int i = 1; i < WARPS; i++) sum += shared[i][threadIdx.x];
    parts[((uint64_t)blockIdx.z * taps + tap) * channels + column] = sum;
}

template <typename T>
__device__ __forceinline__ void of_weight(const float *parts, T *of_weight, int count, int channels, int taps) {
    const uint64_t index = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    const uint64_t elements = (uint64_t)channels * taps;
    if (index >= elements) return;
    const uint64_t column = index / taps, tap = index % taps;
    float sum = 0.0f;
    for (int part = 0; part < count; part++) sum += parts[(uint64_t)part * elements + tap * channels + column];
    of_weight[index] = from_float<T>(sum);
}

// Rows of decoding. A thread has a channel of a sequence: `windows` [slots, taps - 1, channels] has
// the rows before.
template <typename T>
__device__ __forceinline__ void step(const T *x, const T *weight, const uint32_t *sequences, float *windows, T *y, int channels,
                                     int taps) {
    const int column = (int)(blockIdx.y * THREADS + threadIdx.x);
    if (column >= channels) return;
    const uint32_t *sequence = sequences + 3 * (uint64_t)blockIdx.x;
    const uint64_t slot = sequence[0], first = sequence[1];
    const int64_t rows = sequence[2], past = taps - 1;
    float *window = windows + slot * (uint64_t)past * channels + column;
    // Row `at` of the window and the rows after it.
    const auto value = [&](int64_t at) {
        return at < past ? window[at * channels] : to_float(x[(first + (uint64_t)(at - past)) * channels + column]);
    };
    for (int64_t row = 0; row < rows; row++) {
        float sum = 0.0f;
        for (int tap = taps - 1; tap >= 0; tap--) sum = fmaf(value(row + tap), to_float(weight[(uint64_t)column * taps + tap]), sum);
        y[(first + (uint64_t)row) * channels + column] = from_float<T>(sum * sigmoid(sum));
    }
    for (int64_t at = 0; at < past; at++) window[at * channels] = value(rows + at);
}

#define CAUSAL_CONV(T, name)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        causal_conv_forward_##name(const T *x, const T *weight, const uint32_t *before, T *y, uint64_t n,             \
                                   int channels, int taps) {                                                           \
        forward(x, weight, before, y, n, channels, taps);                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        causal_conv_of_sum_##name(const T *x, const T *weight, const T *gradient, const uint32_t *before, float *sums, \
                                  uint64_t n, int channels, int taps) {                                                \
        of_sum(x, weight, gradient, before, sums, n, channels, taps);                                                  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        causal_conv_of_x_##name(const T *weight, const float *sums, const uint32_t *segments,                         \
                                const uint32_t *segment_of, T *gradient, uint64_t n, int channels, int taps) {         \
        of_x(weight, sums, segments, segment_of, gradient, n, channels, taps);                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        causal_conv_of_weight_parts_##name(const T *x, const float *sums, const uint32_t *before, float *parts,       \
                                           uint64_t n, uint32_t rows, int channels, int taps) {                        \
        of_weight_parts(x, sums, before, parts, n, rows, channels, taps);                                              \
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
