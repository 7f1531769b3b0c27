//! Published losses.

use candle_grpo_core::{Kl, KlEstimator};

use super::{EmptySequences, PolicyLoss, TeacherTerm};
use crate::aggregation::Aggregation;
use crate::importance_level::ImportanceLevel;
use crate::kl_loss::{BiasCorrection, KlLoss};
use crate::surrogate::{
    Clip, ClipCov, DetachedWeight, Divergence, DivergenceMask, DropIf, GeometricMean, KlCov,
    Likelihood, MaskedValue, SoftGate, SquaredLogRatio, Surrogate, Topr,
};

impl PolicyLoss {
    /// GRPO (<https://arxiv.org/abs/2402.03300>): clip 0.2, equal weight for each sequence, no KL.
    /// The default.
    ///
    /// For the paper's KL loss, add `kl: Some(KlLoss::k3(0.04))`.
    pub fn grpo() -> Self {
        Self::default()
    }

    /// DAPO (<https://arxiv.org/abs/2503.14476>): clip 0.2 below and 0.28 above, equal weight for each token, no KL.
    pub fn dapo() -> Self {
        Self::with_surrogate(Clip::asymmetric(0.2, 0.28), Aggregation::TokenMean)
    }

    /// BNPO in TRL: clip 0.2, equal weight for each token, no KL. With totals for the whole step,
    /// it is also TRL's default `dapo` loss.
    pub fn bnpo() -> Self {
        Self::with_surrogate(Clip::symmetric(0.2), Aggregation::TokenMean)
    }

    /// Dr. GRPO (<https://arxiv.org/abs/2503.20783>): clip 0.2, no KL. Token sums are divided by
    /// the constant `length` and the number of sequences, including empty ones.
    ///
    /// Use it with [`candle_grpo_core::Scale::None`] in the advantages.
    pub fn dr_grpo(length: f64) -> Self {
        Self {
            empty_sequences: EmptySequences::Include,
            ..Self::with_surrogate(
                Clip::symmetric(0.2),
                Aggregation::SeqMeanTokenSumNorm { length },
            )
        }
    }

    /// GSPO (<https://arxiv.org/abs/2507.18071>): the sequence ratio, with clips 3e-4 and 4e-4.
    pub fn gspo() -> Self {
        Self {
            importance_level: ImportanceLevel::Sequence,
            ..Self::with_surrogate(Clip::asymmetric(3e-4, 4e-4), Aggregation::SeqMeanTokenMean)
        }
    }

    /// GSPO-token (<https://arxiv.org/abs/2507.18071>): the sequence ratio with each token's own
    /// gradient. Use it if advantages differ within a sequence.
    pub fn gspo_token() -> Self {
        Self {
            importance_level: ImportanceLevel::SequenceToken,
            ..Self::gspo()
        }
    }

    /// GMPO (<https://arxiv.org/abs/2507.20673>): the geometric mean over ratios that are clipped
    /// to 0.4 in log space.
    pub fn gmpo() -> Self {
        Self::with_surrogate(GeometricMean::default(), Aggregation::SeqMeanTokenMean)
    }

    /// CISPO (<https://arxiv.org/abs/2506.13585>): the ratio, at most 5, as a detached weight.
    pub fn cispo() -> Self {
        Self::with_surrogate(DetachedWeight::at_most(5.), Aggregation::TokenMean)
    }

    /// Truncated importance sampling (<https://arxiv.org/abs/2503.14286>): the ratio, at most 1, as a detached weight.
    pub fn tis() -> Self {
        Self::with_surrogate(DetachedWeight::at_most(1.), Aggregation::TokenMean)
    }

    /// TOPR (<https://arxiv.org/abs/2503.14286>).
    pub fn topr() -> Self {
        Self::with_surrogate(Topr::default(), Aggregation::TokenMean)
    }

    /// SAPO (<https://arxiv.org/abs/2511.20347>): temperatures 1.0 and 1.05.
    pub fn sapo() -> Self {
        Self::with_surrogate(SoftGate::default(), Aggregation::SeqMeanTokenMean)
    }

    /// GPG (<https://arxiv.org/abs/2504.02546>): the plain policy gradient, equal weight for each token.
    pub fn gpg() -> Self {
        Self {
            surrogate: Surrogate::PolicyGradient,
            aggregation: Aggregation::TokenMean,
            ..Self::default()
        }
    }

    /// RLOO (<https://arxiv.org/abs/2402.14740>): the policy gradient over whole sequences.
    ///
    /// Use it with [`candle_grpo_core::GroupAdvantage::rloo`] without scaling, and with the KL in
    /// the reward.
    pub fn rloo() -> Self {
        Self {
            aggregation: Aggregation::SeqMeanTokenSum,
            ..Self::gpg()
        }
    }

    /// REINFORCE++ (<https://arxiv.org/abs/2501.03262>): clip 0.2, equal weight for each token.
    ///
    /// Use it with whitened returns, and with the KL in the reward.
    pub fn reinforce_plus_plus() -> Self {
        Self::bnpo()
    }

    /// Kimi k1.5 (<https://arxiv.org/abs/2501.12599>): a squared penalty on the log-ratio, with
    /// coefficient 0.1.
    pub fn kimi_k1_5() -> Self {
        Self::with_surrogate(SquaredLogRatio::default(), Aggregation::TokenMean)
    }

    /// DRO (<https://arxiv.org/abs/2405.19107>): a squared penalty on the log-ratio, with
    /// coefficient `beta`.
    pub fn dro(beta: f64) -> Self {
        Self::with_surrogate(SquaredLogRatio { coef: beta }, Aggregation::TokenMean)
    }

    /// DPPO (<https://arxiv.org/abs/2602.04879>), with a choice between divergences.
    pub fn dppo(divergence: Divergence) -> Self {
        let surrogate = DivergenceMask {
            divergence,
            ..DivergenceMask::default()
        };
        Self::with_surrogate(surrogate, Aggregation::TokenMean)
    }

    /// Clip-Cov (<https://arxiv.org/abs/2505.22617>).
    pub fn clip_cov() -> Self {
        Self::with_surrogate(ClipCov::default(), Aggregation::TokenMean)
    }

    /// KL-Cov (<https://arxiv.org/abs/2505.22617>).
    pub fn kl_cov() -> Self {
        Self::with_surrogate(KlCov::default(), Aggregation::TokenMean)
    }

    /// DeepSeek-V3.2 (<https://arxiv.org/abs/2512.02556>): GRPO with off-policy masking and an
    /// unbiased KL. The paper does not state the coefficients.
    pub fn deepseek_v3_2(kl_coef: f64, off_policy_threshold: f64) -> Self {
        Self {
            kl: Some(KlLoss {
                bias_correction: BiasCorrection::Token,
                ..KlLoss::k3(kl_coef)
            }),
            off_policy_threshold: Some(off_policy_threshold),
            ..Self::grpo()
        }
    }

    /// prime-rl's default: DPPO with a total-variation bound of 0.2, and `0.001 d^2` as KL to the
    /// old policy. There, the old policy is the sampler (`old_log_probs: sampler`).
    ///
    /// prime-rl bounds no ratio; here, the weight is at most 20.
    pub fn prime_rl() -> Self {
        let surrogate = DivergenceMask {
            value: MaskedValue::Ratio,
            ..DivergenceMask::default()
        };
        Self {
            old_kl: Some(KlLoss::new(0.002, Kl::new(KlEstimator::K2))),
            ..Self::with_surrogate(surrogate, Aggregation::TokenMean)
        }
    }

    /// prime-rl's `ipo`: like [`Self::prime_rl`], but drops any token whose probability moved by
    /// more than `threshold`, whatever its advantage.
    pub fn ipo(threshold: f64) -> Self {
        let surrogate = DivergenceMask {
            drop_if: DropIf::Outside,
            value: MaskedValue::Ratio,
            low: threshold,
            high: threshold,
            ..DivergenceMask::default()
        };
        Self {
            surrogate: surrogate.into(),
            ..Self::prime_rl()
        }
    }

    /// Likelihood for tokens from another source, whatever their advantage.
    pub fn likelihood() -> Self {
        Self::with_surrogate(Likelihood::default(), Aggregation::TokenMean)
    }

    /// On-policy distillation: the policy gradient for the reverse KL from a teacher. Needs
    /// [`crate::PolicyBatch::teacher_log_probs`]. You can train without rewards: set the advantages
    /// to 0.
    pub fn on_policy_distillation() -> Self {
        Self {
            distillation: Some(TeacherTerm::new(1.)),
            ..Self::gpg()
        }
    }

    /// verl's defaults: clip 0.2 and dual clip 3, equal weight for each token, no KL.
    pub fn verl() -> Self {
        let clip = Clip {
            dual_clip: Some(3.),
            ..Clip::symmetric(0.2)
        };
        Self::with_surrogate(clip, Aggregation::TokenMean)
    }

    /// The GRPO example in ROLL's documentation: clip 0.2, dual clip 1.4, equal weight for each
    /// sequence, and a k3 KL loss with coefficient 0.001, clamped to 10.
    pub fn roll() -> Self {
        let clip = Clip {
            dual_clip: Some(1.4),
            ..Clip::symmetric(0.2)
        };
        let kl = Kl {
            value_clamp: Some(10.),
            ..Kl::new(KlEstimator::K3)
        };
        Self {
            kl: Some(KlLoss::new(0.001, kl)),
            ..Self::with_surrogate(clip, Aggregation::SeqMeanTokenMean)
        }
    }

    /// twinkle's defaults: clip 0.2, equal weight for each sequence, including empty ones, no KL.
    pub fn twinkle() -> Self {
        Self {
            empty_sequences: EmptySequences::Include,
            ..Self::with_surrogate(Clip::symmetric(0.2), Aggregation::SeqMeanTokenMean)
        }
    }

    pub(crate) fn with_surrogate(
        surrogate: impl Into<Surrogate>,
        aggregation: Aggregation,
    ) -> Self {
        Self {
            surrogate: surrogate.into(),
            aggregation,
            ..Self::default()
        }
    }
}
