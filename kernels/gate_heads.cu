// y = x * sigmoid(gate) for heads [n, head_dim], where n counts the heads in all rows. The gates
// are in `query` [n, 2, head_dim], behind each head.

#include "element.cuh"
#include "math.cuh"

constexpr int THREADS = 256;

template <typename T>
__device__ __forceinline__ void gate(const T *x, const T *query, T *y, uint64_t n, int head_dim) {
    const uint64_t width = (uint64_t)head_dim, index = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    const bool is_packed = head_dim % PACK<T> == 0 && is_aligned(x) && is_aligned(query) && is_aligned(y);
    if (!is_packed) {
        for (uint64_t i = index; i < n * width; i += (uint64_t)gridDim.x * THREADS) {
            const float g = to_float(query[(i / width * 2 + 1) * width + i % width]);
            y[i] = from_float<T>(to_float(x[i]) * sigmoid(g));
        }
        return;
    }
    const uint64_t packs = width / PACK<T>;
    for (uint64_t i = index; i < n * packs; i += (uint64_t)gridDim.x * THREADS) {
        float values[PACK<T>], gates[PACK<T>];
        unpack<T>(load_streaming(reinterpret_cast<const uint4 *>(x) + i), values);
        unpack<T>(load_streaming(reinterpret_cast<const uint4 *>(query) + (i / packs * 2 + 1) * packs + i % packs), gates);
#pragma unroll
        for (int k = 0; k < PACK<T>; k++) values[k] *= sigmoid(gates[k]);
        reinterpret_cast<uint4 *>(y)[i] = pack<T>(values);
    }
}

#define GATE_HEADS(T, name)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        gate_heads_##name(const T *x, const T *query, T *y, uint64_t n, int head_dim) {                                \
        gate(x, query, y, n, head_dim);                                                                                \
    }

GATE_HEADS(float, f32)
GATE_HEADS(__nv_bfloat16, bf16)
GATE_HEADS(__half, f16)
