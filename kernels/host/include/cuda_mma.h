// Replaces the tensor cores: each lane has fragments of two matrices, and computes its part of the
// product.
#pragma once

#include <array>
#include <functional>
#include <vector>

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
        const auto number = [&](int lane, int i) -> float& { return products[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]; };
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) number(lane, i) = ((const Fragments*)(uintptr_t)arguments[lane])->c[i];
        add_product(products[0], rows[0], columns[0], 16, 8, depth);
        for (int lane = 0; lane < 32; lane++) {
            float* to = ((const Fragments*)(uintptr_t)arguments[lane])->c;
            for (int i = 0; i < 4; i++) to[i] = number(lane, i);
        }
    });
}

// wgmma. The products of a thread run at the latest possible time: when it waits for them. They read
// shared memory then, and registers at the start. Until then the result is NaN, or that of the
// products before.
struct Products {
    std::vector<std::function<void()>> started;
    bool ended = true;
};
inline Products& products() {
    thread_local Products of_threads[1024];
    return of_threads[threadIdx.x];
}

// The address in shared memory, for descriptors.
inline uint64_t shared_address(const void* pointer) { return (uint64_t)((const char*)pointer - (const char*)dynamic_shared()); }

// An operand that a descriptor names.
struct Operand {
    uint64_t start, panel, eight_rows;
    const char* shared = (const char*)dynamic_shared();
    explicit Operand(uint64_t words)
        : start((words & 0x3fff) << 4), panel((words >> 16 & 0x3fff) << 4), eight_rows((words >> 32 & 0x3fff) << 4) {
        if (words >> 62 != 1) fail("wgmma: an operand without the 128-byte swizzle");
    }
    uint16_t at(uint64_t address) const {
        return *(const uint16_t*)(shared + (address ^ (address >> 7 & 7) << 4));
    }
    // Element `depth` of a row, whose depth is adjacent.
    uint16_t of_row(int row, int depth) const { return at(start + (uint64_t)(row / 8) * eight_rows + row % 8 * 128 + 2 * depth); }
    // Row `depth` of a column, whose columns are adjacent.
    uint16_t of_column(int depth, int column) const {
        return at(start + (uint64_t)(column / 64) * panel + (uint64_t)(depth / 8) * eight_rows + depth % 8 * 128 + column % 64 * 2);
    }
};

// `a(half, k)` is an element of the rows g and g + 8 of the 16 rows of a warp, and `b(k, column)` one
// of b.
template <int pieces, class A, class B>
void start_product(float (&c)[pieces][4], bool adds, A a, B b) {
    const int thread = (int)lane() % 4;
    if (!adds) memset(c, 0xff, sizeof c);
    products().ended = false;
    products().started.push_back([&c, adds, a, b, thread] {
        float rows[2][16], columns[16][2 * pieces], products[2][2 * pieces];
        for (int half = 0; half < 2; half++)
            for (int k = 0; k < 16; k++) rows[half][k] = a(half, k);
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 2 * pieces; j++) columns[k][j] = b(k, j / 2 * 8 + thread * 2 + j % 2);
        for (int n = 0; n < pieces; n++)
            for (int i = 0; i < 4; i++) products[i / 2][2 * n + i % 2] = adds ? c[n][i] : 0.0f;
        add_product(products[0], rows[0], columns[0], 2, 2 * pieces, 16);
        for (int n = 0; n < pieces; n++)
            for (int i = 0; i < 4; i++) c[n][i] = products[i / 2][2 * n + i % 2];
    });
}

template <class Unpack>
float unpacked(uint16_t bits) {
    float two[2];
    Unpack()(bits, two);
    return two[0];
}

template <int pieces, class Unpack>
void start_product(float (&c)[pieces][4], uint64_t of_a, uint64_t of_b, bool adds, Unpack) {
    const Operand a(of_a), b(of_b);
    warp_exchange("wgmma", 0xffffffffu, 0);
    const int row = (int)threadIdx.x / 32 % 4 * 16 + (int)lane() / 4;
    start_product(
        c, adds, [a, row](int half, int depth) { return unpacked<Unpack>(a.of_row(row + half * 8, depth)); },
        [b](int depth, int column) { return unpacked<Unpack>(b.of_row(column, depth)); });
}

template <int pieces, class Unpack>
void start_product(float (&c)[pieces][4], const uint32_t (&a)[4], uint64_t of_b, Unpack) {
    struct Mine {
        const uint32_t* words;
        std::array<float, 2 * 16> rows;
    } mine = {a, {}};
    warp_collective("wgmma of registers", &mine, [](const Lanes& lanes) {
        for (int lane = 0; lane < 32; lane++) {
            auto& to = *(Mine*)(uintptr_t)lanes[lane];
            for (int thread = 0; thread < 4; thread++) {
                const uint32_t* from = ((const Mine*)(uintptr_t)lanes[lane / 4 * 4 + thread])->words;
                for (int i = 0; i < 4; i++) Unpack()(from[i], &to.rows[i % 2 * 16 + i / 2 * 8 + thread * 2]);
            }
        }
    });
    const Operand b(of_b);
    const auto rows = mine.rows;
    start_product(
        c, true, [rows](int half, int depth) { return rows[(size_t)(half * 16 + depth)]; },
        [b](int depth, int column) { return unpacked<Unpack>(b.of_column(depth, column)); });
}

inline void end_products() { products().ended = true; }

inline void wait_for_products() {
    Products& all = products();
    if (!all.ended) fail("wgmma: a wait for products that have not ended");
    for (const auto& product : all.started) product();
    all.started.clear();
}

// Rounds to the nearest, ties away from 0.
inline uint32_t to_tf32(float x) {
    const uint32_t bits = (uint32_t)to_bits(x);
    if (isnan(x)) return 0x7fffffffu;
    return isinf(x) ? bits : (bits + 0x1000u) & 0xffffe000u;
}

}  // namespace cuda_host
