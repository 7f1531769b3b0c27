// Asynchronous copies (cp.async) and products (wgmma): see include/cuda_copy.h and
// include/cuda_mma.h.

#include <string.h>

#include <array>
#include <vector>

#define CUDA_HOST_RUNTIME
#include "include/cuda_copy.h"
#include "include/cuda_mma.h"
#include "races.h"

namespace {

namespace races = cuda_host::races;

struct Copy {
    void* to;
    const void* from;
    size_t real, bytes;
};

// An operand that a descriptor names.
struct Operand {
    uint64_t start, panel, eight_rows;
    const char* shared = (const char*)cuda_host::dynamic_shared();
    explicit Operand(uint64_t words)
        : start((words & 0x3fff) << 4), panel((words >> 16 & 0x3fff) << 4), eight_rows((words >> 32 & 0x3fff) << 4) {
        if (words >> 62 != 1) cuda_host::fail("wgmma: an operand without the 128-byte swizzle");
    }
    const uint16_t* at(uint64_t address) const { return (const uint16_t*)(shared + (address ^ (address >> 7 & 7) << 4)); }
    // Element `depth` of a row, whose depth is adjacent.
    const uint16_t* of_row(int row, int depth) const {
        return at(start + (uint64_t)(row / 8) * eight_rows + (uint64_t)(row % 8 * 128 + 2 * depth));
    }
    // Row `depth` of a column, whose columns are adjacent.
    const uint16_t* of_column(int depth, int column) const {
        return at(start + (uint64_t)(column / 64) * panel + (uint64_t)(depth / 8) * eight_rows
                  + (uint64_t)(depth % 8 * 128 + column % 64 * 2));
    }
};

constexpr int depth = 16, most_pieces = 16;

// The product of the rows g and g + 8 of the 16 rows of a warp, with g = lane / 4, and of the
// columns whose sums the lane has.
struct Product {
    float* c;
    int pieces, row, thread;
    bool adds, is_a_shared;
    Operand a;  // if it is shared
    std::array<float, 2 * depth> rows;
    Operand b;
    cuda_host::Unpack unpack;

    // Calls `each` with adjacent elements of shared memory that the product reads.
    template <class Each>
    void for_chunks(Each each) const {
        constexpr int chunk = 8;
        if (is_a_shared)
            for (int half = 0; half < 2; half++)
                for (int k = 0; k < depth; k += chunk) each(a.of_row(row + half * 8, k), 2 * chunk);
        for (int n = 0; n < pieces; n++) {
            if (!is_a_shared)
                for (int k = 0; k < depth; k++) each(b.of_column(k, n * chunk), 2 * chunk);
            else
                for (int i = 0; i < 2; i++)
                    for (int k = 0; k < depth; k += chunk) each(b.of_row(n * chunk + thread * 2 + i, k), 2 * chunk);
        }
    }

    void run() {
        const auto number = [&](const uint16_t* bits) {
            float two[2];
            unpack(*bits, two);
            return two[0];
        };
        const int width = 2 * pieces;
        float columns[depth * 2 * most_pieces], products[2 * 2 * most_pieces];
        if (is_a_shared)
            for (int half = 0; half < 2; half++)
                for (int k = 0; k < depth; k++) rows[(size_t)(half * depth + k)] = number(a.of_row(row + half * 8, k));
        for (int k = 0; k < depth; k++) {
            for (int j = 0; j < width; j++) {
                const int column = j / 2 * 8 + thread * 2 + j % 2;
                columns[k * width + j] = number(is_a_shared ? b.of_row(column, k) : b.of_column(k, column));
            }
        }
        const auto sum = [&](int n, int i) -> float& { return products[i / 2 * width + 2 * n + i % 2]; };
        for (int n = 0; n < pieces; n++)
            for (int i = 0; i < 4; i++) sum(n, i) = adds ? c[4 * n + i] : 0.0f;
        cuda_host::add_product(products, rows.data(), columns, 2, width, depth);
        for (int n = 0; n < pieces; n++)
            for (int i = 0; i < 4; i++) c[4 * n + i] = sum(n, i);
        for_chunks([](const uint16_t* chunk, size_t bytes) { races::end_read(chunk, bytes); });
    }
};

// What a thread of the block has started.
struct Started {
    std::vector<Copy> copies;
    std::vector<Product> products;
    bool is_ended = true;
};

// On the heap: a program that loads the library late, such as Python, has little thread-local memory.
thread_local std::vector<Started> of_threads;

Started& started() {
    if (of_threads.empty()) of_threads.resize(1024);
    return of_threads[threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)];
}

void start(Product product, const void* code) {
    if (product.pieces > most_pieces) cuda_host::fail("wgmma: a product of %d pieces", product.pieces);
    if (!product.adds) memset(product.c, 0xff, (size_t)product.pieces * 4 * sizeof(float));
    product.for_chunks([&](const uint16_t* chunk, size_t bytes) { races::begin_read(chunk, bytes, true, code); });
    started().is_ended = false;
    started().products.push_back(product);
}

}  // namespace

namespace cuda_host {

void forget_started() {
    for (Started& of_thread : of_threads) of_thread = {};
}

void start_copy(void* to, const void* from, size_t real, size_t bytes) {
    if ((uintptr_t)to % bytes != 0 || (uintptr_t)from % bytes != 0) fail("an asynchronous copy that is not aligned to its size");
    if (real > 0) races::begin_read(from, real, false, __builtin_return_address(0));
    races::begin_write(to, bytes, __builtin_return_address(0));
    memset(to, 0xff, bytes);
    started().copies.push_back({to, from, real, bytes});
}

void wait_for_copies() {
    for (const Copy& copy : started().copies) {
        memset(copy.to, 0, copy.bytes);
        if (copy.real > 0) {
            memcpy(copy.to, copy.from, copy.real);
            races::end_read(copy.from, copy.real);
        }
        races::end_write(copy.to, copy.bytes);
    }
    started().copies.clear();
}

void start_product(float* c, int pieces, bool adds, uint64_t a, uint64_t b, Unpack unpack) {
    const Operand of_a(a), of_b(b);
    warp_exchange("wgmma", 0xffffffffu, 0);
    const int row = (int)threadIdx.x / 32 % 4 * 16 + (int)lane() / 4;
    start({c, pieces, row, (int)lane() % 4, adds, true, of_a, {}, of_b, unpack}, __builtin_return_address(0));
}

void start_product(float* c, int pieces, const uint32_t (&a)[4], uint64_t b, Unpack unpack) {
    struct Mine {
        const uint32_t* words;
        Unpack unpack;
        std::array<float, 2 * depth> rows;
    } mine = {a, unpack, {}};
    warp_collective("wgmma of registers", &mine, [](const Lanes& lanes) {
        for (int lane = 0; lane < 32; lane++) {
            auto& to = *(Mine*)(uintptr_t)lanes[lane];
            for (int thread = 0; thread < 4; thread++) {
                const uint32_t* from = ((const Mine*)(uintptr_t)lanes[lane / 4 * 4 + thread])->words;
                for (int i = 0; i < 4; i++) to.unpack(from[i], &to.rows[(size_t)(i % 2 * depth + i / 2 * 8 + thread * 2)]);
            }
        }
    });
    const Operand of_b(b);
    start({c, pieces, 0, (int)lane() % 4, true, false, of_b, mine.rows, of_b, unpack}, __builtin_return_address(0));
}

void end_products() { started().is_ended = true; }

void wait_for_products() {
    Started& all = started();
    if (!all.is_ended) fail("wgmma: a wait for products that have not ended");
    for (Product& product : all.products) product.run();
    all.products.clear();
}

void publish_operands() { races::publish(); }

}  // namespace cuda_host
