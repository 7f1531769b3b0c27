// The sum of two tensors, element by element.

#include "elements.cuh"

#define ADD(T, name)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        add_forward_##name(const T *a, const T *b, T *sum, uint64_t n) {                                               \
        combine(a, b, sum, n, [](float x, float y) { return x + y; });                                                 \
    }

ADD(float, f32)
ADD(__nv_bfloat16, bf16)
ADD(__half, f16)
