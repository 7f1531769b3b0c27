// The policy loss of surrogates per token: loss, metrics, and the derivatives by log-probs and
// entropy, in one pass. The backward pass multiplies the derivatives by the loss's gradient.
//
// A block has up to TOKENS_OF_BLOCK tokens of one sequence, and writes its part of each statistic.
// A second kernel adds the parts. All sums are f64 in a fixed order.

#include "element.cuh"
#include "math.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int TOKENS_OF_BLOCK = 1024;

// As PolicyStatistic in src/ops/policy_loss/mod.rs.
enum Statistic {
    TOKENS,
    RATIO,
    RATIO_MAX,
    RATIO_MIN,
    K1,
    ABS,
    K2,
    K3,
    K3_MAX,
    LOG_PROB,
    OLD_LOG_PROB,
    CLIPPED_LOW,
    CLIPPED_HIGH,
    CLIPPED,
    DUAL_CLIPPED,
    DROPPED,
    KL,
    OLD_KL,
    ENTROPY,
    LOSS,
    STATISTICS
};

__device__ __forceinline__ constexpr bool is_max(int statistic) { return statistic == RATIO_MAX || statistic == K3_MAX; }
__device__ __forceinline__ constexpr bool is_min(int statistic) { return statistic == RATIO_MIN; }

// Returns a statistic of no tokens.
__device__ __forceinline__ double none(int statistic) {
    return is_max(statistic) ? -(double)INFINITY : is_min(statistic) ? (double)INFINITY : 0.0;
}

// Returns a statistic of two sets of tokens, given that of each.
__device__ __forceinline__ double merged(int statistic, double a, double b) {
    return is_max(statistic) ? fmax(a, b) : is_min(statistic) ? fmin(a, b) : a + b;
}

// Returns to each lane a statistic of all lanes.
__device__ __forceinline__ double merged_in_warp(int statistic, double x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        x = merged(statistic, x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// Bounds x from below, then from above. NaN stays NaN.
__device__ __forceinline__ float clamped(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

// Returns the derivative of a clamp to [-bound, bound]: a half at a bound, as Candle has it.
__device__ __forceinline__ float slope_of_clamp(float x, float bound) {
    if (fabsf(x) < bound || bound == INFINITY) return 1.0f;
    return fabsf(x) == bound ? 0.5f : 0.0f;
}

// A token's log-ratio to the old policy.
struct Drift {
    float log_ratio, clamped, ratio, slope;

    __device__ __forceinline__ Drift(float log_ratio, float bound)
        : log_ratio(log_ratio), clamped(::clamped(log_ratio, -bound, bound)), ratio(expf(clamped)),
          slope(slope_of_clamp(log_ratio, bound)) {}

    // Returns the derivative by the log-prob, given that by the clamped log-ratio.
    __device__ __forceinline__ float slope_of(float by_clamped) const { return slope == 0.0f ? 0.0f : by_clamped * slope; }
};

// A value and its derivative by the log-prob.
struct Term {
    float value, slope;
};

// A KL term. `form` has the estimate, the slope and the factor, 4 bits each.
struct Kl {
    uint32_t form;
    float coef, log_ratio_clamp, value_clamp, max_log_weight;

    __device__ __forceinline__ Term at(float log_ratio, const Drift &drift) const {
        const float d = clamped(log_ratio, -log_ratio_clamp, log_ratio_clamp);
        float estimate, own;
        switch (form & 15) {
        case 1: estimate = d, own = 1.0f; break;
        case 2: estimate = d * d * 0.5f, own = d; break;
        case 3: {
            const float inverse_ratio = expf(-d);
            estimate = (inverse_ratio - 1.0f) + d, own = 1.0f - inverse_ratio;
            break;
        }
        default:
            own = d > 0.0f ? 1.0f : d < 0.0f ? -1.0f : 0.0f;
            estimate = d * own;
        }
        Term term{clamped(estimate, -value_clamp, value_clamp), 0.0f};
        const uint32_t kind = form >> 4 & 15;
        if (kind == 0) {
            const float kept = slope_of_clamp(log_ratio, log_ratio_clamp) * slope_of_clamp(estimate, value_clamp);
            term.slope = kept == 0.0f ? 0.0f : kept * own;
        } else if (isfinite(log_ratio) || log_ratio_clamp == INFINITY) {
            // The clamp does not apply, except to values that are not finite.
            term.slope = kind == 1 ? log_ratio : log_ratio * expf(fminf(drift.log_ratio, max_log_weight));
        }
        if (form >> 8 != 0) {
            term.value *= drift.ratio;
            term.slope = term.slope * drift.ratio + drift.slope_of(term.value);
        }
        return term;
    }
};

// The surrogate's bounds. One that is absent is infinite.
struct Bounds {
    uint32_t surrogate;
    float low, high, delta, dual_clip, drop_low, drop_high;
};

// A token's surrogate.
struct Surrogate {
    Term term;
    bool is_low, is_high, is_dual_clipped, is_dropped;

    __device__ __forceinline__ Surrogate(const Bounds &bounds, float log_prob, float advantage, const Drift &drift)
        : term{0.0f, 0.0f}, is_low(false), is_high(false), is_dual_clipped(false), is_dropped(false) {
        const float ratio = drift.ratio, bounded = clamped(ratio, bounds.low, bounds.high);
        if (bounds.surrogate == 0) {
            const float limited = ratio > bounds.delta ? bounds.delta : ratio;
            const float limited_loss = -(limited * advantage), clipped_loss = -(bounded * advantage);
            const bool takes_clipped = clipped_loss > limited_loss;
            const bool is_outside = ratio < bounds.low || ratio > bounds.high;
            float constant = takes_clipped ? clipped_loss : limited_loss;
            bool is_constant = takes_clipped ? is_outside : ratio != limited;
            const float ceiling = advantage * -bounds.dual_clip;
            is_dual_clipped = advantage < 0.0f && constant > ceiling;
            if (is_dual_clipped) constant = ceiling, is_constant = true;
            is_low = takes_clipped && is_outside && advantage < 0.0f;
            is_high = takes_clipped && is_outside && advantage > 0.0f;
            const float unclipped = -(ratio * advantage);
            if (is_constant) term.value = constant;
            else term = {unclipped, drift.slope_of(unclipped)};
        } else if (bounds.surrogate == 1) {
            is_low = ratio < bounds.low;
            is_high = ratio > bounds.high;
            is_dropped = (ratio > bounds.drop_high && advantage > 0.0f) || (ratio < bounds.drop_low && advantage < 0.0f);
            const float slope = -(bounded * advantage);
            if (!is_dropped) term = {slope * log_prob, slope};
        } else {
            term = {-advantage * log_prob, -advantage};
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    policy_loss_forward(const float *log_probs, const float *old_log_probs, const float *ref_log_probs, const float *entropy,
                        const float *advantages, const float *first_factors, const float *second_factors,
                        const float *token_weights, const float *prompt_tokens, const uint8_t *mask, const uint8_t *policy_mask,
                        const uint8_t *entropy_mask, float *of_log_probs, float *of_entropy, double *parts, uint32_t tokens,
                        uint32_t chunks, uint32_t per_token, uint32_t surrogate, float low, float high, float delta,
                        float dual_clip, float drop_low, float drop_high, float log_ratio_clamp, uint32_t kl_form, float kl_coef,
                        float kl_log_ratio_clamp, float kl_value_clamp, float kl_max_log_weight, uint32_t old_kl_form,
                        float old_kl_coef, float old_kl_log_ratio_clamp, float old_kl_value_clamp, float old_kl_max_log_weight,
                        uint32_t divisor, double scale, uint32_t entropy_divisor, double entropy_scale) {
    const Bounds bounds{surrogate, low, high, delta, dual_clip, drop_low, drop_high};
    const Kl kl{kl_form, kl_coef, kl_log_ratio_clamp, kl_value_clamp, kl_max_log_weight};
    const Kl old_kl{old_kl_form, old_kl_coef, old_kl_log_ratio_clamp, old_kl_value_clamp, old_kl_max_log_weight};
    const uint32_t row = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
    const uint64_t first = (uint64_t)row * tokens;

    double length = 0.0;
    if (divisor == 1 || entropy_divisor == 1) {
        for (uint32_t token = threadIdx.x; token < tokens; token += THREADS) length += mask[first + token] != 0 ? 1.0 : 0.0;
        length = block_sum<THREADS>(length);
    }
    const auto share = [&](double scale, uint32_t divisor) {
        if (divisor == 0) return scale;
        return scale / fmax(divisor == 1 ? length : (double)prompt_tokens[row], 1.0);
    };
    const double share_of_token = share(scale, divisor), share_of_entropy = share(entropy_scale, entropy_divisor);

    double sums[STATISTICS];
#pragma unroll
    for (int i = 0; i < STATISTICS; i++) sums[i] = none(i);
    const uint32_t end = min(tokens, (chunk + 1) * TOKENS_OF_BLOCK);
    for (uint32_t token = chunk * TOKENS_OF_BLOCK + threadIdx.x; token < end; token += THREADS) {
        const uint64_t i = first + token;
        float of_log_prob = 0.0f, of_own_entropy = 0.0f;
        if (mask[i] != 0) {
            const float log_prob = log_probs[i], old_log_prob = old_log_probs != nullptr ? old_log_probs[i] : log_prob;
            const Drift drift(log_prob - old_log_prob, log_ratio_clamp);
            const float d = drift.clamped, k3 = (drift.ratio - 1.0f) - d;
            sums[TOKENS] += 1.0;
            sums[RATIO] += drift.ratio;
            sums[RATIO_MAX] = fmax(sums[RATIO_MAX], (double)drift.ratio);
            sums[RATIO_MIN] = fmin(sums[RATIO_MIN], (double)drift.ratio);
            sums[K1] -= d;
            sums[ABS] += fabsf(d);
            sums[K2] += d * d * 0.5f;
            sums[K3] += k3;
            sums[K3_MAX] = fmax(sums[K3_MAX], (double)k3);
            sums[LOG_PROB] += log_prob;
            sums[OLD_LOG_PROB] += old_log_prob;

            const auto of_token = [&](const float *x, uint32_t bit) { return x[(per_token >> bit & 1) != 0 ? i : row]; };
            const Surrogate policy(bounds, log_prob, of_token(advantages, 0), drift);
            sums[CLIPPED_LOW] += policy.is_low;
            sums[CLIPPED_HIGH] += policy.is_high;
            sums[CLIPPED] += policy.is_low || policy.is_high;
            sums[DUAL_CLIPPED] += policy.is_dual_clipped;
            sums[DROPPED] += policy.is_dropped;

            Term term = policy.term;
            if (policy_mask != nullptr && policy_mask[i] == 0) term = {0.0f, 0.0f};
            float factor = first_factors != nullptr ? of_token(first_factors, 1) : 1.0f;
            term.value *= factor, term.slope *= factor;
            factor = second_factors != nullptr ? of_token(second_factors, 2) : 1.0f;
            term.value *= factor, term.slope *= factor;
            const float weight = token_weights != nullptr ? token_weights[i] : 1.0f;
            double total = term.value * weight;
            of_log_prob = term.slope * weight;
            if (kl_form != 0) {
                const Term own = kl.at(log_prob - ref_log_probs[i], drift);
                sums[KL] += own.value;
                total += (double)(own.value * weight) * (double)kl_coef;
                of_log_prob += own.slope * weight * kl_coef;
            }
            if (old_kl_form != 0) {
                const Term own = old_kl.at(drift.log_ratio, drift);
                sums[OLD_KL] += own.value;
                total += (double)(own.value * weight) * (double)old_kl_coef;
                of_log_prob += own.slope * weight * old_kl_coef;
            }
            sums[LOSS] += total * share_of_token;
            of_log_prob *= (float)share_of_token;

            if (entropy != nullptr) {
                const float own = entropy[i];
                sums[ENTROPY] += own;
                if (entropy_scale != 0.0 && (entropy_mask == nullptr || entropy_mask[i] != 0)) {
                    sums[LOSS] -= (double)own * share_of_entropy;
                    of_own_entropy = -(float)share_of_entropy;
                }
            }
        }
        of_log_probs[i] = of_log_prob;
        if (of_entropy != nullptr) of_entropy[i] = of_own_entropy;
    }

    __shared__ double of_warps[WARPS][STATISTICS];
#pragma unroll
    for (int i = 0; i < STATISTICS; i++) {
        const double x = merged_in_warp(i, sums[i]);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32][i] = x;
    }
    __syncthreads();
    const int statistic = (int)threadIdx.x;
    if (statistic >= STATISTICS) return;
    double x = none(statistic);
    for (int warp = 0; warp < WARPS; warp++) x = merged(statistic, x, of_warps[warp][statistic]);
    parts[(uint64_t)blockIdx.x * STATISTICS + statistic] = x;
}

// Merges the parts of `count` blocks. A warp has a statistic.
extern "C" __global__ void __launch_bounds__(32 * STATISTICS)
    policy_loss_merge(const double *parts, double *statistics, float *loss, uint32_t count) {
    const int statistic = (int)threadIdx.x / 32;
    double x = none(statistic);
    for (uint64_t block = threadIdx.x % 32; block < count; block += 32)
        x = merged(statistic, x, parts[block * STATISTICS + statistic]);
    x = merged_in_warp(statistic, x);
    if (threadIdx.x % 32 != 0) return;
    statistics[statistic] = x;
    if (statistic == LOSS) *loss = (float)x;
}

// A token without a derivative has no gradient, whatever the loss's gradient is.
extern "C" __global__ void __launch_bounds__(THREADS)
    policy_loss_backward(const float *of_log_probs, const float *of_entropy, const float *gradient, float *log_prob_gradient,
                         float *entropy_gradient, uint64_t n) {
    const uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    const float factor = *gradient;
    const auto scaled = [&](float x) { return x == 0.0f ? 0.0f : x * factor; };
    log_prob_gradient[i] = scaled(of_log_probs[i]);
    if (entropy_gradient != nullptr) entropy_gradient[i] = scaled(of_entropy[i]);
}
