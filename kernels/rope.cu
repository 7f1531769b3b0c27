// Rotary position embedding in the half-split layout: queries [n, heads * 2 * pairs], keys
// [n, kv_heads * 2 * pairs] with kv_heads = 0 if there are none, and angles [n, pairs] shared by
// the heads in a row. In each head, elements i and i + pairs form a pair. `sign` is 1, or -1 for
// the inverse rotation. blockDim.x threads share a head, and a block has blockDim.y heads.

#include "element.cuh"
#include "norm_rope.cuh"

constexpr int THREADS = 256;
constexpr double INVERSE_PI = 0.31830988618379067154;

// Rotates `count` pairs, with the first elements at `first` and the second elements at `second`.
template <int count>
__device__ __forceinline__ void turn(float (&first)[count], float (&second)[count], const float *cos, const float *sin,
                                     float sign) {
#pragma unroll
    for (int i = 0; i < count; i++) rotate_pair(first[i], second[i], cos[i], sign * sin[i]);
}

template <typename T>
__device__ __forceinline__ void rotate(const T *query, const T *key, const float *cos, const float *sin, T *rotated_query,
                                       T *rotated_key, uint32_t n, uint32_t heads, uint32_t kv_heads, int pairs, float sign) {
    const uint32_t unit = blockIdx.x * blockDim.y + threadIdx.y;
    const uint32_t row = unit / (heads + kv_heads), head = unit % (heads + kv_heads);
    if (row >= n) return;
    const bool is_query = head < heads;
    const uint64_t index = is_query ? (uint64_t)row * heads + head : (uint64_t)row * kv_heads + (head - heads);
    const T *from = (is_query ? query : key) + index * 2 * (uint64_t)pairs;
    T *to = (is_query ? rotated_query : rotated_key) + index * 2 * (uint64_t)pairs;
    cos += (uint64_t)row * (uint64_t)pairs;
    sin += (uint64_t)row * (uint64_t)pairs;
    constexpr int count = PACK<T>;
    const bool packed = pairs % count == 0 && is_aligned(from) && is_aligned(to) && is_aligned(cos) && is_aligned(sin);
    if (packed) {
        for (int i = (int)threadIdx.x * count; i < pairs; i += (int)blockDim.x * count) {
            const uint4 first_pack = load_streaming(reinterpret_cast<const uint4 *>(from + i));
            const uint4 second_pack = load_streaming(reinterpret_cast<const uint4 *>(from + pairs + i));
            float first[count], second[count], c[count], s[count];
#pragma unroll
            for (int k = 0; k < count; k += 4) {
                const float4 c4 = *reinterpret_cast<const float4 *>(cos + i + k);
                const float4 s4 = *reinterpret_cast<const float4 *>(sin + i + k);
                c[k] = c4.x, c[k + 1] = c4.y, c[k + 2] = c4.z, c[k + 3] = c4.w;
                s[k] = s4.x, s[k + 1] = s4.y, s[k + 2] = s4.z, s[k + 3] = s4.w;
            }
            unpack<T>(first_pack, first);
            unpack<T>(second_pack, second);
            turn(first, second, c, s, sign);
            *reinterpret_cast<uint4 *>(to + i) = pack<T>(first);
            *reinterpret_cast<uint4 *>(to + pairs + i) = pack<T>(second);
        }
    } else {
        for (int i = (int)threadIdx.x; i < pairs; i += (int)blockDim.x) {
            float first[1] = {to_float(from[i])}, second[1] = {to_float(from[pairs + i])};
            turn(first, second, cos + i, sin + i, sign);
            to[i] = from_float<T>(first[0]);
            to[pairs + i] = from_float<T>(second[0]);
        }
    }
}

#define ROPE(T, name)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        rope_##name(const T *query, const T *key, const float *cos, const float *sin, T *rotated_query,                \
                    T *rotated_key, uint32_t n, uint32_t heads, uint32_t kv_heads, int pairs, float sign) {            \
        rotate(query, key, cos, sin, rotated_query, rotated_key, n, heads, kv_heads, pairs, sign);                     \
    }

ROPE(float, f32)
ROPE(__nv_bfloat16, bf16)
ROPE(__half, f16)

// Cosines and sines [n, pairs] for positions times inverse frequencies, times `factor`.
extern "C" __global__ void __launch_bounds__(THREADS)
    rope_angles(const uint32_t *positions, const float *inverse_frequencies, float *cos, float *sin, uint64_t n, uint32_t pairs,
                float factor) {
    const uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n * pairs) return;
    const float angle = (float)positions[i / pairs] * inverse_frequencies[i % pairs];
    // cosf needs local memory for large angles.
    double sine, cosine;
    sincospi((double)angle * INVERSE_PI, &sine, &cosine);
    cos[i] = (float)cosine * factor;
    sin[i] = (float)sine * factor;
}
