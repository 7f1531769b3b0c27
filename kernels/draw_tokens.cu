// Samples one token from the softmax of a row of logits, filtered by top_k, top_p and min_p.
//
// Many blocks read the logits once, and write the largest logit of each part and the weights of
// chunks of adjacent tokens. Then one block per row merges these. Without filters, it reads only
// the chunk that has the token.
//
// The filters do not sort tokens. A pass over the row sums the weights above a logit, and bisection
// over the logit's bits finds where the sum crosses a threshold. The sums are f64 in a fixed order.

#include "element.cuh"
#include "math.cuh"

// Maximum. A small vocabulary has a smaller launch.
constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr uint32_t NONE = 0xffffffffu;
// Threads of a block that reads a part, and the logits that each of them keeps in registers.
constexpr int PART_THREADS = 256;
constexpr int LOGITS = 16;
// Adjacent tokens of a block, and of a warp.
constexpr int PART = PART_THREADS * LOGITS;
constexpr int CHUNK = 32 * LOGITS;
// Above this sum, a chunk has a token whose weight is a normal number: 2^-126 for each of 512.
constexpr double LEAST_OF_CHUNK = 0x1p-116;

// The inverse of to_key.
__device__ __forceinline__ float from_key(uint32_t key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// One row.
template <typename T> struct Distribution {
    const T *logits;
    int vocab;
    float greatest;
    // The inverse temperature in base 2.
    float scale;
    // The sums from `sum_chunks`, in shared memory.
    double *chunk_sums;

    __device__ __forceinline__ double weight(float x) const { return (double)exp2_approx((x - greatest) * scale); }

    // Returns to each thread the sum of `each` over the row's logits.
    template <typename Each> __device__ __forceinline__ double sum(Each each) const {
        double sum = 0.0;
        for (int i = (int)threadIdx.x; i < vocab; i += (int)blockDim.x) sum += each(to_float(logits[i]));
        return block_sum<THREADS>(sum, (int)blockDim.x / 32);
    }

    // Returns the largest key for which the sum of `each` over the logits that are at least as
    // large exceeds `threshold`, or reaches it. If none does, returns the key of the smallest one.
    template <bool reaches, typename Each>
    __device__ __forceinline__ uint32_t crossing(uint32_t smallest, double threshold, Each each) const {
        uint32_t low = smallest, high = to_key(greatest);
        while (low < high) {
            const uint32_t middle = low + (high - low + 1) / 2;
            const double above = sum([&](float x) { return to_key(x) >= middle ? each(x) : 0.0; });
            if (reaches ? above >= threshold : above > threshold) low = middle;
            else high = middle - 1;
        }
        return low;
    }

    // Merges the weights of chunks for `first_above`. Returns the total to each thread. The weights
    // of tokens may be 0 where their sum in another scale is not, so such sums are left out.
    __device__ __forceinline__ double merge_chunks(const float *largest, const double *sums) const {
        const int thread = (int)threadIdx.x, of_row = (vocab + CHUNK - 1) / CHUNK;
        double sum = 0.0;
        for (int i = thread * merged(); i < (thread + 1) * merged() && i < of_row; i++) {
            const double own = sums[i] * weight(largest[i / (PART / CHUNK)]);
            if (own > LEAST_OF_CHUNK) sum += own;
        }
        if (thread < chunks()) chunk_sums[thread] = sum;
        return block_sum<THREADS>(sum, (int)blockDim.x / 32);
    }

    // Computes the sums of `each` over chunks of adjacent tokens, for `first_above`. Returns the
    // total to each thread.
    template <typename Each> __device__ __forceinline__ double sum_chunks(Each each) const {
        const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
        const int rows = rows_of_chunk(), count = chunks();
        for (int chunk = warp; chunk < count; chunk += warps) {
            double sum = 0.0;
            for (int row = 0; row < rows; row++) {
                const int token = (chunk * rows + row) * 32 + lane;
                if (token < vocab) sum += each(to_float(logits[token]));
            }
            sum = warp_sum(sum);
            if (lane == 0) chunk_sums[chunk] = sum;
        }
        __syncthreads();
        return block_sum<THREADS>((int)threadIdx.x < count ? chunk_sums[threadIdx.x] : 0.0, warps);
    }

    // Returns the token at which the running sum of `each` exceeds `threshold`. If rounding keeps
    // the sum below, returns the last token in a chunk for which `each` is not 0. `sum_chunks` must
    // have been called with the same `each`.
    template <typename Each> __device__ __forceinline__ uint32_t first_above(double threshold, Each each) const {
        __shared__ uint32_t found, last;
        __shared__ double before, sums[WARPS];
        const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
        const double own = thread < chunks() ? chunk_sums[thread] : 0.0;
        double in_warp;
        double up_to = scan(own, in_warp);
        if (thread == 0) found = NONE, last = 0;
        if (lane == 31) sums[warp] = in_warp;
        __syncthreads();
        for (int i = 0; i < warp; i++) up_to += sums[i];
        if (own > 0.0) {
            atomicMax(&last, (uint32_t)thread);
            if (up_to + own > threshold) atomicMin(&found, (uint32_t)thread);
        }
        __syncthreads();
        const uint32_t chunk = found != NONE ? found : last;
        if (thread == (int)chunk) before = up_to;
        __syncthreads();
        // One warp searches the chunk.
        if (warp == 0) {
            const int rows = rows_of_chunk();
            double sum = before;
            uint32_t token = NONE, last_token = 0;
            for (int row = 0; row < rows && token == NONE; row++) {
                const int at = ((int)chunk * rows + row) * 32 + lane;
                const double weight = at < vocab ? each(to_float(logits[at])) : 0.0;
                double all;
                const double so_far = sum + scan(weight, all);
                const uint32_t possible = __ballot_sync(0xffffffffu, weight > 0.0);
                const uint32_t above = __ballot_sync(0xffffffffu, weight > 0.0 && so_far + weight > threshold);
                const uint32_t start = (chunk * (uint32_t)rows + (uint32_t)row) * 32;
                if (possible != 0) last_token = start + 31 - (uint32_t)__clz((int)possible);
                if (above != 0) token = start + (uint32_t)__ffs((int)above) - 1;
                sum += all;
            }
            if (lane == 0) last = token != NONE ? token : last_token;
        }
        __syncthreads();
        return last;
    }

    // Returns the first token with the largest logit, which is in a part where it is `largest`.
    __device__ __forceinline__ uint32_t first_greatest(const float *largest) const {
        __shared__ uint32_t part, first;
        if (threadIdx.x == 0) part = first = NONE;
        __syncthreads();
        for (int i = (int)threadIdx.x; i < (vocab + PART - 1) / PART; i += (int)blockDim.x)
            if (largest[i] == greatest) atomicMin(&part, (uint32_t)i);
        __syncthreads();
        const int from = (int)part * PART;
        for (int i = from + (int)threadIdx.x; i < vocab && i < from + PART; i += (int)blockDim.x)
            if (to_float(logits[i]) == greatest) atomicMin(&first, (uint32_t)i);
        __syncthreads();
        return first;
    }

private:
    // Chunks of draw_parts that are one here: one, unless there are more than threads.
    __device__ __forceinline__ int merged() const { return (vocab + CHUNK * THREADS - 1) / (CHUNK * THREADS); }
    // Rows of 32 tokens in a chunk. There are at most as many chunks as threads.
    __device__ __forceinline__ int rows_of_chunk() const { return merged() * LOGITS; }
    __device__ __forceinline__ int chunks() const { return (vocab + 32 * rows_of_chunk() - 1) / (32 * rows_of_chunk()); }

    // Returns the sum over all earlier lanes, and the sum over all lanes in `all`.
    static __device__ __forceinline__ double scan(double own, double &all) {
        const int lane = (int)threadIdx.x % 32;
        double up_to = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const double other = __shfl_up_sync(0xffffffffu, up_to, distance);
            if (lane >= distance) up_to += other;
        }
        all = __shfl_sync(0xffffffffu, up_to, 31);
        const double before = __shfl_up_sync(0xffffffffu, up_to, 1);
        return lane == 0 ? 0.0 : before;
    }
};

// Reads part blockIdx.x % parts of draw blockIdx.x / parts. `largest` [n, parts] has the largest
// logit of each part, which is infinity if a logit is NaN or infinity. `sums` [n, chunks] has the
// weights of chunks of CHUNK tokens, relative to the largest logit of their part.
template <typename T>
__device__ __forceinline__ void draw_parts(const T *logits, const uint32_t *draws, float *largest, double *sums,
                                           uint32_t vocab, uint32_t parts, float inverse_temperature) {
    __shared__ float of_warps[PART_THREADS / 32];
    const uint32_t index = blockIdx.x / parts, part = blockIdx.x % parts;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const uint32_t chunk = part * (PART / CHUNK) + (uint32_t)warp, first = chunk * CHUNK;
    const T *row = logits + (uint64_t)draws[index] * vocab;
    const bool is_packed = is_aligned(row);
    float x[LOGITS];
#pragma unroll
    for (int i = 0; i < LOGITS; i += PACK<T>) {
        const uint32_t token = first + (uint32_t)(i * 32 + lane * PACK<T>);
        float pack[PACK<T>];
        if (is_packed && token + PACK<T> <= vocab) {
            unpack<T>(*reinterpret_cast<const uint4 *>(row + token), pack);
        } else {
#pragma unroll
            for (int j = 0; j < PACK<T>; j++) pack[j] = token + j < vocab ? to_float(row[token + j]) : -INFINITY;
        }
#pragma unroll
        for (int j = 0; j < PACK<T>; j++) x[i + j] = pack[j];
    }
    float greatest = -INFINITY;
#pragma unroll
    for (int i = 0; i < LOGITS; i++) greatest = x[i] < INFINITY ? fmaxf(greatest, x[i]) : INFINITY;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, distance));
    if (lane == 0) of_warps[warp] = greatest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PART_THREADS / 32; i++) greatest = fmaxf(greatest, of_warps[i]);
    if (threadIdx.x == 0) largest[blockIdx.x] = greatest;
    const float scale = inverse_temperature * LOG2_E;
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < LOGITS; i++)
        if (x[i] > -INFINITY) sum += (double)exp2_approx((x[i] - greatest) * scale);
    sum = warp_sum(sum);
    const uint32_t chunks = (vocab + CHUNK - 1) / CHUNK;
    if (lane == 0 && chunk < chunks) sums[(uint64_t)index * chunks + chunk] = sum;
}

// `draws` [3, n] has each draw's row, and the two halves of its uniform number in
// [0, 1) as f64. `drawn` [3, n] has the tokens, the bits of their log-probs, and the bits of their
// log-probs in the filtered distribution. A token is NONE if a logit is NaN or infinity, or all are
// minus infinity. `largest` and `sums` are from draw_parts.
template <typename T>
__device__ __forceinline__ void draw(const T *logits, const uint32_t *draws, const float *largest, const double *sums,
                                     uint32_t *drawn, uint32_t n, uint32_t vocab, float inverse_temperature, uint32_t top_k,
                                     double top_p, double min_p, uint32_t greedy) {
    const uint32_t index = blockIdx.x;
    const int parts = ((int)vocab + PART - 1) / PART;
    largest += (uint64_t)index * parts;
    sums += (uint64_t)index * ((vocab + CHUNK - 1) / CHUNK);
    __shared__ double chunk_sums[THREADS];
    Distribution<T> row{logits + (uint64_t)draws[index] * vocab, (int)vocab, -INFINITY, inverse_temperature * LOG2_E, chunk_sums};
    __shared__ uint32_t greatest_key;
    if (threadIdx.x == 0) greatest_key = 0;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < parts; i += (int)blockDim.x) atomicMax(&greatest_key, to_key(largest[i]));
    __syncthreads();
    row.greatest = from_key(greatest_key);
    if (fabsf(row.greatest) == INFINITY) {
        if (threadIdx.x == 0) drawn[index] = NONE;
        return;
    }

    const double total = row.merge_chunks(largest, sums);
    const uint64_t bits = (uint64_t)draws[2 * n + index] << 32 | draws[n + index];
    const double uniform = __longlong_as_double((long long)bits);
    uint32_t token;
    double kept_total = total;
    if (greedy) {
        token = row.first_greatest(largest);
    } else if (top_k == 0 && top_p == 1.0 && min_p == 0.0) {
        token = row.first_above(uniform * total, [&](float x) { return row.weight(x); });
    } else {
        const uint32_t lowest = to_key(-INFINITY);
        // The logit with rank top_k. Ties are kept.
        uint32_t kth = lowest;
        if (top_k > 0 && top_k < vocab) kth = row.template crossing<true>(lowest, (double)top_k, [](float) { return 1.0; });
        const double top_k_total = row.sum([&](float x) { return to_key(x) >= kth ? row.weight(x) : 0.0; });
        // The last logit that top_p keeps.
        const double wanted = top_p * top_k_total;
        uint32_t nucleus = kth;
        if (top_p < 1.0) nucleus = row.template crossing<true>(kth, wanted, [&](float x) { return row.weight(x); });
        const auto is_kept = [&](float x) { return to_key(x) > nucleus && row.weight(x) >= min_p; };
        const auto is_last = [&](float x) { return to_key(x) == nucleus && row.weight(x) >= min_p; };
        const double above = row.sum([&](float x) { return to_key(x) > nucleus ? row.weight(x) : 0.0; });
        // Among ties, the first ones until the sum reaches top_p.
        const double equals = row.sum([&](float x) { return is_last(x) ? 1.0 : 0.0; });
        const double last_weight = row.weight(from_key(nucleus));
        double count = equals;
        if (top_p < 1.0 && equals > 1.0) count = fmin(equals, fmax(1.0, ceil((wanted - above) / last_weight)));
        const double share = equals > 0.0 ? count / equals : 0.0;
        const auto kept_weight = [&](float x) {
            if (is_last(x)) return share * row.weight(x);
            return is_kept(x) ? row.weight(x) : 0.0;
        };
        kept_total = row.sum(kept_weight);
        // Sorted by weight, the largest first, then by token.
        const double threshold = uniform * kept_total;
        const uint32_t key = row.template crossing<false>(nucleus, threshold, kept_weight);
        const double before = row.sum([&](float x) { return to_key(x) > key ? kept_weight(x) : 0.0; });
        const double weight = row.weight(from_key(key));
        const double most = key == nucleus ? count - 1.0 : INFINITY;
        const double rank = fmax(0.0, fmin(floor((threshold - before) / weight), most));
        const auto is_equal = [&](float x) { return to_key(x) == key ? 1.0 : 0.0; };
        row.sum_chunks(is_equal);
        token = row.first_above(rank, is_equal);
    }
    if (threadIdx.x != 0) return;
    const double log_weight = (double)(to_float(row.logits[token]) - row.greatest) * (double)inverse_temperature;
    drawn[index] = token;
    drawn[n + index] = __float_as_uint((float)(log_weight - log(total)));
    drawn[2 * n + index] = __float_as_uint(greedy ? 0.0f : (float)(log_weight - log(kept_total)));
}

#define DRAW_TOKENS(T, name)                                                                                           \
    extern "C" __global__ void __launch_bounds__(PART_THREADS)                                                        \
        draw_parts_##name(const T *logits, const uint32_t *draws, float *largest, double *sums, uint32_t vocab,        \
                          uint32_t parts, float inverse_temperature) {                                                 \
        draw_parts(logits, draws, largest, sums, vocab, parts, inverse_temperature);                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                          \
        draw_tokens_##name(const T *logits, const uint32_t *draws, const float *largest, const double *sums,           \
                           uint32_t *drawn, uint32_t n, uint32_t vocab, float inverse_temperature, uint32_t top_k,     \
                           double top_p, double min_p, uint32_t greedy) {                                              \
        draw(logits, draws, largest, sums, drawn, n, vocab, inverse_temperature, top_k, top_p, min_p, greedy);         \
    }

DRAW_TOKENS(float, f32)
DRAW_TOKENS(__nv_bfloat16, bf16)
DRAW_TOKENS(__half, f16)
