// Causal grouped-query attention on the tensor cores, forward and backward. The score matrix is
// never stored.
//
// Query heads that share a key head form one matrix: row r in a sequence is head r % group at new
// position r / group. A block keeps some rows of its result and loads the other operands in tiles,
// as in FlashAttention-2 (https://arxiv.org/abs/2307.08691). The forward pass and the query
// gradient keep queries and load keys. The key and value gradients keep keys and load queries. One
// thread computes each sum in a fixed order without atomics, so results are deterministic.
//
// Scores and sums are f32. In bf16 and f16, softmax weights and score gradients are rounded to the
// dtype, like all tensor core operands. All passes compute a score from the same products in the
// same order. __fmul_rn rounds the scaled score and is never fused: where the last bit of a score
// is worth 1, a different rounding would change the weight.
//
// OPTIONS adds a window and a soft cap for scores. Kernels without it contain no code for them.

#include "copy.cuh"
#include "divisor.cuh"
#include "element.cuh"
#include "math.cuh"
#include "mma.cuh"
#include "warpgroup.cuh"

#include <climits>

// Without external names: a program may contain this code for several GPUs.
namespace {

// The sizes of tiles for heads of up to D elements. `attention.rs` has the same sizes for the
// launches.
template <typename T, int D> struct Tiles {
    static constexpr bool WIDE = sizeof(T) == 4, WARPGROUP = ON_WARPGROUP<T>;
    // Rows that a block keeps in the backward pass: 16 for each warp.
    static constexpr int ROWS = WIDE && D == 256 ? 32 : 64;
    static constexpr int THREADS = 2 * ROWS;
    // Groups of 16 rows of a warp in the forward pass. Each loaded fragment of a key or value
    // serves all of them. Warpgroups load no fragments.
    static constexpr int GROUPS = WIDE || WARPGROUP || D == 256 ? 1 : 2;
    // On warpgroups, two of them share the keys and values of the forward pass.
    static constexpr int FORWARD_THREADS = WARPGROUP && D < 256 ? 2 * THREADS : THREADS;
    static constexpr int FORWARD_ROWS = FORWARD_THREADS / 2 * GROUPS;
    // Forward blocks of a multiprocessor, limited by its shared memory. With more blocks the
    // compiler would spill registers.
    static constexpr int FORWARD_BLOCKS = D == 64 && WIDE ? 4 : 2;
    // Rows of a loaded tile, forward and backward.
    static constexpr int KEYS = WIDE ? (D == 256 ? 16 : 32) : (D == 256 ? 32 : 64);
    static constexpr int OTHERS = WARPGROUP ? KEYS : WIDE ? (D == 64 ? 32 : 16) : (D == 256 ? 16 : 32);
    // Rows have 16 bytes of padding, to start in different banks, if they are not in panels.
    static constexpr int STRIDE = WARPGROUP ? D : D + PACK<T>;
    static_assert(KEYS <= THREADS && OTHERS <= THREADS, "a thread has at most one row of a tile");
    // Bytes of the kept operands of the backward pass, and of a pair of loaded tiles with three
    // numbers for each row. The next pair arrives while a block uses the first one, if two fit into
    // 99 KiB: some GPUs have no more. On warpgroups, a third block of the gradient of the queries
    // is faster than that.
    static constexpr int KEPT_BYTES = 2 * ROWS * STRIDE * (int)sizeof(T);
    static constexpr int STAGE_BYTES = 2 * OTHERS * STRIDE * (int)sizeof(T) + 12 * OTHERS;
    static constexpr int KEY_STAGES = KEPT_BYTES + 2 * STAGE_BYTES <= 99 * 1024 ? 2 : 1;
    static constexpr int QUERY_STAGES = WARPGROUP && D == 128 ? 1 : KEY_STAGES;
    // Blocks of a multiprocessor for the gradient of the queries: as many as fit into the 227 KiB
    // of an H100, and at most 4, which have 128 registers for a thread.
    static constexpr int FITTING = 227 * 1024 / (KEPT_BYTES + QUERY_STAGES * STAGE_BYTES);
    static constexpr int QUERY_BLOCKS = FITTING < 4 ? FITTING : 4;
    // Columns of the gradients of keys and values that fit in the registers of one block.
    static constexpr int COLUMNS = D < 128 ? D : 128;

    // The place of an element in a tile of `rows` rows.
    static __device__ __forceinline__ int place(int rows, int row, int column) {
        if constexpr (WARPGROUP) return place_in_panels(rows, row, column);
        else return row * STRIDE + column;
    }
    // The first row of this warp in a tile, with `groups` groups of 16 rows for each warp.
    static __device__ __forceinline__ int first_row(int groups) { return (int)threadIdx.x / 32 * groups * 16; }
};

// Starts to load the same ROWS rows of each operand in `from` into its tile. Row r is at the
// element `offset(r)`, which is in the operand for every r. Row r + n is `step(n)` elements later;
// 0 if that depends on r. Rows that are not `is_real(r)`, and columns beyond the head, become 0. If
// `whole`, all rows are real.
template <typename T, int D, int ROWS, int THREADS, int operands, typename Offset, typename Step, typename Real>
__device__ __forceinline__ void load_tiles(T *const (&tiles)[operands], const T *const (&from)[operands], int head_dim,
                                           bool aligned, bool whole, Offset offset, Step step, Real is_real) {
    using Size = Tiles<T, D>;
    constexpr int PACKS = D / PACK<T>;
    if (!aligned) {
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < ROWS * D; i += THREADS) {
            const int row = i / D, column = i % D;
            const bool real = column < head_dim && is_real(row);
#pragma unroll
            for (int operand = 0; operand < operands; operand++)
                tiles[operand][Size::place(ROWS, row, column)] =
                    real ? from[operand][offset(row) + (uint64_t)column] : from_float<T>(0.0f);
        }
        return;
    }
    // A thread copies the same columns of every STEP-th row.
    constexpr int STEP = THREADS / PACKS, COPIES = ROWS / STEP, BATCH = COPIES < 4 ? COPIES : 4;
    static_assert(THREADS % PACKS == 0 && ROWS % STEP == 0 && COPIES % BATCH == 0, "a thread has whole batches of copies");
    const int first = (int)threadIdx.x / PACKS, column = (int)threadIdx.x % PACKS * PACK<T>;
    const bool in_head = column < head_dim;
    // Without a product for each address. Other kernels would spill registers.
    if constexpr (ON_WARPGROUP<T>) {
        const uint32_t distance = step(STEP);
        if (whole && distance != 0) {
            uint64_t at = offset(first) + (uint64_t)(in_head ? column : 0);
#pragma unroll
            for (int i = 0; i < COPIES; i++, at += distance) {
#pragma unroll
                for (int operand = 0; operand < operands; operand++)
                    start_copy(tiles[operand] + Size::place(ROWS, first + i * STEP, column), from[operand] + at, in_head);
            }
            return;
        }
    }
#pragma unroll 1
    for (int batch = 0; batch < COPIES; batch += BATCH) {
        const int begin = first + batch * STEP;
        bool real[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) real[i] = in_head;
        // Before the copies, so that no copy waits for its entry of the mask.
        if (!whole) {
#pragma unroll
            for (int i = 0; i < BATCH; i++) real[i] = is_real(begin + i * STEP) && in_head;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int row = begin + i * STEP;
            const uint64_t at = offset(row) + (uint64_t)(in_head ? column : 0);
#pragma unroll
            for (int operand = 0; operand < operands; operand++)
                start_copy(tiles[operand] + Size::place(ROWS, row, column), from[operand] + at, real[i]);
        }
    }
}

// The scores of a pass, in base 2, and the keys that a row sees.
template <bool OPTIONS> struct Scoring {
    // The factor of a product before the cap, if there is one.
    float factor, cap;
    int window;

    // A window of INT_MAX has all keys, and a cap of 0 is none.
    __device__ __forceinline__ Scoring(float scale, int window, float cap)
        : factor(OPTIONS && cap > 0.0f ? scale / cap : scale * LOG2_E), cap(cap), window(window) {}

    // cap * tanh(scale * product / cap), or scale * product without a cap.
    __device__ __forceinline__ float score(float product) const {
        if constexpr (OPTIONS) {
            if (cap > 0.0f) return __fmul_rn(__fmul_rn(tanhf(__fmul_rn(product, factor)), cap), LOG2_E);
        }
        return __fmul_rn(product, factor);
    }

    // The derivative of the score by the scaled product.
    __device__ __forceinline__ float slope(float product) const {
        if constexpr (OPTIONS) {
            if (cap > 0.0f) {
                const float t = tanhf(__fmul_rn(product, factor));
                return 1.0f - t * t;
            }
        }
        return 1.0f;
    }

    // A key is visible to a row if its mark is not above the mark of the row, and in its window.
    __device__ __forceinline__ bool sees(int row_mark, int key_mark) const {
        // A negative difference is a large unsigned number.
        if constexpr (OPTIONS) return (uint32_t)(row_mark - key_mark) < (uint32_t)window;
        return key_mark <= row_mark;
    }

    // The first position that the query at `position` sees, and the end of the positions whose
    // queries see the key at `position`, at most `total`.
    __device__ __forceinline__ int first_seen(int position) const {
        if constexpr (OPTIONS) return max(position - window + 1, 0);
        return 0;
    }
    __device__ __forceinline__ int end_of_seeing(int position, int total) const {
        if constexpr (OPTIONS) return window < total - position ? position + window : total;
        return total;
    }
};

// One key head of one sequence. `sequences` has the first query, new positions, first key and all
// positions of each sequence.
struct Head {
    uint32_t first_query, first_key, kv_heads, kv_head;
    Divisor group;
    int total, past, rows, head_dim;
    // Null if every key is real.
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
        this->mask = mask == nullptr ? nullptr : mask + first_key;
    }

    __device__ __forceinline__ bool has_mask() const { return mask != nullptr; }
    __device__ __forceinline__ int position_of_row(int row) const { return past + (int)group.divide((uint32_t)row).quotient; }
    // The positions exist, so that a load does not depend on a comparison.
    __device__ __forceinline__ bool is_real(int position) const { return mask == nullptr || mask[position] != 0; }
    __device__ __forceinline__ bool is_real_row(int row) const {
        return is_real(position_of_row(min(row, rows - 1))) && row < rows;
    }
    __device__ __forceinline__ bool is_real_key(int key) const { return is_real(min(key, total - 1)) && key < total; }

    // Returns the index of a row among the heads of all queries, if each has `size` elements.
    __device__ __forceinline__ uint64_t row_place(int row, uint32_t size = 1) const {
        const Divisor::Result at = group.divide((uint32_t)row);
        return (uint64_t)(first_query + at.quotient) * (kv_heads * group.by * size) + (kv_head * group.by + at.remainder) * size;
    }
    // The first elements of a row and of a key.
    __device__ __forceinline__ uint64_t row_offset(int row) const { return row_place(row, (uint32_t)head_dim); }
    __device__ __forceinline__ uint64_t key_offset(int key) const {
        return (uint64_t)(first_key + (uint32_t)key) * (kv_heads * (uint32_t)head_dim) + kv_head * (uint32_t)head_dim;
    }

    // The elements from a key to the n-th after it: n keys, or n rows of whole positions.
    __device__ __forceinline__ uint32_t keys_apart(int n) const { return (uint32_t)n * kv_heads * (uint32_t)head_dim; }

    // The mark of a row or a key is its position, except at padding: see Scoring.
    __device__ __forceinline__ int row_mark(int row) const { return is_real_row(row) ? position_of_row(row) : -1; }
    __device__ __forceinline__ int key_mark(int key) const { return is_real_key(key) ? key : INT_MAX; }

    // Loads rows from `first`, of operands with the rows of the queries, or of the keys.
    template <int ROWS, int THREADS, typename T, int D, int operands>
    __device__ __forceinline__ void load_rows(T *const (&tiles)[operands], const T *const (&from)[operands], int first, bool aligned) const {
        load_tiles<T, D, ROWS, THREADS>(
            tiles, from, head_dim, aligned, mask == nullptr && first + ROWS <= rows,
            [&](int row) { return row_offset(min(first + row, rows - 1)); },
            [&](int n) { return group.divides((uint32_t)n) ? keys_apart(n) : 0; },
            [&](int row) { return is_real_row(first + row); });
    }
    template <int ROWS, int THREADS, typename T, int D, int operands>
    __device__ __forceinline__ void load_keys(T *const (&tiles)[operands], const T *const (&from)[operands], int first, bool aligned) const {
        load_tiles<T, D, ROWS, THREADS>(
            tiles, from, head_dim, aligned, mask == nullptr && first + ROWS <= total,
            [&](int row) { return key_offset(min(first + row, total - 1)); },
            [&](int n) { return keys_apart(n); },
            [&](int row) { return is_real_key(first + row); });
    }
};

// Writes 16 rows by `columns` of c to `target(row)`, through the rows from `first` of a tile of
// ROWS rows, which only this warp uses. `factors` scale the rows of this lane. A factor of 0 gives
// 0, also for NaN.
template <typename T, int D, int ROWS, int pieces, typename Target>
__device__ __forceinline__ void store_rows(T *tile, const float (&c)[pieces][4], const float (&factors)[2], int first,
                                           int columns, bool aligned, Target target) {
    const int lane = (int)threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < pieces; n++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float two[2];
#pragma unroll
            for (int i = 0; i < 2; i++) two[i] = factors[r] == 0.0f ? 0.0f : c[n][2 * r + i] * factors[r];
            store_two(tile + Tiles<T, D>::place(ROWS, first + lane / 4 + r * 8, n * 8 + lane % 4 * 2), two);
        }
    }
    __syncwarp();
    const int packs = (columns + PACK<T> - 1) / PACK<T>;
    for (int i = lane; i < 16 * packs; i += 32) {
        const int row = first + i / packs, column = i % packs * PACK<T>;
        T *to = target(row);
        if (to == nullptr) continue;
        const T *from = tile + Tiles<T, D>::place(ROWS, row, column);
        if (aligned) *reinterpret_cast<uint4 *>(to + column) = *reinterpret_cast<const uint4 *>(from);
        else
            for (int k = 0; k < PACK<T> && column + k < columns; k++) to[column + k] = from[k];
    }
}

template <int groups, int pieces> __device__ __forceinline__ void clear(float (&c)[groups][pieces][4]) {
#pragma unroll
    for (int g = 0; g < groups; g++) {
#pragma unroll
        for (int n = 0; n < pieces; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) c[g][n][i] = 0.0f;
        }
    }
}

// c[g] = a b^T, of the g-th 16 rows of `a` of this warp and the rows of `b`. `swapped` adds the
// products in the order of the transposed product. On a warpgroup, the products are still running.
template <typename T, int D, int ROWS, int OTHERS, bool swapped, int groups>
__device__ __forceinline__ void multiply_rows(float (&c)[groups][OTHERS / 8][4], const T *a, const T *b) {
    using Size = Tiles<T, D>;
    if constexpr (ON_WARPGROUP<T>) {
        static_assert(groups == 1, "a warp of a warpgroup has 16 rows");
        const int first = ROWS == 64 ? 0 : first_row_of_warpgroup();
        const uint64_t tile_a = operand_at<ROWS>(describe<ROWS>(a), first, 0), tile_b = describe<OTHERS>(b);
        begin_products();
#pragma unroll
        for (int column = 0; column < D; column += DEPTH<T>)
            start_product(c[0], operand_at<ROWS>(tile_a, 0, column), operand_at<OTHERS>(tile_b, 0, column), column > 0, a);
        end_products();
    } else {
        // With more the compiler would spill registers of f32.
        [[maybe_unused]] constexpr int UNROLLED = Size::WIDE ? 1 : D / DEPTH<T>;
        clear(c);
#pragma unroll UNROLLED
        for (int k = 0; k < D / DEPTH<T>; k++) {
            FragmentA of_a[groups];
#pragma unroll
            for (int g = 0; g < groups; g++) of_a[g] = load_a(a, Size::STRIDE, Size::first_row(groups) + 16 * g, k * DEPTH<T>);
#pragma unroll
            for (int n = 0; n < OTHERS / 16; n++) {
                FragmentB of_b[2];
                load_b_of_rows(b, Size::STRIDE, n * 16, k * DEPTH<T>, of_b);
#pragma unroll
                for (int g = 0; g < groups; g++) {
                    multiply<T, swapped>(c[g][2 * n], of_a[g], of_b[0]);
                    multiply<T, swapped>(c[g][2 * n + 1], of_a[g], of_b[1]);
                }
            }
        }
    }
}

// c += weights b, at the columns of the tile from `first`. On a warpgroup, the products are still
// running.
template <typename T, int D, int groups, int pieces, int others>
__device__ __forceinline__ void multiply_columns(float (&c)[groups][pieces][4], const float (&weights)[groups][others][4],
                                                 const T *b, int first, int head_dim) {
    if constexpr (ON_WARPGROUP<T>) {
        // An instruction has at most 128 columns here.
        constexpr int SLICE = pieces < 16 ? pieces : 16;
        FragmentA a[others / 2];
#pragma unroll
        for (int k = 0; k < others / 2; k++) a[k] = as_a<T>(weights[0], k);
        const uint64_t tile = describe<others * 8>(b);
        pin(a);
        pin(c[0]);
        begin_products();
#pragma unroll
        for (int k = 0; k < others / 2; k++) {
#pragma unroll
            for (int n = 0; n < pieces; n += SLICE)
                start_product(reinterpret_cast<float(&)[SLICE][4]>(c[0][n]), a[k],
                              operand_at<others * 8>(tile, k * DEPTH<T>, first + n * 8), b);
        }
        end_products();
    } else {
#pragma unroll
        for (int k = 0; k < others * 8 / DEPTH<T>; k++) {
            FragmentA a[groups];
#pragma unroll
            for (int g = 0; g < groups; g++) a[g] = as_a<T>(weights[g], k);
#pragma unroll
            for (int n = 0; n < pieces / 2; n++) {
                // Columns beyond the head are 0. The branch orders the products of f32, whose
                // operands would not fit in the registers all at once.
                if (sizeof(T) == 4 && first + n * 16 >= head_dim) continue;
                FragmentB of_b[2];
                load_b_of_columns(b, Tiles<T, D>::STRIDE, k * DEPTH<T>, first + n * 16, of_b);
#pragma unroll
                for (int g = 0; g < groups; g++) {
                    multiply<T>(c[g][2 * n], a[g], of_b[0]);
                    multiply<T>(c[g][2 * n + 1], a[g], of_b[1]);
                }
            }
        }
    }
}

// Waits for the copies of all threads. After it, no thread uses the previous tiles.
template <typename T> __device__ __forceinline__ void wait_for_tiles() {
    wait_for_copies();
    if constexpr (ON_WARPGROUP<T>) publish_operands();
    __syncthreads();
}

// Waits for the products of a warpgroup, whose result is c.
template <typename T, int groups, int pieces> __device__ __forceinline__ void wait_for_result(float (&c)[groups][pieces][4]) {
    if constexpr (ON_WARPGROUP<T>) wait_for_products(c[0]);
}

// Returns sum + the dot product of a pack in shared memory and `count` elements, or a whole pack if
// `aligned`.
template <typename T> __device__ __forceinline__ float add_dot(const T *pack, const T *from, int count, bool aligned, float sum) {
    float x[PACK<T>], z[PACK<T>];
    unpack<T>(*reinterpret_cast<const uint4 *>(pack), x);
    if (aligned) {
        unpack<T>(*reinterpret_cast<const uint4 *>(from), z);
    } else {
#pragma unroll
        for (int k = 0; k < PACK<T>; k++) z[k] = k < count ? to_float(from[k]) : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < PACK<T>; k++) sum = fmaf(x[k], z[k], sum);
    return sum;
}

// log2 of the largest weight of the forward pass, before it is divided by the sum.
constexpr float SLACK = 8.0f;

// `log_sums`: log2 of the sum of the weights of each row, [queries, heads]. Arbitrary for a row
// without visible keys.
//
// Computes a part of the rows of the block, with `GROUPS` groups of 16 rows for a warp.
template <typename T, int D, bool OPTIONS, int GROUPS>
__device__ __forceinline__ void forward_part(int part, const T *query, const T *key, const T *value, const uint8_t *mask,
                                             const uint32_t *sequences, T *y, float *log_sums, uint32_t tiles, uint32_t kv_heads,
                                             uint32_t group, int head_dim, float scale, int window, float cap) {
    using Size = Tiles<T, D>;
    constexpr int STRIDE = Size::STRIDE, KEYS = Size::KEYS, THREADS = Size::FORWARD_THREADS;
    constexpr int ROWS = THREADS / 2 * GROUPS;
    DYNAMIC_SHARED(T, queries, 1024);
    T *keys = queries + ROWS * STRIDE, *values = keys + KEYS * STRIDE;
    int *marks = reinterpret_cast<int *>(values + KEYS * STRIDE);

    const Head head(mask, sequences, blockIdx.x / tiles, kv_heads, group, head_dim);
    // The rows with the most visible keys come first.
    const int first_row = (int)(tiles - 1 - blockIdx.x % tiles) * Size::FORWARD_ROWS + part * ROWS;
    if (first_row >= head.rows) return;
    // All warps have read the tiles of the part before.
    if (part > 0) __syncthreads();
    const bool aligned = head_dim % PACK<T> == 0 && is_aligned(query) && is_aligned(key) && is_aligned(value) && is_aligned(y);
    const int thread = (int)threadIdx.x, lane = thread % 32;
    const int own_rows = Size::first_row(GROUPS);
    const auto row_of_lane = [&](int g, int r) { return first_row + own_rows + 16 * g + lane / 4 + 8 * r; };
    const auto load_keys = [&](int first) {
        if (thread < KEYS) marks[thread] = head.key_mark(first + thread);
        head.load_keys<KEYS, THREADS, T, D, 1>({keys}, {key}, first, aligned);
    };
    const Scoring<OPTIONS> scoring(scale, window, cap);
    const int first_position = head.position_of_row(first_row), first_seen = scoring.first_seen(first_position);
    head.load_rows<ROWS, THREADS, T, D, 1>({queries}, {query}, first_row, aligned);
    load_keys(first_seen);

    float mixed[GROUPS][D / 8][4], largest[GROUPS][2], sums[GROUPS][2];
    int own_marks[GROUPS][2];
    clear(mixed);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            largest[g][r] = -INFINITY;
            sums[g][r] = 0.0f;
            own_marks[g][r] = head.row_mark(row_of_lane(g, r));
        }
    }
    const int last_row = min(first_row + ROWS, head.rows) - 1;
    const int last_key = head.position_of_row(last_row);
    for (int first_key = first_seen; first_key <= last_key; first_key += KEYS) {
        // The keys are there, and nobody reads the values of the previous tile.
        wait_for_tiles<T>();
        head.load_keys<KEYS, THREADS, T, D, 1>({values}, {value}, first_key, aligned);

        // Most tiles are before all rows of the block.
        const bool all_visible = !OPTIONS && !head.has_mask() && first_key + KEYS - 1 <= first_position;
        float scores[GROUPS][KEYS / 8][4];
        multiply_rows<T, D, ROWS, KEYS, false>(scores, queries, keys);
        wait_for_result<T>(scores);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            // Before the marks are read: with them, the cap would need more registers than there
            // are.
            if constexpr (OPTIONS) {
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) scores[g][n][i] = scoring.score(scores[g][n][i]);
                }
            }
            float peaks[2] = {-INFINITY, -INFINITY}, factors[2], subtract[2];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float &score = scores[g][n][i];
                    if constexpr (!OPTIONS) score = scoring.score(score);
                    if (!all_visible && !scoring.sees(own_marks[g][i / 2], marks[n * 8 + lane % 4 * 2 + i % 2])) score = -INFINITY;
                    peaks[i / 2] = fmaxf(peaks[i / 2], score);
                }
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float peak = row_max(peaks[r]);
                // Weights of up to 2^SLACK leave the sums of most tiles as they are.
                const float next = peak - largest[g][r] > SLACK ? peak : largest[g][r];
                // The difference of two minus infinities would be NaN.
                subtract[r] = next == -INFINITY ? 0.0f : next;
                factors[r] = exp2_approx(largest[g][r] - subtract[r]);
                largest[g][r] = next;
                sums[g][r] *= factors[r];
            }
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[g][n][i] = exp2_approx(scores[g][n][i] - subtract[i / 2]);
                    sums[g][i / 2] += scores[g][n][i];
                }
            }
            if (__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) mixed[g][n][i] *= factors[i / 2];
                }
            }
        }

        // The values are there, and nobody reads the keys and marks of this tile.
        wait_for_tiles<T>();
        if (first_key + KEYS <= last_key) load_keys(first_key + KEYS);
        multiply_columns<T, D>(mixed, scores, values, 0, head_dim);
        wait_for_result<T>(mixed);
    }

#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float factors[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float sum = row_sum(sums[g][r]);
            factors[r] = own_marks[g][r] < 0 ? 0.0f : 1.0f / sum;
            const int row = row_of_lane(g, r);
            if (lane % 4 == 0 && row < head.rows) log_sums[head.row_place(row)] = largest[g][r] + log2f(sum);
        }
        store_rows<T, D, ROWS>(queries, mixed[g], factors, own_rows + 16 * g, head_dim, aligned, [&](int row) {
            return first_row + row < head.rows ? y + head.row_offset(first_row + row) : nullptr;
        });
    }
}

template <typename T, int D, bool OPTIONS>
__device__ __forceinline__ void forward(const T *query, const T *key, const T *value, const uint8_t *mask,
                                        const uint32_t *sequences, T *y, float *log_sums, uint32_t tiles, uint32_t kv_heads,
                                        uint32_t group, int head_dim, float scale, int window, float cap) {
    // With a cap, two groups of heads of 128 elements need more registers than there are.
    constexpr int GROUPS = OPTIONS && D == 128 ? 1 : Tiles<T, D>::GROUPS;
#pragma unroll 1
    for (int part = 0; part < Tiles<T, D>::GROUPS / GROUPS; part++)
        forward_part<T, D, OPTIONS, GROUPS>(part, query, key, value, mask, sequences, y, log_sums, tiles, kv_heads, group,
                                            head_dim, scale, window, cap);
}

// The gradient of the queries (`first`), or of keys (`first`) and values (`second`). `dots`: the
// dot product of each row of the result with its gradient, [queries, heads]. The pass of the
// queries writes it, and the pass of the keys reads it.
template <typename T, int D, bool OF_KEYS, bool OPTIONS>
__device__ __forceinline__ void backward(const T *query, const T *key, const T *value, const uint8_t *mask,
                                         const uint32_t *sequences, const T *y, const T *gradient, const float *log_sums,
                                         float *dots, T *first, T *second, uint32_t tiles, uint32_t kv_heads, uint32_t group,
                                         int head_dim, float scale, int window, float cap) {
    using Size = Tiles<T, D>;
    constexpr int STRIDE = Size::STRIDE, OTHERS = Size::OTHERS, COLUMNS = OF_KEYS ? Size::COLUMNS : D;
    // The kept operands are queries and the gradient of the result, or keys and values. The other
    // two are loaded in tiles.
    DYNAMIC_SHARED(T, kept, 1024);
    constexpr int ROWS = Size::ROWS, THREADS = Size::THREADS, STAGES = OF_KEYS ? Size::KEY_STAGES : Size::QUERY_STAGES;
    T *kept_with = kept + ROWS * STRIDE, *stages = kept_with + ROWS * STRIDE;

    constexpr uint32_t PARTS = D / COLUMNS;
    const int column = (int)(blockIdx.x % PARTS) * COLUMNS;
    const uint32_t block = blockIdx.x / PARTS;
    const Head head(mask, sequences, block / tiles, kv_heads, group, head_dim);
    // The blocks with the most work come first: late queries, early keys.
    const int tile = (int)(OF_KEYS ? block % tiles : tiles - 1 - block % tiles), first_own = tile * ROWS;
    if (first_own >= (OF_KEYS ? head.total : head.rows)) return;
    const bool aligned = head_dim % PACK<T> == 0 && is_aligned(query) && is_aligned(key) && is_aligned(value) && is_aligned(y) &&
                         is_aligned(gradient) && is_aligned(first) && is_aligned(second);
    const int thread = (int)threadIdx.x, lane = thread % 32;

    const int own_rows = Size::first_row(1), own = own_rows + lane / 4;
    int own_marks[2];
    float own_sums[2] = {0.0f, 0.0f}, own_dots[2] = {0.0f, 0.0f};
    if constexpr (OF_KEYS) {
        head.load_keys<ROWS, THREADS, T, D, 2>({kept, kept_with}, {key, value}, first_own, aligned);
        // Without a query that sees a key, each warp overwrites its rows next.
        wait_for_tiles<T>();
#pragma unroll
        for (int r = 0; r < 2; r++) own_marks[r] = head.key_mark(first_own + own + 8 * r);
    } else {
        head.load_rows<ROWS, THREADS, T, D, 2>({kept, kept_with}, {query, gradient}, first_own, aligned);
        wait_for_tiles<T>();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = own + 8 * r;
            own_marks[r] = head.row_mark(first_own + row);
            float dot = 0.0f;
            if (own_marks[r] >= 0) {
                const uint64_t place = head.row_place(first_own + row);
                own_sums[r] = log_sums[place];
                const T *of_y = y + head.row_offset(first_own + row);
                for (int i = lane % 4 * PACK<T>; i < head_dim; i += 4 * PACK<T>)
                    dot = add_dot(kept_with + Size::place(ROWS, row, i), of_y + i, min(PACK<T>, head_dim - i), aligned, dot);
            }
            own_dots[r] = row_sum(dot);
            if (lane % 4 == 0 && first_own + row < head.rows) dots[head.row_place(first_own + row)] = own_dots[r];
        }
    }

    const Scoring<OPTIONS> scoring(scale, window, cap);
    float of_first[1][COLUMNS / 8][4], of_second[1][OF_KEYS ? COLUMNS / 8 : 1][4];
    clear(of_first);
    clear(of_second);
    // The queries that see a key of this block, or the keys that its queries see.
    const int last_own = min(first_own + ROWS, OF_KEYS ? head.total : head.rows) - 1;
    const int begin = OF_KEYS ? max(first_own - head.past, 0) * (int)group
                              : scoring.first_seen(head.position_of_row(first_own));
    const int end = OF_KEYS ? (scoring.end_of_seeing(last_own, head.total) - head.past) * (int)group
                            : head.position_of_row(last_own) + 1;
    // The tiles of a stage, and the numbers of their rows.
    const auto others_of = [&](int stage) { return stages + stage * 2 * OTHERS * STRIDE; };
    const auto marks_of = [&](int stage) {
        return reinterpret_cast<int *>(stages + STAGES * 2 * OTHERS * STRIDE) + stage * 3 * OTHERS;
    };
    const auto sums_of = [&](int stage) { return reinterpret_cast<float *>(marks_of(stage) + OTHERS); };
    const auto load = [&](int from, int stage) {
        T *others = others_of(stage), *others_with = others + OTHERS * STRIDE;
        if (thread < OTHERS) {
            if constexpr (OF_KEYS) {
                const uint64_t place = head.row_place(min(from + thread, head.rows - 1));
                marks_of(stage)[thread] = head.row_mark(from + thread);
                start_copy_of_four(sums_of(stage) + thread, log_sums + place);
                start_copy_of_four(sums_of(stage) + OTHERS + thread, dots + place);
            } else {
                marks_of(stage)[thread] = head.key_mark(from + thread);
            }
        }
        if constexpr (OF_KEYS) {
            head.load_rows<OTHERS, THREADS, T, D, 2>({others, others_with}, {query, gradient}, from, aligned);
        } else {
            head.load_keys<OTHERS, THREADS, T, D, 2>({others, others_with}, {key, value}, from, aligned);
        }
    };
    int stage = 0;
    if (STAGES == 2 && begin < end) load(begin, stage);
    for (int from = begin; from < end; from += OTHERS) {
        if constexpr (STAGES == 1) {
            __syncthreads();
            load(from, stage);
        }
        // This stage is there, and nobody reads the other one.
        wait_for_tiles<T>();
        const T *others = others_of(stage), *others_with = others + OTHERS * STRIDE;
        const int *marks = marks_of(stage);
        const float *other_sums = sums_of(stage), *other_dots = other_sums + OTHERS;
        if constexpr (STAGES == 2) {
            stage = 1 - stage;
            if (from + OTHERS < end) load(from + OTHERS, stage);
        }

        // The weights, and their gradient, which becomes the gradient of the scores. Both are
        // transposed in the pass of the keys.
        float weights[1][OTHERS / 8][4], of_scores[1][OTHERS / 8][4];
        multiply_rows<T, D, ROWS, OTHERS, OF_KEYS>(weights, kept, others);
        multiply_rows<T, D, ROWS, OTHERS, OF_KEYS>(of_scores, kept_with, others_with);
        wait_for_result<T>(weights);
        wait_for_result<T>(of_scores);
        // Most keys of a tile are before all of its queries.
        const bool all_visible =
            !OPTIONS && !head.has_mask() &&
            (OF_KEYS ? from + OTHERS <= head.rows && first_own + ROWS <= min(head.total, head.position_of_row(from) + 1)
                     : from + OTHERS <= head.position_of_row(first_own) + 1);
#pragma unroll
        for (int n = 0; n < OTHERS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int other = n * 8 + lane % 4 * 2 + i % 2;
                const bool visible = all_visible || (OF_KEYS ? scoring.sees(marks[other], own_marks[i / 2])
                                                             : scoring.sees(own_marks[i / 2], marks[other]));
                const float log_sum = OF_KEYS ? other_sums[other] : own_sums[i / 2];
                const float dot = OF_KEYS ? other_dots[other] : own_dots[i / 2];
                float &weight = weights[0][n][i], &of_score = of_scores[0][n][i];
                const float product = weight;
                weight = visible ? exp2_approx(scoring.score(product) - log_sum) : 0.0f;
                of_score = visible ? weight * (of_score - dot) : 0.0f;
                if constexpr (OPTIONS) of_score *= visible ? scoring.slope(product) : 0.0f;
            }
        }
        multiply_columns<T, D>(of_first, of_scores, others, column, head_dim);
        if constexpr (OF_KEYS) {
            multiply_columns<T, D>(of_second, weights, others_with, column, head_dim);
            wait_for_result<T>(of_second);
        }
        wait_for_result<T>(of_first);
    }
    // The products of a warp may read the rows of the others.
    if constexpr (ON_WARPGROUP<T>) __syncthreads();

    const int columns = min(COLUMNS, head_dim - column);
    if constexpr (OF_KEYS) {
        auto target = [&](T *of) {
            return [&, of](int row) {
                return first_own + row < head.total ? of + head.key_offset(first_own + row) + column : nullptr;
            };
        };
        const bool real[2] = {own_marks[0] != INT_MAX, own_marks[1] != INT_MAX};
        // Only this warp reads its rows of the tiles, and it has finished.
        store_rows<T, D, ROWS>(kept, of_first[0], {real[0] ? scale : 0.0f, real[1] ? scale : 0.0f}, own_rows, columns, aligned,
                              target(first));
        store_rows<T, D, ROWS>(kept_with, of_second[0], {real[0] ? 1.0f : 0.0f, real[1] ? 1.0f : 0.0f}, own_rows, columns,
                              aligned, target(second));
    } else {
        const float factors[2] = {own_marks[0] < 0 ? 0.0f : scale, own_marks[1] < 0 ? 0.0f : scale};
        store_rows<T, D, ROWS>(kept, of_first[0], factors, own_rows, columns, aligned, [&](int row) {
            return first_own + row < head.rows ? first + head.row_offset(first_own + row) : nullptr;
        });
    }
}

}  // namespace

#define FORWARD_ARGUMENTS(T)                                                                                           \
    const T *query, const T *key, const T *value, const uint8_t *mask, const uint32_t *sequences, T *y,               \
        float *log_sums, uint32_t tiles, uint32_t kv_heads, uint32_t group, int head_dim, float scale
#define OF_QUERY_ARGUMENTS(T)                                                                                          \
    const T *query, const T *key, const T *value, const uint8_t *mask, const uint32_t *sequences, const T *y,         \
        const T *gradient, const float *log_sums, float *dots, T *of_query, uint32_t tiles, uint32_t kv_heads,        \
        uint32_t group, int head_dim, float scale
#define OF_KEY_ARGUMENTS(T)                                                                                            \
    const T *query, const T *key, const T *value, const uint8_t *mask, const uint32_t *sequences, const T *gradient,  \
        const float *log_sums, const float *dots, T *of_key, T *of_value, uint32_t tiles, uint32_t kv_heads,          \
        uint32_t group, int head_dim, float scale

#define FORWARD(T, D, OPTIONS, window, cap)                                                                            \
    forward<T, D, OPTIONS>(query, key, value, mask, sequences, y, log_sums, tiles, kv_heads, group, head_dim, scale,   \
                           window, cap)
#define OF_QUERY(T, D, OPTIONS, window, cap)                                                                           \
    backward<T, D, false, OPTIONS>(query, key, value, mask, sequences, y, gradient, log_sums, dots, of_query, nullptr, \
                                   tiles, kv_heads, group, head_dim, scale, window, cap)
#define OF_KEY(T, D, OPTIONS, window, cap)                                                                             \
    backward<T, D, true, OPTIONS>(query, key, value, mask, sequences, nullptr, gradient, log_sums,                     \
                                  const_cast<float *>(dots), of_key, of_value, tiles, kv_heads, group, head_dim,       \
                                  scale, window, cap)

#define ATTENTION(D, T, name)                                                                                          \
    extern "C" __global__ void __launch_bounds__(Tiles<T, D>::FORWARD_THREADS, Tiles<T, D>::FORWARD_BLOCKS)           \
        attention_forward_##D##_##name(FORWARD_ARGUMENTS(T)) {                                                         \
        FORWARD(T, D, false, INT_MAX, 0.0f);                                                                           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(Tiles<T, D>::THREADS, Tiles<T, D>::QUERY_BLOCKS)                     \
        attention_of_query_##D##_##name(OF_QUERY_ARGUMENTS(T)) {                                                       \
        OF_QUERY(T, D, false, INT_MAX, 0.0f);                                                                          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(Tiles<T, D>::THREADS)                                                \
        attention_of_key_##D##_##name(OF_KEY_ARGUMENTS(T)) {                                                           \
        OF_KEY(T, D, false, INT_MAX, 0.0f);                                                                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(Tiles<T, D>::FORWARD_THREADS)                                        \
        scored_attention_forward_##D##_##name(FORWARD_ARGUMENTS(T), int window, float cap) {                           \
        FORWARD(T, D, true, window, cap);                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(Tiles<T, D>::THREADS)                                                \
        scored_attention_of_query_##D##_##name(OF_QUERY_ARGUMENTS(T), int window, float cap) {                         \
        OF_QUERY(T, D, true, window, cap);                                                                             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(Tiles<T, D>::THREADS)                                                \
        scored_attention_of_key_##D##_##name(OF_KEY_ARGUMENTS(T), int window, float cap) {                             \
        OF_KEY(T, D, true, window, cap);                                                                               \
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
