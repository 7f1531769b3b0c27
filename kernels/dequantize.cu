// Dequantizes GGUF blocks.

#include "blocks.cuh"

constexpr int THREADS = 256;

// A thread has four values of the n blocks.
template <typename T>
__device__ __forceinline__ void dequantize(const uint8_t *blocks, T *y, uint64_t n, uint32_t bytes) {
    with_format(bytes, [&](auto format) {
        using Format = decltype(format);
        constexpr uint32_t THREADS_OF_BLOCK = Format::SIZE / 4;
        const uint64_t index = (uint64_t)blockIdx.x * THREADS + threadIdx.x, block = index / THREADS_OF_BLOCK;
        if (block >= n) return;
        const uint8_t *from = blocks + block * Format::BYTES;
        const uint32_t i = (uint32_t)(index % THREADS_OF_BLOCK) * 4;
        const float4 four = to_values<Format>(Format::numbers(from, i), Format::scale(from, i));
        store_four(y + 4 * index, {four.x, four.y, four.z, four.w});
    });
}

#define DEQUANTIZE(T, name)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        dequantize_##name(const uint8_t *blocks, T *y, uint64_t n, uint32_t bytes) {                                  \
        dequantize(blocks, y, n, bytes);                                                                               \
    }

DEQUANTIZE(float, f32)
DEQUANTIZE(__nv_bfloat16, bf16)
DEQUANTIZE(__half, f16)
