// Decoding: attention from single queries to keys and values in pages, and page writes.
//
// Keys and values are [pages, kv_heads, PAGE, head_dim]. A sequence is a list of spans, each a page
// and its first element's position in the sequence.

#include "element.cuh"
#include "math.cuh"
#include "norm_rope.cuh"

constexpr int PAGE = 16;
constexpr int WRITE_THREADS = 256;
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
// Head elements per lane.
constexpr int ELEMENTS = 8;
// Spans per sequence part. A constant, so that a row's result does not depend on other rows.
constexpr int PART = 16;
// Positions that a lane loads before it uses the first one. Fewer if registers are scarce.
template <typename T, int HEADS> constexpr int IN_FLIGHT_OF = HEADS == 2 || (sizeof(T) == 4 && HEADS == 8) ? 2 : 4;
// Blocks per multiprocessor, with THREADS threads each.
template <int HEADS> constexpr int BLOCKS = HEADS == 8 ? 1 : HEADS == 4 ? 3 : 5;

// Writes one head: from[i], normed with `weight` unless it is null, and rotated unless `cos` is
// null.
template <typename T>
__device__ __forceinline__ void write_head(const T *from, const T *weight, const float *cos, const float *sin, T *to,
                                           int head_dim, float epsilon) {
    const int lane = (int)threadIdx.x;
    float scale = 0.0f;
    if (weight != nullptr) {
        float squares = 0.0f;
        for (int i = lane; i < head_dim; i += 32) squares += to_float(from[i]) * to_float(from[i]);
        scale = rsqrtf(warp_sum(squares) / (float)head_dim + epsilon);
    }
    const auto normed = [&](int i) {
        const float x = to_float(from[i]);
        if (weight == nullptr) return x;
        return to_float(from_float<T>(weighted_norm<T>(x, scale, to_float(weight[i]))));
    };
    if (cos == nullptr) {
        for (int i = lane; i < head_dim; i += 32) to[i] = from_float<T>(normed(i));
        return;
    }
    const int pairs = head_dim / 2;
    for (int i = lane; i < pairs; i += 32) {
        float a = normed(i), b = normed(i + pairs);
        rotate_pair(a, b, cos[i], sin[i]);
        to[i] = from_float<T>(a);
        to[i + pairs] = from_float<T>(b);
    }
}

// One warp for each head in each row: `heads` from the query, which go to `rotated`, then
// `kv_heads` from the key and from the value, which go to the row's slot (page * PAGE + position).
template <typename T>
__device__ __forceinline__ void write_rows(const T *query, const T *query_weight, const T *key, const T *key_weight,
                                           const T *value, const float *cos, const float *sin, const uint32_t *slots,
                                           T *rotated, T *keys, T *values, uint32_t n, uint32_t heads, uint32_t kv_heads,
                                           int head_dim, float epsilon) {
    const uint64_t unit = (uint64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const uint32_t units = heads + 2 * kv_heads, row = (uint32_t)(unit / units);
    if (row >= n) return;
    const uint32_t head = (uint32_t)(unit % units);
    const uint64_t width = (uint64_t)head_dim;
    const float *row_cos = cos == nullptr ? nullptr : cos + row * (width / 2);
    const float *row_sin = sin == nullptr ? nullptr : sin + row * (width / 2);
    if (head < heads) {
        const uint64_t at = ((uint64_t)row * heads + head) * width;
        write_head(query + at, query_weight, row_cos, row_sin, rotated + at, head_dim, epsilon);
        return;
    }
    const bool is_key = head < heads + kv_heads;
    const uint32_t kv_head = head - heads - (is_key ? 0 : kv_heads);
    const uint64_t at = ((uint64_t)row * kv_heads + kv_head) * width;
    const uint64_t slot = slots[row];
    const uint64_t place = (((slot / PAGE) * kv_heads + kv_head) * PAGE + slot % PAGE) * width;
    if (is_key) write_head(key + at, key_weight, row_cos, row_sin, keys + place, head_dim, epsilon);
    else write_head<T>(value + at, nullptr, nullptr, nullptr, values + place, head_dim, epsilon);
}

// One head's elements in one lane.
template <typename T> struct Elements {
    uint4 packs[ELEMENTS * sizeof(T) / 16];

    // Loads the elements from `first` on, and zeros from `head_dim` on.
    __device__ __forceinline__ void load(const T *head, int first, int head_dim, bool is_packed) {
        if (is_packed) {
#pragma unroll
            for (int i = 0; i < ELEMENTS / PACK<T>; i++) {
                packs[i] = make_uint4(0, 0, 0, 0);
                if (first < head_dim) packs[i] = reinterpret_cast<const uint4 *>(head + first)[i];
            }
            return;
        }
        float values[ELEMENTS];
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) values[i] = first + i < head_dim ? to_float(head[first + i]) : 0.0f;
#pragma unroll
        for (int i = 0; i < ELEMENTS / PACK<T>; i++) {
            float part[PACK<T>];
#pragma unroll
            for (int j = 0; j < PACK<T>; j++) part[j] = values[i * PACK<T> + j];
            packs[i] = pack<T>(part);
        }
    }

    __device__ __forceinline__ void to_floats(float (&values)[ELEMENTS]) const {
#pragma unroll
        for (int i = 0; i < ELEMENTS / PACK<T>; i++) {
            float part[PACK<T>];
            unpack<T>(packs[i], part);
#pragma unroll
            for (int j = 0; j < PACK<T>; j++) values[i * PACK<T> + j] = part[j];
        }
    }
};

// exp2(from - to), or 0 for a maximum of nothing.
__device__ __forceinline__ float rescale(float from, float to) { return from == -INFINITY ? 0.0f : exp2_approx(from - to); }

// Softmax over positions: the largest score in base 2, and the sums of weights and weighted values
// relative to it.
struct Softmax {
    float largest = -INFINITY;
    float sum = 0.0f;
    float mixed[ELEMENTS] = {};

    // Makes room for scores of up to `score`, which may be that of nothing.
    __device__ __forceinline__ void raise(float score) {
        const float both = fmaxf(largest, score), factor = rescale(largest, both);
        sum *= factor;
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) mixed[i] *= factor;
        largest = both;
    }

    // Adds a position after `raise`.
    __device__ __forceinline__ void add(float score, const float (&value)[ELEMENTS]) {
        const float weight = rescale(score, largest);
        sum += weight;
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) mixed[i] += weight * value[i];
    }

    // Merges with the lane at a distance, in both.
    __device__ __forceinline__ void merge(int distance) {
        const float other = __shfl_xor_sync(0xffffffffu, largest, distance);
        const float both = fmaxf(largest, other), factor = rescale(largest, both), other_factor = rescale(other, both);
        sum = factor * sum + other_factor * __shfl_xor_sync(0xffffffffu, sum, distance);
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++)
            mixed[i] = factor * mixed[i] + other_factor * __shfl_xor_sync(0xffffffffu, mixed[i], distance);
        largest = both;
    }
};

// Attention for row blockIdx.x, with up to HEADS query heads that share a key head (blockIdx.y), to
// part blockIdx.z of its spans. LANES lanes share a position. `rows` [3, n] has each row's first
// span, end of spans, and number of visible positions; `spans` [2, count] the pages and first
// positions. With one part the result goes to `y`, else to `partial`
// [n, heads, parts, head_dim + 2], which has the weighted sum, the largest score and the weight
// sum.
//
// OPTIONS adds a window of the nearest positions, and a soft cap for scores. A cap of 0 means none.
template <typename T, int LANES, int HEADS, bool OPTIONS>
__device__ __forceinline__ void attend(const T *query, const T *keys, const T *values, const uint32_t *rows,
                                       const uint32_t *spans, T *y, float *partial, uint32_t n, uint32_t count,
                                       uint32_t kv_heads, uint32_t group, int head_dim, float scale, uint32_t window,
                                       float cap) {
    constexpr int WIDTH = LANES * ELEMENTS, AT_ONCE = 32 / LANES, IN_FLIGHT = IN_FLIGHT_OF<T, HEADS>;
    __shared__ float shared[WARPS][HEADS][WIDTH + 2];
    const uint32_t row = blockIdx.x, chunks = (group + HEADS - 1) / HEADS, chunk = blockIdx.y % chunks;
    const uint32_t kv_head = blockIdx.y / chunks, heads = kv_heads * group;
    const uint32_t first_head = kv_head * group + chunk * HEADS;
    const int used = (int)(group - chunk * HEADS < HEADS ? group - chunk * HEADS : HEADS);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int first = lane % LANES * ELEMENTS, which = lane / LANES;
    const bool is_packed = head_dim % ELEMENTS == 0 && is_aligned(query) && is_aligned(keys) && is_aligned(values);

    const bool is_capped = OPTIONS && cap > 0.0f;
    const float factor_of_query = is_capped ? scale / cap : scale * LOG2_E;
    float queries[HEADS][ELEMENTS];
    Softmax softmax[HEADS];
#pragma unroll
    for (int head = 0; head < HEADS; head++) {
        Elements<T> elements;
        // Further heads repeat the last one and are not written.
        const uint32_t from = first_head + (uint32_t)(head < used ? head : used - 1);
        elements.load(query + ((uint64_t)row * heads + from) * (uint64_t)head_dim, first, head_dim, is_packed);
        elements.to_floats(queries[head]);
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) queries[head][i] *= factor_of_query;
    }

    const uint32_t begin = rows[row], end = rows[n + row], visible = rows[2 * n + row];
    const uint32_t first_visible = OPTIONS && visible > window ? visible - window : 0;
    const uint32_t part_begin = begin + blockIdx.z * PART;
    const uint32_t part_end = part_begin + PART < end ? part_begin + PART : end;
    for (uint32_t span = part_begin + (uint32_t)warp; span < part_end; span += WARPS) {
        const uint32_t stop = span + 1 < end ? spans[count + span + 1] : visible;
        const uint32_t start = spans[count + span];
        const int length = (int)(stop - start);
        const int hidden = OPTIONS && first_visible > start ? (int)(first_visible - start) : 0;
        const uint64_t page = ((uint64_t)spans[span] * kv_heads + kv_head) * PAGE * (uint64_t)head_dim;
        // Unrolled, it would need more registers.
#pragma unroll 1
        for (int position = hidden; position < length; position += AT_ONCE * IN_FLIGHT) {
            Elements<T> key[IN_FLIGHT], value[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) {
                // Lanes without a position repeat the last one.
                const int wanted = position + i * AT_ONCE + which, at = wanted < length ? wanted : length - 1;
                const uint64_t place = page + (uint64_t)at * (uint64_t)head_dim;
                key[i].load(keys + place, first, head_dim, is_packed);
                value[i].load(values + place, first, head_dim, is_packed);
            }
            // All scores come before the weights, which then do not wait for each other.
            float scores[IN_FLIGHT][HEADS];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) {
                const bool is_there = position + i * AT_ONCE + which < length;
                float floats[ELEMENTS];
                key[i].to_floats(floats);
#pragma unroll
                for (int head = 0; head < HEADS; head++) {
                    float score = 0.0f;
#pragma unroll
                    for (int j = 0; j < ELEMENTS; j++) score += queries[head][j] * floats[j];
#pragma unroll
                    for (int distance = LANES / 2; distance > 0; distance /= 2)
                        score += __shfl_xor_sync(0xffffffffu, score, distance);
                    if (is_capped) score = tanhf(score) * (cap * LOG2_E);
                    scores[i][head] = is_there ? score : -INFINITY;
                }
            }
#pragma unroll
            for (int head = 0; head < HEADS; head++) {
                float best = scores[0][head];
#pragma unroll
                for (int i = 1; i < IN_FLIGHT; i++) best = fmaxf(best, scores[i][head]);
                softmax[head].raise(best);
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) {
                float floats[ELEMENTS];
                value[i].to_floats(floats);
#pragma unroll
                for (int head = 0; head < HEADS; head++) softmax[head].add(scores[i][head], floats);
            }
        }
    }

#pragma unroll
    for (int head = 0; head < HEADS; head++) {
#pragma unroll
        for (int distance = LANES; distance < 32; distance *= 2) softmax[head].merge(distance);
        if (which > 0) continue;
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) shared[warp][head][first + i] = softmax[head].mixed[i];
        if (lane == 0) {
            shared[warp][head][WIDTH] = softmax[head].largest;
            shared[warp][head][WIDTH + 1] = softmax[head].sum;
        }
    }
    __syncthreads();
    for (int index = (int)threadIdx.x; index < used * head_dim; index += THREADS) {
        const int head = index / head_dim, element = index % head_dim;
        float largest = -INFINITY, sum = 0.0f, mixed = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) largest = fmaxf(largest, shared[i][head][WIDTH]);
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            const float factor = rescale(shared[i][head][WIDTH], largest);
            sum += factor * shared[i][head][WIDTH + 1];
            mixed += factor * shared[i][head][element];
        }
        const uint64_t place = (uint64_t)row * heads + first_head + (uint32_t)head;
        if (gridDim.z == 1) {
            y[place * (uint64_t)head_dim + (uint64_t)element] = from_float<T>(mixed / sum);
            continue;
        }
        float *to = partial + (place * gridDim.z + blockIdx.z) * (uint64_t)(head_dim + 2);
        to[element] = mixed;
        if (element == 0) {
            to[head_dim] = largest;
            to[head_dim + 1] = sum;
        }
    }
}

// Merges each head's parts. A warp has one head.
template <typename T>
__device__ __forceinline__ void merge_parts(const float *partial, T *y, uint64_t heads_in_all, int parts, int head_dim) {
    const uint64_t head = (uint64_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (head >= heads_in_all) return;
    const uint64_t width = (uint64_t)head_dim + 2;
    const float *from = partial + head * (uint64_t)parts * width;
    float largest = -INFINITY, sum = 0.0f;
    for (int part = 0; part < parts; part++) largest = fmaxf(largest, from[(uint64_t)part * width + (uint64_t)head_dim]);
    for (int part = 0; part < parts; part++) {
        const float *last = from + (uint64_t)part * width + head_dim;
        sum += rescale(last[0], largest) * last[1];
    }
    for (int element = (int)threadIdx.x; element < head_dim; element += 32) {
        float mixed = 0.0f;
        for (int part = 0; part < parts; part++) {
            const float *of_part = from + (uint64_t)part * width;
            mixed += rescale(of_part[head_dim], largest) * of_part[element];
        }
        y[head * (uint64_t)head_dim + (uint64_t)element] = from_float<T>(mixed / sum);
    }
}

#define ATTEND_ARGUMENTS(T)                                                                                            \
    const T *query, const T *keys, const T *values, const uint32_t *rows, const uint32_t *spans, T *y,                \
        float *partial, uint32_t n, uint32_t count, uint32_t kv_heads, uint32_t group, int head_dim, float scale

#define ATTEND(T, name, D, H)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS<H>)                                                   \
        paged_attention_##D##_##H##_##name(ATTEND_ARGUMENTS(T)) {                                                      \
        attend<T, D / ELEMENTS, H, false>(query, keys, values, rows, spans, y, partial, n, count, kv_heads, group,     \
                                          head_dim, scale, 0, 0.0f);                                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS<H>)                                                   \
        scored_paged_attention_##D##_##H##_##name(ATTEND_ARGUMENTS(T), uint32_t window, float cap) {                   \
        attend<T, D / ELEMENTS, H, true>(query, keys, values, rows, spans, y, partial, n, count, kv_heads, group,      \
                                         head_dim, scale, window, cap);                                                \
    }

#define PAGED_ATTENTION(T, name)                                                                                       \
    extern "C" __global__ void __launch_bounds__(WRITE_THREADS)                                                       \
        paged_write_##name(const T *query, const T *query_weight, const T *key, const T *key_weight, const T *value,   \
                           const float *cos, const float *sin, const uint32_t *slots, T *rotated, T *keys, T *values,  \
                           uint32_t n, uint32_t heads, uint32_t kv_heads, int head_dim, float epsilon) {               \
        write_rows(query, query_weight, key, key_weight, value, cos, sin, slots, rotated, keys, values, n, heads,      \
                   kv_heads, head_dim, epsilon);                                                                       \
    }                                                                                                                  \
    ATTEND(T, name, 64, 2)                                                                                             \
    ATTEND(T, name, 64, 4)                                                                                             \
    ATTEND(T, name, 64, 8)                                                                                             \
    ATTEND(T, name, 128, 2)                                                                                            \
    ATTEND(T, name, 128, 4)                                                                                            \
    ATTEND(T, name, 128, 8)                                                                                            \
    ATTEND(T, name, 256, 2)                                                                                            \
    ATTEND(T, name, 256, 4)                                                                                            \
    ATTEND(T, name, 256, 8)                                                                                            \
    extern "C" __global__ void __launch_bounds__(WRITE_THREADS)                                                       \
        paged_attention_merge_##name(const float *partial, T *y, uint64_t heads_in_all, int parts, int head_dim) {     \
        merge_parts(partial, y, heads_in_all, parts, head_dim);                                                        \
    }

PAGED_ATTENTION(float, f32)
PAGED_ATTENTION(__nv_bfloat16, bf16)
PAGED_ATTENTION(__half, f16)
