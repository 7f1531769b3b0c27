//! What one token scores, and its derivatives: one function for each surrogate.

use crate::policy_loss::{PolicySum, TokenSurrogate};

/// What a surrogate may use.
#[derive(Clone, Copy)]
pub(super) struct Token {
    pub(super) log_prob: f32,
    pub(super) old_log_prob: f32,
    /// At its level.
    pub(super) log_ratio: f32,
    /// Its exponential.
    pub(super) ratio: f32,
    pub(super) advantage: f32,
}

/// What a surrogate says of a token.
#[derive(Clone, Copy, Default)]
pub(super) struct Scored {
    pub(super) loss: f32,
    /// The derivative by the log-ratio.
    pub(super) by_log_ratio: f32,
    /// The derivative by the log-prob, the log-ratio being held.
    pub(super) by_log_prob: f32,
    pub(super) flags: Flags,
}

/// What happened to a token.
#[derive(Clone, Copy, Default)]
pub(super) struct Flags {
    pub(super) clipped: bool,
    clipped_low: bool,
    clipped_high: bool,
    dual_clipped: bool,
    dropped: bool,
    positive: bool,
    weight_bounded: bool,
}

impl Flags {
    /// Each flag with the figure that counts it.
    pub(super) fn counted(self) -> [(PolicySum, bool); 7] {
        [
            (PolicySum::Clipped, self.clipped),
            (PolicySum::ClippedLow, self.clipped_low),
            (PolicySum::ClippedHigh, self.clipped_high),
            (PolicySum::DualClipped, self.dual_clipped),
            (PolicySum::Dropped, self.dropped),
            (PolicySum::Positive, self.positive),
            (PolicySum::WeightBounded, self.weight_bounded),
        ]
    }
}

impl TokenSurrogate {
    #[inline(always)]
    pub(super) fn score(&self, token: Token) -> Scored {
        match *self {
            Self::Clip {
                ratio_min,
                ratio_max,
                dual_clip,
                delta,
            } => clip(token, ratio_min, ratio_max, dual_clip, delta),
            Self::PolicyGradient => weighted_policy_gradient(token, 1.0),
            Self::DetachedWeight {
                ratio_min,
                ratio_max,
                drop_below,
                drop_above,
            } => detached_weight(token, ratio_min, ratio_max, drop_below, drop_above),
            Self::Topr {
                positive_weight,
                negative_weight,
            } => topr(token, positive_weight, negative_weight),
            Self::SoftGate { tau_pos, tau_neg } => soft_gate(token, tau_pos, tau_neg),
            Self::SquaredLogRatio { coef } => squared_log_ratio(token, coef),
            Self::DivergenceMask {
                binary_kl,
                low,
                high,
                ratio_max,
            } => divergence_mask(token, binary_kl, low, high, ratio_max),
        }
    }
}

/// `x`, at most `bound`; NaN stays.
#[inline(always)]
pub(super) fn at_most(x: f32, bound: f32) -> f32 {
    if x > bound { bound } else { x }
}

/// `x`, from `low` to `high`; NaN stays.
#[inline(always)]
pub(super) fn within(x: f32, low: f32, high: f32) -> f32 {
    if x < low { low } else { at_most(x, high) }
}

/// `-weight advantage log_prob` with a constant weight.
#[inline(always)]
fn weighted_policy_gradient(token: Token, weight: f32) -> Scored {
    let by_log_prob = -(weight * token.advantage);
    Scored {
        loss: by_log_prob * token.log_prob,
        by_log_prob,
        ..Scored::default()
    }
}

/// Nothing, for a token that is left out.
#[inline(always)]
fn unless(dropped: bool, scored: Scored) -> Scored {
    if dropped { Scored::default() } else { scored }
}

#[inline(always)]
fn clip(token: Token, ratio_min: f32, ratio_max: f32, dual_clip: f32, delta: f32) -> Scored {
    let Token {
        ratio, advantage, ..
    } = token;
    let limited = at_most(ratio, delta);
    let limited_loss = -(limited * advantage);
    let clipped_loss = -(within(ratio, ratio_min, ratio_max) * advantage);
    let takes_clipped = clipped_loss > limited_loss;
    let outside = ratio < ratio_min || ratio > ratio_max;
    let clipped = takes_clipped && outside;
    let mut loss = if takes_clipped {
        clipped_loss
    } else {
        limited_loss
    };
    let mut is_constant = if takes_clipped {
        outside
    } else {
        ratio > delta
    };
    let ceiling = -(dual_clip * advantage);
    let dual_clipped = advantage < 0.0 && loss > ceiling;
    if dual_clipped {
        loss = ceiling;
        is_constant = true;
    }
    Scored {
        loss,
        by_log_ratio: if is_constant { 0.0 } else { loss },
        by_log_prob: 0.0,
        flags: Flags {
            clipped,
            clipped_low: clipped && advantage < 0.0,
            clipped_high: clipped && advantage > 0.0,
            dual_clipped,
            ..Flags::default()
        },
    }
}

#[inline(always)]
fn detached_weight(
    token: Token,
    ratio_min: f32,
    ratio_max: f32,
    drop_below: f32,
    drop_above: f32,
) -> Scored {
    let Token {
        ratio, advantage, ..
    } = token;
    let (below, above) = (ratio < ratio_min, ratio > ratio_max);
    let dropped =
        (ratio > drop_above && advantage > 0.0) || (ratio < drop_below && advantage < 0.0);
    let weight = within(ratio, ratio_min, ratio_max);
    Scored {
        flags: Flags {
            clipped: below || above,
            clipped_low: below,
            clipped_high: above,
            dropped,
            ..Flags::default()
        },
        ..unless(dropped, weighted_policy_gradient(token, weight))
    }
}

#[inline(always)]
fn topr(token: Token, positive_weight: f32, negative_weight: f32) -> Scored {
    let positive = token.advantage > 0.0;
    let weight = if positive {
        positive_weight
    } else {
        at_most(token.ratio, 1.0) * negative_weight
    };
    Scored {
        flags: Flags {
            clipped: token.ratio > 1.0 && !positive,
            positive,
            ..Flags::default()
        },
        ..weighted_policy_gradient(token, weight)
    }
}

#[inline(always)]
fn soft_gate(token: Token, tau_pos: f32, tau_neg: f32) -> Scored {
    let tau = if token.advantage > 0.0 {
        tau_pos
    } else {
        tau_neg
    };
    // sigmoid(x) is (1 + tanh(x / 2)) / 2, which overflows on neither side.
    let gate = ((token.ratio - 1.0) * tau * 0.5).tanh();
    Scored {
        loss: -((gate + 1.0) * 2.0 / tau * token.advantage),
        by_log_ratio: -((1.0 - gate * gate) * token.ratio * token.advantage),
        ..Scored::default()
    }
}

#[inline(always)]
fn squared_log_ratio(token: Token, coef: f32) -> Scored {
    let gain = weighted_policy_gradient(token, 1.0);
    Scored {
        loss: token.log_ratio * token.log_ratio * (0.5 * coef) + gain.loss,
        by_log_ratio: coef * token.log_ratio,
        ..gain
    }
}

#[inline(always)]
fn divergence_mask(token: Token, binary_kl: bool, low: f32, high: f32, ratio_max: f32) -> Scored {
    let (p, q) = (token.log_prob.exp(), token.old_log_prob.exp());
    let distance = if binary_kl {
        kl_of_coins(q, p)
    } else {
        (p - q).abs()
    };
    let above = p > q && token.advantage > 0.0 && distance > high;
    let below = p < q && token.advantage < 0.0 && distance > low;
    let weight = at_most(token.ratio, ratio_max);
    Scored {
        flags: Flags {
            clipped: below || above,
            clipped_low: below,
            clipped_high: above,
            weight_bounded: token.ratio > ratio_max,
            ..Flags::default()
        },
        ..unless(below || above, weighted_policy_gradient(token, weight))
    }
}

/// The KL between two coins, the probabilities kept off 0 and 1.
#[inline(always)]
fn kl_of_coins(q: f32, p: f32) -> f32 {
    let inner = |x: f32| within(x, 1e-7, 1.0 - 1e-7);
    let (q, p) = (inner(q), inner(p));
    q * (q.ln() - p.ln()) + (1.0 - q) * ((1.0 - q).ln() - (1.0 - p).ln())
}
