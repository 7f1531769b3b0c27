// Advantages of samples relative to their group, in one launch. Statistics are in f64, relative to the smallest reward and in two
// passes, so that equal rewards give exactly 0. A warp takes one group after another; what the statistics of the batch need is
// summed by every block for itself, in the same order, which costs less than a second launch.

#include "element.cuh"
#include "math.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

enum Scale { SCALE_GROUP, SCALE_BATCH, SCALE_NONE };
enum LoneSample { LONE_ZERO, LONE_RAW, LONE_BATCH_MEAN };

struct Sum {
    static __device__ __forceinline__ double of(double a, double b) { return a + b; }
};
struct Smallest {
    static __device__ __forceinline__ double of(double a, double b) { return fmin(a, b); }
};
struct Largest {
    static __device__ __forceinline__ double of(double a, double b) { return fmax(a, b); }
};

// Threads that make one statistic together. `merged` gives each of them what all have.
struct Warp {
    static constexpr uint32_t SIZE = 32;
    static __device__ __forceinline__ uint32_t rank() { return threadIdx.x % 32; }

    template <typename Operation> static __device__ __forceinline__ double merged(double x) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) x = Operation::of(x, __shfl_xor_sync(0xffffffffu, x, offset));
        return x;
    }
};
struct Block {
    static constexpr uint32_t SIZE = THREADS;
    static __device__ __forceinline__ uint32_t rank() { return threadIdx.x; }

    template <typename Operation> static __device__ __forceinline__ double merged(double x) {
        __shared__ double warps[WARPS];
        x = Warp::merged<Operation>(x);
        __syncthreads();
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
        __syncthreads();
        x = warps[0];
        for (int i = 1; i < WARPS; i++) x = Operation::of(x, warps[i]);
        return x;
    }
};

// Mean and variance, relative to the smallest reward. Of no rewards they are not numbers: no sample asks for them.
struct Moments {
    double count, smallest, shifted_mean, squares;
    // Whether all rewards are equal. Their mean can be rounded; what is centred on it is 0 all the same.
    bool constant;

    __device__ __forceinline__ double centered(double x) const { return constant ? 0.0 : (x - smallest) - shifted_mean; }

    // Where nothing is left in the denominator, there is one reward, and the squares are 0.
    __device__ __forceinline__ double std(int ddof) const { return sqrt(squares / fmax(count - (double)ddof, 1.0)); }
};

// Of `size` samples; `sample(i)` is the number of one, `reward(sample, &x)` says whether it has a reward, and which.
template <typename Team, typename Sample, typename Reward>
__device__ __forceinline__ Moments moments_of(uint32_t size, Sample sample, Reward reward) {
    double count = 0.0, smallest = INFINITY, largest = -INFINITY, sum = 0.0, squares = 0.0, x;
    for (uint32_t i = Team::rank(); i < size; i += Team::SIZE) {
        if (!reward(sample(i), x)) continue;
        count += 1.0;
        smallest = fmin(smallest, x);
        largest = fmax(largest, x);
    }
    count = Team::template merged<Sum>(count);
    smallest = Team::template merged<Smallest>(smallest);
    largest = Team::template merged<Largest>(largest);
    for (uint32_t i = Team::rank(); i < size; i += Team::SIZE)
        if (reward(sample(i), x)) sum += x - smallest;
    sum = Team::template merged<Sum>(sum);
    // The smallest and the largest leave NaN out, the sum does not.
    Moments moments = {count, smallest, sum / count, 0.0, smallest == largest && sum == 0.0};
    for (uint32_t i = Team::rank(); i < size; i += Team::SIZE)
        if (reward(sample(i), x)) squares += moments.centered(x) * moments.centered(x);
    moments.squares = Team::template merged<Sum>(squares);
    return moments;
}

// 0 stays 0 where the denominator is 0.
__device__ __forceinline__ double divided(double centered, double std, double epsilon) {
    const double denominator = std + epsilon;
    return denominator == 0.0 ? centered : centered / denominator;
}

// `members`: groups + 1 offsets, and behind them the samples of the groups, one group after the other. Each sample is in one.
template <typename T>
__device__ __forceinline__ void advantages_of(const T *rewards, const uint8_t *mask, const uint32_t *members, float *advantages,
                                              uint32_t samples, uint32_t groups, bool leave_one_out, int scale, double epsilon,
                                              int ddof, int lone_sample) {
    auto reward = [&](uint32_t sample, double &x) {
        if (mask != nullptr && mask[sample] == 0) return false;
        x = (double)to_float(rewards[sample]);
        return true;
    };
    Moments batch = {0.0, 0.0, 0.0, 0.0, true};
    if (scale == SCALE_BATCH || lone_sample == LONE_BATCH_MEAN)
        batch = moments_of<Block>(samples, [](uint32_t i) { return i; }, reward);

    const uint32_t *sample_of = members + groups + 1;
    for (uint32_t group = blockIdx.x * WARPS + threadIdx.x / 32; group < groups; group += gridDim.x * WARPS) {
        const uint32_t begin = members[group], size = members[group + 1] - begin;
        auto sample = [&](uint32_t i) { return sample_of[begin + i]; };
        const Moments moments = moments_of<Warp>(size, sample, reward);
        for (uint32_t i = Warp::rank(); i < size; i += 32) {
            double x = 0.0, advantage = 0.0;
            if (!reward(sample(i), x)) {
                // No reward, no advantage.
            } else if (moments.count == 1.0) {
                if (lone_sample == LONE_RAW) advantage = x;
                if (lone_sample == LONE_BATCH_MEAN) {
                    advantage = batch.centered(x);
                    if (scale == SCALE_BATCH) advantage = divided(advantage, batch.std(ddof), epsilon);
                }
            } else {
                advantage = moments.centered(x);
                if (leave_one_out) advantage *= moments.count / (moments.count - 1.0);
                if (scale == SCALE_GROUP) advantage = divided(advantage, moments.std(ddof), epsilon);
                if (scale == SCALE_BATCH) advantage = divided(advantage, batch.std(ddof), epsilon);
            }
            advantages[sample(i)] = (float)advantage;
        }
    }
}

#define GROUP_ADVANTAGE(T, name)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) group_advantage_##name(                                     \
        const T *rewards, const uint8_t *mask, const uint32_t *members, float *advantages, uint32_t samples,          \
        uint32_t groups, int leave_one_out, int scale, double epsilon, int ddof, int lone_sample) {                   \
        advantages_of(rewards, mask, members, advantages, samples, groups, leave_one_out != 0, scale, epsilon, ddof,  \
                      lone_sample);                                                                                    \
    }

GROUP_ADVANTAGE(float, f32)
GROUP_ADVANTAGE(__nv_bfloat16, bf16)
GROUP_ADVANTAGE(__half, f16)
