//! The KL estimate of one token, and its derivatives.

use super::surrogate::{Token, at_most, within};
use crate::policy_loss::{KlEstimate, KlRatio, KlSlope, KlTerm};

/// What a KL term says of a token, without its coefficient.
#[derive(Clone, Copy, Default)]
pub(super) struct Estimated {
    pub(super) value: f32,
    /// The derivative by the log-prob, both log-ratios being held.
    pub(super) by_log_prob: f32,
    /// The derivative by the log-ratio at its level.
    pub(super) by_log_ratio: f32,
    /// The derivative by the log-ratio of the token.
    pub(super) by_token_log_ratio: f32,
}

impl KlTerm {
    #[inline(always)]
    pub(super) fn estimate(&self, token: Token, ref_log_prob: f32, token_ratio: f32) -> Estimated {
        let d = token.log_prob - ref_log_prob;
        let (value, slope) = self.value(d);
        let slope = match self.slope {
            KlSlope::Direct => slope,
            _ if !d.is_finite() => 0.0,
            KlSlope::StraightThrough => d,
            KlSlope::ImportanceWeighted { max } => {
                at_most((token.log_prob - token.old_log_prob).exp(), max) * d
            }
        };
        match self.ratio {
            KlRatio::One => Estimated {
                value,
                by_log_prob: slope,
                ..Estimated::default()
            },
            KlRatio::Token => Estimated {
                value: value * token_ratio,
                by_log_prob: slope * token_ratio,
                by_token_log_ratio: value * token_ratio,
                by_log_ratio: 0.0,
            },
            KlRatio::Level => Estimated {
                value: value * token.ratio,
                by_log_prob: slope * token.ratio,
                by_log_ratio: value * token.ratio,
                by_token_log_ratio: 0.0,
            },
        }
    }

    /// The estimate and its derivative by d.
    #[inline(always)]
    fn value(&self, d: f32) -> (f32, f32) {
        let inside = d.abs() <= self.log_ratio_clamp;
        let d = within(d, -self.log_ratio_clamp, self.log_ratio_clamp);
        let (value, slope) = match self.estimate {
            KlEstimate::K1 => (d, 1.0),
            KlEstimate::K2 => (d * d * 0.5, d),
            KlEstimate::K3 => {
                let inverse = (-d).exp();
                ((inverse + d) - 1.0, 1.0 - inverse)
            }
            KlEstimate::Abs if d == 0.0 => (0.0, 0.0),
            KlEstimate::Abs => (d.abs(), d.signum()),
        };
        let inside = inside && value.abs() <= self.value_clamp;
        let value = within(value, -self.value_clamp, self.value_clamp);
        (value, if inside { slope } else { 0.0 })
    }
}
