// Small matrix products by a warpgroup: 128 threads on the tensor cores in compute capability 9.0
// (wgmma), in bf16 and f16 with f32 sums. Other GPUs lack them: see mma.cuh.
//
// The fragments of c and a are as in mma.cuh: warp w in the warpgroup has the rows from 16 w among
// the 64 rows of a. Operands in shared memory are tiles made of panels: a panel has all rows, and
// 64 columns in 128 bytes per row. The eighths of a row are permuted, so that the same columns in
// eight rows are in different banks ("128-byte swizzle"). A panel starts at a multiple of 1,024
// bytes.
#pragma once

#include "mma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool HAS_WARPGROUPS = true;
#else
constexpr bool HAS_WARPGROUPS = false;
#endif

// Whether the products of a dtype are those of a warpgroup.
template <typename T> constexpr bool ON_WARPGROUP = HAS_WARPGROUPS && sizeof(T) == 2;

constexpr int PANEL_COLUMNS = 64;

// The place of an element in a tile of `rows` rows.
__device__ __forceinline__ int place_in_panels(int rows, int row, int column) {
    const int in_panel = column % PANEL_COLUMNS;
    return (column / PANEL_COLUMNS * rows + row) * PANEL_COLUMNS + (in_panel / 8 ^ row % 8) * 8 + in_panel % 8;
}

// The numbers of a tile of ROWS rows that an instruction takes: its address, the bytes from a panel
// to the next one, and those from eight rows to the next ones.
template <int ROWS, typename T> __device__ __forceinline__ uint64_t describe(const T *tile) {
    constexpr uint32_t PANEL_BYTES = ROWS * PANEL_COLUMNS * (uint32_t)sizeof(T), EIGHT_ROWS = 1024;
    constexpr uint64_t SWIZZLE_128 = 1;
#ifdef CUDA_ON_HOST
    const uint64_t address = cuda_host::shared_address(tile);
#else
    const uint64_t address = (uint64_t)__cvta_generic_to_shared(tile);
#endif
    return address >> 4 | (uint64_t)(PANEL_BYTES >> 4) << 16 | (uint64_t)(EIGHT_ROWS >> 4) << 32 | SWIZZLE_128 << 62;
}

// The same for an operand inside of the tile. It has either rows from a multiple of 8, and 16
// columns, or 16 rows, and all columns from the first one of a panel. An address is in 16 bytes.
template <int ROWS> __device__ __forceinline__ uint64_t operand_at(uint64_t tile, int row, int column) {
    return tile + (uint64_t)((column / PANEL_COLUMNS * ROWS + row) * 8 + column % PANEL_COLUMNS / 8);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(CUDA_ON_HOST)
// The registers of c, and their places in the text of an instruction.
#define WARPGROUP_C(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define WARPGROUP_C_2 WARPGROUP_C(0), WARPGROUP_C(1)
#define WARPGROUP_C_4 WARPGROUP_C_2, WARPGROUP_C(2), WARPGROUP_C(3)
#define WARPGROUP_C_8 WARPGROUP_C_4, WARPGROUP_C(4), WARPGROUP_C(5), WARPGROUP_C(6), WARPGROUP_C(7)
#define WARPGROUP_C_16                                                                                                 \
    WARPGROUP_C_8, WARPGROUP_C(8), WARPGROUP_C(9), WARPGROUP_C(10), WARPGROUP_C(11), WARPGROUP_C(12), WARPGROUP_C(13), \
        WARPGROUP_C(14), WARPGROUP_C(15)
#define WARPGROUP_TEXT_2 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WARPGROUP_TEXT_4 WARPGROUP_TEXT_2 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WARPGROUP_TEXT_8                                                                                               \
    WARPGROUP_TEXT_4 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WARPGROUP_TEXT_16                                                                                              \
    WARPGROUP_TEXT_8 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "              \
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Starts c [64, 8 pieces] = a b, or c += a b. r0 to r4 are the numbers after those of c.
#define WARPGROUP_PRODUCTS(type, name, n, pieces, r0, r1, r2, r3, r4)                                                  \
    __device__ __forceinline__ void start_product(float (&c)[pieces][4], uint64_t a, uint64_t b, bool adds, const type *) { \
        asm volatile("{ .reg .pred adds; setp.ne.b32 adds, %" #r2 ", 0; "                                              \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #name "." #name                                \
                     " {" WARPGROUP_TEXT_##pieces "}, %" #r0 ", %" #r1 ", adds, 1, 1, 0, 0; }"                         \
                     : WARPGROUP_C_##pieces                                                                            \
                     : "l"(a), "l"(b), "r"((int)adds)                                                                  \
                     : "memory");                                                                                      \
    }                                                                                                                  \
    __device__ __forceinline__ void start_product(float (&c)[pieces][4], const FragmentA &a, uint64_t b, const type *) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #name "." #name                                \
                     " {" WARPGROUP_TEXT_##pieces "}, {%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", 1, 1, 1, 1;" \
                     : WARPGROUP_C_##pieces                                                                            \
                     : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "l"(b)                      \
                     : "memory");                                                                                      \
    }
#define WARPGROUP_SIZES(type, name)                                                                                    \
    WARPGROUP_PRODUCTS(type, name, 32, 4, 16, 17, 18, 19, 20)                                                          \
    WARPGROUP_PRODUCTS(type, name, 64, 8, 32, 33, 34, 35, 36)                                                          \
    WARPGROUP_PRODUCTS(type, name, 128, 16, 64, 65, 66, 67, 68)
WARPGROUP_SIZES(__nv_bfloat16, bf16)
WARPGROUP_SIZES(__half, f16)
#elif defined(CUDA_ON_HOST)
template <typename T> void unpack_half(uint32_t word, float *two) { UnpackHalf<T>()(word, two); }
template <int pieces, typename T> void start_product(float (&c)[pieces][4], uint64_t a, uint64_t b, bool adds, const T *) {
    cuda_host::start_product(c[0], pieces, adds, a, b, unpack_half<T>);
}
template <int pieces, typename T> void start_product(float (&c)[pieces][4], const FragmentA &a, uint64_t b, const T *) {
    cuda_host::start_product(c[0], pieces, a.words, b, unpack_half<T>);
}
#endif

// The first of the 64 rows of a warpgroup, as a number that all threads have in common: the
// compiler does not see it without the shuffle.
__device__ __forceinline__ int first_row_of_warpgroup() { return __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0) * 64; }

// Makes shared memory that this thread has written visible to products that start after the next
// barrier.
__device__ __forceinline__ void publish_operands() {
#ifdef CUDA_ON_HOST
    cuda_host::publish_operands();
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Registers that a product uses: no use of them moves to the other side.
template <int pieces> __device__ __forceinline__ void pin([[maybe_unused]] float (&c)[pieces][4]) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(CUDA_ON_HOST)
#pragma unroll
    for (int n = 0; n < pieces; n++) asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
#endif
}
template <int count> __device__ __forceinline__ void pin([[maybe_unused]] FragmentA (&a)[count]) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(CUDA_ON_HOST)
#pragma unroll
    for (int k = 0; k < count; k++)
        asm volatile("" : "+r"(a[k].words[0]), "+r"(a[k].words[1]), "+r"(a[k].words[2]), "+r"(a[k].words[3])::"memory");
#endif
}

// Before the first product. Registers that other instructions have written are pinned before it.
__device__ __forceinline__ void begin_products() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(CUDA_ON_HOST)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// After the last product before a wait.
__device__ __forceinline__ void end_products() {
#ifdef CUDA_ON_HOST
    cuda_host::end_products();
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits for all products. `c` is a result of theirs.
template <int pieces> __device__ __forceinline__ void wait_for_products([[maybe_unused]] float (&c)[pieces][4]) {
#ifdef CUDA_ON_HOST
    cuda_host::wait_for_products();
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    pin(c);
#endif
}
