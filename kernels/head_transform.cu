// Query and key heads before attention: RMSNorm over each head, then rotary position embedding,
// forward and backward. Queries have `query_step` elements from one head to the next: head_dim, or
// twice as many where a gate for the attention output follows each head. In a head, elements i and
// i + pairs are a pair that rotates by angle i of its row, and those from 2 * pairs on do not
// rotate. A null weight is no norm.
//
// blockDim.x threads, a power of two up to 32, share a head, and a block has blockDim.y heads.

#include "element.cuh"
#include "math.cuh"
#include "norm_rope.cuh"

constexpr int THREADS = 256;

// The elements in a head, in slots of two times `count` elements.
template <int count> struct Slots {
    int head_dim, pairs;

    __device__ __forceinline__ int length() const { return pairs / count + (head_dim - 2 * pairs + 2 * count - 1) / (2 * count); }
    __device__ __forceinline__ bool rotates(int slot) const { return slot < pairs / count; }
    __device__ __forceinline__ int first(int slot) const {
        return rotates(slot) ? slot * count : 2 * pairs + (slot - pairs / count) * 2 * count;
    }
    __device__ __forceinline__ int second(int slot) const { return rotates(slot) ? pairs + slot * count : first(slot) + count; }
    // The last slot may have half its elements.
    __device__ __forceinline__ bool has_second(int slot) const { return second(slot) < head_dim; }
};

// A slot's elements.
template <int count> struct Pair {
    float first[count] = {}, second[count] = {};

    template <typename T> __device__ __forceinline__ static void load(const T *from, float (&values)[count]) {
        if constexpr (count == 1) values[0] = to_float(*from);
        else unpack<T>(*reinterpret_cast<const uint4 *>(from), values);
    }

    template <typename T> __device__ __forceinline__ static void store(T *to, const float (&values)[count]) {
        if constexpr (count == 1) *to = from_float<T>(values[0]);
        else *reinterpret_cast<uint4 *>(to) = pack<T>(values);
    }

    // Zeros in place of elements behind the head.
    template <typename T> __device__ __forceinline__ Pair(const T *head, Slots<count> slots, int slot) {
        load(head + slots.first(slot), first);
        if (slots.has_second(slot)) load(head + slots.second(slot), second);
    }

    __device__ __forceinline__ Pair() {}

    template <typename T> __device__ __forceinline__ void write(T *head, Slots<count> slots, int slot) const {
        store(head + slots.first(slot), first);
        if (slots.has_second(slot)) store(head + slots.second(slot), second);
    }

    // Rotates by the row's angles, or back.
    __device__ __forceinline__ void rotate(const float *cos, const float *sin, float sign, Slots<count> slots, int slot) {
        if (!slots.rotates(slot)) return;
        float c[count], s[count];
        if constexpr (count == 1) {
            c[0] = cos[slot];
            s[0] = sin[slot];
        } else {
#pragma unroll
            for (int k = 0; k < count; k += 4) {
                const float4 c4 = *reinterpret_cast<const float4 *>(cos + slot * count + k);
                const float4 s4 = *reinterpret_cast<const float4 *>(sin + slot * count + k);
                c[k] = c4.x, c[k + 1] = c4.y, c[k + 2] = c4.z, c[k + 3] = c4.w;
                s[k] = s4.x, s[k + 1] = s4.y, s[k + 2] = s4.z, s[k + 3] = s4.w;
            }
        }
#pragma unroll
        for (int k = 0; k < count; k++) rotate_pair(first[k], second[k], c[k], sign * s[k]);
    }

    // Calls `each` with both halves of this and of another.
    template <typename Each> __device__ __forceinline__ void with(Pair &other, Each each) {
#pragma unroll
        for (int k = 0; k < count; k++) {
            each(first[k], other.first[k]);
            each(second[k], other.second[k]);
        }
    }
};

// Returns the sum over a head's threads to each of them.
__device__ __forceinline__ float head_sum(float x) {
    for (int offset = (int)blockDim.x / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// The rows' heads of one kind, and their weight.
template <typename T> struct Heads {
    const T *from;
    const T *weight;
    T *to;
    // Heads per row, and elements from one head to the next in `from` and in `to`.
    uint32_t per_row;
    int from_step, to_step;
};

// A choice of structs by reference would put them into local memory.
template <typename T> __device__ __forceinline__ Heads<T> either(bool is_query, const Heads<T> &query, const Heads<T> &key) {
    return {is_query ? query.from : key.from,           is_query ? query.weight : key.weight,
            is_query ? query.to : key.to,               is_query ? query.per_row : key.per_row,
            is_query ? query.from_step : key.from_step, is_query ? query.to_step : key.to_step};
}

template <typename T> __device__ __forceinline__ bool is_aligned_by_head(const Heads<T> &heads) {
    return is_aligned(heads.from) && is_aligned(heads.weight) && is_aligned(heads.to);
}

template <int count, typename T>
__device__ __forceinline__ void forward(const Heads<T> &heads, uint64_t index, bool is_head, const float *cos, const float *sin,
                                        Slots<count> slots, float sign, float epsilon, float offset) {
    const T *from = heads.from + index * (uint64_t)heads.from_step;
    const int length = is_head ? slots.length() : 0;
    Pair<count> pair;
    float scale = 0.0f;
    if (heads.weight != nullptr) {
        float squares = 0.0f;
        for (int slot = (int)threadIdx.x; slot < length; slot += (int)blockDim.x) {
            pair = Pair<count>(from, slots, slot);
            pair.with(pair, [&](float &x, float) { squares += x * x; });
        }
        scale = norm_scale(head_sum(squares), slots.head_dim, epsilon);
    }
    // The threads have the head in registers if each has one slot.
    const bool is_kept = heads.weight != nullptr && slots.length() <= (int)blockDim.x;
    for (int slot = (int)threadIdx.x; slot < length; slot += (int)blockDim.x) {
        if (!is_kept) pair = Pair<count>(from, slots, slot);
        if (heads.weight != nullptr) {
            Pair<count> weights(heads.weight, slots, slot);
            pair.with(weights, [&](float &x, float weight) {
                x = to_float(from_float<T>(weighted_norm<T>(x, scale, weight, offset)));
            });
        }
        pair.rotate(cos, sin, sign, slots, slot);
        pair.write(heads.to + index * (uint64_t)heads.to_step, slots, slot);
    }
}

template <typename T>
__device__ __forceinline__ void forward_all(const Heads<T> &query, const Heads<T> &key, const float *cos, const float *sin,
                                            uint32_t n, int head_dim, int pairs, float sign, float epsilon, float offset) {
    const uint64_t unit = (uint64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const uint32_t units = query.per_row + key.per_row, row = (uint32_t)(unit / units), head = (uint32_t)(unit % units);
    const bool is_query = head < query.per_row, is_head = row < n;
    const Heads<T> heads = either(is_query, query, key);
    const uint64_t index = (uint64_t)row * heads.per_row + (is_query ? head : head - query.per_row);
    const uint64_t angles = (uint64_t)row * (uint64_t)pairs;
    const bool is_packed = head_dim % PACK<T> == 0 && pairs % PACK<T> == 0 && is_aligned_by_head(query) &&
                           is_aligned_by_head(key) && is_aligned(cos) && is_aligned(sin);
    if (is_packed)
        forward<PACK<T>>(heads, index, is_head, cos + angles, sin + angles, {head_dim, pairs}, sign, epsilon, offset);
    else forward<1>(heads, index, is_head, cos + angles, sin + angles, {head_dim, pairs}, sign, epsilon, offset);
}

// What the backward pass reads beside the inputs of the forward pass.
template <typename T> struct Gradients {
    // With respect to the transformed heads, side by side.
    const T *of_heads;
    // Where gates follow the heads: the gradient of the gated attention output, and the output
    // before the gates. Else null.
    const T *of_gated;
    const T *mixed;
};

// Writes the gradients of a block's heads, and those of the gates. Adds those of the weight to
// `sums` [head_dim] of the head's threads, in shared memory: element k in pack p is at k * packs +
// p, so that a warp accesses adjacent memory.
template <int count, typename T>
__device__ __forceinline__ void backward(const Heads<T> &heads, const Gradients<T> &gradients, uint64_t index, bool is_head,
                                         const float *cos, const float *sin, Slots<count> slots, float epsilon, float offset,
                                         float *sums) {
    const int head_dim = slots.head_dim, packs = head_dim / count, length = is_head ? slots.length() : 0;
    const T *from = heads.from + index * (uint64_t)heads.from_step;
    const uint64_t at = index * (uint64_t)head_dim;
    T *to = heads.to + index * (uint64_t)heads.to_step;
    Pair<count> x, gradient;
    const auto load = [&](int slot) {
        gradient = Pair<count>(gradients.of_heads + at, slots, slot);
        gradient.rotate(cos, sin, -1.0f, slots, slot);
        if (heads.weight != nullptr) x = Pair<count>(from, slots, slot);
    };
    float squares = 0.0f, products = 0.0f;
    if (heads.weight != nullptr) {
        for (int slot = (int)threadIdx.x; slot < length; slot += (int)blockDim.x) {
            load(slot);
            Pair<count> factors(heads.weight, slots, slot);
            factors.with(gradient, [&](float &weight, float g) { weight = g * (offset + weight); });
            factors.with(x, [&](float along, float value) {
                products += along * value;
                squares += value * value;
            });
        }
        squares = head_sum(squares);
        products = head_sum(products);
    }
    const NormGradient norm(squares, products, head_dim, epsilon);
    const bool is_kept = heads.weight != nullptr && slots.length() <= (int)blockDim.x;
    for (int slot = (int)threadIdx.x; slot < length; slot += (int)blockDim.x) {
        if (!is_kept) load(slot);
        if (heads.weight != nullptr) {
            Pair<count> weights(heads.weight, slots, slot);
            gradient.with(gradient, [&](float &g, float) { g *= norm.scale; });
            const int first = slots.first(slot) / count, second = slots.second(slot) / count;
#pragma unroll
            for (int k = 0; k < count; k++) {
                sums[k * packs + first] += gradient.first[k] * x.first[k];
                if (slots.has_second(slot)) sums[k * packs + second] += gradient.second[k] * x.second[k];
            }
#pragma unroll
            for (int k = 0; k < count; k++) {
                gradient.first[k] = norm.of_x(gradient.first[k], offset + weights.first[k], x.first[k]);
                gradient.second[k] = norm.of_x(gradient.second[k], offset + weights.second[k], x.second[k]);
            }
        }
        gradient.write(to, slots, slot);
        if (gradients.of_gated == nullptr) continue;
        Pair<count> gate(from + head_dim, slots, slot), of_gate(gradients.of_gated + at, slots, slot);
        Pair<count> mixed(gradients.mixed + at, slots, slot);
        of_gate.with(mixed, [](float &g, float value) { g *= value; });
        // The derivative of s is s (1 - s).
        of_gate.with(gate, [](float &g, float value) {
            const float s = sigmoid(value);
            g *= s * (1.0f - s);
        });
        of_gate.write(to + head_dim, slots, slot);
    }
}

// Blocks before `query_blocks` have query heads, the others key heads. Each kind loops with the
// stride of its blocks. `partial` [gridDim.x, head_dim] has each block's sum of the weight
// gradient, if there are weights.
template <typename T>
__device__ __forceinline__ void backward_all(const Heads<T> &query, const Gradients<T> &of_query, const Heads<T> &key,
                                             const Gradients<T> &of_key, const float *cos, const float *sin, float *partial,
                                             uint32_t n, uint32_t query_blocks, int head_dim, int pairs, float epsilon,
                                             float offset, float *shared) {
    const bool is_query = blockIdx.x < query_blocks;
    const Heads<T> heads = either(is_query, query, key);
    // Keys have no gates.
    const Gradients<T> gradients = {is_query ? of_query.of_heads : of_key.of_heads, is_query ? of_query.of_gated : nullptr,
                                    of_query.mixed};
    const uint32_t block = is_query ? blockIdx.x : blockIdx.x - query_blocks;
    const uint32_t blocks = is_query ? query_blocks : gridDim.x - query_blocks;
    const uint64_t count = (uint64_t)n * heads.per_row, stride = (uint64_t)blocks * blockDim.y;
    float *sums = shared + (int)threadIdx.y * head_dim;
    for (int i = (int)threadIdx.x; i < head_dim; i += (int)blockDim.x) sums[i] = 0.0f;
    // A head's threads are in one warp.
    __syncwarp();
    const bool is_packed = head_dim % PACK<T> == 0 && pairs % PACK<T> == 0 && is_aligned_by_head(query) &&
                           is_aligned_by_head(key) && is_aligned(cos) && is_aligned(sin) && is_aligned(of_query.of_heads) &&
                           is_aligned(of_key.of_heads) && is_aligned(of_query.of_gated) && is_aligned(of_query.mixed);
    // The same number of iterations in each thread, because a warp sums together.
    for (uint64_t first = (uint64_t)block * blockDim.y; first < count; first += stride) {
        const uint64_t index = first + threadIdx.y;
        const bool is_head = index < count;
        const uint64_t angles = is_head ? index / heads.per_row * (uint64_t)pairs : 0;
        if (is_packed)
            backward<PACK<T>>(heads, gradients, index, is_head, cos + angles, sin + angles, {head_dim, pairs}, epsilon, offset,
                              sums);
        else
            backward<1>(heads, gradients, index, is_head, cos + angles, sin + angles, {head_dim, pairs}, epsilon, offset,
                        sums);
    }
    if (partial == nullptr) return;
    __syncthreads();
    const int packed = is_packed ? PACK<T> : 1, packs = head_dim / packed;
    for (int column = (int)(threadIdx.y * blockDim.x + threadIdx.x); column < head_dim; column += (int)(blockDim.x * blockDim.y)) {
        float sum = 0.0f;
        for (int head = 0; head < (int)blockDim.y; head++)
            sum += shared[head * head_dim + column % packed * packs + column / packed];
        partial[(uint64_t)blockIdx.x * (uint64_t)head_dim + (uint64_t)column] = sum;
    }
}

#define HEAD_TRANSFORM(T, name)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                      \
        head_transform_forward_##name(const T *query, const T *query_weight, const T *key, const T *key_weight,                \
                                      const float *cos, const float *sin, T *to_query, T *to_key, uint32_t n, uint32_t heads,  \
                                      uint32_t kv_heads, int query_step, int head_dim, int pairs, float sign, float epsilon,   \
                                      float offset) {                                                                          \
        const Heads<T> queries = {query, query_weight, to_query, heads, query_step, head_dim};                                 \
        const Heads<T> keys = {key, key_weight, to_key, kv_heads, head_dim, head_dim};                                         \
        forward_all(queries, keys, cos, sin, n, head_dim, pairs, sign, epsilon, offset);                                       \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                      \
        head_transform_backward_##name(const T *query, const T *query_weight, const T *query_gradient, const T *key,           \
                                       const T *key_weight, const T *key_gradient, const float *cos, const float *sin,         \
                                       const T *of_gated, const T *mixed, T *of_query, T *of_key, float *partial, uint32_t n,  \
                                       uint32_t heads, uint32_t kv_heads, uint32_t query_blocks, int query_step, int head_dim, \
                                       int pairs, float epsilon, float offset) {                                               \
        DYNAMIC_SHARED(float, shared, 16);                                                                                     \
        const Heads<T> queries = {query, query_weight, of_query, heads, query_step, query_step};                               \
        const Heads<T> keys = {key, key_weight, of_key, kv_heads, head_dim, head_dim};                                         \
        const Gradients<T> of_queries = {query_gradient, of_gated, mixed}, of_keys = {key_gradient, nullptr, nullptr};         \
        backward_all(queries, of_queries, keys, of_keys, cos, sin, partial, n, query_blocks, head_dim, pairs, epsilon,         \
                     offset, shared);                                                                                          \
    }

HEAD_TRANSFORM(float, f32)
HEAD_TRANSFORM(__nv_bfloat16, bf16)
HEAD_TRANSFORM(__half, f16)
