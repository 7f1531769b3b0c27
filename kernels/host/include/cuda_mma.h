// Replaces the tensor cores: each lane has fragments of two matrices, and computes its part of the
// product.
#pragma once

#include "cuda_host.h"

namespace cuda_host {

// ldmatrix.x4 of four matrices of 8 x 8 16-bit elements: lane 8 m + r has the address of row r of
// matrix m. A lane receives two elements of each matrix, adjacent in a row or in a column.
inline void load_matrices(const void* row, bool transposed, uint32_t (&words)[4]) {
    if ((uintptr_t)row % 16 != 0) fail("ldmatrix of a row that is not aligned to 16 bytes");
    const Lanes& rows = warp_exchange(transposed ? "ldmatrix.trans" : "ldmatrix", 0xffffffffu, (uint64_t)(uintptr_t)row);
    const int group = (int)lane() / 4, thread = (int)lane() % 4;
    for (int matrix = 0; matrix < 4; matrix++) {
        auto element = [&](int r, int c) { return (uint32_t)((const uint16_t*)(uintptr_t)rows[8 * matrix + r])[c]; };
        words[matrix] = transposed ? element(2 * thread, group) | element(2 * thread + 1, group) << 16
                                   : element(group, 2 * thread) | element(group, 2 * thread + 1) << 16;
    }
}

// The fragments of a lane.
struct Fragments {
    float* c;
    const uint32_t *a, *b;
};

// mma.m16n8k`depth`, with the fragments of the PTX manual. `Unpack` converts a word to numbers.
template <int depth, class Unpack>
void multiply(const char* name, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Unpack) {
    Fragments mine = {c, a, b};
    warp_collective(name, &mine, [](const Lanes& arguments) {
        constexpr int in_word = depth / 8;
        // A lane of a group of four has the elements of the depth from in_word * thread, and those
        // 4 * in_word later.
        float rows[16][depth], columns[8][depth];
        for (int lane = 0; lane < 32; lane++) {
            const auto& from = *(const Fragments*)(uintptr_t)arguments[lane];
            const int group = lane / 4, thread = lane % 4;
            for (int half = 0; half < 2; half++) {
                const int k = 4 * in_word * half + in_word * thread;
                Unpack()(from.a[2 * half], &rows[group][k]);
                Unpack()(from.a[2 * half + 1], &rows[group + 8][k]);
                Unpack()(from.b[half], &columns[group][k]);
            }
        }
        for (int lane = 0; lane < 32; lane++) {
            float* to = ((const Fragments*)(uintptr_t)arguments[lane])->c;
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
                double sum = to[i];
                for (int k = 0; k < depth; k++) sum += (double)rows[row][k] * (double)columns[column][k];
                to[i] = (float)sum;
            }
        }
    });
}

// Rounds to the nearest, ties away from 0.
inline uint32_t to_tf32(float x) {
    const uint32_t bits = (uint32_t)to_bits(x);
    if (isnan(x)) return 0x7fffffffu;
    return isinf(x) ? bits : (bits + 0x1000u) & 0xffffe000u;
}

}  // namespace cuda_host
