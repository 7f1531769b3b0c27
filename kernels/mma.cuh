// Products of small matrices on the tensor cores, with sums in f32. bf16 and f16 are multiplied
// directly. f32 is split into two parts of 11 bits: three products leave an error of 2^-22 of each
// term.
//
// A warp holds the matrices in fragments. With g = lane / 4 and t = lane % 4, a lane has
//   a [16, DEPTH]  the rows g and g + 8, at the columns 2t, 2t + 1 (bf16, f16: and 2t + 8, 2t + 9),
//   b [DEPTH, 8]   the same rows of the depth at the column g,
//   c [16, 8]      (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
// In f32 the hardware has another order of the depth. The order of the products does not matter.
#pragma once

#include "element.cuh"

#ifdef CUDA_ON_HOST
#include "cuda_mma.h"

template <typename T> struct UnpackHalf {
    CUDA_HOST_EMULATION void operator()(uint32_t word, float *out) const { unpack_word(word, out, (const T *)nullptr); }
};
struct UnpackTf32 {
    CUDA_HOST_EMULATION void operator()(uint32_t word, float *out) const { out[0] = __uint_as_float(word & 0xffffe000u); }
};
#endif

// Products that one instruction adds.
template <typename T> constexpr int DEPTH = sizeof(T) == 4 ? 8 : 16;

struct FragmentA {
    uint32_t words[4];
};
struct FragmentB {
    uint32_t words[2];
};

// Loads four matrices of 8 x 8 16-bit elements from shared memory. Each lane has the address of a
// row.
template <bool transposed> __device__ __forceinline__ void load_matrices(const void *row, uint32_t (&words)[4]) {
#ifdef CUDA_ON_HOST
    cuda_host::load_matrices(row, transposed, words);
#else
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(address)
                     : "memory");
#endif
}

// Loads 16 rows of `tile` from `row`, at DEPTH columns from `column`.
template <typename T> __device__ __forceinline__ FragmentA load_a(const T *tile, int stride, int row, int column) {
    const int lane = (int)threadIdx.x % 32;
    FragmentA a;
    load_matrices<false>(tile + (row + lane % 16) * stride + column + lane / 16 * 8, a.words);
    return a;
}
template <> __device__ __forceinline__ FragmentA load_a<float>(const float *tile, int stride, int row, int column) {
    const int lane = (int)threadIdx.x % 32;
    const float *from = tile + (row + lane / 4) * stride + column + lane % 4 * 2;
    const float2 upper = *reinterpret_cast<const float2 *>(from), lower = *reinterpret_cast<const float2 *>(from + 8 * stride);
    return {{__float_as_uint(upper.x), __float_as_uint(lower.x), __float_as_uint(upper.y), __float_as_uint(lower.y)}};
}

// Loads two fragments. Their columns are the rows of `tile` from `row`, and their depth its columns
// from `column`.
template <typename T>
__device__ __forceinline__ void load_b_of_rows(const T *tile, int stride, int row, int column, FragmentB (&b)[2]) {
    const int lane = (int)threadIdx.x % 32;
    uint32_t words[4];
    load_matrices<false>(tile + (row + lane / 16 * 8 + lane % 8) * stride + column + lane / 8 % 2 * 8, words);
    b[0] = {{words[0], words[1]}};
    b[1] = {{words[2], words[3]}};
}
template <>
__device__ __forceinline__ void load_b_of_rows<float>(const float *tile, int stride, int row, int column, FragmentB (&b)[2]) {
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float2 two =
            *reinterpret_cast<const float2 *>(tile + (row + i * 8 + lane / 4) * stride + column + lane % 4 * 2);
        b[i] = {{__float_as_uint(two.x), __float_as_uint(two.y)}};
    }
}

// Loads two fragments. Their depth is the rows of `tile` from `row`, and their columns its columns
// from `column`.
template <typename T>
__device__ __forceinline__ void load_b_of_columns(const T *tile, int stride, int row, int column, FragmentB (&b)[2]) {
    const int lane = (int)threadIdx.x % 32;
    uint32_t words[4];
    load_matrices<true>(tile + (row + lane % 16) * stride + column + lane / 16 * 8, words);
    b[0] = {{words[0], words[1]}};
    b[1] = {{words[2], words[3]}};
}
template <>
__device__ __forceinline__ void load_b_of_columns<float>(const float *tile, int stride, int row, int column,
                                                         FragmentB (&b)[2]) {
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float *from = tile + (row + lane % 4 * 2) * stride + column + i * 8 + lane / 4;
        b[i] = {{__float_as_uint(from[0]), __float_as_uint(from[stride])}};
    }
}

// Converts the fragments of c from `first` to a fragment of a, whose depth is their columns.
template <typename T, int count> __device__ __forceinline__ FragmentA a_of(const float (&c)[count][4], int first) {
    const float(&left)[4] = c[first], (&right)[4] = c[first + 1];
    const T *of = nullptr;
    return {{pack_word(left, of), pack_word(left + 2, of), pack_word(right, of), pack_word(right + 2, of)}};
}
template <int count> __device__ __forceinline__ FragmentA a_of_f32(const float (&c)[count][4], int first) {
    return {{__float_as_uint(c[first][0]), __float_as_uint(c[first][2]), __float_as_uint(c[first][1]),
             __float_as_uint(c[first][3])}};
}

__device__ __forceinline__ void multiply_half(float (&c)[4], const FragmentA &a, const FragmentB &b, const __nv_bfloat16 *) {
#ifdef CUDA_ON_HOST
    cuda_host::multiply<16>("mma.bf16", c, a.words, b.words, UnpackHalf<__nv_bfloat16>());
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "r"(b.words[0]), "r"(b.words[1]));
#endif
}
__device__ __forceinline__ void multiply_half(float (&c)[4], const FragmentA &a, const FragmentB &b, const __half *) {
#ifdef CUDA_ON_HOST
    cuda_host::multiply<16>("mma.f16", c, a.words, b.words, UnpackHalf<__half>());
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "r"(b.words[0]), "r"(b.words[1]));
#endif
}

// Rounds to the nearest number of 11 bits. The instruction leaves the other bits undefined, so they
// are cleared: a product ignores them, and the remainder must not.
__device__ __forceinline__ uint32_t to_tf32(float x) {
#ifdef CUDA_ON_HOST
    return cuda_host::to_tf32(x);
#else
    uint32_t word;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(x));
    return word & 0xffffe000u;
#endif
}
__device__ __forceinline__ void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef CUDA_ON_HOST
    cuda_host::multiply<8>("mma.tf32", c, a, b, UnpackTf32());
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
// Splits a number into a large part and a remainder.
template <int count>
__device__ __forceinline__ void split(const uint32_t (&words)[count], uint32_t (&large)[count], uint32_t (&small)[count]) {
#pragma unroll
    for (int i = 0; i < count; i++) {
        const float x = __uint_as_float(words[i]);
        large[i] = to_tf32(x);
        small[i] = to_tf32(x - __uint_as_float(large[i]));
    }
}

// c += a b. `swapped` adds the products in the order of b^T a^T, for bit-identical results.
template <typename T, bool swapped = false>
__device__ __forceinline__ void multiply(float (&c)[4], const FragmentA &a, const FragmentB &b) {
    if constexpr (sizeof(T) == 4) {
        uint32_t large_a[4], small_a[4], large_b[2], small_b[2];
        split(a.words, large_a, small_a);
        split(b.words, large_b, small_b);
        // Tensor cores round sums toward zero. Long sums are added here, to the nearest
        // (https://arxiv.org/abs/2203.03341).
        const float before[4] = {c[0], c[1], c[2], c[3]};
        c[0] = c[1] = c[2] = c[3] = 0.0f;
        if (swapped) multiply_tf32(c, large_a, small_b);
        multiply_tf32(c, small_a, large_b);
        if (!swapped) multiply_tf32(c, large_a, small_b);
        multiply_tf32(c, large_a, large_b);
#pragma unroll
        for (int i = 0; i < 4; i++) c[i] += before[i];
    } else {
        multiply_half(c, a, b, (const T *)nullptr);
    }
}

// Converts the DEPTH columns of c from fragment k * DEPTH / 8 to a fragment of a.
template <typename T, int count> __device__ __forceinline__ FragmentA as_a(const float (&c)[count][4], int k) {
    if constexpr (sizeof(T) == 4) return a_of_f32(c, k);
    else return a_of<T>(c, 2 * k);
}

// Reductions over the four lanes with parts of the same rows of c.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
