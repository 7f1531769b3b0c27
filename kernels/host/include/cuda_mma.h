// Replaces the tensor cores: each lane has fragments of two matrices, and computes its part of the
// product.
#pragma once

#include "cuda_host.h"

namespace cuda_host {

// ldmatrix.x4 of four matrices of 8 x 8 16-bit elements: lane 8 m + r has the address of row r of
// matrix m. A lane receives two elements of each matrix, adjacent in a row or in a column.
CUDA_HOST_EMULATION inline void load_matrices(const void* row, bool transposed, uint32_t (&words)[4]) {
    if ((uintptr_t)row % 16 != 0) fail("ldmatrix of a row that is not aligned to 16 bytes");
    const Lanes& rows = warp_exchange(transposed ? "ldmatrix.trans" : "ldmatrix", 0xffffffffu, (uint64_t)(uintptr_t)row);
    const int group = (int)lane() / 4, thread = (int)lane() % 4;
    for (int matrix = 0; matrix < 4; matrix++) {
        const uint32_t* const* of_matrix = (const uint32_t* const*)&rows[8 * matrix];
        // Two adjacent elements of a row.
        const auto two = [&](int r, int pair) CUDA_HOST_EMULATION {
            reads(of_matrix[r] + pair, 4);
            return of_matrix[r][pair];
        };
        if (!transposed) {
            words[matrix] = two(group, thread);
            continue;
        }
        const int shift = group % 2 * 16;
        words[matrix] = (two(2 * thread, group / 2) >> shift & 0xffff) | two(2 * thread + 1, group / 2) >> shift << 16;
    }
}

// The fragments of a lane.
struct Fragments {
    float* c;
    const uint32_t *a, *b;
};

// mma.m16n8k`depth`, with the fragments of the PTX manual. `Unpack` converts a word to numbers.
template <int depth, class Unpack>
CUDA_HOST_EMULATION void multiply(const char* name, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Unpack) {
    Fragments mine = {c, a, b};
    warp_collective(name, &mine, [](const Lanes& arguments) CUDA_HOST_EMULATION {
        constexpr int in_word = depth / 8;
        // A lane of a group of four has the elements of the depth from in_word * thread, and those
        // 4 * in_word later.
        float rows[16][depth], columns[depth][8], products[16][8];
        for (int lane = 0; lane < 32; lane++) {
            const auto& from = *(const Fragments*)(uintptr_t)arguments[lane];
            const int group = lane / 4, thread = lane % 4;
            for (int half = 0; half < 2; half++) {
                const int k = 4 * in_word * half + in_word * thread;
                Unpack()(from.a[2 * half], &rows[group][k]);
                Unpack()(from.a[2 * half + 1], &rows[group + 8][k]);
                float of_column[in_word];
                Unpack()(from.b[half], of_column);
                for (int i = 0; i < in_word; i++) columns[k + i][group] = of_column[i];
            }
        }
        const auto number = [&](int lane, int i) CUDA_HOST_EMULATION -> float& { return products[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]; };
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) number(lane, i) = ((const Fragments*)(uintptr_t)arguments[lane])->c[i];
        add_product(products[0], rows[0], columns[0], 16, 8, depth);
        for (int lane = 0; lane < 32; lane++) {
            float* to = ((const Fragments*)(uintptr_t)arguments[lane])->c;
            for (int i = 0; i < 4; i++) to[i] = number(lane, i);
        }
    });
}

// The address in shared memory, for descriptors.
inline uint64_t shared_address(const void* pointer) { return (uint64_t)((const char*)pointer - (const char*)dynamic_shared()); }

// Converts a word to two numbers.
using Unpack = void (*)(uint32_t word, float* two);

// wgmma. The products of a thread run at the latest possible time: when it waits for them. They read
// shared memory then, and registers at the start. Until then the result is NaN, or that of the
// products before. c has `pieces` times four numbers. Operands in shared memory are descriptors.
void start_product(float* c, int pieces, bool adds, uint64_t a, uint64_t b, Unpack);
void start_product(float* c, int pieces, const uint32_t (&a)[4], uint64_t b, Unpack);
void end_products();
void wait_for_products();
void publish_operands();

// Rounds to the nearest, ties away from 0.
inline uint32_t to_tf32(float x) {
    const uint32_t bits = (uint32_t)to_bits(x);
    if (isnan(x)) return 0x7fffffffu;
    return isinf(x) ? bits : (bits + 0x1000u) & 0xffffe000u;
}

}  // namespace cuda_host
