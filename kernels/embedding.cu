// Rows of a table [vocab, width] at ids [n], and row sums by id. An id out of range gives NaN
// forward, and its row is not added to any sum.

#include "element.cuh"
#include "math.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// One warp per row; blockDim is 32 by WARPS.
template <typename T>
__device__ __forceinline__ void forward(const T *weight, const uint32_t *ids, T *rows, uint64_t n, uint32_t vocab,
                                        int width) {
    const uint64_t row = (uint64_t)blockIdx.x * WARPS + threadIdx.y;
    if (row >= n) return;
    const uint32_t id = ids[row];
    const bool is_row = id < vocab;
    const T *from = weight + (is_row ? (uint64_t)id * (uint64_t)width : 0);
    T *to = rows + row * (uint64_t)width;
    int done = 0;
    if (is_row && width % PACK<T> == 0 && is_aligned(weight) && is_aligned(rows)) {
        const uint4 *packs = reinterpret_cast<const uint4 *>(from);
        for (int i = (int)threadIdx.x; i < width / PACK<T>; i += 32) reinterpret_cast<uint4 *>(to)[i] = packs[i];
        done = width;
    }
    for (int i = done + (int)threadIdx.x; i < width; i += 32) to[i] = is_row ? from[i] : from_float<T>(NAN);
}

constexpr int SORT_THREADS = 1024;

// Sorts the positions of ids, in one block: positions[starts[id]..starts[id + 1]] are where `id`
// occurs, in ascending order. Ids out of range have none. `counts` [vocab] must start as zeros, and
// `ranks` [n] is working memory.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
embedding_sort(const uint32_t *ids, uint32_t *counts, uint32_t *starts, uint32_t *ranks, uint32_t *positions,
               uint32_t n, uint32_t vocab) {
    __shared__ uint32_t shared[SORT_THREADS];
    const uint32_t thread = threadIdx.x;
    // A position's rank among those with its id: first earlier chunks of ids, then the chunk.
    for (uint32_t first = 0; first < n; first += SORT_THREADS) {
        const uint32_t place = first + thread;
        const uint32_t id = place < n ? ids[place] : vocab;
        shared[thread] = id;
        __syncthreads();
        uint32_t before = 0;
        bool is_last = true;
        if (id < vocab) {
            for (uint32_t i = 0; i < SORT_THREADS; i++) {
                const bool is_same = shared[i] == id;
                before += is_same && i < thread;
                is_last = is_last && !(is_same && i > thread);
            }
            ranks[place] = counts[id] + before;
        }
        __syncthreads();
        if (id < vocab && is_last) counts[id] += before + 1;
        __syncthreads();
    }
    // Sums of the counts before each id. Each thread has a part of the ids.
    const uint32_t part = (vocab + SORT_THREADS - 1) / SORT_THREADS;
    const uint32_t begin = thread * part < vocab ? thread * part : vocab;
    const uint32_t end = begin + part < vocab ? begin + part : vocab;
    uint32_t sum = 0;
    for (uint32_t id = begin; id < end; id++) sum += counts[id];
    shared[thread] = sum;
    __syncthreads();
    for (uint32_t offset = 1; offset < SORT_THREADS; offset *= 2) {
        const uint32_t other = thread >= offset ? shared[thread - offset] : 0;
        __syncthreads();
        shared[thread] += other;
        __syncthreads();
    }
    uint32_t start = shared[thread] - sum;
    for (uint32_t id = begin; id < end; id++) {
        starts[id] = start;
        start += counts[id];
    }
    if (thread == SORT_THREADS - 1) starts[vocab] = start;
    __syncthreads();
    for (uint32_t place = thread; place < n; place += SORT_THREADS)
        if (ids[place] < vocab) positions[starts[ids[place]] + ranks[place]] = place;
}

// Adds rows of `gradient` [n, width] to the rows of `sum` at their ids. There is a block for each
// sorted position (blockIdx.x) and each 64 packs of columns (blockIdx.y). It adds all rows for an
// id if its position is that id's first. Each warp adds a part of the positions in order, and the
// block adds the warps in order, so the result is deterministic. Rows without an id are not
// written.
template <typename T>
__device__ __forceinline__ void add(const T *gradient, const uint32_t *ids, const uint32_t *starts,
                                    const uint32_t *positions, float *sum_of_rows, uint32_t vocab, int width) {
    const uint32_t first = blockIdx.x;
    if (first >= starts[vocab]) return;
    const uint32_t id = ids[positions[first]];
    if (starts[id] != first) return;

    constexpr int PER_LANE = 2 * PACK<T>;
    constexpr int COLUMNS = 32 * PER_LANE;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int first_column = (int)blockIdx.y * COLUMNS;
    const bool packed = width % PACK<T> == 0 && is_aligned(gradient);
    float sums[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) sums[i] = 0.0f;

    // Element i in pack p of a lane is at column first_column + p * 32 * PACK + lane * PACK + i.
    auto add_row = [&](uint32_t row) {
        const T *from = gradient + (uint64_t)row * (uint64_t)width;
#pragma unroll
        for (int p = 0; p < 2; p++) {
            const int column = first_column + (p * 32 + lane) * PACK<T>;
            if (packed) {
                if (column >= width) continue;
                float values[PACK<T>];
                unpack<T>(load_streaming(reinterpret_cast<const uint4 *>(from + column)), values);
#pragma unroll
                for (int i = 0; i < PACK<T>; i++) sums[p * PACK<T> + i] += values[i];
            } else {
#pragma unroll
                for (int i = 0; i < PACK<T>; i++)
                    if (column + i < width) sums[p * PACK<T> + i] += to_float(from[column + i]);
            }
        }
    };
    const uint32_t rows = starts[id + 1] - first;
    const uint32_t part = (rows + WARPS - 1) / WARPS;
    const uint32_t begin = first + (uint32_t)warp * part;
    const uint32_t last = first + rows;
    const uint32_t end = begin + part < last ? begin + part : last;
    uint32_t at = begin;
    // Four rows at once, so that their loads overlap.
    for (; at + 4 <= end; at += 4) {
        uint32_t four[4];
#pragma unroll
        for (int i = 0; i < 4; i++) four[i] = positions[at + (uint32_t)i];
#pragma unroll
        for (int i = 0; i < 4; i++) add_row(four[i]);
    }
    for (; at < end; at++) add_row(positions[at]);

    __shared__ float shared[WARPS][COLUMNS];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) shared[warp][i * 32 + lane] = sums[i];
    __syncthreads();
    for (int i = (int)threadIdx.x; i < COLUMNS; i += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += shared[w][i];
        const int element = i / 32, of_lane = i % 32;
        const int column = first_column + (element / PACK<T> * 32 + of_lane) * PACK<T> + element % PACK<T>;
        if (column < width) sum_of_rows[(uint64_t)id * (uint64_t)width + (uint64_t)column] += sum;
    }
}

// For each row of `sums` [n, width], adds the rows of `x` [.., width] at
// positions[starts[row]..starts[row + 1]], in order. One warp per row; blockDim is 32 by WARPS.
template <typename T>
__device__ __forceinline__ void sum(const T *x, const uint32_t *starts, const uint32_t *positions, T *sums, uint64_t n,
                                    int width) {
    const uint64_t row = (uint64_t)blockIdx.x * WARPS + threadIdx.y;
    if (row >= n) return;
    const uint32_t begin = starts[row], end = starts[row + 1];
    T *to = sums + row * (uint64_t)width;
    int done = 0;
    if (width % PACK<T> == 0 && is_aligned(x) && is_aligned(sums)) {
        for (int i = (int)threadIdx.x; i < width / PACK<T>; i += 32) {
            float total[PACK<T>];
#pragma unroll
            for (int k = 0; k < PACK<T>; k++) total[k] = 0.0f;
            // Several rows at once, so that their loads overlap.
#pragma unroll 4
            for (uint32_t at = begin; at < end; at++) {
                const T *from = x + (uint64_t)positions[at] * (uint64_t)width;
                float values[PACK<T>];
                unpack<T>(reinterpret_cast<const uint4 *>(from)[i], values);
#pragma unroll
                for (int k = 0; k < PACK<T>; k++) total[k] += values[k];
            }
            reinterpret_cast<uint4 *>(to)[i] = pack<T>(total);
        }
        done = width;
    }
    for (int i = done + (int)threadIdx.x; i < width; i += 32) {
        float total = 0.0f;
        for (uint32_t at = begin; at < end; at++)
            total += to_float(x[(uint64_t)positions[at] * (uint64_t)width + (uint64_t)i]);
        to[i] = from_float<T>(total);
    }
}

#define EMBEDDING(T, name)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                          \
        embedding_forward_##name(const T *weight, const uint32_t *ids, T *rows, uint64_t n, uint32_t vocab,           \
                                 int width) {                                                                          \
        forward(weight, ids, rows, n, vocab, width);                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                          \
        embedding_add_##name(const T *gradient, const uint32_t *ids, const uint32_t *starts,                          \
                             const uint32_t *positions, float *sum, uint32_t vocab, int width) {                       \
        add(gradient, ids, starts, positions, sum, vocab, width);                                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                          \
        embedding_sum_##name(const T *x, const uint32_t *starts, const uint32_t *positions, T *sums, uint64_t n,      \
                             int width) {                                                                              \
        sum(x, starts, positions, sums, n, width);                                                                     \
    }

EMBEDDING(float, f32)
EMBEDDING(__nv_bfloat16, bf16)
EMBEDDING(__half, f16)
