//! Published losses as points of the product.

use candle_grpo_core::{Kl, KlEstimator};

use crate::aggregation::Aggregation;
use crate::importance::ImportanceLevel;
use crate::kl_loss::{BiasCorrection, KlLoss};
use crate::policy_loss::{EmptySequences, PolicyLoss};
use crate::surrogate::{
    Clip, ClipCov, DetachedWeight, Divergence, DivergenceMask, GeometricMean, KlCov, SoftGate,
    SquaredLogRatio, Surrogate, Topr, Vespo,
};

impl PolicyLoss {
    /// GRPO (<https://arxiv.org/abs/2402.03300>): clip 0.2, each sequence counts the same, a k3 KL loss of 0.04.
    pub fn grpo() -> Self {
        Self {
            kl: Some(KlLoss::k3(0.04)),
            ..Self::of(Clip::symmetric(0.2), Aggregation::SeqMeanTokenMean)
        }
    }

    /// DAPO (<https://arxiv.org/abs/2503.14476>): clip 0.2 below and 0.28 above, each token counts the same, no KL.
    pub fn dapo() -> Self {
        Self::of(Clip::asymmetric(0.2, 0.28), Aggregation::TokenMean)
    }

    /// BNPO as TRL has it: clip 0.2, each token counts the same, no KL. With the totals of the whole step it is
    /// TRL's default `dapo` loss as well.
    pub fn bnpo() -> Self {
        Self::of(Clip::symmetric(0.2), Aggregation::TokenMean)
    }

    /// Dr. GRPO (<https://arxiv.org/abs/2503.20783>): clip 0.2, sums of tokens divided by the constant `length` for each
    /// sequence, those without a token included, no KL.
    /// Its advantages are those of [`candle_grpo_core::Scale::None`].
    pub fn dr_grpo(length: f64) -> Self {
        Self {
            empty_sequences: EmptySequences::Include,
            ..Self::of(
                Clip::symmetric(0.2),
                Aggregation::SeqMeanTokenSumNorm { length },
            )
        }
    }

    /// GSPO (<https://arxiv.org/abs/2507.18071>): the ratio of the sequence with clips of 3e-4 and 4e-4.
    pub fn gspo() -> Self {
        Self {
            importance_level: ImportanceLevel::Sequence,
            ..Self::of(Clip::asymmetric(3e-4, 4e-4), Aggregation::SeqMeanTokenMean)
        }
    }

    /// GSPO-token (<https://arxiv.org/abs/2507.18071>): the value of the ratio of the sequence with the gradient of each
    /// token, for advantages that differ within a sequence.
    pub fn gspo_token() -> Self {
        Self {
            importance_level: ImportanceLevel::SequenceToken,
            ..Self::gspo()
        }
    }

    /// LUSPO (<https://arxiv.org/abs/2602.05261>): GSPO with each sequence weighted by its length.
    pub fn luspo() -> Self {
        Self {
            aggregation: Aggregation::SeqMeanTokenSum,
            ..Self::gspo()
        }
    }

    /// GMPO (<https://arxiv.org/abs/2507.20673>): the geometric mean of ratios clipped to 0.4 in log space.
    pub fn gmpo() -> Self {
        Self::of(GeometricMean::default(), Aggregation::SeqMeanTokenMean)
    }

    /// CISPO (<https://arxiv.org/abs/2506.13585>): the ratio, at most 5, as a constant weight.
    pub fn cispo() -> Self {
        Self::of(DetachedWeight::at_most(5.), Aggregation::TokenMean)
    }

    /// Truncated importance sampling (<https://arxiv.org/abs/2503.14286>): the ratio, at most 1, as a constant weight.
    pub fn tis() -> Self {
        Self::of(DetachedWeight::at_most(1.), Aggregation::TokenMean)
    }

    /// TOPR (<https://arxiv.org/abs/2503.14286>).
    pub fn topr() -> Self {
        Self::of(Topr::default(), Aggregation::TokenMean)
    }

    /// SAPO (<https://arxiv.org/abs/2511.20347>): temperatures 1.0 and 1.05.
    pub fn sapo() -> Self {
        Self::of(SoftGate::default(), Aggregation::SeqMeanTokenMean)
    }

    /// VESPO (<https://arxiv.org/abs/2602.10693>).
    pub fn vespo() -> Self {
        Self::of(Vespo::default(), Aggregation::TokenMean)
    }

    /// GPG (<https://arxiv.org/abs/2504.02546>): the plain policy gradient, each token counts the same.
    pub fn gpg() -> Self {
        Self {
            surrogate: Surrogate::PolicyGradient,
            aggregation: Aggregation::TokenMean,
            ..Self::default()
        }
    }

    /// RLOO (<https://arxiv.org/abs/2402.14740>): the policy gradient of whole sequences. Its advantages are those of
    /// [`candle_grpo_core::GroupAdvantage::rloo`] without scaling, its KL is in the reward.
    pub fn rloo() -> Self {
        Self {
            aggregation: Aggregation::SeqMeanTokenSum,
            ..Self::gpg()
        }
    }

    /// REINFORCE++ (<https://arxiv.org/abs/2501.03262>): clip 0.2, each token counts the same; returns are whitened and
    /// the KL is in the reward.
    pub fn reinforce_plus_plus() -> Self {
        Self::bnpo()
    }

    /// Kimi k1.5 (<https://arxiv.org/abs/2501.12599>): a squared penalty of 0.1 on the log-ratio.
    pub fn kimi_k1_5() -> Self {
        Self::of(SquaredLogRatio::default(), Aggregation::TokenMean)
    }

    /// DRO (<https://arxiv.org/abs/2405.19107>): a squared penalty of `beta` on the log-ratio.
    pub fn dro(beta: f64) -> Self {
        Self::of(SquaredLogRatio { coef: beta }, Aggregation::TokenMean)
    }

    /// DPPO (<https://arxiv.org/abs/2602.04879>) with a divergence.
    pub fn dppo(divergence: Divergence) -> Self {
        let surrogate = DivergenceMask {
            divergence,
            ..DivergenceMask::default()
        };
        Self::of(surrogate, Aggregation::TokenMean)
    }

    /// Clip-Cov (<https://arxiv.org/abs/2505.22617>).
    pub fn clip_cov() -> Self {
        Self::of(ClipCov::default(), Aggregation::TokenMean)
    }

    /// KL-Cov (<https://arxiv.org/abs/2505.22617>).
    pub fn kl_cov() -> Self {
        Self::of(KlCov::default(), Aggregation::TokenMean)
    }

    /// The off-policy masking and unbiased KL of DeepSeek-V3.2 (<https://arxiv.org/abs/2512.02556>) around the clip and
    /// aggregation of GRPO. The coefficients are what the paper leaves open.
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

    /// The defaults of verl: clip 0.2 and dual clip 3, each token counts the same, no KL.
    pub fn verl() -> Self {
        let clip = Clip {
            dual_clip: Some(3.),
            ..Clip::symmetric(0.2)
        };
        Self::of(clip, Aggregation::TokenMean)
    }

    /// The GRPO example of ROLL's documentation: clip 0.2 and dual clip 1.4, each sequence counts the same, a k3 KL loss
    /// of 0.001 that is clamped to 10.
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
            ..Self::of(clip, Aggregation::SeqMeanTokenMean)
        }
    }

    /// The defaults of twinkle: clip 0.2, each sequence counts the same, those without a token included, no KL.
    pub fn twinkle() -> Self {
        Self {
            empty_sequences: EmptySequences::Include,
            ..Self::of(Clip::symmetric(0.2), Aggregation::SeqMeanTokenMean)
        }
    }

    fn of(surrogate: impl Into<Surrogate>, aggregation: Aggregation) -> Self {
        Self {
            surrogate: surrogate.into(),
            aggregation,
            ..Self::default()
        }
    }
}
