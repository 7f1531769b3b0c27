// Dequantizes GGUF blocks. Block sizes in bytes are all different. The formats are defined in ggml
// (ggml-common.h), and described in src/cpu/blocks.rs.

#include "element.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ float half_at(const uint8_t *block, int place) {
    return to_float(*reinterpret_cast<const __half *>(block + place));
}

__device__ __forceinline__ float q4_0(const uint8_t *block, int i) {
    const int q = block[2 + i % 16] >> (i / 16 * 4) & 15;
    return (float)(q - 8) * half_at(block, 0);
}

__device__ __forceinline__ float q4_1(const uint8_t *block, int i) {
    const int q = block[4 + i % 16] >> (i / 16 * 4) & 15;
    return (float)q * half_at(block, 0) + half_at(block, 2);
}

__device__ __forceinline__ float q5_0(const uint8_t *block, int i) {
    const int q = block[6 + i % 16] >> (i / 16 * 4) & 15;
    const int fifth = block[2 + i / 8] >> (i % 8) & 1;
    return (float)((q | fifth << 4) - 16) * half_at(block, 0);
}

__device__ __forceinline__ float q5_1(const uint8_t *block, int i) {
    const int q = block[8 + i % 16] >> (i / 16 * 4) & 15;
    const int fifth = block[4 + i / 8] >> (i % 8) & 1;
    return (float)(q | fifth << 4) * half_at(block, 0) + half_at(block, 2);
}

__device__ __forceinline__ float q8_0(const uint8_t *block, int i) {
    return (float)(int8_t)block[2 + i] * half_at(block, 0);
}

// Value `q` in part `part` of 8 in a Q4K or Q5K block. Each part has a 6-bit factor and offset.
__device__ __forceinline__ float scaled(const uint8_t *block, int part, int q) {
    const uint8_t *bytes = block + 4;
    int scale, min;
    if (part < 4) {
        scale = bytes[part] & 63;
        min = bytes[part + 4] & 63;
    } else {
        scale = (bytes[part + 4] & 15) | (bytes[part - 4] >> 6 << 4);
        min = bytes[part + 4] >> 4 | (bytes[part] >> 6 << 4);
    }
    const float factor = half_at(block, 0) * (float)scale, offset = half_at(block, 2) * (float)min;
    return factor * (float)q - offset;
}

__device__ __forceinline__ float q4_k(const uint8_t *block, int i) {
    const int part = i / 32;
    return scaled(block, part, block[16 + part / 2 * 32 + i % 32] >> (part % 2 * 4) & 15);
}

__device__ __forceinline__ float q5_k(const uint8_t *block, int i) {
    const int part = i / 32;
    const int q = block[48 + part / 2 * 32 + i % 32] >> (part % 2 * 4) & 15;
    const int fifth = block[16 + i % 32] >> part & 1;
    return scaled(block, part, q | fifth << 4);
}

__device__ __forceinline__ float q6_k(const uint8_t *block, int i) {
    const int half = i / 128, quarter = i / 32 % 4, column = i % 32;
    const int four = block[64 * half + 32 * (quarter % 2) + column] >> (quarter / 2 * 4) & 15;
    const int two = block[128 + 32 * half + column] >> (2 * quarter) & 3;
    const float scale = half_at(block, 208) * (float)(int8_t)block[192 + i / 16];
    return scale * (float)((four | two << 4) - 32);
}

// One warp per block, with BYTES bytes and SIZE values; blockDim is 32 by WARPS.
template <int BYTES, int SIZE, typename T, typename Number>
__device__ __forceinline__ void each(const uint8_t *blocks, T *y, uint64_t n, Number number) {
    const uint64_t index = (uint64_t)blockIdx.x * WARPS + threadIdx.y;
    if (index >= n) return;
    const uint8_t *block = blocks + index * BYTES;
    T *to = y + index * SIZE;
#pragma unroll
    for (int i = (int)threadIdx.x; i < SIZE; i += 32) to[i] = from_float<T>(number(block, i));
}

template <typename T>
__device__ __forceinline__ void dequantize(const uint8_t *blocks, T *y, uint64_t n, uint32_t bytes) {
    switch (bytes) {
        case 18: return each<18, 32>(blocks, y, n, q4_0);
        case 20: return each<20, 32>(blocks, y, n, q4_1);
        case 22: return each<22, 32>(blocks, y, n, q5_0);
        case 24: return each<24, 32>(blocks, y, n, q5_1);
        case 34: return each<34, 32>(blocks, y, n, q8_0);
        case 144: return each<144, 256>(blocks, y, n, q4_k);
        case 176: return each<176, 256>(blocks, y, n, q5_k);
        case 210: return each<210, 256>(blocks, y, n, q6_k);
    }
}

#define DEQUANTIZE(T, name)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        dequantize_##name(const uint8_t *blocks, T *y, uint64_t n, uint32_t bytes) {                                  \
        dequantize(blocks, y, n, bytes);                                                                               \
    }

DEQUANTIZE(float, f32)
DEQUANTIZE(__nv_bfloat16, bf16)
DEQUANTIZE(__half, f16)
