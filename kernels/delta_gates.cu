// Gates for the gated delta rule, forward and backward: g = -exp(a_log) softplus(a + dt_bias) and
// beta = sigmoid(b), for a and b [n, heads], and a_log and dt_bias [heads].

#include "element.cuh"
#include "math.cuh"

constexpr int THREADS = 256;
// Rows per block in the backward pass, a warp each. Blocks loop over further rows.
constexpr int ROWS = 8;
// log(1 + exp(x)) without overflow.
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

template <typename T>
__device__ __forceinline__ void forward(const T *a, const T *b, const T *a_log, const T *dt_bias, float *g, float *beta, uint64_t n,
                                        uint32_t heads) {
    const uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n * heads) return;
    const uint32_t head = (uint32_t)(i % heads);
    g[i] = -expf(to_float(a_log[head])) * softplus(to_float(a[i]) + to_float(dt_bias[head]));
    beta[i] = sigmoid(to_float(b[i]));
}

// Writes the gradients of a and b. `partial` [gridDim.y, 2, heads] has those of a_log, then of
// dt_bias, summed over a block's rows.
template <typename T>
__device__ __forceinline__ void backward(const T *a, const T *b, const T *a_log, const T *dt_bias, const float *of_g,
                                         const float *of_beta, T *of_a, T *of_b, float *partial, uint64_t n, uint32_t heads) {
    __shared__ float shared[2][ROWS][32];
    const uint32_t head = blockIdx.x * 32 + threadIdx.x;
    float log_sum = 0.0f, bias_sum = 0.0f;
    if (head < heads) {
        const float rate = expf(to_float(a_log[head])), bias = to_float(dt_bias[head]);
        for (uint64_t row = (uint64_t)blockIdx.y * ROWS + threadIdx.y; row < n; row += (uint64_t)gridDim.y * ROWS) {
            const uint64_t i = row * heads + head;
            const float x = to_float(a[i]) + bias, along = -of_g[i] * rate, of_x = along * sigmoid(x);
            const float beta = sigmoid(to_float(b[i]));
            log_sum += along * softplus(x);
            bias_sum += of_x;
            of_a[i] = from_float<T>(of_x);
            of_b[i] = from_float<T>(of_beta[i] * beta * (1.0f - beta));
        }
    }
    shared[0][threadIdx.y][threadIdx.x] = log_sum;
    shared[1][threadIdx.y][threadIdx.x] = bias_sum;
    __syncthreads();
    if (threadIdx.y > 1 || head >= heads) return;
    float sum = 0.0f;
    for (int row = 0; row < ROWS; row++) sum += shared[threadIdx.y][row][threadIdx.x];
    partial[((uint64_t)blockIdx.y * 2 + threadIdx.y) * heads + head] = sum;
}

#define DELTA_GATES(T, name)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        delta_gates_forward_##name(const T *a, const T *b, const T *a_log, const T *dt_bias, float *g, float *beta,    \
                                   uint64_t n, uint32_t heads) {                                                       \
        forward(a, b, a_log, dt_bias, g, beta, n, heads);                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * ROWS)                                                            \
        delta_gates_backward_##name(const T *a, const T *b, const T *a_log, const T *dt_bias, const float *of_g,       \
                                    const float *of_beta, T *of_a, T *of_b, float *partial, uint64_t n,                \
                                    uint32_t heads) {                                                                  \
        backward(a, b, a_log, dt_bias, of_g, of_beta, of_a, of_b, partial, n, heads);                                  \
    }

DELTA_GATES(float, f32)
DELTA_GATES(__nv_bfloat16, bf16)
DELTA_GATES(__half, f16)
