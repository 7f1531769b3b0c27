// Replaces the tensor cores: each lane has fragments of two matrices, and computes its part of the
// product.
#pragma once

#include "cuda_host.h"

namespace cuda_host {

// The words of each lane.
template <int count>
void exchange_words(const char* name, const uint32_t (&mine)[count], uint32_t (&all)[32][count]) {
    for (int i = 0; i < count; i += 2) {
        const Lanes& lanes = warp_exchange(name, 0xffffffffu, (uint64_t)mine[i + 1] << 32 | mine[i]);
        for (int lane = 0; lane < 32; lane++) {
            all[lane][i] = (uint32_t)lanes[lane];
            all[lane][i + 1] = (uint32_t)(lanes[lane] >> 32);
        }
    }
}

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

// mma.m16n8k`depth`, with the fragments of the PTX manual.
template <int depth, class Unpack>
void multiply(const char* name, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Unpack unpack) {
    constexpr int in_word = depth / 8;
    uint32_t all_a[32][4], all_b[32][2];
    exchange_words(name, a, all_a);
    exchange_words(name, b, all_b);
    // A lane of a group of four has the elements of the depth from in_word * thread, and those 4 *
    // in_word later.
    auto element = [&](uint32_t word, int k) {
        float out[2];
        unpack(word, out);
        return (double)out[k % in_word];
    };
    for (int i = 0; i < 4; i++) {
        const int row = (int)lane() / 4 + i / 2 * 8, column = (int)lane() % 4 * 2 + i % 2;
        double sum = c[i];
        for (int k = 0; k < depth; k++) {
            const int thread = k % (4 * in_word) / in_word, half = k / (4 * in_word);
            const uint32_t word_a = all_a[row % 8 * 4 + thread][row / 8 + 2 * half];
            const uint32_t word_b = all_b[column * 4 + thread][half];
            sum += element(word_a, k) * element(word_b, k);
        }
        c[i] = (float)sum;
    }
}

// Rounds to the nearest, ties away from 0.
inline uint32_t to_tf32(float x) {
    const uint32_t bits = (uint32_t)to_bits(x);
    if (isnan(x)) return 0x7fffffffu;
    return isinf(x) ? bits : (bits + 0x1000u) & 0xffffe000u;
}

}  // namespace cuda_host
