// Causal grouped-query attention on the tensor cores, forward and backward. The matrix of the
// scores is never stored.
//
// The query heads that share a key head are the rows of one matrix: row r of a sequence is head r %
// group at new position r / group. A block keeps some rows of its result and loads the other
// operands in tiles, as in FlashAttention-2 (https://arxiv.org/abs/2307.08691). The forward pass
// and the gradient of the queries keep queries and load keys. The gradient of keys and values keeps
// keys and loads queries. One thread computes each sum in a fixed order without atomics, so results
// are deterministic.
//
// Scores and sums are f32. In bf16 and f16 the softmax weights and the gradients of the scores are
// rounded to the dtype, like all operands of the tensor cores. All passes compute a score from the
// same products in the same order. __fmul_rn rounds the scaled score and is never part of a fused
// operation: if the last bit of a score is worth 1, another rounding gives another weight.

#include "element.cuh"
#include "math.cuh"
#include "mma.cuh"

#include <climits>

// The sizes of tiles for heads of up to D elements. `attention.rs` has the same sizes for the
// launches. A warp has 16 of the kept rows.
template <typename T, int D> struct Tiles {
    static constexpr bool WIDE = sizeof(T) == 4;
    static constexpr int ROWS = WIDE && D == 256 ? 32 : 64;
    static constexpr int THREADS = 2 * ROWS;
    // Forward blocks of a multiprocessor, limited by its shared memory. With more blocks the
    // compiler would spill registers.
    static constexpr int FORWARD_BLOCKS = D == 64 ? 4 : 2;
    // Rows of a loaded tile, forward and backward.
    static constexpr int KEYS = WIDE ? (D == 256 ? 16 : 32) : (D == 256 ? 32 : 64);
    static constexpr int OTHERS = WIDE ? (D == 64 ? 32 : 16) : (D == 256 ? 16 : 32);
    // Rows have 16 bytes of padding, to start in different banks.
    static constexpr int STRIDE = D + PACK<T>;
    // Columns of the gradients of keys and values that fit in the registers of one block.
    static constexpr int COLUMNS = D < 128 ? D : 128;
};

// One key head of one sequence. `sequences` has the first query, new positions, first key and all
// positions of each sequence.
struct Head {
    uint32_t first_query, first_key, kv_heads, kv_head, group;
    int total, past, rows, head_dim;
    const uint8_t *mask;

    __device__ __forceinline__ Head(const uint8_t *mask, const uint32_t *sequences, uint32_t index, uint32_t kv_heads,
                                    uint32_t group, int head_dim)
        : kv_heads(kv_heads), kv_head(index % kv_heads), group(group), head_dim(head_dim) {
        const uint32_t *sequence = sequences + 4 * (uint64_t)(index / kv_heads);
        first_query = sequence[0];
        first_key = sequence[2];
        total = (int)sequence[3];
        past = total - (int)sequence[1];
        rows = (int)(sequence[1] * group);
        this->mask = mask + first_key;
    }

    // Returns the index of a row among the heads of all queries.
    __device__ __forceinline__ uint64_t row_place(int row) const {
        const uint64_t position = first_query + (uint32_t)row / group;
        return (position * kv_heads + kv_head) * group + (uint32_t)row % group;
    }
    __device__ __forceinline__ uint64_t key_place(int key) const {
        return (uint64_t)(first_key + (uint32_t)key) * kv_heads + kv_head;
    }
    __device__ __forceinline__ uint64_t elements(uint64_t place) const { return place * (uint64_t)head_dim; }

    // A key is visible to a row if its mark is not above the mark of the row. The mark is the
    // position, except at padding.
    __device__ __forceinline__ int row_mark(int row) const {
        if (row >= rows) return -1;
        const int position = past + row / (int)group;
        return mask[position] != 0 ? position : -1;
    }
    __device__ __forceinline__ int key_mark(int key) const { return key < total && mask[key] != 0 ? key : INT_MAX; }
};

// Products cover whole fragments of the head dimension.
__device__ __forceinline__ int padded(int head_dim) { return (head_dim + 15) / 16 * 16; }

// Loads `rows` rows of a tile from `source(row)`. Rows with a null source, and columns beyond the
// head, are 0.
template <typename T, int STRIDE, int THREADS, typename Source>
__device__ __forceinline__ void load_tile(T *tile, int rows, int head_dim, bool aligned, Source source) {
    const int packs = padded(head_dim) / PACK<T>;
    for (int i = (int)threadIdx.x; i < rows * packs; i += THREADS) {
        const int row = i / packs, column = i % packs * PACK<T>;
        const T *from = source(row);
        T *to = tile + row * STRIDE + column;
        if (from == nullptr || (aligned && column >= head_dim)) {
            *reinterpret_cast<uint4 *>(to) = make_uint4(0, 0, 0, 0);
        } else if (aligned) {
            *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from + column);
        } else {
            for (int k = 0; k < PACK<T>; k++) to[k] = column + k < head_dim ? from[column + k] : from_float<T>(0.0f);
        }
    }
}

// Writes 16 rows by `columns` of c to `target(row)`, through the rows of this warp in a tile.
// `factors` scale the rows of this lane. A factor of 0 gives 0, also for NaN.
template <typename T, int STRIDE, int pieces, typename Target>
__device__ __forceinline__ void store_rows(T *tile, const float (&c)[pieces][4], const float (&factors)[2], int columns,
                                           bool aligned, Target target) {
    const int lane = (int)threadIdx.x % 32, first = (int)threadIdx.x / 32 * 16;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < pieces; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x = factors[i / 2] == 0.0f ? 0.0f : c[n][i] * factors[i / 2];
            tile[(first + lane / 4 + i / 2 * 8) * STRIDE + n * 8 + lane % 4 * 2 + i % 2] = from_float<T>(x);
        }
    }
    __syncwarp();
    const int packs = (columns + PACK<T> - 1) / PACK<T>;
    for (int i = lane; i < 16 * packs; i += 32) {
        const int row = first + i / packs, column = i % packs * PACK<T>;
        T *to = target(row);
        if (to == nullptr) continue;
        const T *from = tile + row * STRIDE + column;
        if (aligned) *reinterpret_cast<uint4 *>(to + column) = *reinterpret_cast<const uint4 *>(from);
        else
            for (int k = 0; k < PACK<T> && column + k < columns; k++) to[column + k] = from[k];
    }
}

// Adds to c[.., n] the product of the 16 rows of `a` of this warp with the rows of `b`, at the k-th
// DEPTH columns of the head. `swapped` adds the products in the order of the transposed product.
template <typename T, int STRIDE, bool swapped, int pieces>
__device__ __forceinline__ void multiply_rows(float (&c)[pieces][4], const T *a, const T *b, int k) {
    const FragmentA of_a = load_a(a, STRIDE, (int)threadIdx.x / 32 * 16, k * DEPTH<T>);
#pragma unroll
    for (int n = 0; n < pieces / 2; n++) {
        FragmentB of_b[2];
        load_b_of_rows(b, STRIDE, n * 16, k * DEPTH<T>, of_b);
        multiply<T, swapped>(c[2 * n], of_a, of_b[0]);
        multiply<T, swapped>(c[2 * n + 1], of_a, of_b[1]);
    }
}

// c += weights b, at the columns of the tile from `first` to the end of the head.
template <typename T, int STRIDE, int pieces, int others>
__device__ __forceinline__ void multiply_columns(float (&c)[pieces][4], const float (&weights)[others][4], const T *b, int first,
                                                 int head_dim) {
#pragma unroll
    for (int k = 0; k < others * 8 / DEPTH<T>; k++) {
        const FragmentA a = as_a<T>(weights, k);
#pragma unroll
        for (int n = 0; n < pieces / 2; n++) {
            // Not `break`: the fragments would leave the registers.
            if (first + n * 16 < head_dim) {
                FragmentB of_b[2];
                load_b_of_columns(b, STRIDE, k * DEPTH<T>, first + n * 16, of_b);
                multiply<T>(c[2 * n], a, of_b[0]);
                multiply<T>(c[2 * n + 1], a, of_b[1]);
            }
        }
    }
}

template <int pieces> __device__ __forceinline__ void clear(float (&c)[pieces][4]) {
#pragma unroll
    for (int n = 0; n < pieces; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) c[n][i] = 0.0f;
    }
}

// Reductions over the four lanes with parts of the same rows.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// `log_sums`: log2 of the sum of the weights of each row, [queries, heads]. Not read for a row
// without visible keys.
template <typename T, int D>
__device__ __forceinline__ void forward(const T *query, const T *key, const T *value, const uint8_t *mask,
                                        const uint32_t *sequences, T *y, float *log_sums, uint32_t tiles, uint32_t kv_heads,
                                        uint32_t group, int head_dim, float scale) {
    using Size = Tiles<T, D>;
    constexpr int STRIDE = Size::STRIDE, KEYS = Size::KEYS;
    DYNAMIC_SHARED(T, queries);
    T *keys = queries + Size::ROWS * STRIDE, *values = keys + KEYS * STRIDE;
    int *marks = reinterpret_cast<int *>(values + KEYS * STRIDE);

    const Head head(mask, sequences, blockIdx.x / tiles, kv_heads, group, head_dim);
    // The rows with the most visible keys come first.
    const int first_row = (int)(tiles - 1 - blockIdx.x % tiles) * Size::ROWS;
    if (first_row >= head.rows) return;
    const bool aligned = head_dim % PACK<T> == 0 && is_aligned(query) && is_aligned(key) && is_aligned(value) && is_aligned(y);
    const int thread = (int)threadIdx.x, lane = thread % 32;
    // The two rows of this lane.
    const int own_row = first_row + thread / 32 * 16 + lane / 4;
    const int own_marks[2] = {head.row_mark(own_row), head.row_mark(own_row + 8)};
    load_tile<T, STRIDE, Size::THREADS>(queries, Size::ROWS, head_dim, aligned, [&](int row) {
        return head.row_mark(first_row + row) < 0 ? nullptr : query + head.elements(head.row_place(first_row + row));
    });

    const float to_log2 = scale * LOG2_E;
    float mixed[D / 8][4], largest[2] = {-INFINITY, -INFINITY}, sums[2] = {0.0f, 0.0f};
    clear(mixed);
    const int last_row = min(first_row + Size::ROWS, head.rows) - 1;
    const int last_key = head.past + last_row / (int)group;
    for (int first_key = 0; first_key <= last_key; first_key += KEYS) {
        __syncthreads();
        for (int i = thread; i < KEYS; i += Size::THREADS) marks[i] = head.key_mark(first_key + i);
        auto source = [&](const T *of) {
            return [&, of](int row) {
                const int key_of_row = first_key + row;
                return head.key_mark(key_of_row) == INT_MAX ? nullptr : of + head.elements(head.key_place(key_of_row));
            };
        };
        load_tile<T, STRIDE, Size::THREADS>(keys, KEYS, head_dim, aligned, source(key));
        load_tile<T, STRIDE, Size::THREADS>(values, KEYS, head_dim, aligned, source(value));
        __syncthreads();

        float scores[KEYS / 8][4];
        clear(scores);
        for (int k = 0; k < padded(head_dim) / DEPTH<T>; k++) multiply_rows<T, STRIDE, false>(scores, queries, keys, k);
        float peaks[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool visible = marks[n * 8 + lane % 4 * 2 + i % 2] <= own_marks[i / 2];
                scores[n][i] = visible ? __fmul_rn(scores[n][i], to_log2) : -INFINITY;
                peaks[i / 2] = fmaxf(peaks[i / 2], scores[n][i]);
            }
        }
        float factors[2], subtract[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float peak = fmaxf(largest[r], row_max(peaks[r]));
            // The difference of two minus infinities would be NaN.
            subtract[r] = peak == -INFINITY ? 0.0f : peak;
            factors[r] = exp2_approx(largest[r] - subtract[r]);
            largest[r] = peak;
            sums[r] *= factors[r];
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[n][i] = exp2_approx(scores[n][i] - subtract[i / 2]);
                sums[i / 2] += scores[n][i];
            }
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) mixed[n][i] *= factors[i / 2];
        }
        multiply_columns<T, STRIDE>(mixed, scores, values, 0, head_dim);
    }

    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = row_sum(sums[r]);
        factors[r] = own_marks[r] < 0 ? 0.0f : 1.0f / sum;
        if (lane % 4 == 0 && own_row + 8 * r < head.rows)
            log_sums[head.row_place(own_row + 8 * r)] = largest[r] + log2f(sum);
    }
    store_rows<T, STRIDE>(queries, mixed, factors, head_dim, aligned, [&](int row) {
        return first_row + row < head.rows ? y + head.elements(head.row_place(first_row + row)) : nullptr;
    });
}

// The gradient of the queries (`first`), or of keys (`first`) and values (`second`). `dots`: the
// dot product of each row of the result with its gradient, [queries, heads]. The pass of the
// queries writes it, and the pass of the keys reads it.
template <typename T, int D, bool OF_KEYS>
__device__ __forceinline__ void backward(const T *query, const T *key, const T *value, const uint8_t *mask,
                                         const uint32_t *sequences, const T *y, const T *gradient, const float *log_sums,
                                         float *dots, T *first, T *second, uint32_t tiles, uint32_t kv_heads, uint32_t group,
                                         int head_dim, float scale) {
    using Size = Tiles<T, D>;
    constexpr int STRIDE = Size::STRIDE, OTHERS = Size::OTHERS, COLUMNS = OF_KEYS ? Size::COLUMNS : D;
    // The kept operands are queries and the gradient of the result, or keys and values. The other
    // two are loaded in tiles.
    DYNAMIC_SHARED(T, kept);
    T *kept_with = kept + Size::ROWS * STRIDE, *others = kept_with + Size::ROWS * STRIDE, *others_with = others + OTHERS * STRIDE;
    int *marks = reinterpret_cast<int *>(others_with + OTHERS * STRIDE);
    float *other_sums = reinterpret_cast<float *>(marks + OTHERS), *other_dots = other_sums + OTHERS;

    constexpr uint32_t PARTS = D / COLUMNS;
    const int column = (int)(blockIdx.x % PARTS) * COLUMNS;
    const uint32_t block = blockIdx.x / PARTS;
    const Head head(mask, sequences, block / tiles, kv_heads, group, head_dim);
    // The blocks with the most work come first: late queries, early keys.
    const int tile = (int)(OF_KEYS ? block % tiles : tiles - 1 - block % tiles), first_own = tile * Size::ROWS;
    if (first_own >= (OF_KEYS ? head.total : head.rows)) return;
    const bool aligned = head_dim % PACK<T> == 0 && is_aligned(query) && is_aligned(key) && is_aligned(value) &&
                         is_aligned(gradient) && is_aligned(first) && is_aligned(second);
    const int thread = (int)threadIdx.x, lane = thread % 32;

    auto rows_of = [&](const T *of, int from) {
        return [&head, of, from](int row) {
            return head.row_mark(from + row) < 0 ? nullptr : of + head.elements(head.row_place(from + row));
        };
    };
    auto keys_of = [&](const T *of, int from) {
        return [&head, of, from](int row) {
            return head.key_mark(from + row) == INT_MAX ? nullptr : of + head.elements(head.key_place(from + row));
        };
    };
    const int own = thread / 32 * 16 + lane / 4;
    int own_marks[2];
    float own_sums[2] = {0.0f, 0.0f}, own_dots[2] = {0.0f, 0.0f};
    if constexpr (OF_KEYS) {
        load_tile<T, STRIDE, Size::THREADS>(kept, Size::ROWS, head_dim, aligned, keys_of(key, first_own));
        load_tile<T, STRIDE, Size::THREADS>(kept_with, Size::ROWS, head_dim, aligned, keys_of(value, first_own));
#pragma unroll
        for (int r = 0; r < 2; r++) own_marks[r] = head.key_mark(first_own + own + 8 * r);
    } else {
        load_tile<T, STRIDE, Size::THREADS>(kept, Size::ROWS, head_dim, aligned, rows_of(query, first_own));
        load_tile<T, STRIDE, Size::THREADS>(kept_with, Size::ROWS, head_dim, aligned, rows_of(gradient, first_own));
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = own + 8 * r;
            own_marks[r] = head.row_mark(first_own + row);
            float dot = 0.0f;
            if (own_marks[r] >= 0) {
                const uint64_t place = head.row_place(first_own + row);
                own_sums[r] = log_sums[place];
                for (int i = lane % 4; i < head_dim; i += 4)
                    dot += to_float(kept_with[row * STRIDE + i]) * to_float(y[head.elements(place) + (uint64_t)i]);
            }
            own_dots[r] = row_sum(dot);
            if (lane % 4 == 0 && first_own + row < head.rows) dots[head.row_place(first_own + row)] = own_dots[r];
        }
    }

    const float to_log2 = scale * LOG2_E;
    float of_first[COLUMNS / 8][4], of_second[OF_KEYS ? COLUMNS / 8 : 1][4];
    clear(of_first);
    clear(of_second);
    // Queries from the first with a visible key of this block, or keys up to the last visible one.
    const int begin = OF_KEYS ? max(first_own - head.past, 0) * (int)group : 0;
    const int end = OF_KEYS ? head.rows : head.past + (min(first_own + Size::ROWS, head.rows) - 1) / (int)group + 1;
    for (int from = begin; from < end; from += OTHERS) {
        __syncthreads();
        for (int i = thread; i < OTHERS; i += Size::THREADS) {
            if constexpr (OF_KEYS) {
                marks[i] = head.row_mark(from + i);
                const bool real = marks[i] >= 0;
                const uint64_t place = real ? head.row_place(from + i) : 0;
                other_sums[i] = real ? log_sums[place] : 0.0f;
                other_dots[i] = real ? dots[place] : 0.0f;
            } else {
                marks[i] = head.key_mark(from + i);
            }
        }
        if constexpr (OF_KEYS) {
            load_tile<T, STRIDE, Size::THREADS>(others, OTHERS, head_dim, aligned, rows_of(query, from));
            load_tile<T, STRIDE, Size::THREADS>(others_with, OTHERS, head_dim, aligned, rows_of(gradient, from));
        } else {
            load_tile<T, STRIDE, Size::THREADS>(others, OTHERS, head_dim, aligned, keys_of(key, from));
            load_tile<T, STRIDE, Size::THREADS>(others_with, OTHERS, head_dim, aligned, keys_of(value, from));
        }
        __syncthreads();

        // The weights, and their gradient, which becomes the gradient of the scores. Both are
        // transposed in the pass of the keys.
        float weights[OTHERS / 8][4], of_scores[OTHERS / 8][4];
        clear(weights);
        clear(of_scores);
        for (int k = 0; k < padded(head_dim) / DEPTH<T>; k++) {
            multiply_rows<T, STRIDE, OF_KEYS>(weights, kept, others, k);
            multiply_rows<T, STRIDE, OF_KEYS>(of_scores, kept_with, others_with, k);
        }
#pragma unroll
        for (int n = 0; n < OTHERS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int other = n * 8 + lane % 4 * 2 + i % 2;
                const bool visible = OF_KEYS ? own_marks[i / 2] <= marks[other] : marks[other] <= own_marks[i / 2];
                const float log_sum = OF_KEYS ? other_sums[other] : own_sums[i / 2];
                const float dot = OF_KEYS ? other_dots[other] : own_dots[i / 2];
                weights[n][i] = visible ? exp2_approx(__fmul_rn(weights[n][i], to_log2) - log_sum) : 0.0f;
                of_scores[n][i] = visible ? weights[n][i] * (of_scores[n][i] - dot) : 0.0f;
            }
        }
        multiply_columns<T, STRIDE>(of_first, of_scores, others, column, head_dim);
        if constexpr (OF_KEYS) multiply_columns<T, STRIDE>(of_second, weights, others_with, column, head_dim);
    }

    const int columns = min(COLUMNS, head_dim - column);
    if constexpr (OF_KEYS) {
        auto target = [&](T *of) {
            return [&, of](int row) {
                return first_own + row < head.total ? of + head.elements(head.key_place(first_own + row)) + column : nullptr;
            };
        };
        const bool real[2] = {own_marks[0] != INT_MAX, own_marks[1] != INT_MAX};
        // Only this warp reads its rows of the tiles, and it has finished.
        store_rows<T, STRIDE>(kept, of_first, {real[0] ? scale : 0.0f, real[1] ? scale : 0.0f}, columns, aligned, target(first));
        store_rows<T, STRIDE>(kept_with, of_second, {real[0] ? 1.0f : 0.0f, real[1] ? 1.0f : 0.0f}, columns, aligned,
                              target(second));
    } else {
        store_rows<T, STRIDE>(kept, of_first, {own_marks[0] < 0 ? 0.0f : scale, own_marks[1] < 0 ? 0.0f : scale}, columns, aligned,
                              [&](int row) {
                                  return first_own + row < head.rows ? first + head.elements(head.row_place(first_own + row))
                                                                     : nullptr;
                              });
    }
}

#define ATTENTION(D, T, name)                                                                                          \
    extern "C" __global__ void __launch_bounds__(Tiles<T, D>::THREADS, Tiles<T, D>::FORWARD_BLOCKS)                   \
        attention_forward_##D##_##name(                                                                                \
        const T *query, const T *key, const T *value, const uint8_t *mask, const uint32_t *sequences, T *y,           \
        float *log_sums, uint32_t tiles, uint32_t kv_heads, uint32_t group, int head_dim, float scale) {              \
        forward<T, D>(query, key, value, mask, sequences, y, log_sums, tiles, kv_heads, group, head_dim, scale);      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(Tiles<T, D>::THREADS) attention_of_query_##D##_##name(               \
        const T *query, const T *key, const T *value, const uint8_t *mask, const uint32_t *sequences, const T *y,     \
        const T *gradient, const float *log_sums, float *dots, T *of_query, uint32_t tiles, uint32_t kv_heads,        \
        uint32_t group, int head_dim, float scale) {                                                                  \
        backward<T, D, false>(query, key, value, mask, sequences, y, gradient, log_sums, dots, of_query, nullptr,     \
                              tiles, kv_heads, group, head_dim, scale);                                               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(Tiles<T, D>::THREADS) attention_of_key_##D##_##name(                 \
        const T *query, const T *key, const T *value, const uint8_t *mask, const uint32_t *sequences,                 \
        const T *gradient, const float *log_sums, const float *dots, T *of_key, T *of_value, uint32_t tiles,          \
        uint32_t kv_heads, uint32_t group, int head_dim, float scale) {                                               \
        backward<T, D, true>(query, key, value, mask, sequences, nullptr, gradient, log_sums,                          \
                             const_cast<float *>(dots), of_key, of_value, tiles, kv_heads, group, head_dim, scale);    \
    }

ATTENTION(64, float, f32)
ATTENTION(64, __nv_bfloat16, bf16)
ATTENTION(64, __half, f16)
ATTENTION(128, float, f32)
ATTENTION(128, __nv_bfloat16, bf16)
ATTENTION(128, __half, f16)
ATTENTION(256, float, f32)
ATTENTION(256, __nv_bfloat16, bf16)
ATTENTION(256, __half, f16)
