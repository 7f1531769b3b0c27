// Float dtypes that kernels read and write, one element or 16 bytes at a time. Arithmetic is in
// f32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }

// Elements in 16 bytes.
template <typename T> constexpr int PACK = 16 / sizeof(T);

// Converts the elements of one 32-bit word.
__device__ __forceinline__ void unpack_word(uint32_t word, float *out, const float *) { out[0] = __uint_as_float(word); }
__device__ __forceinline__ void unpack_word(uint32_t word, float *out, const __nv_bfloat16 *) {
    out[0] = __uint_as_float(word << 16);
    out[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void unpack_word(uint32_t word, float *out, const __half *) {
    __half2 pair;
    memcpy(&pair, &word, 4);
    const float2 both = __half22float2(pair);
    out[0] = both.x;
    out[1] = both.y;
}

__device__ __forceinline__ uint32_t pack_word(const float *x, const float *) { return __float_as_uint(x[0]); }
__device__ __forceinline__ uint32_t pack_word(const float *x, const __nv_bfloat16 *) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[0], x[1]);
    uint32_t word;
    memcpy(&word, &pair, 4);
    return word;
}
__device__ __forceinline__ uint32_t pack_word(const float *x, const __half *) {
    const __half2 pair = __floats2half2_rn(x[0], x[1]);
    uint32_t word;
    memcpy(&word, &pair, 4);
    return word;
}

template <typename T> __device__ __forceinline__ void unpack(uint4 pack, float (&out)[PACK<T>]) {
    constexpr int n = PACK<T> / 4;
    unpack_word(pack.x, out, (const T *)nullptr);
    unpack_word(pack.y, out + n, (const T *)nullptr);
    unpack_word(pack.z, out + 2 * n, (const T *)nullptr);
    unpack_word(pack.w, out + 3 * n, (const T *)nullptr);
}

template <typename T> __device__ __forceinline__ uint4 pack(const float (&x)[PACK<T>]) {
    constexpr int n = PACK<T> / 4;
    return make_uint4(pack_word(x, (const T *)nullptr), pack_word(x + n, (const T *)nullptr),
                      pack_word(x + 2 * n, (const T *)nullptr), pack_word(x + 3 * n, (const T *)nullptr));
}

// A row with `length` elements: `head` elements before the first multiple of 16 bytes, then `packs`
// of 16 bytes, then `tail` elements. A row with odd length, or in a view, may start at any address.
template <typename T> struct Row {
    int head;
    int packs;
    int tail;

    __device__ __forceinline__ Row(const T *row, int length) {
        const int before = (int)((16 - reinterpret_cast<uintptr_t>(row) % 16) % 16 / sizeof(T));
        head = before < length ? before : length;
        packs = (length - head) / PACK<T>;
        tail = length - head - packs * PACK<T>;
    }
};

// Returns whether two rows have their packs at the same columns.
__device__ __forceinline__ bool same_alignment(const void *a, const void *b) {
    return (reinterpret_cast<uintptr_t>(a) - reinterpret_cast<uintptr_t>(b)) % 16 == 0;
}

// For data that is read or written once: bypasses the caches.
__device__ __forceinline__ uint4 load_streaming(const uint4 *from) { return __ldcs(from); }

// Returns whether a pointer is aligned to 16 bytes.
__device__ __forceinline__ bool is_aligned(const void *address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

// Four elements at a time, for arguments of several dtypes.
template <typename T> __device__ __forceinline__ bool is_aligned_for_four(const T *address) {
    return reinterpret_cast<uintptr_t>(address) % (4 * sizeof(T)) == 0;
}

__device__ __forceinline__ void load_four(const float *from, float (&out)[4]) {
    const float4 four = *reinterpret_cast<const float4 *>(from);
    out[0] = four.x;
    out[1] = four.y;
    out[2] = four.z;
    out[3] = four.w;
}
template <typename T> __device__ __forceinline__ void load_four(const T *from, float (&out)[4]) {
    const uint2 two = *reinterpret_cast<const uint2 *>(from);
    unpack_word(two.x, out, from);
    unpack_word(two.y, out + 2, from);
}

// Two elements at an address that is aligned to both.
__device__ __forceinline__ void store_two(float *to, const float (&x)[2]) { *reinterpret_cast<float2 *>(to) = make_float2(x[0], x[1]); }
template <typename T> __device__ __forceinline__ void store_two(T *to, const float (&x)[2]) {
    *reinterpret_cast<uint32_t *>(to) = pack_word(x, to);
}

__device__ __forceinline__ void store_four(float *to, const float (&x)[4]) {
    *reinterpret_cast<float4 *>(to) = make_float4(x[0], x[1], x[2], x[3]);
}
template <typename T> __device__ __forceinline__ void store_four(T *to, const float (&x)[4]) {
    *reinterpret_cast<uint2 *>(to) = make_uint2(pack_word(x, to), pack_word(x + 2, to));
}
