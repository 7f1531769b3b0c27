// The gated delta rule in chunks of rows, with the formulas in src/ops/gated_delta_rule/cpu.rs.
//
// A forward block has a tree segment, a value head and some value columns, which do not depend on
// each other. A backward block has a segment and a value head. A launch has all trees' segments at
// one level. States are in global memory, in f32. A chunk that is not full is filled with zero
// rows, which change nothing.

#include "element.cuh"
#include "math.cuh"
#include "prefix_tree.cuh"
#include "slots.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
// Rows per chunk: a warp has a lane for each.
constexpr int CHUNK = 32;
// Value columns per forward block, and per step block.
constexpr int COLUMNS = 64;
constexpr int STEP_COLUMNS = 32;
// Rows in shared memory have an odd length, so that neither rows nor columns have bank conflicts.
constexpr int STRIDE = CHUNK + 1;
constexpr float NORM_EPSILON = 1e-6f;

struct Heads {
    int key_heads, value_heads, key_dim, value_dim;

    __device__ __forceinline__ int group() const { return value_heads / key_heads; }
    __device__ __forceinline__ int keys() const { return key_heads * key_dim; }
    __device__ __forceinline__ uint64_t values() const { return (uint64_t)value_heads * value_dim; }
    __device__ __forceinline__ uint64_t width() const { return 2 * (uint64_t)keys() + values(); }
    __device__ __forceinline__ uint64_t state_len() const { return (uint64_t)key_dim * value_dim; }
};

// The entries of neighboring threads in a product. They are in a row if the rows of `b` are in
// global memory, and in a column if its columns are.
enum Neighbors { IN_ROW, IN_COLUMN };

// Computes the product of `a` [m, depth] and `b` [depth, n] and calls `store(i, j, sum)` for each
// entry, in the same thread for the same m, n and neighbors. A thread has 16 entries at a time.
template <Neighbors neighbors = IN_ROW, typename A, typename B, typename Store>
__device__ __forceinline__ void product(int m, int n, int depth, A a, B b, Store store) {
    const int rows = (m + 3) / 4, columns = (n + 3) / 4;
    for (int tile = (int)threadIdx.x; tile < rows * columns; tile += THREADS) {
        const int row = neighbors == IN_ROW ? tile / columns : tile % rows;
        const int column = neighbors == IN_ROW ? tile % columns : tile / rows;
        float sums[4][4];
        int i[4], j[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            i[r] = min(row + r * rows, m - 1);
            j[r] = min(column + r * columns, n - 1);
#pragma unroll
            for (int c = 0; c < 4; c++) sums[r][c] = 0.0f;
        }
        // Several steps at once, so that their loads overlap.
#pragma unroll 2
        for (int k = 0; k < depth; k++) {
            float x[4], y[4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                x[r] = a(i[r], k);
                y[r] = b(k, j[r]);
            }
#pragma unroll
            for (int r = 0; r < 4; r++) {
#pragma unroll
                for (int c = 0; c < 4; c++) sums[r][c] = fmaf(x[r], y[c], sums[r][c]);
            }
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (row + r * rows < m && column + c * columns < n) store(i[r], j[c], sums[r][c]);
            }
        }
    }
}

// Loads a row's key or query with a warp, and divides it by its length.
template <typename T>
__device__ __forceinline__ void load_unit(const T *from, bool is_query, int dim, float *to) {
    const int lane = (int)threadIdx.x % 32;
    float squares = 0.0f;
    for (int d = lane; d < dim; d += 32) {
        const float x = to_float(from[d]);
        to[d] = x;
        squares = fmaf(x, x, squares);
    }
    squares = warp_sum(squares);
    const float norm = (is_query ? 1.0f / sqrtf((float)dim) : 1.0f) / sqrtf(squares + NORM_EPSILON);
    for (int d = lane; d < dim; d += 32) to[d] *= norm;
}

// The gates for the rows in a chunk.
struct Gates {
    float g[CHUNK], beta[CHUNK];
    // The running sum c of g, exp(c), and exp(c_last - c).
    float sums[CHUNK], decay[CHUNK], rest[CHUNK];
};

// Loads a chunk's keys, then its queries, [2 * CHUNK, key_dim], and the gates. Threads must
// synchronize before and after.
template <typename T>
__device__ __forceinline__ void load_chunk(const T *qkv, const float *g, const float *beta, uint64_t first, int rows, int head,
                                           const Heads &heads, float *keys, Gates &gates) {
    const int dim = heads.key_dim, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int of_head = head / heads.group() * dim;
    for (int row = warp; row < 2 * CHUNK; row += WARPS) {
        const int place = row % CHUNK;
        const bool is_query = row >= CHUNK;
        float *to = keys + row * (dim + 1);
        if (place < rows) {
            const T *from = qkv + (first + (uint64_t)place) * heads.width() + (is_query ? 0 : heads.keys()) + of_head;
            load_unit(from, is_query, dim, to);
        } else {
            for (int d = lane; d < dim; d += 32) to[d] = 0.0f;
        }
    }
    if (warp == 0) {
        const uint64_t at = (first + (uint64_t)lane) * (uint64_t)heads.value_heads + (uint64_t)head;
        gates.g[lane] = lane < rows ? g[at] : 0.0f;
        gates.beta[lane] = lane < rows ? beta[at] : 0.0f;
        __syncwarp();
        float sum = 0.0f;
        for (int i = 0; i <= lane; i++) sum += gates.g[i];
        const float last = __shfl_sync(0xffffffffu, sum, CHUNK - 1);
        gates.sums[lane] = sum;
        gates.decay[lane] = expf(sum);
        gates.rest[lane] = expf(last - sum);
    }
}

// Returns the state before a chunk in a segment, or null for zeros. A segment has a slot per chunk
// if `advance` is 1, and one slot if it is 0.
__device__ __forceinline__ float *state_before(float *states, const uint32_t *segments, const Segment &segment, uint32_t index,
                                               uint32_t chunk, uint32_t advance, uint64_t head, const Heads &heads) {
    uint64_t slot;
    if (chunk > 0) {
        slot = advance ? segment.first_chunk + chunk - 1 : index;
    } else if (segment.parent == NONE) {
        return nullptr;
    } else {
        slot = advance ? segment_at(segments, segment.parent + 1).first_chunk - 1 : segment.parent;
    }
    return states + (slot * (uint64_t)heads.value_heads + head) * heads.state_len();
}

template <typename T>
__device__ __forceinline__ void forward(const T *qkv, const float *g, const float *beta, const uint32_t *segments, float *states,
                                        T *o, float *errors, float *changes, uint32_t first_segment, uint32_t advance,
                                        const Heads &heads) {
    DYNAMIC_SHARED(float, shared, 16);
    __shared__ Gates gates;
    const uint32_t index = first_segment + blockIdx.x;
    const Segment segment = segment_at(segments, index);
    const int head = (int)blockIdx.y, first_column = (int)blockIdx.z * COLUMNS;
    const int key_dim = heads.key_dim, stride = key_dim + 1;
    const int columns = min(COLUMNS, heads.value_dim - first_column);
    const uint64_t width = heads.width(), values = heads.values();
    const uint64_t column_of_o = (uint64_t)head * heads.value_dim + first_column;
    const uint64_t column_of_v = 2 * (uint64_t)heads.keys() + column_of_o;

    float *keys = shared;
    // M below the diagonal, then P, [2 * CHUNK, CHUNK].
    float *mixing = keys + 2 * CHUNK * stride;
    // R, then N, and the results, [2 * CHUNK, COLUMNS].
    float *read = mixing + 2 * CHUNK * STRIDE;
    constexpr int READ = COLUMNS + 1;

    for (uint32_t chunk = 0; chunk * CHUNK < segment.rows; chunk++) {
        const uint64_t first = segment.first + (uint64_t)chunk * CHUNK;
        const int rows = (int)min((uint32_t)CHUNK, segment.rows - chunk * CHUNK);
        const float *from = state_before(states, segments, segment, index, chunk, advance, head, heads);
        float *to = states + ((uint64_t)(advance ? segment.first_chunk + chunk : index) * heads.value_heads + head) * heads.state_len();
        __syncthreads();
        load_chunk(qkv, g, beta, first, rows, head, heads, keys, gates);
        __syncthreads();
        product(
            2 * CHUNK, CHUNK, key_dim, [&](int i, int k) { return keys[i * stride + k]; },
            [&](int k, int j) { return keys[j * stride + k]; },
            [&](int i, int j, float sum) {
                const int row = i % CHUNK;
                const bool is_seen = i < CHUNK ? j < row : j <= row;
                const float factor = i < CHUNK ? gates.beta[row] : 1.0f;
                mixing[i * STRIDE + j] = is_seen ? factor * expf(gates.sums[row] - gates.sums[j]) * sum : 0.0f;
            });
        product(
            2 * CHUNK, columns, from ? key_dim : 0, [&](int i, int k) { return keys[i * stride + k]; },
            [&](int k, int j) { return from[(uint64_t)k * heads.value_dim + first_column + j]; },
            [&](int i, int j, float sum) {
                const int row = i % CHUNK;
                sum *= gates.decay[row];
                if (i < CHUNK) {
                    sum = row < rows ? to_float(qkv[(first + row) * width + column_of_v + j]) - sum : 0.0f;
                    if (errors && row < rows) errors[(first + row) * values + column_of_o + j] = sum;
                }
                read[i * READ + j] = sum;
            });
        __syncthreads();
        // N, row by row. A thread has a column.
        if ((int)threadIdx.x < columns) {
            float n[CHUNK];
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                float sum = gates.beta[i] * read[i * READ + threadIdx.x];
#pragma unroll
                for (int j = 0; j < i; j++) sum = fmaf(-mixing[i * STRIDE + j], n[j], sum);
                n[i] = sum;
                read[i * READ + threadIdx.x] = sum;
            }
            for (int i = 0; changes && i < rows; i++) {
                changes[(first + i) * values + column_of_o + threadIdx.x] = read[i * READ + threadIdx.x];
            }
        }
        __syncthreads();
        if (o) {
            product(
                CHUNK, columns, CHUNK, [&](int i, int k) { return mixing[(CHUNK + i) * STRIDE + k]; },
                [&](int k, int j) { return read[k * READ + j]; },
                [&](int i, int j, float sum) {
                    if (i < rows) o[(first + i) * values + column_of_o + j] = from_float<T>(read[(CHUNK + i) * READ + j] + sum);
                });
        }
        const float last = gates.decay[CHUNK - 1];
        product(
            key_dim, columns, CHUNK, [&](int i, int k) { return keys[k * stride + i] * gates.rest[k]; },
            [&](int k, int j) { return read[k * READ + j]; },
            [&](int i, int j, float sum) {
                const uint64_t at = (uint64_t)i * heads.value_dim + first_column + j;
                to[at] = from ? fmaf(last, from[at], sum) : sum;
            });
    }
}

template <typename T>
__device__ __forceinline__ void backward(const T *qkv, const float *g, const float *beta, const T *gradient,
                                         const uint32_t *segments, const float *states, const float *errors, const float *changes,
                                         float *state_gradients, float *key_gradients, T *of_qkv, float *of_g, float *of_beta,
                                         uint32_t first_segment, const Heads &heads) {
    DYNAMIC_SHARED(float, shared, 16);
    __shared__ Gates gates;
    // Gradients with respect to the running sums and beta, and sums over the rest of the chunk.
    __shared__ float of_sums[CHUNK], of_betas[CHUNK], of_rest[CHUNK];
    const uint32_t index = first_segment + blockIdx.x;
    const Segment segment = segment_at(segments, index);
    const int head = (int)blockIdx.y, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int key_dim = heads.key_dim, dim = heads.value_dim;
    const int stride = key_dim + 1, term_stride = dim + 1;
    const uint64_t width = heads.width(), values = heads.values(), state_len = heads.state_len();
    const uint64_t column = (uint64_t)head * dim;

    float *keys = shared;
    // X and dO, then Z, [2 * CHUNK, dim].
    float *terms = keys + 2 * CHUNK * stride;
    // Products of keys and queries with keys, [2 * CHUNK, CHUNK].
    float *products = terms + 2 * CHUNK * term_stride;
    // dM and dP times the decays, [2 * CHUNK, CHUNK].
    float *pairs = products + 2 * CHUNK * STRIDE;
    float *decays = pairs + 2 * CHUNK * STRIDE;

    // The gradient of the state after the segment is the sum over those at its children's starts.
    float *of_state = state_gradients + ((uint64_t)index * heads.value_heads + head) * state_len;
    const uint32_t last_child = segment_at(segments, index + 1).first_child;
    for (uint64_t at = threadIdx.x; at < state_len; at += THREADS) {
        float sum = 0.0f;
        for (uint32_t child = segment.first_child; child < last_child; child++) {
            sum += state_gradients[((uint64_t)child * heads.value_heads + head) * state_len + at];
        }
        of_state[at] = sum;
    }

    for (uint32_t chunk = (segment.rows + CHUNK - 1) / CHUNK; chunk-- > 0;) {
        const uint64_t first = segment.first + (uint64_t)chunk * CHUNK;
        const int rows = (int)min((uint32_t)CHUNK, segment.rows - chunk * CHUNK);
        const float *state = state_before(const_cast<float *>(states), segments, segment, index, chunk, 1, head, heads);
        const float *error = errors + first * values + column, *change = changes + first * values + column;
        // Keys at 0, queries at key_dim.
        float *of_keys = key_gradients + (first * (uint64_t)heads.value_heads + head) * 2 * key_dim;
        const uint64_t of_keys_stride = (uint64_t)heads.value_heads * 2 * key_dim;
        const auto key_gradient = [&](int i, int j) -> float & {
            return of_keys[(uint64_t)(i % CHUNK) * of_keys_stride + (i < CHUNK ? 0 : key_dim) + j];
        };
        __syncthreads();
        load_chunk(qkv, g, beta, first, rows, head, heads, keys, gates);
        __syncthreads();
        product(
            2 * CHUNK, CHUNK, key_dim, [&](int i, int k) { return keys[i * stride + k]; },
            [&](int k, int j) { return keys[j * stride + k]; },
            [&](int i, int j, float sum) { products[i * STRIDE + j] = sum; });
        for (int at = (int)threadIdx.x; at < CHUNK * CHUNK; at += THREADS) {
            const int i = at / CHUNK, j = at % CHUNK;
            decays[i * STRIDE + j] = j <= i ? expf(gates.sums[i] - gates.sums[j]) : 0.0f;
        }
        for (int at = (int)threadIdx.x; at < CHUNK * dim; at += THREADS) {
            const int i = at / dim, j = at % dim;
            terms[(CHUNK + i) * term_stride + j] = i < rows ? to_float(gradient[(first + i) * values + column + j]) : 0.0f;
        }
        // X starts as the gradient that arrives through the state after the chunk.
        product(
            CHUNK, dim, key_dim, [&](int i, int k) { return keys[i * stride + k]; },
            [&](int k, int j) { return of_state[(uint64_t)k * dim + j]; },
            [&](int i, int j, float sum) { terms[i * term_stride + j] = gates.rest[i] * sum; });
        __syncthreads();
        for (int row = warp; row < CHUNK; row += WARPS) {
            float sum = 0.0f;
            for (int j = lane; j < dim && row < rows; j += 32) sum = fmaf(change[row * values + j], terms[row * term_stride + j], sum);
            sum = warp_sum(sum);
            if (lane == 0) of_rest[row] = sum;
        }
        __syncthreads();
        product(
            CHUNK, dim, CHUNK, [&](int i, int k) { return products[(CHUNK + k) * STRIDE + i] * decays[k * STRIDE + i]; },
            [&](int k, int j) { return terms[(CHUNK + k) * term_stride + j]; },
            [&](int i, int j, float sum) { terms[i * term_stride + j] += sum; });
        __syncthreads();
        for (int j = (int)threadIdx.x; j < dim; j += THREADS) {
            float x[CHUNK];
#pragma unroll
            for (int i = CHUNK - 1; i >= 0; i--) {
                float sum = terms[i * term_stride + j];
#pragma unroll
                for (int k = i + 1; k < CHUNK; k++) {
                    sum = fmaf(-gates.beta[k] * products[k * STRIDE + i] * decays[k * STRIDE + i], x[k], sum);
                }
                x[i] = sum;
                terms[i * term_stride + j] = sum;
            }
        }
        __syncthreads();
        product<IN_COLUMN>(
            2 * CHUNK, CHUNK, dim, [&](int i, int k) { return terms[i * term_stride + k]; },
            [&](int k, int j) { return j < rows ? change[j * values + k] : 0.0f; },
            [&](int i, int j, float sum) {
                const int row = i % CHUNK;
                const float pair = sum * decays[row * STRIDE + j];
                pairs[i * STRIDE + j] = i < CHUNK ? (j < row ? -pair : 0.0f) : pair;
            });
        __syncthreads();
        for (int row = warp; row < CHUNK; row += WARPS) {
            const auto of_system = [&](int i, int j) { return pairs[i * STRIDE + j] * products[i * STRIDE + j]; };
            const auto of_mixing = [&](int i, int j) { return of_system(CHUNK + i, j); };
            const float of_beta_here = warp_sum(of_system(row, lane));
            float sum = of_mixing(row, lane) - of_mixing(lane, row) - gates.beta[lane] * of_system(lane, row);
            sum = warp_sum(sum) + gates.beta[row] * of_beta_here;
            float own = 0.0f;
            for (int j = lane; j < dim && row < rows; j += 32) own = fmaf(terms[row * term_stride + j], error[row * values + j], own);
            own = warp_sum(own);
            if (lane == 0) {
                of_betas[row] = of_beta_here + own;
                of_sums[row] = sum;
            }
        }
        __syncthreads();
        for (int at = (int)threadIdx.x; at < CHUNK * dim; at += THREADS) {
            const int i = at / dim, j = at % dim;
            const float of_value = gates.beta[i] * terms[i * term_stride + j];
            if (i < rows) of_qkv[(first + i) * width + 2 * (uint64_t)heads.keys() + column + j] = from_float<T>(of_value);
            terms[i * term_stride + j] = -gates.decay[i] * of_value;
            terms[(CHUNK + i) * term_stride + j] *= gates.decay[i];
        }
        __syncthreads();
        product<IN_COLUMN>(
            2 * CHUNK, key_dim, state ? dim : 0, [&](int i, int k) { return terms[i * term_stride + k]; },
            [&](int k, int j) { return state[(uint64_t)j * dim + k]; },
            [&](int i, int j, float sum) {
                if (i % CHUNK < rows) key_gradient(i, j) = sum;
            });
        __syncthreads();
        for (int row = warp; row < rows; row += WARPS) {
            float sum = 0.0f;
            for (int d = lane; d < key_dim; d += 32) {
                sum = fmaf(keys[row * stride + d], key_gradient(row, d), sum);
                sum = fmaf(keys[(CHUNK + row) * stride + d], key_gradient(CHUNK + row, d), sum);
            }
            sum = warp_sum(sum);
            if (lane == 0) of_sums[row] += sum - of_rest[row];
        }
        __syncthreads();
        // Each product is between a key or query and a key.
        product(
            2 * CHUNK, key_dim, CHUNK,
            [&](int i, int k) { return (i < CHUNK ? gates.beta[i] : 1.0f) * pairs[i * STRIDE + k]; },
            [&](int k, int j) { return keys[k * stride + j]; },
            [&](int i, int j, float sum) {
                if (i % CHUNK < rows) key_gradient(i, j) += sum;
            });
        __syncthreads();
        product<IN_COLUMN>(
            CHUNK, key_dim, 2 * CHUNK,
            [&](int i, int k) { return (k < CHUNK ? gates.beta[k] : 1.0f) * pairs[k * STRIDE + i]; },
            [&](int k, int j) { return keys[k * stride + j]; },
            [&](int i, int j, float sum) {
                if (i < rows) key_gradient(i, j) += sum;
            });
        // The keys that write to the state after the chunk.
        product<IN_COLUMN>(
            CHUNK, key_dim, dim, [&](int i, int k) { return i < rows ? change[i * values + k] : 0.0f; },
            [&](int k, int j) { return of_state[(uint64_t)j * dim + k]; },
            [&](int i, int j, float sum) {
                if (i < rows) key_gradient(i, j) += gates.rest[i] * sum;
            });
        double dot = 0.0;
        for (uint64_t at = threadIdx.x; state && at < state_len; at += THREADS) dot += of_state[at] * state[at];
        const float last = gates.decay[CHUNK - 1];
        float of_last = last * (float)block_sum<THREADS>(dot);
        __syncthreads();
        product(
            key_dim, dim, 2 * CHUNK, [&](int i, int k) { return keys[k * stride + i]; },
            [&](int k, int j) { return terms[k * term_stride + j]; },
            [&](int i, int j, float sum) {
                float &x = of_state[(uint64_t)i * dim + j];
                x = fmaf(last, x, sum);
            });
        if ((int)threadIdx.x < rows) {
            for (int i = 0; i < rows; i++) of_last += of_rest[i];
            for (int i = rows - 1; i >= lane; i--) of_last += of_sums[i];
            const uint64_t at = (first + (uint64_t)lane) * (uint64_t)heads.value_heads + (uint64_t)head;
            of_g[at] = of_last;
            of_beta[at] = of_betas[lane];
        }
    }
}

// Adds a key's or query's gradients over the value heads that share it, and writes the gradient
// before normalization. Each key or query has a warp.
template <typename T>
__device__ __forceinline__ void keys(const T *qkv, const float *key_gradients, T *of_qkv, uint64_t n, const Heads &heads) {
    const int lane = (int)threadIdx.x % 32, dim = heads.key_dim;
    const uint64_t index = (uint64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (index >= n * 2 * heads.key_heads) return;
    const uint64_t row = index / (2 * heads.key_heads);
    const int key_head = (int)(index % (2 * heads.key_heads)) / 2;
    const bool is_query = index % 2 == 1;
    const uint64_t at = row * heads.width() + (is_query ? 0 : heads.keys()) + (uint64_t)key_head * dim;
    const float *partial = key_gradients + (row * heads.value_heads + (uint64_t)key_head * heads.group()) * 2 * dim + (is_query ? dim : 0);
    const auto gradient = [&](int d) {
        float sum = 0.0f;
        for (int head = 0; head < heads.group(); head++) sum += partial[(uint64_t)head * 2 * dim + d];
        return sum;
    };
    float squares = 0.0f, along = 0.0f;
    for (int d = lane; d < dim; d += 32) {
        const float x = to_float(qkv[at + d]);
        squares = fmaf(x, x, squares);
        along = fmaf(x, gradient(d), along);
    }
    squares = warp_sum(squares) + NORM_EPSILON;
    along = warp_sum(along) / squares;
    const float norm = (is_query ? 1.0f / sqrtf((float)dim) : 1.0f) / sqrtf(squares);
    for (int d = lane; d < dim; d += 32) of_qkv[at + d] = from_float<T>(norm * (gradient(d) - along * to_float(qkv[at + d])));
}

// Decoding rows, one at a time, so that a row's bits do not depend on how its sequence was divided
// into passes. A block has a sequence, a value head and some value columns. Its part of the state
// is in shared memory. A sequence with the slot NO_SLOT starts with zeros, and leaves no state.
template <typename T>
__device__ __forceinline__ void step(const T *qkv, const float *g, const float *beta, const uint32_t *sequences, float *states,
                                     T *o, const Heads &heads) {
    DYNAMIC_SHARED(float, shared, 16);
    const uint32_t *sequence = sequences + 3 * (uint64_t)blockIdx.x;
    const uint32_t slot = sequence[0], first = sequence[1], rows = sequence[2];
    const int head = (int)blockIdx.y, first_column = (int)blockIdx.z * STEP_COLUMNS;
    const int warp = (int)threadIdx.x / 32, column = first_column + (int)threadIdx.x % 32;
    const int key_dim = heads.key_dim, dim = heads.value_dim;
    const bool has_column = column < dim;
    float *state = shared + threadIdx.x % 32;
    float *key = shared + key_dim * STEP_COLUMNS, *query = key + key_dim, *sums = query + key_dim;
    // Null without a state: a flag would take one more register.
    float *of_slot = nullptr;
    if (has_column && slot != NO_SLOT) of_slot = states + ((uint64_t)slot * heads.value_heads + head) * heads.state_len() + column;
    for (int k = warp; k < key_dim; k += WARPS) state[k * STEP_COLUMNS] = of_slot != nullptr ? of_slot[(uint64_t)k * dim] : 0.0f;
    // The sum over the warps, for each column.
    const auto total = [&](float sum) {
        sums[threadIdx.x] = sum;
        __syncthreads();
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += sums[i * 32 + threadIdx.x % 32];
        __syncthreads();
        return sum;
    };
    for (uint64_t row = first; row < (uint64_t)first + rows; row++) {
        const T *from = qkv + row * heads.width() + (uint64_t)(head / heads.group()) * key_dim;
        if (warp == 0) load_unit(from + heads.keys(), false, key_dim, key);
        if (warp == 1) load_unit(from, true, key_dim, query);
        const uint64_t gate = row * heads.value_heads + head;
        const float decay = expf(g[gate]);
        __syncthreads();
        float sum = 0.0f;
        for (int k = warp; k < key_dim; k += WARPS) sum = fmaf(key[k], state[k * STEP_COLUMNS], sum);
        sum = total(sum);
        const uint64_t value = row * heads.width() + 2 * (uint64_t)heads.keys() + (uint64_t)head * dim + column;
        const float change = has_column ? beta[gate] * (to_float(qkv[value]) - decay * sum) : 0.0f;
        sum = 0.0f;
        for (int k = warp; k < key_dim; k += WARPS) {
            const float x = fmaf(key[k], change, decay * state[k * STEP_COLUMNS]);
            state[k * STEP_COLUMNS] = x;
            sum = fmaf(query[k], x, sum);
        }
        sum = total(sum);
        if (warp == 0 && has_column) o[row * heads.values() + (uint64_t)head * dim + column] = from_float<T>(sum);
    }
    for (int k = warp; k < key_dim && of_slot != nullptr; k += WARPS) of_slot[(uint64_t)k * dim] = state[k * STEP_COLUMNS];
}

#define GATED_DELTA_RULE(T, name)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) gated_delta_rule_forward_##name(                            \
        const T *qkv, const float *g, const float *beta, const uint32_t *segments, float *states, T *o,               \
        float *errors, float *changes, uint32_t first_segment, uint32_t advance, int key_heads, int value_heads,      \
        int key_dim, int value_dim) {                                                                                  \
        forward(qkv, g, beta, segments, states, o, errors, changes, first_segment, advance,                           \
                Heads{key_heads, value_heads, key_dim, value_dim});                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) gated_delta_rule_backward_##name(                           \
        const T *qkv, const float *g, const float *beta, const T *gradient, const uint32_t *segments,                 \
        const float *states, const float *errors, const float *changes, float *state_gradients,                       \
        float *key_gradients, T *of_qkv, float *of_g, float *of_beta, uint32_t first_segment, int key_heads,          \
        int value_heads, int key_dim, int value_dim) {                                                                 \
        backward(qkv, g, beta, gradient, segments, states, errors, changes, state_gradients, key_gradients, of_qkv,   \
                 of_g, of_beta, first_segment, Heads{key_heads, value_heads, key_dim, value_dim});                     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) gated_delta_rule_keys_##name(                               \
        const T *qkv, const float *key_gradients, T *of_qkv, uint64_t n, int key_heads, int value_heads, int key_dim, \
        int value_dim) {                                                                                               \
        keys(qkv, key_gradients, of_qkv, n, Heads{key_heads, value_heads, key_dim, value_dim});                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) gated_delta_rule_step_##name(                               \
        const T *qkv, const float *g, const float *beta, const uint32_t *sequences, float *states, T *o,              \
        int key_heads, int value_heads, int key_dim, int value_dim) {                                                  \
        step(qkv, g, beta, sequences, states, o, Heads{key_heads, value_heads, key_dim, value_dim});                  \
    }

GATED_DELTA_RULE(float, f32)
GATED_DELTA_RULE(__nv_bfloat16, bf16)
GATED_DELTA_RULE(__half, f16)
