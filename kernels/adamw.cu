// One AdamW step for all parameters, in place. With an f32 master the kernel updates the master and
// rounds it to the parameter. Without a master (null) it updates the parameter in f32 and rounds
// it: to nearest, or a bf16 parameter at random (src/ops/adamw/rounding.rs). Moments are f32, or
// blocks of 8-bit codes (src/ops/adamw/moments.rs).

#include "math.cuh"
#include "tensor_list.cuh"

constexpr int THREADS = 256;
// Elements per block. A thread processes four at a time.
constexpr int CHUNK = THREADS * 16;

// Values and bytes in a block of codes: the codes, and their scale.
constexpr int NUMBERS = 256;
constexpr int BYTES = NUMBERS + 4;
constexpr int WARPS = THREADS / 32;
constexpr int LANE_NUMBERS = NUMBERS / 32;

// A parameter in the list. Moments in blocks of codes store their addresses in place of the
// floats'.
struct Parameter {
    void *parameter;
    float *master, *average, *square;
    const void *gradient;
    uint64_t n;
    uint32_t first_block;
    // The Dtype of the parameter, four times that of the gradient, and 16 more if a bf16 parameter
    // is rounded at random.
    uint32_t dtypes;
    // Weight decay factor.
    float keep;
    uint32_t unused;
    // The key of the random numbers, and the number of eights of elements before the first one.
    uint64_t key, eight;

    __device__ __forceinline__ bool is_rounded_at_random() const { return dtypes & 16; }

    // Calls `of` with null pointers in the types of the parameter and of the gradient.
    template <typename Of> __device__ __forceinline__ void with_dtypes(Of of) const {
        with_dtype(dtypes % 4, [&](auto *parameter) {
            with_dtype(dtypes / 4 % 4, [&](auto *gradient) { of(parameter, gradient); });
        });
    }
};
static_assert(sizeof(Parameter) == 80, "a row has 10 words");

struct Step {
    float gradient_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, step_size, inverse_root_correction;
    uint32_t number;

    // Each rounding is explicit. Otherwise the compiler may fuse different operations for different
    // dtypes, and the results would differ.
    __device__ __forceinline__ void update(float &p, float &m, float &v, float g, float keep) const {
        g = __fmul_rn(g, gradient_factor);
        m = __fmaf_rn(m, beta1, __fmul_rn(g, one_minus_beta1));
        v = __fmaf_rn(v, beta2, __fmul_rn(__fmul_rn(g, g), one_minus_beta2));
        const float root = __fmaf_rn(sqrtf(v), inverse_root_correction, epsilon);
        p = __fmaf_rn(-step_size, m / root, __fmul_rn(p, keep));
    }
};

// The random numbers of eight elements: Philox 4x32 with 10 rounds. Word i has those of the
// elements 2i and 2i + 1.
struct Eight {
    uint32_t words[4];

    __device__ __forceinline__ Eight(uint64_t key, uint64_t counter, uint32_t step)
        : words{(uint32_t)counter, (uint32_t)(counter >> 32), step, 0} {
        uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
#pragma unroll
        for (int round = 0; round < 10; round++) {
            const uint64_t first = (uint64_t)words[0] * 0xD2511F53u, second = (uint64_t)words[2] * 0xCD9E8D57u;
            words[0] = (uint32_t)(second >> 32) ^ words[1] ^ low;
            words[1] = (uint32_t)second;
            words[2] = (uint32_t)(first >> 32) ^ words[3] ^ high;
            words[3] = (uint32_t)first;
            low += 0x9E3779B9u;
            high += 0xBB67AE85u;
        }
    }
};

// The random number of an element in the word of its pair.
__device__ __forceinline__ uint32_t half_of(uint32_t word, uint64_t element) {
    return element % 2 == 0 ? word & 0xffffu : word >> 16;
}

// Rounds x to bf16: down if the part that bf16 lacks, of 16 bits, is small beside `random`.
__device__ __forceinline__ float rounded_at_random(float x, uint32_t random) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) return x;
    return __uint_as_float((bits + random) & 0xffff0000u);
}

// Updates the elements [first, first + 4) that exist. `first` is a multiple of 4.
template <typename P, typename G>
__device__ __forceinline__ void update_four(const Parameter &row, uint64_t first, bool packed, const Step &step) {
    P *parameter = static_cast<P *>(row.parameter);
    const G *gradient = static_cast<const G *>(row.gradient);
    const bool at_random = std::is_same_v<P, __nv_bfloat16> && row.is_rounded_at_random();
    uint32_t random[4] = {};
    if (at_random) {
        const Eight eight(row.key, row.eight + first / 8, step.number);
#pragma unroll
        for (int i = 0; i < 4; i++)
            random[i] = half_of(first % 8 == 0 ? eight.words[i / 2] : eight.words[2 + i / 2], i);
    }
    if (packed && first + 4 <= row.n) {
        float p[4], m[4], v[4], g[4];
        if (row.master != nullptr) load_four(row.master + first, p);
        else load_four(parameter + first, p);
        load_four(row.average + first, m);
        load_four(row.square + first, v);
        load_four(gradient + first, g);
#pragma unroll
        for (int i = 0; i < 4; i++) step.update(p[i], m[i], v[i], g[i], row.keep);
        if (row.master != nullptr) store_four(row.master + first, p);
        if (at_random) {
#pragma unroll
            for (int i = 0; i < 4; i++) p[i] = rounded_at_random(p[i], random[i]);
        }
        store_four(parameter + first, p);
        store_four(row.average + first, m);
        store_four(row.square + first, v);
    } else {
        const uint64_t last = first + 4 < row.n ? first + 4 : row.n;
#pragma unroll 1
        for (uint64_t i = first; i < last; i++) {
            float p = row.master != nullptr ? row.master[i] : to_float(parameter[i]);
            step.update(p, row.average[i], row.square[i], to_float(gradient[i]), row.keep);
            if (row.master != nullptr) row.master[i] = p;
            // Chosen, not indexed, so that the random numbers stay in registers.
            const uint32_t upper = i % 2 == 0 ? random[2] : random[3], lower = i % 2 == 0 ? random[0] : random[1];
            if (at_random) p = rounded_at_random(p, i - first < 2 ? lower : upper);
            parameter[i] = from_float<P>(p);
        }
    }
}

template <typename P, typename G> __device__ __forceinline__ void update_chunk(const Parameter &row, const Step &step) {
    const bool packed = is_aligned_for_four(static_cast<const P *>(row.parameter)) &&
                        is_aligned_for_four(static_cast<const G *>(row.gradient)) && is_aligned_for_four(row.average) &&
                        is_aligned_for_four(row.square) && is_aligned_for_four(row.master);
    const uint64_t begin = (uint64_t)(blockIdx.x - row.first_block) * CHUNK;
#pragma unroll 1
    for (int i = (int)threadIdx.x * 4; i < CHUNK && begin + i < row.n; i += THREADS * 4)
        update_four<P, G>(row, begin + i, packed, step);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    adamw(const uint64_t *list, uint32_t count, float gradient_factor, float beta1, float one_minus_beta1, float beta2,
          float one_minus_beta2, float epsilon, float step_size, float inverse_root_correction, uint32_t number) {
    const Parameter row = row_of_block<Parameter>(list, count);
    const Step step = {gradient_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, step_size, inverse_root_correction,
                       number};
    row.with_dtypes([&](auto *parameter, auto *gradient) {
        update_chunk<std::remove_pointer_t<decltype(parameter)>, std::remove_pointer_t<decltype(gradient)>>(row, step);
    });
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// Returns the code in `map`, which ascends, whose value is nearest to x.
__device__ __forceinline__ int nearest_code(const float *map, float x) {
    int low = 0, high = NUMBERS - 1;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (map[middle] <= x) low = middle;
        else high = middle;
    }
    return x - map[low] <= map[high] - x ? low : high;
}

// A moment's block of codes, shared by the lanes in a warp: lane i has value i of every 32.
struct Moment {
    uint8_t *block;
    float scale;

    __device__ __forceinline__ Moment(float *moment, uint64_t index)
        : block(reinterpret_cast<uint8_t *>(moment) + index * BYTES),
          scale(*reinterpret_cast<const float *>(block + NUMBERS)) {}

    __device__ __forceinline__ float number(const float *map, int i) const { return map[block[i]] * scale; }

    // Writes the block's `count` values. All lanes must have read theirs. `least` is the smallest
    // code with a positive value.
    __device__ __forceinline__ void write(const float *map, const float (&numbers)[LANE_NUMBERS], int count, int least) {
        const int lane = (int)threadIdx.x % 32;
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < LANE_NUMBERS; k++) largest = fmaxf(largest, fabsf(numbers[k]));
        largest = warp_max(largest);
#pragma unroll
        for (int k = 0; k < LANE_NUMBERS; k++) {
            const int i = lane + 32 * k;
            if (i >= count) break;
            int code = 0;
            if (largest > 0.0f) {
                code = nearest_code(map, numbers[k] / largest);
                if (numbers[k] > 0.0f && code < least) code = least;
            }
            block[i] = (uint8_t)code;
        }
        // All lanes have read the scale. The shuffles above do not order memory.
        __syncwarp();
        if (lane == 0) *reinterpret_cast<float *>(block + NUMBERS) = largest;
    }
};

template <typename P, typename G>
__device__ __forceinline__ void update_block(const Parameter &row, const float *maps, const Step &step) {
    const uint64_t index = (uint64_t)(blockIdx.x - row.first_block) * WARPS + threadIdx.x / 32;
    const uint64_t begin = index * NUMBERS;
    if (begin >= row.n) return;
    const int count = row.n - begin < NUMBERS ? (int)(row.n - begin) : NUMBERS;
    P *parameter = static_cast<P *>(row.parameter) + begin;
    float *master = row.master != nullptr ? row.master + begin : nullptr;
    const G *gradient = static_cast<const G *>(row.gradient) + begin;
    const float *signed_map = maps, *unsigned_map = maps + NUMBERS;
    Moment average(row.average, index), square(row.square, index);
    const int lane = (int)threadIdx.x % 32;
    const bool at_random = std::is_same_v<P, __nv_bfloat16> && row.is_rounded_at_random();
    // Each lane has the random numbers of eight elements that are side by side.
    uint32_t words[4] = {};
    if (at_random) {
        const Eight eight(row.key, row.eight + begin / 8 + lane, step.number);
#pragma unroll
        for (int w = 0; w < 4; w++) words[w] = eight.words[w];
    }
    float m[LANE_NUMBERS], v[LANE_NUMBERS];
#pragma unroll
    for (int k = 0; k < LANE_NUMBERS; k++) {
        const int i = lane + 32 * k;
        uint32_t random = 0;
        if (at_random) {
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const uint32_t word = __shfl_sync(0xffffffffu, words[w], i / 8);
                if (w == i % 8 / 2) random = half_of(word, i);
            }
        }
        m[k] = v[k] = 0.0f;
        if (i < count) {
            float p = master != nullptr ? master[i] : to_float(parameter[i]);
            m[k] = average.number(signed_map, i);
            v[k] = square.number(unsigned_map, i);
            step.update(p, m[k], v[k], to_float(gradient[i]), row.keep);
            if (master != nullptr) master[i] = p;
            if (at_random) p = rounded_at_random(p, random);
            parameter[i] = from_float<P>(p);
        }
    }
    average.write(signed_map, m, count, 0);
    square.write(unsigned_map, v, count, 1);
}

// A step with moments in blocks of codes. `maps` holds the code values for the average, and for the
// squared average. Each warp updates one block.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    adamw_quantized(const uint64_t *list, const float *maps, uint32_t count, float gradient_factor, float beta1,
                    float one_minus_beta1, float beta2, float one_minus_beta2, float epsilon, float step_size,
                    float inverse_root_correction, uint32_t number) {
    __shared__ float shared_maps[2 * NUMBERS];
    for (int i = (int)threadIdx.x; i < 2 * NUMBERS; i += THREADS) shared_maps[i] = maps[i];
    __syncthreads();
    const float *numbers = shared_maps;
    const Parameter row = row_of_block<Parameter>(list, count);
    const Step step = {gradient_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, step_size, inverse_root_correction,
                       number};
    row.with_dtypes([&](auto *parameter, auto *gradient) {
        update_block<std::remove_pointer_t<decltype(parameter)>, std::remove_pointer_t<decltype(gradient)>>(row, numbers, step);
    });
}
