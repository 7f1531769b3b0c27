// A mixture of experts for few rows: down(silu(gate(x)) * up(x)) for each pair of a row and one of
// its experts, and the sum over a row's experts, weighted by gates. Pair p is entry p of `chosen`
// [n, top_k]: row p / top_k.
//
// A block has 16 or 32 output columns of one expert. It lists the expert's pairs, and reads its
// weights once for each ROWS of them, from global memory to the registers of the tensor cores. The
// warps divide the depth of the products, and add their sums in order. A pair's result does not
// depend on other pairs.

#include "element.cuh"
#include "math.cuh"
#include "mma.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
// Output columns in a fragment, of which a warp has two.
constexpr int COLUMNS = 16;
// Fragments of eight pairs.
constexpr int TILES = 4;
constexpr int ROWS = 8 * TILES;
// Chunks of the weights that a warp loads before it uses the first one.
constexpr int IN_FLIGHT = 2;
// Blocks per multiprocessor. Their warps have 48 KiB of weights in flight. That is 1.9 times what
// 4.3 TB/s on 132 multiprocessors takes with a latency of 800 ns.
constexpr int BLOCKS = 3;
// Depth of a chunk: 16 bytes in each of the four lanes that share a row. It makes two products.
// Both operands have the same order of the depth, in which a lane's elements are adjacent.
template <typename T> constexpr int CHUNK = 4 * PACK<T>;
constexpr int THREADS_OF_SUM = 256;

// Returns the elements of a row from `column` on, and zeros from `depth` on.
template <typename T, bool is_packed> __device__ __forceinline__ uint4 load_pack(const T *row, int column, int depth) {
    if constexpr (is_packed) {
        // The depth is a multiple of the pack.
        return column < depth ? *reinterpret_cast<const uint4 *>(row + column) : make_uint4(0, 0, 0, 0);
    } else {
        float values[PACK<T>];
#pragma unroll
        for (int i = 0; i < PACK<T>; i++) values[i] = column + i < depth ? to_float(row[column + i]) : 0.0f;
        return pack<T>(values);
    }
}

// Adds this warp's part of the products to `c`: each of the 32 rows of weights times each of the
// first `tiles` fragments of pairs. A lane has the addresses of four rows of weights, and of one
// row in each fragment.
template <typename T, bool is_packed>
__device__ __forceinline__ void add_products(float (&c)[2][TILES][4], const T *const (&weights)[4], const T *const (&rows)[TILES],
                                             int tiles, int depth) {
    const int warp = (int)threadIdx.x / 32, in_chunk = (int)threadIdx.x % 4 * PACK<T>;
    const int chunks = (depth + CHUNK<T> - 1) / CHUNK<T>;
    for (int first = warp; first < chunks; first += WARPS * IN_FLIGHT) {
        uint4 loaded[IN_FLIGHT][4];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                loaded[i][j] = load_pack<T, is_packed>(weights[j], (first + i * WARPS) * CHUNK<T> + in_chunk, depth);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const int chunk = first + i * WARPS;
            if (chunk >= chunks) break;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                if (tile >= tiles) break;
                const uint4 x = load_pack<T, is_packed>(rows[tile], chunk * CHUNK<T> + in_chunk, depth);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint4 upper = loaded[i][2 * half], lower = loaded[i][2 * half + 1];
                    multiply<T>(c[half][tile], {{upper.x, lower.x, upper.y, lower.y}}, {{x.x, x.y}});
                    multiply<T>(c[half][tile], {{upper.z, lower.z, upper.w, lower.w}}, {{x.z, x.w}});
                }
            }
        }
    }
}

// Lists the pairs of an expert in order. Returns their number.
__device__ __forceinline__ uint32_t list_pairs(const uint32_t *chosen, uint32_t pairs, uint32_t expert, uint16_t *list) {
    __shared__ uint32_t counts[WARPS];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Each warp has a part.
    const uint32_t part = (pairs + THREADS - 1) / THREADS * 32, begin = warp * part;
    const uint32_t end = begin + part < pairs ? begin + part : pairs;
    const auto own = [&](uint32_t first) {
        return __ballot_sync(0xffffffffu, first + lane < end && chosen[first + lane] == expert);
    };
    uint32_t count = 0;
    for (uint32_t first = begin; first < end; first += 32) count += (uint32_t)__popc(own(first));
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    uint32_t at = 0, total = 0;
#pragma unroll
    for (uint32_t i = 0; i < WARPS; i++) {
        if (i < warp) at += counts[i];
        total += counts[i];
    }
    for (uint32_t first = begin; first < end; first += 32) {
        const uint32_t all = own(first);
        if (all >> lane & 1) list[at + (uint32_t)__popc(all & ((1u << lane) - 1))] = (uint16_t)(first + lane);
        at += (uint32_t)__popc(all);
    }
    __syncthreads();
    return total;
}

// Finds this block's expert and its pairs. With fewer pairs than experts, blockIdx.y is a pair, and
// the first pair of an expert has its block. Returns 0 if this block has no work, and for an index
// that is not an expert.
__device__ __forceinline__ uint32_t find_pairs(const uint32_t *chosen, uint32_t pairs, uint32_t experts, uint16_t *list,
                                               uint32_t &expert) {
    const bool is_by_pair = pairs < experts;
    expert = is_by_pair ? chosen[blockIdx.y] : blockIdx.y;
    if (expert >= experts) return 0;
    const uint32_t count = list_pairs(chosen, pairs, expert, list);
    return count > 0 && is_by_pair && list[0] != blockIdx.y ? 0 : count;
}

// Computes two matrices of 16 output columns for the listed pairs, whose inputs are the rows
// pair / `pairs_of_row` of `x` [.., depth]. Row i of half h is the row of weights that
// `weight(h, i)` returns. Calls `write(pair, column, first, second)` with the entries of both
// halves.
template <typename T, typename Weight, typename Write>
__device__ __forceinline__ void multiply_pairs(const uint16_t *list, uint32_t count, const T *x, uint32_t pairs_of_row, int depth,
                                               Weight weight, Write write) {
    // A further element moves rows to other banks.
    __shared__ float sums[WARPS][2][COLUMNS][ROWS + 1];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, group = lane / 4, thread = lane % 4;
    const T *const weights[4] = {weight(0, group), weight(0, group + 8), weight(1, group), weight(1, group + 8)};
    bool is_packed = depth % PACK<T> == 0 && is_aligned(x);
#pragma unroll
    for (int i = 0; i < 4; i++) is_packed = is_packed && is_aligned(weights[i]);
    // The lanes of a warp have rows of the same matrices, so all of them agree.
    for (uint32_t first = 0; first < count; first += ROWS) {
        const uint32_t left = count - first < ROWS ? count - first : ROWS;
        const T *rows[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            // Rows after the last one repeat it and are not written.
            const uint32_t at = (uint32_t)(tile * 8 + group) < left ? (uint32_t)(tile * 8 + group) : left - 1;
            rows[tile] = x + (uint64_t)(list[first + at] / pairs_of_row) * (uint64_t)depth;
        }
        float c[2][TILES][4] = {};
        const int tiles = (int)((left + 7) / 8);
        if (is_packed) add_products<T, true>(c, weights, rows, tiles, depth);
        else add_products<T, false>(c, weights, rows, tiles, depth);
        // All threads have read the sums of the rows before.
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[warp][half][group + i / 2 * 8][tile * 8 + thread * 2 + i % 2] = c[half][tile][i];
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < left * COLUMNS; i += THREADS) {
            const uint32_t column = i % COLUMNS, row = i / COLUMNS;
            float values[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                values[half] = sums[0][half][column][row];
#pragma unroll
                for (int other = 1; other < WARPS; other++) values[half] += sums[other][half][column][row];
            }
            write(list[first + row], (int)column, values[0], values[1]);
        }
    }
}

// Row `row` of expert `expert`'s matrix `matrix` (gate, up, down), or the last one of its `rows`.
template <typename T>
__device__ __forceinline__ const T *weight_row(const uint64_t *weights, uint32_t experts, uint32_t matrix, uint32_t expert,
                                               int row, int rows, int depth) {
    const T *from = reinterpret_cast<const T *>(weights[(uint64_t)matrix * experts + expert]);
    return from + (uint64_t)(row < rows ? row : rows - 1) * (uint64_t)depth;
}

// `weights` [3, experts] has the addresses of each expert's gate and up, [width, hidden], and down,
// [hidden, width]. `x` is [n, hidden] and `inner` [pairs, width]. Each block has 16 columns.
template <typename T>
__device__ __forceinline__ void gate_up(const T *x, const uint64_t *weights, const uint32_t *chosen, T *inner, uint32_t pairs,
                                        uint32_t top_k, uint32_t experts, int hidden, int width) {
    DYNAMIC_SHARED(uint16_t, list, 16);
    uint32_t expert;
    const uint32_t count = find_pairs(chosen, pairs, experts, list, expert);
    if (count == 0) return;
    const int first = (int)blockIdx.x * COLUMNS;
    multiply_pairs<T>(
        list, count, x, top_k, hidden,
        [&](int half, int i) { return weight_row<T>(weights, experts, (uint32_t)half, expert, first + i, width, hidden); },
        [&](uint32_t pair, int column, float gate, float up) {
            if (first + column < width)
                inner[(uint64_t)pair * (uint64_t)width + (uint64_t)(first + column)] = from_float<T>(swiglu(gate, up));
        });
}

// `parts` is [pairs, hidden]. Each block has 32 columns.
template <typename T>
__device__ __forceinline__ void down(const T *inner, const uint64_t *weights, const uint32_t *chosen, float *parts,
                                     uint32_t pairs, uint32_t experts, int hidden, int width) {
    DYNAMIC_SHARED(uint16_t, list, 16);
    uint32_t expert;
    const uint32_t count = find_pairs(chosen, pairs, experts, list, expert);
    if (count == 0) return;
    const int first = (int)blockIdx.x * 2 * COLUMNS;
    multiply_pairs<T>(
        list, count, inner, 1, width,
        [&](int half, int i) {
            return weight_row<T>(weights, experts, 2, expert, first + half * COLUMNS + i, hidden, width);
        },
        [&](uint32_t pair, int column, float left, float right) {
            float *to = parts + (uint64_t)pair * (uint64_t)hidden;
            if (first + column < hidden) to[first + column] = left;
            if (first + COLUMNS + column < hidden) to[first + COLUMNS + column] = right;
        });
}

// Sums the parts of each of n rows in the order of its experts. An index that is not an expert
// makes the row NaN. Each thread has an element.
template <typename T>
__device__ __forceinline__ void sum(const float *parts, const uint32_t *chosen, const float *gates, T *y, uint64_t n,
                                    uint32_t top_k, uint32_t experts, uint32_t hidden) {
    const uint64_t i = (uint64_t)blockIdx.x * THREADS_OF_SUM + threadIdx.x;
    if (i >= n * hidden) return;
    const uint64_t pair = i / hidden * top_k, column = i % hidden;
    float sum = 0.0f;
    for (uint32_t k = 0; k < top_k; k++) {
        const bool is_expert = chosen[pair + k] < experts;
        sum += is_expert ? gates[pair + k] * parts[(pair + k) * hidden + column] : NAN;
    }
    y[i] = from_float<T>(sum);
}

#define EXPERTS(T, name)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                         \
        experts_gate_up_##name(const T *x, const uint64_t *weights, const uint32_t *chosen, T *inner, uint32_t pairs,  \
                               uint32_t top_k, uint32_t experts, int hidden, int width) {                              \
        gate_up(x, weights, chosen, inner, pairs, top_k, experts, hidden, width);                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                         \
        experts_down_##name(const T *inner, const uint64_t *weights, const uint32_t *chosen, float *parts,             \
                            uint32_t pairs, uint32_t experts, int hidden, int width) {                                 \
        down(inner, weights, chosen, parts, pairs, experts, hidden, width);                                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS_OF_SUM)                                                      \
        experts_sum_##name(const float *parts, const uint32_t *chosen, const float *gates, T *y, uint64_t n,           \
                           uint32_t top_k, uint32_t experts, uint32_t hidden) {                                        \
        sum(parts, chosen, gates, y, n, top_k, experts, hidden);                                                       \
    }

EXPERTS(float, f32)
EXPERTS(__nv_bfloat16, bf16)
EXPERTS(__half, f16)
