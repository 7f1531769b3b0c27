// Kernels with one mistake each, and right ones, for the tests of the emulation.

// Each thread reads its neighbor's number; without the barrier, before or after it is written.
template <bool barrier>
__device__ void rotate(float* out) {
    __shared__ float numbers[64];
    numbers[threadIdx.x] = (float)threadIdx.x;
    if (barrier) __syncthreads();
    out[threadIdx.x] = numbers[(threadIdx.x + 1) % blockDim.x];
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
