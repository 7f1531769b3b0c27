// Rows of a table [vocab, width] at ids [n], and the gradient of the table. An id out of range
// gives NaN forward and no gradient.

#include "element.cuh"
#include "math.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// A warp for each row; blockDim is 32 by WARPS.
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

// Sets `first[id]` to n minus the first position of the id. It starts as zeros.
extern "C" __global__ void __launch_bounds__(THREADS)
embedding_first(const uint32_t *ids, uint32_t *first, uint32_t n, uint32_t vocab) {
    const uint32_t place = blockIdx.x * THREADS + threadIdx.x;
    if (place < n && ids[place] < vocab) atomicMax(first + ids[place], n - place);
}

// A block for each position (blockIdx.x) and each 64 packs of columns (blockIdx.y). It sums the
// rows of its id if the position is the first of the id. A warp sums some positions in order, and
// the block adds the warps in order, so the result is deterministic. Rows without an id are not
// written.
template <typename T>
__device__ __forceinline__ void backward(const T *gradient, const uint32_t *ids, const uint32_t *first, T *dweight,
                                         uint32_t n, uint32_t vocab, int width) {
    const uint32_t place = blockIdx.x;
    const uint32_t id = ids[place];
    if (id >= vocab || first[id] != n - place) return;

    constexpr int PER_LANE = 2 * PACK<T>;
    constexpr int COLUMNS = 32 * PER_LANE;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int first_column = (int)blockIdx.y * COLUMNS;
    const bool packed = width % PACK<T> == 0 && is_aligned(gradient);
    float sums[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) sums[i] = 0.0f;

    // Element i of pack p of a lane has the column first_column + p * 32 * PACK + lane * PACK + i.
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
    const uint32_t places = n - place;
    const uint32_t part = (places + WARPS - 1) / WARPS;
    const uint32_t begin = place + (uint32_t)warp * part;
    const uint32_t end = begin + part < n ? begin + part : n;
    for (uint32_t at = begin; at < end; at += 32) {
        const bool is_here = at + (uint32_t)lane < end && ids[at + (uint32_t)lane] == id;
        unsigned here = __ballot_sync(0xffffffffu, is_here);
        // Up to four rows at once, so that their loads overlap.
        while (here != 0) {
            uint32_t rows[4];
            int count = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                rows[i] = at + (uint32_t)(here == 0 ? 0 : __ffs((int)here) - 1);
                count += here != 0;
                here &= here - 1;
            }
            if (count == 4) {
#pragma unroll
                for (int i = 0; i < 4; i++) add_row(rows[i]);
            } else {
                add_row(rows[0]);
                if (count > 1) add_row(rows[1]);
                if (count > 2) add_row(rows[2]);
            }
        }
    }

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
        if (column < width) dweight[(uint64_t)id * (uint64_t)width + (uint64_t)column] = from_float<T>(sum);
    }
}

#define EMBEDDING(T, name)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                          \
        embedding_forward_##name(const T *weight, const uint32_t *ids, T *rows, uint64_t n, uint32_t vocab,           \
                                 int width) {                                                                          \
        forward(weight, ids, rows, n, vocab, width);                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                          \
        embedding_backward_##name(const T *gradient, const uint32_t *ids, const uint32_t *first, T *dweight,          \
                                  uint32_t n, uint32_t vocab, int width) {                                             \
        backward(gradient, ids, first, dweight, n, vocab, width);                                                      \
    }

EMBEDDING(float, f32)
EMBEDDING(__nv_bfloat16, bf16)
EMBEDDING(__half, f16)
