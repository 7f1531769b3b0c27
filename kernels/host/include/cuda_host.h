// Replaces nvcc's built-ins, so that a kernel compiles as C++ and runs on the CPU, for tests.
//
// The threads of a block are fibers on one CPU thread. A barrier, a shuffle or a vote switches to
// the next fiber, and completes when all participating threads have arrived. It is an error if one
// cannot arrive.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#define CUDA_ON_HOST
#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };

#define CUDA_HOST_VECTORS(type, name)                                                                              \
    struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                                       \
    struct alignas(sizeof(type) == 8 ? 16 : 4 * sizeof(type)) name##4 { type x, y, z, w; };                        \
    static inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                        \
    static inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
CUDA_HOST_VECTORS(float, float)
CUDA_HOST_VECTORS(int, int)
CUDA_HOST_VECTORS(unsigned, uint)
#undef CUDA_HOST_VECTORS

// Functions that emulate something. Their accesses are not those of the kernel, in which races are
// found (kernels/host/races.h).
#define CUDA_HOST_EMULATION __attribute__((no_sanitize_thread))

// Constants to a thread. Kernels in shared libraries (kernels/host/bin/nvcc) read them without a
// call.
#ifdef CUDA_HOST_RUNTIME
#define CUDA_HOST_INDEX extern thread_local
#elif defined(CUDA_HOST_MODULE)
#define CUDA_HOST_INDEX extern thread_local __attribute__((tls_model("initial-exec"))) const
#else
#define CUDA_HOST_INDEX extern thread_local const
#endif
CUDA_HOST_INDEX uint3 threadIdx;
CUDA_HOST_INDEX uint3 blockIdx;
CUDA_HOST_INDEX dim3 blockDim;
CUDA_HOST_INDEX dim3 gridDim;
static const int warpSize = 32;

namespace cuda_host {

using Lanes = uint64_t[32];

// The dynamic shared memory of the launch.
void* dynamic_shared();

void block_barrier();

// Arrives with `value` at the operation `name` of the lanes in `mask`, and returns the values of
// all lanes.
const Lanes& warp_exchange(const char* name, unsigned mask, uint64_t value);

// Arrives at __syncwarp of the lanes in `mask`, which orders their accesses to memory.
void warp_barrier(unsigned mask);

// Say how the running thread accesses memory, where a function that emulates something does it.
void reads(const void* address, size_t bytes);
void changes_atomically(const void* address, size_t bytes, const void* code);

// A function of the arguments of all lanes.
using Collective = void (*)(const Lanes& arguments);

// Arrives with `argument` at the operation `name` of all lanes. When all have arrived, calls
// `collective` once, with their arguments.
void warp_collective(const char* name, void* argument, Collective collective);

// Ends the launch with this message.
[[noreturn]] void fail(const char* format, ...);

unsigned lane();

// Adds the product of a, `rows` x `depth`, and b, `depth` x `columns`, to c, with sums in f64 in the order of the
// depth.
void add_product(float* c, const float* a, const float* b, int rows, int columns, int depth);

template <class T>
uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a shuffle moves 8 bytes at most");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
T from_bits(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}

// The value of lane `from(self, first)`, where the part of the warp begins at lane `first`, or the lane's own value if
// that is outside its part. `width` is a power of two.
template <class T, class From>
CUDA_HOST_EMULATION T shuffle(const char* name, unsigned mask, T value, int width, From from_lane) {
    const int self = (int)lane(), first = self & -width, from = from_lane(self, first);
    const Lanes& lanes = warp_exchange(name, mask, to_bits(value));
    if (from < first || from >= first + width) return value;
    if (!(mask >> from & 1)) fail("%s reads lane %d, which is not in its mask %08x", name, from, mask);
    return from_bits<T>(lanes[from]);
}

}  // namespace cuda_host

static inline void __syncthreads() { cuda_host::block_barrier(); }
static inline void __syncwarp(unsigned mask = 0xffffffffu) { cuda_host::warp_barrier(mask); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    return cuda_host::shuffle("__shfl_sync", mask, value, width, [=](int, int first) { return first + (from & (width - 1)); });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
    return cuda_host::shuffle("__shfl_xor_sync", mask, value, width, [=](int self, int) { return self ^ flip; });
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int by, int width = 32) {
    return cuda_host::shuffle("__shfl_down_sync", mask, value, width, [=](int self, int) { return self + by; });
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int by, int width = 32) {
    return cuda_host::shuffle("__shfl_up_sync", mask, value, width, [=](int self, int) { return self - by; });
}
CUDA_HOST_EMULATION static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const cuda_host::Lanes& lanes = cuda_host::warp_exchange("__ballot_sync", mask, predicate != 0);
    unsigned votes = 0;
    for (int i = 0; i < 32; i++) votes |= (mask >> i & 1 && lanes[i] ? 1u : 0u) << i;
    return votes;
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline int __ffs(int bits) { return __builtin_ffs(bits); }
static inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz((unsigned)bits); }

// Fibers switch only at barriers, so plain arithmetic is atomic.
#define CUDA_HOST_ATOMIC(name, ...)                                                             \
    template <class T, class U>                                                                 \
    CUDA_HOST_EMULATION T name(T* address, U value) {                                           \
        cuda_host::changes_atomically(address, sizeof(T), __builtin_return_address(0));         \
        T old = *address;                                                                       \
        __VA_ARGS__;                                                                            \
        return old;                                                                             \
    }
CUDA_HOST_ATOMIC(atomicAdd, *address = old + (T)value)
CUDA_HOST_ATOMIC(atomicMax, if ((T)value > old) *address = (T)value)
CUDA_HOST_ATOMIC(atomicMin, if ((T)value < old) *address = (T)value)
#undef CUDA_HOST_ATOMIC
template <class T, class U, class V>
CUDA_HOST_EMULATION T atomicCAS(T* address, U expected, V value) {
    cuda_host::changes_atomically(address, sizeof(T), __builtin_return_address(0));
    T old = *address;
    if (old == (T)expected) *address = (T)value;
    return old;
}

template <class T>
T __ldg(const T* address) { return *address; }
template <class T>
T __ldcs(const T* address) { return *address; }
template <class T>
T __ldcg(const T* address) { return *address; }
template <class T>
void __stcs(T* address, T value) { *address = value; }
template <class T>
void __stcg(T* address, T value) { *address = value; }

#undef assert
#define assert(condition) ((condition) ? (void)0 : cuda_host::fail("assertion failed: %s", #condition))

// Macros, because the C library declares functions of these names.
#define __expf expf
#define __logf logf
#define __log2f log2f
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = (uint64_t)high << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) result |= (uint32_t)(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return result;
}
static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)(((uint64_t)a * b) >> 32); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline void sincospi(double x, double* sine, double* cosine) { sincos(x * 3.14159265358979323846, sine, cosine); }
static inline float __int_as_float(int bits) { return cuda_host::from_bits<float>((uint32_t)bits); }
static inline int __float_as_int(float x) { return (int)cuda_host::to_bits(x); }
static inline float __uint_as_float(unsigned bits) { return cuda_host::from_bits<float>(bits); }
static inline unsigned __float_as_uint(float x) { return (unsigned)cuda_host::to_bits(x); }
static inline double __longlong_as_double(long long bits) { return cuda_host::from_bits<double>((uint64_t)bits); }
static inline long long __double_as_longlong(double x) { return (long long)cuda_host::to_bits(x); }
static inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678f); }
static inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752); }
template <class T>
constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T>
constexpr T max(T a, T b) { return a < b ? b : a; }
