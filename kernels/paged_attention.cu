// Decoding: attention from single queries to keys and values in pages, and page writes.
//
// Keys and values are [pages, kv_heads, PAGE, head_dim]. A sequence is a list of spans, each a page
// and its first element's position in the sequence.
//
// Rows that begin with the same spans form a unit. A block reads a part of these spans once for the
// query heads of all rows in the unit, and multiplies on the tensor cores. The other spans of each
// row are read by blocks of their own. Every block handles PART spans of a row or a unit, and a
// last launch merges a row's parts.

#include "copy.cuh"
#include "element.cuh"
#include "math.cuh"
#include "mma.cuh"
#include "norm_rope.cuh"
#include "slots.cuh"

constexpr int PAGE = 16;
constexpr int WRITE_THREADS = 256;
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
// Head elements per lane.
constexpr int ELEMENTS = 8;
// Spans per part of a row or a unit. A constant, so that a row's result depends on other rows only
// through its unit.
constexpr int PART = 16;
// Positions that a lane loads before it uses the first one. Fewer if registers are scarce.
template <typename T, int HEADS> constexpr int IN_FLIGHT_OF = HEADS == 2 || (sizeof(T) == 4 && HEADS == 8) ? 2 : 4;
// Blocks per multiprocessor, with THREADS threads each.
template <int HEADS> constexpr int BLOCKS = HEADS == 8 ? 1 : HEADS == 4 ? 3 : 5;

// Writes one head: from[i], normed with `weight` unless it is null. The first `pairs` elements and
// the next `pairs` rotate.
template <typename T>
__device__ __forceinline__ void write_head(const T *from, const T *weight, const float *cos, const float *sin, T *to,
                                           int head_dim, int pairs, float epsilon, float offset) {
    const int lane = (int)threadIdx.x;
    float scale = 0.0f;
    if (weight != nullptr) {
        float squares = 0.0f;
        for (int i = lane; i < head_dim; i += 32) squares += to_float(from[i]) * to_float(from[i]);
        scale = norm_scale(warp_sum(squares), head_dim, epsilon);
    }
    const auto normed = [&](int i) {
        const float x = to_float(from[i]);
        if (weight == nullptr) return x;
        return to_float(from_float<T>(weighted_norm<T>(x, scale, to_float(weight[i]), offset)));
    };
    for (int i = 2 * pairs + lane; i < head_dim; i += 32) to[i] = from_float<T>(normed(i));
    for (int i = lane; i < pairs; i += 32) {
        float a = normed(i), b = normed(i + pairs);
        rotate_pair(a, b, cos[i], sin[i]);
        to[i] = from_float<T>(a);
        to[i + pairs] = from_float<T>(b);
    }
}

// One warp for each head in each row: `heads` from the query, `query_step` elements apart, which go
// to `rotated`, then `kv_heads` from the key and from the value, which go to the row's slot (page *
// PAGE + position).
template <typename T>
__device__ __forceinline__ void write_rows(const T *query, const T *query_weight, const T *key, const T *key_weight,
                                           const T *value, const float *cos, const float *sin, const uint32_t *slots,
                                           T *rotated, T *keys, T *values, uint32_t n, uint32_t heads, uint32_t kv_heads,
                                           int query_step, int head_dim, int pairs, float epsilon, float offset) {
    const uint64_t unit = (uint64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const uint32_t units = heads + 2 * kv_heads, row = (uint32_t)(unit / units);
    if (row >= n) return;
    const uint32_t head = (uint32_t)(unit % units);
    const uint64_t width = (uint64_t)head_dim;
    // Without pairs there are no angles.
    const float *row_cos = cos + (uint64_t)row * (uint64_t)pairs, *row_sin = sin + (uint64_t)row * (uint64_t)pairs;
    if (head < heads) {
        const uint64_t index = (uint64_t)row * heads + head;
        write_head(query + index * (uint64_t)query_step, query_weight, row_cos, row_sin, rotated + index * width, head_dim, pairs,
                   epsilon, offset);
        return;
    }
    const bool is_key = head < heads + kv_heads;
    const uint32_t kv_head = head - heads - (is_key ? 0 : kv_heads);
    const uint64_t at = ((uint64_t)row * kv_heads + kv_head) * width;
    if (slots[row] == NO_SLOT) return;
    const uint64_t slot = slots[row];
    const uint64_t place = (((slot / PAGE) * kv_heads + kv_head) * PAGE + slot % PAGE) * width;
    if (is_key) write_head(key + at, key_weight, row_cos, row_sin, keys + place, head_dim, pairs, epsilon, offset);
    else write_head<T>(value + at, nullptr, nullptr, nullptr, values + place, head_dim, 0, 0.0f, 0.0f);
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

// An element of a result, relative to the largest score, and the weight sum.
struct Merged {
    float largest, sum = 0.0f, mixed = 0.0f;

    // Merges `count` results, which are `stride` floats apart. Each has `width` elements, the
    // largest score and the weight sum.
    __device__ __forceinline__ Merged(const float *from, int count, int stride, int width, int element)
        : largest(-INFINITY) {
        for (int i = 0; i < count; i++) largest = fmaxf(largest, from[i * stride + width]);
        for (int i = 0; i < count; i++) {
            const float factor = rescale(from[i * stride + width], largest);
            sum += factor * from[i * stride + width + 1];
            mixed += factor * from[i * stride + element];
        }
    }

    // Writes the element to a part of `partial`.
    __device__ __forceinline__ void write(float *to, int head_dim, int element) const {
        to[element] = mixed;
        if (element == 0) {
            to[head_dim] = largest;
            to[head_dim + 1] = sum;
        }
    }
};

// The spans that a row's own blocks read, from `begin` to `end`, after those that a unit reads.
struct OwnSpans {
    uint32_t shared, begin, end;

    // `shared_spans` [n] is null without units.
    __device__ __forceinline__ OwnSpans(const uint32_t *rows, const uint32_t *shared_spans, uint32_t n, uint32_t row)
        : shared(shared_spans == nullptr ? 0 : shared_spans[row]), begin(rows[row] + shared), end(rows[n + row]) {}

    // The parts of a row in `partial`: its own come first.
    __device__ __forceinline__ uint32_t own_parts() const { return (end - begin + PART - 1) / PART; }
    __device__ __forceinline__ uint32_t parts() const { return own_parts() + (shared + PART - 1) / PART; }
};

// Attention for row blockIdx.x, with up to HEADS query heads that share a key head (blockIdx.y), to
// part blockIdx.z of its own spans. LANES lanes share a position. `rows` [3, n] has each row's
// first span, end of spans, and number of visible positions; `spans` [2, count] the pages and first
// positions; `shared_spans` [n] the number of spans that units read. With one part the result goes
// to `y`, else to `partial` [n, heads, parts, head_dim + 2], which has the weighted sum, the
// largest score and the weight sum. Parts that a row does not have are not written.
//
// OPTIONS adds a window of the nearest positions, and a soft cap for scores. A cap of 0 means none.
template <typename T, int LANES, int HEADS, bool OPTIONS>
__device__ __forceinline__ void attend(const T *query, const T *keys, const T *values, const uint32_t *rows,
                                       const uint32_t *spans, const uint32_t *shared_spans, T *y, float *partial,
                                       uint32_t n, uint32_t count, uint32_t kv_heads, uint32_t group, uint32_t parts,
                                       int head_dim, float scale, uint32_t window, float cap) {
    constexpr int WIDTH = LANES * ELEMENTS, AT_ONCE = 32 / LANES, IN_FLIGHT = IN_FLIGHT_OF<T, HEADS>;
    __shared__ float shared[WARPS][HEADS][WIDTH + 2];
    const uint32_t row = blockIdx.x, chunks = (group + HEADS - 1) / HEADS, chunk = blockIdx.y % chunks;
    const OwnSpans own(rows, shared_spans, n, row);
    const uint32_t part_begin = own.begin + blockIdx.z * PART, end = own.end;
    if (part_begin >= end) return;
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

    const uint32_t visible = rows[2 * n + row];
    const uint32_t first_visible = OPTIONS && visible > window ? visible - window : 0;
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
        const Merged merged(shared[0][head], WARPS, HEADS * (WIDTH + 2), WIDTH, element);
        const uint64_t place = (uint64_t)row * heads + first_head + (uint32_t)head;
        if (parts == 1) y[place * (uint64_t)head_dim + (uint64_t)element] = from_float<T>(merged.mixed / merged.sum);
        else merged.write(partial + (place * parts + blockIdx.z) * (uint64_t)(head_dim + 2), head_dim, element);
    }
}

// Sizes of a block for units. f32 has half as many warps, so that all fits in 99 KiB.
template <typename T, int D> struct UnitTiles {
    static constexpr int WARPS = sizeof(T) == 4 ? 2 : 4, THREADS = 32 * WARPS;
    // Rows of queries: 16 for each warp. If there are fewer, warps divide the spans.
    static constexpr int ROWS = 16 * WARPS;
    // Spans that arrive together. The next ones arrive while a block computes.
    static constexpr int SPANS = WARPS;
    // Rows have 16 bytes of padding, to start in different banks.
    static constexpr int STRIDE = D + PACK<T>;
    static constexpr int TILE = SPANS * PAGE * STRIDE;
    static_assert(4 * TILE * sizeof(T) >= ROWS * (D + 2) * sizeof(float), "the results of all warps fit in the tiles");
    static_assert(PART % SPANS == 0, "a part has whole tiles");
};

// The softmax of one warp for 16 rows of queries, in fragments of c.
template <typename T, int D> struct UnitSoftmax {
    float largest[2] = {-INFINITY, -INFINITY}, sums[2] = {}, mixed[D / 8][4] = {};

    // Adds the `length` positions of a span. `factor` scales the scores, also to base 2.
    __device__ __forceinline__ void add(const T *queries, const T *keys, const T *values, int length, float factor) {
        constexpr int STRIDE = UnitTiles<T, D>::STRIDE;
        const int lane = (int)threadIdx.x % 32;
        float weights[2][4] = {};
#pragma unroll
        for (int k = 0; k < D; k += DEPTH<T>) {
            FragmentB of_keys[2];
            const FragmentA of_queries = load_a(queries, STRIDE, 0, k);
            load_b_of_rows(keys, STRIDE, 0, k, of_keys);
            multiply<T>(weights[0], of_queries, of_keys[0]);
            multiply<T>(weights[1], of_queries, of_keys[1]);
        }
        float peaks[2] = {-INFINITY, -INFINITY}, factors[2];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float &score = weights[i / 4][i % 4];
            score = i / 4 * 8 + lane % 4 * 2 + i % 2 < length ? score * factor : -INFINITY;
            peaks[i % 4 / 2] = fmaxf(peaks[i % 4 / 2], score);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float both = fmaxf(largest[r], row_max(peaks[r]));
            factors[r] = rescale(largest[r], both);
            largest[r] = both;
            sums[r] *= factors[r];
        }
        if (__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < D / 2; i++) mixed[i / 4][i % 4] *= factors[i % 4 / 2];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float &weight = weights[i / 4][i % 4];
            weight = rescale(weight, largest[i % 4 / 2]);
            sums[i % 4 / 2] += weight;
        }
        add_products(weights, values);
        if constexpr (sizeof(T) == 2) {
            // The part of the weights that rounding to T leaves. Together, they have 16 bits in
            // bf16 and 22 in f16.
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float &weight = weights[i / 4][i % 4];
                weight -= to_float(from_float<T>(weight));
            }
            add_products(weights, values);
        }
    }

    __device__ __forceinline__ void add_products(const float (&weights)[2][4], const T *values) {
#pragma unroll
        for (int k = 0; k < PAGE / DEPTH<T>; k++) {
            const FragmentA a = as_a<T>(weights, k);
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                FragmentB b[2];
                load_b_of_columns(values, UnitTiles<T, D>::STRIDE, k * DEPTH<T>, n * 16, b);
                multiply<T>(mixed[2 * n], a, b[0]);
                multiply<T>(mixed[2 * n + 1], a, b[1]);
            }
        }
    }

    // Writes the 16 results to rows of D + 2 floats.
    __device__ __forceinline__ void write(float *to) const {
        const int lane = (int)threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float *row = to + (lane / 4 + 8 * r) * (D + 2);
#pragma unroll
            for (int i = 0; i < D / 4; i++) row[i / 2 * 8 + lane % 4 * 2 + i % 2] = mixed[i / 2][2 * r + i % 2];
            const float sum = row_sum(sums[r]);
            if (lane % 4 != 0) continue;
            row[D] = largest[r];
            row[D + 1] = sum;
        }
    }
};

// Attention of unit blockIdx.x to part blockIdx.z of the spans that its rows share. Its rows are
// `members` from starts[unit] to starts[unit + 1], with the same `shared_spans`. blockIdx.y has a
// key head, and a chunk of the query heads of all rows in the unit. Writes to `partial` like
// `attend`, after the own parts of each row.
//
// All pointers are aligned to 16 bytes, and head_dim is a multiple of 16 bytes.
template <typename T, int D>
__device__ __forceinline__ void attend_shared(const T *query, const T *keys, const T *values, const uint32_t *rows,
                                              const uint32_t *spans, const uint32_t *shared_spans, const uint32_t *members,
                                              const uint32_t *starts, float *partial, uint32_t n, uint32_t count,
                                              uint32_t kv_heads, uint32_t group, uint32_t parts, int head_dim, float scale) {
    using Size = UnitTiles<T, D>;
    constexpr int PACKS = D / PACK<T>, STEP = Size::THREADS / PACKS;
    static_assert(Size::THREADS % PACKS == 0 && 16 % STEP == 0, "a thread copies the same columns of each row");
    // Each stage has keys, then values. The queries follow.
    DYNAMIC_SHARED(T, stages, 16);
    T *queries = stages + 4 * Size::TILE;
    __shared__ uint32_t pages[PART];
    __shared__ int lengths[PART];

    const uint32_t first_member = starts[blockIdx.x], in_unit = (starts[blockIdx.x + 1] - first_member) * group;
    const uint32_t kv_head = blockIdx.y % kv_heads, first_query = blockIdx.y / kv_heads * Size::ROWS;
    if (first_query >= in_unit) return;
    const uint32_t leader = members[first_member];
    const OwnSpans of_leader(rows, shared_spans, n, leader);
    if (blockIdx.z * PART >= of_leader.shared) return;
    const int left = (int)(of_leader.shared - blockIdx.z * PART), used = left < PART ? left : PART;
    const int in_block = (int)(in_unit - first_query < Size::ROWS ? in_unit - first_query : Size::ROWS);
    const int tiles = in_block <= 16 ? 1 : in_block <= 32 ? 2 : 4;
    const int thread = (int)threadIdx.x, warp = thread / 32, tile = warp % tiles;
    const int first = thread / PACKS, column = thread % PACKS * PACK<T>;
    const bool in_head = column < head_dim;
    const uint64_t width = (uint64_t)head_dim, from_column = in_head ? (uint64_t)column : 0;

    // The head of query `index` in the block, among the heads of all rows.
    const auto head_of = [&](int index) {
        const uint32_t at = first_query + (uint32_t)index;
        return ((uint64_t)members[first_member + at / group] * kv_heads + kv_head) * group + at % group;
    };
    if (thread < PART) {
        const uint32_t span = of_leader.begin - of_leader.shared + blockIdx.z * PART + (uint32_t)thread;
        const bool is_there = thread < used;
        const uint32_t stop = !is_there ? 0 : span + 1 < of_leader.end ? spans[count + span + 1] : rows[2 * n + leader];
        pages[thread] = is_there ? spans[span] : 0;
        lengths[thread] = is_there ? (int)(stop - spans[count + span]) : 0;
    }
    for (int row = first; row < 16 * tiles; row += STEP) {
        const bool is_real = row < in_block;
        const T *from = query + head_of(is_real ? row : 0) * width + from_column;
        start_copy(queries + row * Size::STRIDE + column, from, is_real && in_head);
    }
    __syncthreads();
    // Positions that are not there become 0.
    const auto load = [&](int from_span) {
        T *to = stages + from_span / Size::SPANS % 2 * 2 * Size::TILE;
#pragma unroll 4
        for (int row = first; row < Size::SPANS * PAGE; row += STEP) {
            const int span = from_span + row / PAGE;
            const bool is_real = row % PAGE < lengths[span];
            const uint64_t position = ((uint64_t)pages[span] * kv_heads + kv_head) * PAGE + (uint64_t)(row % PAGE);
            const uint64_t place = position * width + from_column;
            start_copy(to + row * Size::STRIDE + column, keys + place, is_real && in_head);
            start_copy(to + Size::TILE + row * Size::STRIDE + column, values + place, is_real && in_head);
        }
    };

    UnitSoftmax<T, D> softmax;
    load(0);
    for (int from_span = 0; from_span < used; from_span += Size::SPANS) {
        // The tiles of this stage are there, and nobody reads the other ones.
        wait_for_copies();
        __syncthreads();
        if (from_span + Size::SPANS < used) load(from_span + Size::SPANS);
        const T *stage = stages + from_span / Size::SPANS % 2 * 2 * Size::TILE;
        const int end = used - from_span < Size::SPANS ? used - from_span : Size::SPANS;
#pragma unroll 1
        for (int span = warp / tiles; span < end; span += Size::WARPS / tiles) {
            const T *tile_of_span = stage + span * PAGE * Size::STRIDE;
            softmax.add(queries + tile * 16 * Size::STRIDE, tile_of_span, tile_of_span + Size::TILE,
                        lengths[from_span + span], scale * LOG2_E);
        }
    }

    // The results take the place of the tiles, which all warps have read.
    __syncthreads();
    float *results = reinterpret_cast<float *>(stages);
    softmax.write(results + warp * 16 * (D + 2));
    __syncthreads();
    for (int index = thread; index < in_block * head_dim; index += Size::THREADS) {
        const int at = index / head_dim, element = index % head_dim;
        const Merged merged(results + at * (D + 2), Size::WARPS / tiles, tiles * 16 * (D + 2), D, element);
        const uint64_t head = head_of(at);
        const uint32_t own_parts = OwnSpans(rows, shared_spans, n, (uint32_t)(head / (kv_heads * group))).own_parts();
        merged.write(partial + (head * parts + own_parts + blockIdx.z) * (width + 2), head_dim, element);
    }
}

// Merges each head's parts. A warp has one head.
template <typename T>
__device__ __forceinline__ void merge_parts(const float *partial, const uint32_t *rows, const uint32_t *shared_spans, T *y,
                                            uint32_t n, uint32_t heads, uint32_t parts, int head_dim) {
    const uint64_t head = (uint64_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (head >= (uint64_t)n * heads) return;
    const int count = (int)OwnSpans(rows, shared_spans, n, (uint32_t)(head / heads)).parts(), width = head_dim + 2;
    const float *from = partial + head * parts * (uint64_t)width;
    for (int element = (int)threadIdx.x; element < head_dim; element += 32) {
        const Merged merged(from, count, width, head_dim, element);
        y[head * (uint64_t)head_dim + (uint64_t)element] = from_float<T>(merged.mixed / merged.sum);
    }
}

#define ATTEND_ARGUMENTS(T)                                                                                            \
    const T *query, const T *keys, const T *values, const uint32_t *rows, const uint32_t *spans,                       \
        const uint32_t *shared, T *y, float *partial, uint32_t n, uint32_t count, uint32_t kv_heads, uint32_t group,   \
        uint32_t parts, int head_dim, float scale

#define ATTEND(T, name, D, H)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS<H>)                                                   \
        paged_attention_##D##_##H##_##name(ATTEND_ARGUMENTS(T)) {                                                      \
        attend<T, D / ELEMENTS, H, false>(query, keys, values, rows, spans, shared, y, partial, n, count, kv_heads,    \
                                          group, parts, head_dim, scale, 0, 0.0f);                                     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS<H>)                                                   \
        scored_paged_attention_##D##_##H##_##name(ATTEND_ARGUMENTS(T), uint32_t window, float cap) {                   \
        attend<T, D / ELEMENTS, H, true>(query, keys, values, rows, spans, shared, y, partial, n, count, kv_heads,     \
                                         group, parts, head_dim, scale, window, cap);                                  \
    }

#define SHARED_ARGUMENTS(T)                                                                                            \
    const T *query, const T *keys, const T *values, const uint32_t *rows, const uint32_t *spans,                       \
        const uint32_t *shared, const uint32_t *members, const uint32_t *starts, float *partial, uint32_t n,           \
        uint32_t count, uint32_t kv_heads, uint32_t group, uint32_t parts, int head_dim, float scale

#define PAGED_ATTENTION(T, name)                                                                                       \
    extern "C" __global__ void __launch_bounds__(WRITE_THREADS)                                                        \
        paged_write_##name(const T *query, const T *query_weight, const T *key, const T *key_weight, const T *value,   \
                           const float *cos, const float *sin, const uint32_t *slots, T *rotated, T *keys, T *values,  \
                           uint32_t n, uint32_t heads, uint32_t kv_heads, int query_step, int head_dim, int pairs,     \
                           float epsilon, float offset) {                                                              \
        write_rows(query, query_weight, key, key_weight, value, cos, sin, slots, rotated, keys, values, n, heads,      \
                   kv_heads, query_step, head_dim, pairs, epsilon, offset);                                            \
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
    extern "C" __global__ void __launch_bounds__(UnitTiles<T, 64>::THREADS)                                            \
        shared_paged_attention_64_##name(SHARED_ARGUMENTS(T)) {                                                        \
        attend_shared<T, 64>(query, keys, values, rows, spans, shared, members, starts, partial, n, count,             \
                             kv_heads, group, parts, head_dim, scale);                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(UnitTiles<T, 128>::THREADS)                                           \
        shared_paged_attention_128_##name(SHARED_ARGUMENTS(T)) {                                                       \
        attend_shared<T, 128>(query, keys, values, rows, spans, shared, members, starts, partial, n, count,            \
                              kv_heads, group, parts, head_dim, scale);                                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(WRITE_THREADS)                                                        \
        paged_attention_merge_##name(const float *partial, const uint32_t *rows, const uint32_t *shared, T *y,         \
                                     uint32_t n, uint32_t heads, uint32_t parts, int head_dim) {                       \
        merge_parts(partial, rows, shared, y, n, heads, parts, head_dim);                                              \
    }

PAGED_ATTENTION(float, f32)
PAGED_ATTENTION(__nv_bfloat16, bf16)
PAGED_ATTENTION(__half, f16)
