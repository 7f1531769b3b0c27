// Rotary position embedding in the half-split layout: rows [rows, heads * 2 * pairs], and angles
// [rows, pairs] shared by the heads of a row. In each head, elements i and i + pairs are a pair.
// `sign` is 1, or -1 for the inverse rotation. blockDim.x threads share a head, and a block has
// blockDim.y heads.

#include "element.cuh"
#include "norm_rope.cuh"

constexpr int THREADS = 256;
constexpr double INVERSE_PI = 0.31830988618379067154;

// Rotates `count` pairs, with the first elements at `first` and the second elements at `second`.
template <typename T, int count>
__device__ __forceinline__ void turn(float (&first)[count], float (&second)[count], const float *cos, const float *sin,
                                     float sign) {
#pragma unroll
    for (int i = 0; i < count; i++) rotate_pair(first[i], second[i], cos[i], sign * sin[i]);
}

template <typename T>
__device__ __forceinline__ void rotate(const T *x, const float *cos, const float *sin, T *y, uint32_t heads_in_all,
                                       uint32_t heads, int pairs, float sign) {
    const uint32_t head = blockIdx.x * blockDim.y + threadIdx.y;
    if (head >= heads_in_all) return;
    const uint64_t start = (uint64_t)head * 2 * (uint64_t)pairs;
    const uint64_t angle = (uint64_t)(head / heads) * (uint64_t)pairs;
    const T *from = x + start;
    T *to = y + start;
    constexpr int count = PACK<T>;
    const bool packed = pairs % count == 0 && is_aligned(x) && is_aligned(y) && is_aligned(cos) && is_aligned(sin);
    if (packed) {
        for (int i = (int)threadIdx.x * count; i < pairs; i += (int)blockDim.x * count) {
            const uint4 first_pack = load_streaming(reinterpret_cast<const uint4 *>(from + i));
            const uint4 second_pack = load_streaming(reinterpret_cast<const uint4 *>(from + pairs + i));
            float first[count], second[count], c[count], s[count];
#pragma unroll
            for (int k = 0; k < count; k += 4) {
                const float4 c4 = *reinterpret_cast<const float4 *>(cos + angle + i + k);
                const float4 s4 = *reinterpret_cast<const float4 *>(sin + angle + i + k);
                c[k] = c4.x, c[k + 1] = c4.y, c[k + 2] = c4.z, c[k + 3] = c4.w;
                s[k] = s4.x, s[k + 1] = s4.y, s[k + 2] = s4.z, s[k + 3] = s4.w;
            }
            unpack<T>(first_pack, first);
            unpack<T>(second_pack, second);
            turn<T>(first, second, c, s, sign);
            *reinterpret_cast<uint4 *>(to + i) = pack<T>(first);
            *reinterpret_cast<uint4 *>(to + pairs + i) = pack<T>(second);
        }
    } else {
        for (int i = (int)threadIdx.x; i < pairs; i += (int)blockDim.x) {
            float first[1] = {to_float(from[i])}, second[1] = {to_float(from[pairs + i])};
            turn<T>(first, second, cos + angle + i, sin + angle + i, sign);
            to[i] = from_float<T>(first[0]);
            to[pairs + i] = from_float<T>(second[0]);
        }
    }
}

#define ROPE(T, name)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        rope_##name(const T *x, const float *cos, const float *sin, T *y, uint32_t heads_in_all, uint32_t heads,      \
                    int pairs, float sign) {                                                                           \
        rotate(x, cos, sin, y, heads_in_all, heads, pairs, sign);                                                      \
    }

ROPE(float, f32)
ROPE(__nv_bfloat16, bf16)
ROPE(__half, f16)

// Cosines and sines [n, pairs] of positions times inverse frequencies, times `factor`.
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
