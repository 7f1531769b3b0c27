// Products x w^T of few rows `x` [n, inputs] and weights in GGUF blocks [outputs, blocks], which
// are dequantized to the dtype of x in registers.
//
// A block has 64 rows of one weight, and a part of the depth if the grid has several blocks in y.
// Its warps have 32 of the rows, and take turns with segments of the depth. A warp copies the next
// segment to shared memory while it multiplies the current one. Each value is dequantized once for
// all rows of x. Sums are added in an order that depends only on the sizes of the weights, so a
// row's result has the same bits for any other rows.

#include "blocks.cuh"
#include "copy.cuh"
#include "math.cuh"
#include "mma.cuh"

constexpr int WARPS_OF_COLUMNS = 2;
constexpr int WARPS_OF_DEPTH = 2;
constexpr int THREADS = 32 * WARPS_OF_COLUMNS * WARPS_OF_DEPTH;
// Fragments of 16 rows of the weight in a warp.
constexpr int FRAGMENTS = 2;
constexpr int COLUMNS_OF_WARP = 16 * FRAGMENTS;
// Rows of the weight, which are columns of the result.
constexpr int COLUMNS = WARPS_OF_COLUMNS * COLUMNS_OF_WARP;
// Depth that a warp copies at a time.
constexpr uint32_t SEGMENT = 256;
// Depth in which a lane has two times four elements of each row, in both operands.
constexpr uint32_t PART = 32;
constexpr int WEIGHTS = 4;
constexpr int THREADS_OF_SUM = 256;
// Blocks per multiprocessor that leave enough registers.
template <typename T, int TILES> constexpr int BLOCKS = (TILES == 2 ? 4 : 3) - (sizeof(T) == 4 ? 1 : 0);

// A weight, or null. Rows are adjacent. `before` is the number of rows of the weights before it.
struct Weight {
    const uint8_t *blocks;
    uint32_t outputs, bytes;
    uint64_t before;
};

// A segment of a row in shared memory. Rows may start at any even address, and the bytes have the
// same place in 16 bytes as in global memory.
template <typename Format> struct Segment {
    static constexpr uint32_t BYTES = SEGMENT / Format::SIZE * Format::BYTES;
    static constexpr int PIECES = ((int)BYTES + 14 + 15) / 16;
    // With an odd number of pieces, the rows of a fragment are in different banks.
    static constexpr int STRIDE = 16 * (PIECES | 1);
};

// Four elements, as words of the fragments.
template <typename T> struct Four {
    uint32_t words[sizeof(T)];
};
__device__ __forceinline__ Four<float> load_words(const float *from) {
    const uint4 four = *reinterpret_cast<const uint4 *>(from);
    return {{four.x, four.y, four.z, four.w}};
}
template <typename T> __device__ __forceinline__ Four<T> load_words(const T *from) {
    const uint2 two = *reinterpret_cast<const uint2 *>(from);
    return {{two.x, two.y}};
}
template <typename T> __device__ __forceinline__ Four<T> to_words(const float4 &four) {
    const float values[4] = {four.x, four.y, four.z, four.w};
    constexpr int in_word = 4 / sizeof(T);
    Four<T> result;
#pragma unroll
    for (int i = 0; i < (int)sizeof(T); i++) result.words[i] = pack_word(values + i * in_word, (const T *)nullptr);
    return result;
}

// The rows of a weight that a warp multiplies.
template <typename Format> struct WarpRows {
    using Part = Segment<Format>;

    const uint8_t *blocks;
    uint64_t row_bytes, end;
    uint32_t first, last;

    __device__ __forceinline__ WarpRows(const Weight &weight, uint32_t first, uint32_t inputs)
        : blocks(weight.blocks), row_bytes((uint64_t)(inputs / Format::SIZE) * Format::BYTES),
          end(weight.outputs * row_bytes), first(first), last(weight.outputs - 1) {}

    // The first byte of a segment. Rows after the last one repeat it, and their results are not
    // written.
    __device__ __forceinline__ uint64_t start(int row, uint32_t segment) const {
        const uint32_t in_weight = first + (uint32_t)row;
        return (in_weight < last ? in_weight : last) * row_bytes + (uint64_t)segment * Part::BYTES;
    }

    // Starts to copy a segment of all rows to `stage`.
    __device__ __forceinline__ void start_copies(uint8_t *stage, uint32_t segment) const {
        const uint64_t left = row_bytes - (uint64_t)segment * Part::BYTES;
        const uint64_t bytes = left < Part::BYTES ? left : Part::BYTES;
#pragma unroll 2
        for (int i = (int)threadIdx.x % 32; i < COLUMNS_OF_WARP * Part::PIECES; i += 32) {
            const int row = i / Part::PIECES, piece = i % Part::PIECES;
            const uint64_t from = start(row, segment), at = from / 16 * 16 + (uint64_t)(16 * piece);
            if (at >= from + bytes) continue;
            // The last piece of the weight may have fewer bytes.
            start_copy_of_first(end - at < 16 ? (int)(end - at) : 16, stage + row * Part::STRIDE + 16 * piece, blocks + at);
        }
    }

    // The first byte of a segment in `stage`.
    __device__ __forceinline__ const uint8_t *staged(const uint8_t *stage, int row, uint32_t segment) const {
        return stage + row * Part::STRIDE + (int)(start(row, segment) % 16);
    }
};

// Adds the products of 32 rows of the weight and the first `tiles` of TILES fragments of eight rows
// of x.
template <typename Format, int TILES, typename T>
__device__ __forceinline__ void add_segment(float (&c)[FRAGMENTS][TILES][4], const uint8_t *const (&rows)[2 * FRAGMENTS],
                                            const T *x, const uint32_t (&x_rows)[TILES], int tiles, uint32_t depth) {
    constexpr int PRODUCTS = sizeof(T) / 2;
    const uint32_t thread = threadIdx.x % 4;
#pragma unroll 1
    for (uint32_t index = 0; index < depth / PART; index++) {
        constexpr uint32_t PARTS = Format::SIZE / PART;
        const uint32_t at = index / PARTS * Format::BYTES, part = index % PARTS * PART;
        float2 scales[2 * FRAGMENTS];
#pragma unroll
        for (uint32_t k = 0; k < 2; k++) {
            const uint32_t own = 16 * k + 4 * thread;
            const T *own_x = x + index * PART + own;
            Four<T> next = load_words(own_x + x_rows[0]);
            Four<T> values[2 * FRAGMENTS];
#pragma unroll
            for (int i = 0; i < 2 * FRAGMENTS; i++) {
                const uint8_t *block = rows[i] + at;
                if (16 * k % Format::GROUP == 0) scales[i] = Format::scale(block, part + 16 * k);
                values[i] = to_words<T>(to_values<Format>(Format::numbers(block, part + own), scales[i]));
            }
            FragmentA a[FRAGMENTS][PRODUCTS];
#pragma unroll
            for (int half = 0; half < FRAGMENTS; half++)
#pragma unroll
                for (int j = 0; j < PRODUCTS; j++) {
                    const Four<T> &upper = values[2 * half], &lower = values[2 * half + 1];
                    a[half][j] = {{upper.words[2 * j], lower.words[2 * j], upper.words[2 * j + 1], lower.words[2 * j + 1]}};
                }
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const Four<T> b = next;
                if (tile + 1 < TILES) next = load_words(own_x + x_rows[tile + 1]);
#pragma unroll
                for (int j = 0; j < PRODUCTS; j++)
#pragma unroll
                    for (int half = 0; half < FRAGMENTS; half++)
                        multiply<T>(c[half][tile], a[half][j], {{b.words[2 * j], b.words[2 * j + 1]}});
                if (tile + 1 >= tiles) break;
            }
        }
    }
}

// Writes the results of this block, whose columns start at `first` in the weight. With several
// blocks in y, these are f32 in `parts` [blocks, n, outputs], without a rounding.
template <typename Format, int TILES, typename T>
__device__ __forceinline__ void multiply_rows(const T *x, const Weight &weight, uint32_t first, T *y, float *parts, uint32_t n,
                                              uint32_t inputs, uint64_t all_outputs) {
    using Part = Segment<Format>;
    DYNAMIC_SHARED(uint8_t, shared, 16);
    constexpr int ROWS = 8 * TILES, STAGE = COLUMNS_OF_WARP * Part::STRIDE;
    // A further element moves columns to other banks.
    using Sums = float[COLUMNS][ROWS + 1];
    static_assert(WARPS_OF_DEPTH * sizeof(Sums) <= 2 * WARPS_OF_COLUMNS * WARPS_OF_DEPTH * STAGE, "");
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, group = lane / 4, thread = lane % 4;
    const int of_columns = warp % WARPS_OF_COLUMNS, of_depth = warp / WARPS_OF_COLUMNS;
    const WarpRows<Format> rows(weight, first + (uint32_t)(of_columns * COLUMNS_OF_WARP), inputs);
    uint8_t *stages[2] = {shared + 2 * warp * STAGE, shared + (2 * warp + 1) * STAGE};
    uint32_t x_rows[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const uint32_t row = (uint32_t)(tile * 8 + group);
        x_rows[tile] = (row < n ? row : n - 1) * inputs;
    }
    const uint32_t segments = (inputs + SEGMENT - 1) / SEGMENT;
    const uint32_t end = segments * (blockIdx.y + 1) / gridDim.y;
    uint32_t segment = segments * blockIdx.y / gridDim.y + (uint32_t)of_depth;
    float c[FRAGMENTS][TILES][4] = {};
    if (segment < end) rows.start_copies(stages[0], segment);
    for (; segment < end; segment += WARPS_OF_DEPTH) {
        wait_for_copies();
        // All lanes have the segment, and have read the one before.
        __syncwarp();
        if (segment + WARPS_OF_DEPTH < end) rows.start_copies(stages[1], segment + WARPS_OF_DEPTH);
        const uint8_t *staged[2 * FRAGMENTS];
#pragma unroll
        for (int i = 0; i < 2 * FRAGMENTS; i++) staged[i] = rows.staged(stages[0], i * 8 + group, segment);
        const uint32_t left = inputs - segment * SEGMENT;
        add_segment<Format, TILES, T>(c, staged, x + segment * SEGMENT, x_rows, (int)(n + 7) / 8,
                                      left < SEGMENT ? left : SEGMENT);
        uint8_t *used = stages[0];
        stages[0] = stages[1];
        stages[1] = used;
    }
    // All warps have read their segments.
    __syncthreads();
    Sums *sums = reinterpret_cast<Sums *>(shared);
#pragma unroll
    for (int half = 0; half < FRAGMENTS; half++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[of_depth][of_columns * COLUMNS_OF_WARP + half * 16 + group + i / 2 * 8][tile * 8 + thread * 2 + i % 2] =
                    c[half][tile][i];
    __syncthreads();
    const uint32_t left = weight.outputs - first;
    for (uint32_t i = threadIdx.x; i < n * COLUMNS; i += THREADS) {
        const uint32_t column = i % COLUMNS, row = i / COLUMNS;
        if (column >= left) continue;
        float sum = sums[0][column][row];
#pragma unroll
        for (int other = 1; other < WARPS_OF_DEPTH; other++) sum += sums[other][column][row];
        const uint64_t at = n * weight.before + (uint64_t)row * weight.outputs + first + column;
        if (gridDim.y == 1) y[at] = from_float<T>(sum);
        else parts[n * all_outputs * blockIdx.y + at] = sum;
    }
}

// The results of the weights are adjacent. Each weight has blockIdx.x for its rows.
template <int TILES, typename T>
__device__ __forceinline__ void linear_rows(const T *x, const uint8_t *const (&blocks)[WEIGHTS], const uint32_t (&outputs)[WEIGHTS],
                                            const uint32_t (&bytes)[WEIGHTS], T *y, float *parts, uint32_t n, uint32_t inputs) {
    Weight weight = {};
    uint32_t first = blockIdx.x, own = 0;
    uint64_t before = 0;
#pragma unroll
    for (int i = 0; i < WEIGHTS; i++) {
        const uint32_t count = (outputs[i] + COLUMNS - 1) / COLUMNS;
        if (first < count) {
            weight = {blocks[i], outputs[i], bytes[i], before};
            own = first;
            first = 0xffffffffu;
        } else if (first != 0xffffffffu) {
            first -= count;
        }
        before += outputs[i];
    }
    with_format(weight.bytes, [&](auto format) {
        multiply_rows<decltype(format), TILES, T>(x, weight, own * COLUMNS, y, parts, n, inputs, before);
    });
}

// Adds the parts of each of `len` results in order. Each thread has a result.
template <typename T> __device__ __forceinline__ void sum(const float *parts, T *y, uint64_t len, uint32_t count) {
    const uint64_t i = (uint64_t)blockIdx.x * THREADS_OF_SUM + threadIdx.x;
    if (i >= len) return;
    float sum = parts[i];
    for (uint32_t part = 1; part < count; part++) sum += parts[part * len + i];
    y[i] = from_float<T>(sum);
}

#define LINEAR_ROWS_ARGUMENTS(T)                                                                                       \
    const T *x, const uint8_t *blocks0, const uint8_t *blocks1, const uint8_t *blocks2, const uint8_t *blocks3, T *y,  \
        float *parts, uint32_t n, uint32_t inputs, uint32_t outputs0, uint32_t outputs1, uint32_t outputs2,            \
        uint32_t outputs3, uint32_t bytes0, uint32_t bytes1, uint32_t bytes2, uint32_t bytes3

#define CALL_LINEAR_ROWS(tiles)                                                                                        \
    linear_rows<tiles>(x, {blocks0, blocks1, blocks2, blocks3}, {outputs0, outputs1, outputs2, outputs3},              \
                       {bytes0, bytes1, bytes2, bytes3}, y, parts, n, inputs)

#define LINEAR_ROWS(T, name)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS<T, 2>)                                                \
        linear_rows_16_##name(LINEAR_ROWS_ARGUMENTS(T)) {                                                              \
        CALL_LINEAR_ROWS(2);                                                                                           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS<T, 8>)                                                \
        linear_rows_64_##name(LINEAR_ROWS_ARGUMENTS(T)) {                                                              \
        CALL_LINEAR_ROWS(8);                                                                                           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS_OF_SUM)                                                       \
        linear_rows_sum_##name(const float *parts, T *y, uint64_t len, uint32_t count) {                               \
        sum(parts, y, len, count);                                                                                     \
    }

LINEAR_ROWS(float, f32)
LINEAR_ROWS(__nv_bfloat16, bf16)
LINEAR_ROWS(__half, f16)
