// Kernels with one mistake each, and right ones, for the tests of the emulation.

#include "cuda_copy.h"

// Each thread reads the number of the one before; without the barrier, before or after it is
// written.
template <bool barrier>
__device__ void rotate(float* out) {
    __shared__ float numbers[64];
    numbers[threadIdx.x] = (float)threadIdx.x;
    if (barrier) __syncthreads();
    out[threadIdx.x] = numbers[(threadIdx.x + blockDim.x - 1) % blockDim.x];
}
extern "C" __global__ void wrong_no_barrier(float* out) { rotate<false>(out); }
extern "C" __global__ void right_barrier(float* out) { rotate<true>(out); }

extern "C" __global__ void wrong_thread_leaves(float* out) {
    if (threadIdx.x == 5) return;
    __syncthreads();
    out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void wrong_lane_leaves(float* out) {
    if (threadIdx.x % 32 == 31) return;
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}

extern "C" __global__ void wrong_operations_differ(float* out) {
    float x = (float)threadIdx.x;
    if (threadIdx.x % 2 == 0) x = __shfl_xor_sync(0xffffffffu, x, 1);
    else x = __shfl_down_sync(0xffffffffu, x, 1);
    out[threadIdx.x] = x;
}

extern "C" __global__ void wrong_alignment(const float* x, float* out) {
    out[threadIdx.x] = reinterpret_cast<const float4*>(x + 1)[threadIdx.x].y;
}

extern "C" __global__ void wrong_shared_index(float* out) {
    __shared__ float numbers[16];
    numbers[threadIdx.x] = 1.0f;
    out[threadIdx.x] = numbers[threadIdx.x];
}

extern "C" __global__ void wrong_overflow(int rows, float* out) { out[threadIdx.x] = (float)(rows * 65536); }

// Kernels that race, and whose results are right in each order of the threads. Each thread writes
// its number again while its neighbor may still read it.
enum class Between { Nothing, Shuffle, LanesBarrier, Barrier };
template <Between between>
__device__ void write_again(float* out) {
    __shared__ float numbers[64];
    numbers[threadIdx.x] = (float)threadIdx.x;
    __syncthreads();
    // Earlier barriers, whose number differs between warps, order nothing that follows.
    for (unsigned i = 0; i < 1 + 2 * (threadIdx.x / 32); i++) __syncwarp();
    const float next = numbers[(threadIdx.x + 1) % blockDim.x];
    if (between == Between::Shuffle) __shfl_sync(0xffffffffu, next, 0);
    if (between == Between::LanesBarrier) __syncwarp();
    if (between == Between::Barrier) __syncthreads();
    numbers[threadIdx.x] = (float)threadIdx.x;
    out[blockIdx.x * blockDim.x + threadIdx.x] = next;
}
extern "C" __global__ void race_without_barrier(float* out) { write_again<Between::Nothing>(out); }
extern "C" __global__ void race_after_shuffle(float* out) { write_again<Between::Shuffle>(out); }
extern "C" __global__ void after_barrier_of_lanes(float* out) { write_again<Between::LanesBarrier>(out); }
extern "C" __global__ void after_barrier(float* out) { write_again<Between::Barrier>(out); }

// Each block writes the same numbers, or its own ones.
extern "C" __global__ void race_of_blocks(float* out) { out[threadIdx.x] = (float)threadIdx.x; }
extern "C" __global__ void blocks(float* out) { out[blockIdx.x * blockDim.x + threadIdx.x] = (float)threadIdx.x; }

// Each thread copies a number, and looks at its neighbor's.
template <bool wait, bool barrier>
__device__ void copies(float* out) {
    __shared__ float numbers[64];
    cuda_host::start_copy(numbers + threadIdx.x, out + threadIdx.x, 4, 4);
    if (wait) cuda_host::wait_for_copies();
    if (barrier) __syncthreads();
    const bool is_huge = numbers[(threadIdx.x + barrier) % blockDim.x] > 1e30f;
    if (!wait) cuda_host::wait_for_copies();
    __syncthreads();
    out[threadIdx.x] = is_huge ? 1.0f : 2.0f;
}
extern "C" __global__ void race_before_own_wait(float* out) { copies<false, false>(out); }
extern "C" __global__ void race_before_other_wait(float* out) { copies<false, true>(out); }
extern "C" __global__ void own_copy(float* out) { copies<true, false>(out); }
extern "C" __global__ void other_copy(float* out) { copies<true, true>(out); }

// Each thread of all blocks counts, and one also looks at the count.
template <bool look>
__device__ void count(float* out) {
    atomicAdd(out, 1.0f);
    if (look && threadIdx.x == 5) out[1] = *out > 1e30f ? 1.0f : -1.0f;
}
extern "C" __global__ void race_with_atomic(float* out) { count<true>(out); }
extern "C" __global__ void atomics(float* out) { count<false>(out); }

extern "C" __global__ void shuffles(float* out) {
    int lane = (int)(threadIdx.x % 32);
    float sum = 1.0f + (float)lane;
    for (int flip = 16; flip > 0; flip /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, flip);
    float above = __shfl_down_sync(0xffffffffu, (float)lane, 4);
    float below = __shfl_up_sync(0xffffffffu, (float)lane, 1);
    float part = __shfl_sync(0xffffffffu, (float)lane, 3, 8);
    unsigned odd = __ballot_sync(0xffffffffu, lane % 2);
    float* mine = out + 5 * threadIdx.x;
    mine[0] = sum;
    mine[1] = above;
    mine[2] = below;
    mine[3] = part;
    mine[4] = (float)__popc(odd);
}

// Kernels for the tests of the driver.
extern "C" __global__ void add_one(float* x, unsigned n) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1.0f;
}
extern "C" __global__ void add_one_to_each(const uint64_t* list) {
    reinterpret_cast<float*>(list[blockIdx.x])[threadIdx.x] += 1.0f;
}
extern "C" __global__ void __launch_bounds__(64) copy(const float* from, float* to, uint64_t n) {
    const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i];
}
extern "C" __global__ void check_index(const unsigned* ids, unsigned rows) { assert(ids[threadIdx.x] < rows); }
