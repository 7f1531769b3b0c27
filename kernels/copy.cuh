// Asynchronous copies from global to shared memory (cp.async).
#pragma once

#include <cstdint>

#ifdef CUDA_ON_HOST
#include "cuda_copy.h"
#endif

// Starts to copy 16 bytes, or to write zeros there. Both addresses must be multiples of 16. This
// thread can read the bytes after `wait_for_copies`, and other threads after a further barrier.
__device__ __forceinline__ void start_copy(void *to, const void *from, bool is_real) {
#ifdef CUDA_ON_HOST
    cuda_host::start_copy(to, from, is_real ? 16 : 0, 16);
#else
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(is_real ? 16 : 0) : "memory");
#endif
}

// Like `start_copy`, for the first `bytes` of 16 bytes, and zeros after them.
__device__ __forceinline__ void start_copy_of_first(int bytes, void *to, const void *from) {
#ifdef CUDA_ON_HOST
    cuda_host::start_copy(to, from, (size_t)bytes, 16);
#else
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
#endif
}

// Starts to copy 4 bytes. Both addresses must be multiples of 4.
__device__ __forceinline__ void start_copy_of_four(float *to, const float *from) {
#ifdef CUDA_ON_HOST
    cuda_host::start_copy(to, from, 4, 4);
#else
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
#endif
}

// Waits for all of this thread's copies.
__device__ __forceinline__ void wait_for_copies() {
#ifdef CUDA_ON_HOST
    cuda_host::wait_for_copies();
#else
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
