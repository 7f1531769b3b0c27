// One AdamW step of all parameters, in place. With an f32 master the kernel updates the master and
// rounds it to the parameter. Without a master (null) it updates the parameter in f32 and rounds
// it.

#include "math.cuh"
#include "tensor_list.cuh"

constexpr int THREADS = 256;
// Elements of a block. A thread takes four at a time.
constexpr int CHUNK = THREADS * 16;

// A parameter in the list. The gradient is in f32 or in the dtype of the parameter.
struct Parameter {
    void *parameter;
    float *master, *average, *square;
    const void *gradient;
    uint64_t n;
    uint32_t first_block;
    // The Dtype of the parameter, and 4 if the gradient has it too.
    uint32_t dtypes;
    // The factor of weight decay.
    float keep;
    uint32_t unused;
};
static_assert(sizeof(Parameter) == 64, "a row has 8 words");

struct Step {
    float gradient_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, step_size, inverse_root_correction;

    __device__ __forceinline__ void update(float &p, float &m, float &v, float g, float keep) const {
        g *= gradient_factor;
        m = m * beta1 + g * one_minus_beta1;
        v = v * beta2 + g * g * one_minus_beta2;
        p = p * keep - step_size * (m / (sqrtf(v) * inverse_root_correction + epsilon));
    }
};

// Updates the elements [first, first + 4) that exist.
template <typename P, typename G>
__device__ __forceinline__ void update_four(const Parameter &row, uint64_t first, bool packed, const Step &step) {
    P *parameter = static_cast<P *>(row.parameter);
    const G *gradient = static_cast<const G *>(row.gradient);
    if (packed && first + 4 <= row.n) {
        float p[4], m[4], v[4], g[4];
        if (row.master != nullptr) load_four(row.master + first, p);
        else load_four(parameter + first, p);
        load_four(row.average + first, m);
        load_four(row.square + first, v);
        load_four(gradient + first, g);
#pragma unroll
        for (int i = 0; i < 4; i++) step.update(p[i], m[i], v[i], g[i], row.keep);
        if (row.master != nullptr) store_four(row.master + first, p);
        store_four(parameter + first, p);
        store_four(row.average + first, m);
        store_four(row.square + first, v);
    } else {
        const uint64_t last = first + 4 < row.n ? first + 4 : row.n;
        for (uint64_t i = first; i < last; i++) {
            float p = row.master != nullptr ? row.master[i] : to_float(parameter[i]);
            step.update(p, row.average[i], row.square[i], to_float(gradient[i]), row.keep);
            if (row.master != nullptr) row.master[i] = p;
            parameter[i] = from_float<P>(p);
        }
    }
}

template <typename P, typename G> __device__ __forceinline__ void update_chunk(const Parameter &row, const Step &step) {
    const bool packed = is_aligned_for_four(static_cast<const P *>(row.parameter)) &&
                        is_aligned_for_four(static_cast<const G *>(row.gradient)) && is_aligned_for_four(row.average) &&
                        is_aligned_for_four(row.square) && is_aligned_for_four(row.master);
    const uint64_t begin = (uint64_t)(blockIdx.x - row.first_block) * CHUNK;
#pragma unroll 1
    for (int i = (int)threadIdx.x * 4; i < CHUNK && begin + i < row.n; i += THREADS * 4)
        update_four<P, G>(row, begin + i, packed, step);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    adamw(const uint64_t *list, uint32_t count, float gradient_factor, float beta1, float one_minus_beta1, float beta2,
          float one_minus_beta2, float epsilon, float step_size, float inverse_root_correction) {
    const Parameter row = row_of_block<Parameter>(list, count);
    const Step step = {gradient_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, step_size, inverse_root_correction};
    with_dtype(row.dtypes % 4, [&](auto *of) {
        using P = std::remove_pointer_t<decltype(of)>;
        if (row.dtypes >= 4) update_chunk<P, P>(row, step);
        else update_chunk<P, float>(row, step);
    });
}
