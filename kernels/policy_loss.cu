// The policy loss of B sequences of T tokens with its gradient and its figures, in one launch: per-token losses, a sum over
// everything, and nothing of a token outside of the mask. Inputs are f32 [B, T] unless said, null where they may be missing; sums are
// in f64. A block takes one sequence after another; the last block to finish adds what all of them found, in their order, so
// that the same input gives the same bits.

#include "element.cuh"
#include "math.cuh"

constexpr int THREADS = 256;

// The figures, numbered as `PolicySum` of the crate, and behind them the loss.
enum Figure {
    COUNT, RATIO, RATIO_MAX, RATIO_MIN, TOKEN_RATIO_MAX, K1, ABS, K2, K3, K3_MAX, LOG_PROB, OLD_LOG_PROB, KL, ENTROPY, CLIPPED,
    CLIPPED_LOW, CLIPPED_HIGH, DUAL_CLIPPED, DROPPED, POSITIVE, WEIGHT_BOUNDED, LOSS, FIGURES
};

// Two parts of a figure together.
__device__ __forceinline__ double merge(int figure, double a, double b) {
    if (figure == RATIO_MIN) return fmin(a, b);
    if (figure == RATIO_MAX || figure == TOKEN_RATIO_MAX || figure == K3_MAX) return fmax(a, b);
    return a + b;
}

// The figure of nothing.
__device__ __forceinline__ double none(int figure) {
    if (figure == RATIO_MIN) return INFINITY;
    return figure == RATIO_MAX || figure == TOKEN_RATIO_MAX || figure == K3_MAX ? -INFINITY : 0.0;
}

enum Level { TOKEN, SEQUENCE, SEQUENCE_TOKEN, SEQUENCE_PRODUCT };
enum Surrogate { CLIP, POLICY_GRADIENT, DETACHED_WEIGHT, TOPR, SOFT_GATE, SQUARED_LOG_RATIO, DIVERGENCE_MASK };
enum KlEstimate { ESTIMATE_K1, ESTIMATE_K2, ESTIMATE_K3, ESTIMATE_ABS };
enum KlSlope { DIRECT, STRAIGHT_THROUGH, IMPORTANCE_WEIGHTED };
enum KlRatio { RATIO_ONE, RATIO_OF_TOKEN, RATIO_OF_LEVEL };

// What a surrogate may use. The log-ratio and its exponential are at their level.
struct Token {
    float log_prob, old_log_prob, log_ratio, ratio, advantage;
};

// What a surrogate says of a token: its loss, the derivatives by the log-ratio and, the log-ratio being held, by the log-prob.
struct Scored {
    float loss, by_log_ratio, by_log_prob;
    bool clipped, clipped_low, clipped_high, dual_clipped, dropped, positive, weight_bounded;
};

// NaN stays, in both.
__device__ __forceinline__ float at_most(float x, float bound) { return x > bound ? bound : x; }
__device__ __forceinline__ float within(float x, float low, float high) { return x < low ? low : at_most(x, high); }

// -weight advantage log_prob with a constant weight.
__device__ __forceinline__ void weighted_policy_gradient(Token token, float weight, Scored &scored) {
    scored.by_log_prob = -(weight * token.advantage);
    scored.loss = scored.by_log_prob * token.log_prob;
}

__device__ __forceinline__ void clip(Token token, float ratio_min, float ratio_max, float dual_clip, float delta,
                                     Scored &scored) {
    const float limited_loss = -(at_most(token.ratio, delta) * token.advantage);
    const float clipped_loss = -(within(token.ratio, ratio_min, ratio_max) * token.advantage);
    const bool takes_clipped = clipped_loss > limited_loss;
    const bool outside = token.ratio < ratio_min || token.ratio > ratio_max;
    float loss = takes_clipped ? clipped_loss : limited_loss;
    bool is_constant = takes_clipped ? outside : token.ratio > delta;
    const float ceiling = -(dual_clip * token.advantage);
    scored.clipped = takes_clipped && outside;
    scored.clipped_low = scored.clipped && token.advantage < 0.0f;
    scored.clipped_high = scored.clipped && token.advantage > 0.0f;
    scored.dual_clipped = token.advantage < 0.0f && loss > ceiling;
    if (scored.dual_clipped) {
        loss = ceiling;
        is_constant = true;
    }
    scored.loss = loss;
    scored.by_log_ratio = is_constant ? 0.0f : loss;
}

__device__ __forceinline__ void detached_weight(Token token, float ratio_min, float ratio_max, float drop_below,
                                                float drop_above, Scored &scored) {
    scored.clipped_low = token.ratio < ratio_min;
    scored.clipped_high = token.ratio > ratio_max;
    scored.clipped = scored.clipped_low || scored.clipped_high;
    scored.dropped = (token.ratio > drop_above && token.advantage > 0.0f) ||
                     (token.ratio < drop_below && token.advantage < 0.0f);
    if (!scored.dropped) weighted_policy_gradient(token, within(token.ratio, ratio_min, ratio_max), scored);
}

__device__ __forceinline__ void topr(Token token, float positive_weight, float negative_weight, Scored &scored) {
    scored.positive = token.advantage > 0.0f;
    scored.clipped = token.ratio > 1.0f && !scored.positive;
    const float weight = scored.positive ? positive_weight : at_most(token.ratio, 1.0f) * negative_weight;
    weighted_policy_gradient(token, weight, scored);
}

__device__ __forceinline__ void soft_gate(Token token, float tau_pos, float tau_neg, Scored &scored) {
    const float tau = token.advantage > 0.0f ? tau_pos : tau_neg;
    // sigmoid(x) is (1 + tanh(x / 2)) / 2, which overflows on neither side.
    const float gate = tanhf((token.ratio - 1.0f) * tau * 0.5f);
    scored.loss = -((gate + 1.0f) * 2.0f / tau * token.advantage);
    scored.by_log_ratio = -((1.0f - gate * gate) * token.ratio * token.advantage);
}

__device__ __forceinline__ void squared_log_ratio(Token token, float coef, Scored &scored) {
    weighted_policy_gradient(token, 1.0f, scored);
    scored.loss = token.log_ratio * token.log_ratio * (0.5f * coef) + scored.loss;
    scored.by_log_ratio = coef * token.log_ratio;
}

// The KL between two coins, the probabilities kept off 0 and 1.
__device__ __forceinline__ float kl_of_coins(float q, float p) {
    q = within(q, 1e-7f, 1.0f - 1e-7f);
    p = within(p, 1e-7f, 1.0f - 1e-7f);
    return q * (logf(q) - logf(p)) + (1.0f - q) * (logf(1.0f - q) - logf(1.0f - p));
}

__device__ __forceinline__ void divergence_mask(Token token, bool binary_kl, float low, float high, float ratio_max,
                                                Scored &scored) {
    const float p = expf(token.log_prob), q = expf(token.old_log_prob);
    const float distance = binary_kl ? kl_of_coins(q, p) : fabsf(p - q);
    scored.clipped_high = p > q && token.advantage > 0.0f && distance > high;
    scored.clipped_low = p < q && token.advantage < 0.0f && distance > low;
    scored.clipped = scored.clipped_low || scored.clipped_high;
    scored.weight_bounded = token.ratio > ratio_max;
    if (!scored.clipped) weighted_policy_gradient(token, at_most(token.ratio, ratio_max), scored);
}

// A surrogate with its numbers, in the order of its function above.
struct Score {
    int surrogate;
    float a, b, c, d;

    __device__ __forceinline__ Scored of(Token token) const {
        Scored scored = {0.0f, 0.0f, 0.0f, false, false, false, false, false, false, false};
        switch (surrogate) {
        case CLIP: clip(token, a, b, c, d, scored); break;
        case POLICY_GRADIENT: weighted_policy_gradient(token, 1.0f, scored); break;
        case DETACHED_WEIGHT: detached_weight(token, a, b, c, d, scored); break;
        case TOPR: topr(token, a, b, scored); break;
        case SOFT_GATE: soft_gate(token, a, b, scored); break;
        case SQUARED_LOG_RATIO: squared_log_ratio(token, a, scored); break;
        default: divergence_mask(token, a != 0.0f, b, c, d, scored);
        }
        return scored;
    }
};

// A KL estimate without its coefficient, and its derivatives: by the log-prob, both log-ratios being held, and by the log-ratios
// at the level and of the token.
struct Estimated {
    float value, by_log_prob, by_log_ratio, by_token_log_ratio;
};

struct KlTerm {
    int estimate, slope, ratio;
    float slope_max, log_ratio_clamp, value_clamp;

    __device__ __forceinline__ Estimated of(Token token, float ref_log_prob, float token_ratio) const {
        const float d = token.log_prob - ref_log_prob;
        const float x = within(d, -log_ratio_clamp, log_ratio_clamp);
        float value = x, by_d = 1.0f;
        if (estimate == ESTIMATE_K2) {
            value = x * x * 0.5f;
            by_d = x;
        } else if (estimate == ESTIMATE_K3) {
            const float inverse = expf(-x);
            value = (inverse + x) - 1.0f;
            by_d = 1.0f - inverse;
        } else if (estimate == ESTIMATE_ABS) {
            value = fabsf(x);
            by_d = x == 0.0f ? 0.0f : copysignf(1.0f, x);
        }
        if (!(fabsf(d) <= log_ratio_clamp && fabsf(value) <= value_clamp)) by_d = 0.0f;
        value = within(value, -value_clamp, value_clamp);
        if (slope != DIRECT) {
            const float weight = slope == STRAIGHT_THROUGH ? 1.0f : at_most(expf(token.log_prob - token.old_log_prob), slope_max);
            by_d = isfinite(d) ? weight * d : 0.0f;
        }
        if (ratio == RATIO_OF_TOKEN) return {value * token_ratio, by_d * token_ratio, 0.0f, value * token_ratio};
        if (ratio == RATIO_OF_LEVEL) return {value * token.ratio, by_d * token.ratio, value * token.ratio, 0.0f};
        return {value, by_d, 0.0f, 0.0f};
    }
};

// A log-ratio, clamped, and its derivative by the log-prob.
struct Clamped {
    float value, slope;

    __device__ __forceinline__ Clamped(float x, float bound)
        : value(within(x, -bound, bound)), slope(fabsf(x) > bound ? 0.0f : 1.0f) {}
};

extern "C" __global__ void __launch_bounds__(THREADS) policy_loss(
    const float *log_probs, const float *old_log_probs, const float *ref_log_probs, const float *advantages, const float *weights,
    const float *entropy, const float *row_divisors, const uint8_t *mask, float *gradient, float *surrogate, float *policy,
    float *kl, float *log_ratios, uint8_t *clipped, double *parts, uint32_t *finished, float *loss, double *sums, uint64_t batch,
    uint64_t tokens, int advantages_of_tokens, int weights_of_tokens, int level, float log_ratio_clamp, int score, float score_a,
    float score_b, float score_c, float score_d, int kl_estimate, int kl_slope, int kl_ratio, float kl_coef, float kl_slope_max,
    float kl_log_ratio_clamp, float kl_value_clamp, int divide_by_length, double denominator) {
    const Score score_of = {score, score_a, score_b, score_c, score_d};
    const KlTerm kl_of = {kl_estimate, kl_slope, kl_ratio, kl_slope_max, kl_log_ratio_clamp, kl_value_clamp};
    const int thread = (int)threadIdx.x;
    double figures[FIGURES];
#pragma unroll
    for (int i = 0; i < FIGURES; i++) figures[i] = none(i);

    for (uint64_t row = blockIdx.x; row < batch; row += gridDim.x) {
        const uint64_t first = row * tokens;
        auto old_log_prob = [&](uint64_t at) { return old_log_probs != nullptr ? old_log_probs[at] : log_probs[at]; };
        auto own_log_ratio = [&](uint64_t at) { return Clamped(log_probs[at] - old_log_prob(at), log_ratio_clamp); };

        double length = 0.0, sum = 0.0;
        for (uint64_t column = threadIdx.x; column < tokens; column += THREADS) {
            if (mask[first + column] == 0) continue;
            length += 1.0;
            if (level != TOKEN) sum += (double)own_log_ratio(first + column).value;
        }
        length = block_sum<THREADS>(length);
        float shared_log_ratio = 0.0f, shared_slope = 0.0f;
        if (level != TOKEN) {
            sum = block_sum<THREADS>(sum);
            if (level == SEQUENCE_PRODUCT) {
                const Clamped product((float)sum, log_ratio_clamp);
                shared_log_ratio = product.value;
                shared_slope = product.slope;
            } else {
                shared_log_ratio = (float)(sum / length);
                shared_slope = 1.0f / (float)length;
            }
        }
        const double divisor = divide_by_length ? length : row_divisors != nullptr ? (double)row_divisors[row] : 1.0;
        const double scale = 1.0 / (denominator * divisor);
        const bool own_gradient = level == TOKEN || level == SEQUENCE_TOKEN;

        double row_loss = 0.0, by_shared = 0.0;
        for (uint64_t column = threadIdx.x; column < tokens; column += THREADS) {
            const uint64_t at = first + column;
            if (mask[at] == 0) {
                gradient[at] = surrogate[at] = policy[at] = log_ratios[at] = 0.0f;
                if (kl != nullptr) kl[at] = 0.0f;
                clipped[at] = 0;
                continue;
            }
            const Clamped own = own_log_ratio(at);
            const float own_ratio = expf(own.value);
            const float log_ratio = level == TOKEN ? own.value : shared_log_ratio;
            const Token token = {log_probs[at], old_log_prob(at), log_ratio, level == TOKEN ? own_ratio : expf(log_ratio),
                                 advantages[advantages_of_tokens ? at : row]};
            const float k3 = (own_ratio - 1.0f) - own.value;
            figures[COUNT] += 1.0;
            figures[RATIO] += (double)token.ratio;
            figures[RATIO_MAX] = fmax(figures[RATIO_MAX], (double)token.ratio);
            figures[RATIO_MIN] = fmin(figures[RATIO_MIN], (double)token.ratio);
            figures[TOKEN_RATIO_MAX] = fmax(figures[TOKEN_RATIO_MAX], (double)own_ratio);
            figures[K1] -= (double)own.value;
            figures[ABS] += (double)fabsf(own.value);
            figures[K2] += (double)(own.value * own.value * 0.5f);
            figures[K3] += (double)k3;
            figures[K3_MAX] = fmax(figures[K3_MAX], (double)k3);
            figures[LOG_PROB] += (double)token.log_prob;
            figures[OLD_LOG_PROB] += (double)token.old_log_prob;
            if (entropy != nullptr) figures[ENTROPY] += (double)entropy[at];

            const Scored scored = score_of.of(token);
            figures[CLIPPED] += scored.clipped;
            figures[CLIPPED_LOW] += scored.clipped_low;
            figures[CLIPPED_HIGH] += scored.clipped_high;
            figures[DUAL_CLIPPED] += scored.dual_clipped;
            figures[DROPPED] += scored.dropped;
            figures[POSITIVE] += scored.positive;
            figures[WEIGHT_BOUNDED] += scored.weight_bounded;

            Estimated estimated = {0.0f, 0.0f, 0.0f, 0.0f};
            if (kl != nullptr) {
                estimated = kl_of.of(token, ref_log_probs[at], own_ratio);
                figures[KL] += (double)estimated.value;
                kl[at] = estimated.value;
            }
            // A weight of 0 drops the token: what it scores may be infinite.
            const float weight = weights == nullptr ? 1.0f : weights[weights_of_tokens ? at : row];
            auto weighted = [&](float x) { return weight == 0.0f ? 0.0f : x * weight; };
            const float policy_loss = weighted(scored.loss);
            const float by_log_ratio = weighted(scored.by_log_ratio) + kl_coef * estimated.by_log_ratio;
            const float by_log_prob = weighted(scored.by_log_prob) +
                                      kl_coef * (estimated.by_log_prob + estimated.by_token_log_ratio * own.slope);
            row_loss += (double)policy_loss + (double)(kl_coef * estimated.value);
            float own_part = 0.0f;
            if (own_gradient) own_part = by_log_ratio * own.slope;
            else by_shared += (double)by_log_ratio;
            gradient[at] = (float)((double)(by_log_prob + own_part) * scale);
            surrogate[at] = scored.loss;
            policy[at] = policy_loss;
            log_ratios[at] = log_ratio;
            clipped[at] = scored.clipped;
        }
        if (row_loss != 0.0) figures[LOSS] += row_loss * scale;
        if (!own_gradient) {
            by_shared = block_sum<THREADS>(by_shared) * (double)shared_slope * scale;
            for (uint64_t column = threadIdx.x; column < tokens; column += THREADS) {
                const uint64_t at = first + column;
                if (mask[at] != 0) gradient[at] += (float)(by_shared * (double)own_log_ratio(at).slope);
            }
        }
    }

    // The block, warp by warp.
    __shared__ double warps[THREADS / 32][FIGURES];
#pragma unroll
    for (int i = 0; i < FIGURES; i++) {
        for (int offset = 16; offset > 0; offset /= 2)
            figures[i] = merge(i, figures[i], __shfl_xor_sync(0xffffffffu, figures[i], offset));
        if (thread % 32 == 0) warps[thread / 32][i] = figures[i];
    }
    __syncthreads();
    if (thread < FIGURES) {
        double x = warps[0][thread];
        for (int i = 1; i < THREADS / 32; i++) x = merge(thread, x, warps[i][thread]);
        parts[(uint64_t)blockIdx.x * FIGURES + (uint64_t)thread] = x;
    }

    // All blocks, by the last of them. `finished` begins as 0.
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (thread == 0) is_last = atomicAdd(finished, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    constexpr int SHARES = THREADS / FIGURES;
    __shared__ double shares[SHARES][FIGURES];
    const int figure = thread % FIGURES, share = thread / FIGURES;
    if (share < SHARES) {
        double x = none(figure);
        for (uint64_t i = (uint64_t)share; i < gridDim.x; i += SHARES)
            x = merge(figure, x, __ldcg(parts + i * FIGURES + (uint64_t)figure));
        shares[share][figure] = x;
    }
    __syncthreads();
    if (thread >= FIGURES) return;
    double x = shares[0][thread];
    for (int i = 1; i < SHARES; i++) x = merge(thread, x, shares[i][thread]);
    if (thread == LOSS) *loss = (float)x;
    else sums[thread] = x;
}
