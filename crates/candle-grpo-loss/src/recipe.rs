//! Published recipes: reward shaping, advantage and loss.

use candle_core::Result;
use candle_grpo_core::advantage::{AdvantageName, KlPenalty, SingletonGroup};
use candle_grpo_core::rewards::{CostPenalty, OverlongPenalty};
use candle_grpo_core::selection::GroupFilter;
use candle_grpo_core::validate::{Name, check};
use candle_grpo_core::{
    AdvantagePipeline, Invalid, Kl, KlEstimator, RewardShaping, TokenAdvantage,
};
use serde::{Deserialize, Serialize};

use crate::aggregation::Aggregation;
use crate::distillation_loss::{DistillationLoss, Support};
use crate::policy_loss::PolicyLoss;

/// An algorithm without its model: reward shaping, advantage and loss. It is the section
/// `recipe` in a configuration file.
///
/// Published algorithms are constructors. The default is [`Recipe::grpo`]. Try [`Recipe::dapo`] if
/// answers are long or the policy stops exploring.
///
/// ```
/// use candle_grpo_loss::Recipe;
///
/// let recipe = Recipe::dapo(20_480, 4096);
/// recipe.validate()?;
/// assert!(recipe.policy_loss.kl.is_none() && recipe.group_filter.is_some());
///
/// let unknown = r#"{"policy_loss": {"agregation": "token-mean"}}"#;
/// assert!(serde_json::from_str::<Recipe>(unknown).is_err());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Recipe {
    /// Reward shaping, which comes first. Default [`RewardShaping::default`].
    pub reward_shaping: RewardShaping,
    /// A penalty for responses close to the maximum length. Absent by default.
    pub overlong: Option<OverlongPenalty>,
    /// A penalty on a sample's length, relative to its group. Absent by default.
    pub length_penalty: Option<CostPenalty>,
    /// Group filter, applied to scores before any shaping. Rejected groups are sampled again.
    /// Absent by default.
    pub group_filter: Option<GroupFilter>,
    /// Advantage estimator. Default [`AdvantagePipeline::default`].
    pub advantage: AdvantagePipeline,
    /// Policy loss. Default [`PolicyLoss::default`].
    pub policy_loss: PolicyLoss,
    /// Divergence from a teacher's distributions, added to the policy loss. Absent by default.
    pub distillation_loss: Option<DistillationLoss>,
}

impl Recipe {
    pub(crate) fn new(advantage: impl Into<AdvantagePipeline>, policy_loss: PolicyLoss) -> Self {
        Self {
            advantage: advantage.into(),
            policy_loss,
            ..Self::default()
        }
    }

    pub(crate) fn grpo_advantage(policy_loss: PolicyLoss) -> Self {
        Self::new(AdvantagePipeline::grpo(), policy_loss)
    }

    /// GRPO (<https://arxiv.org/abs/2402.03300>): rewards minus the group mean, divided by the
    /// group's unbiased standard deviation +
    /// [`DEFAULT_EPSILON`](candle_grpo_core::advantage::DEFAULT_EPSILON). Clip 0.2, equal weight
    /// for each sequence, no KL.
    pub fn grpo() -> Self {
        Self::grpo_advantage(PolicyLoss::grpo())
    }

    /// DAPO (<https://arxiv.org/abs/2503.14476>): clip-higher, token-mean, a soft overlong penalty
    /// in the last `overlong_buffer` tokens before `max_length`, and only groups whose rewards
    /// differ.
    pub fn dapo(max_length: usize, overlong_buffer: usize) -> Self {
        Self {
            overlong: Some(OverlongPenalty::new(max_length, overlong_buffer)),
            group_filter: Some(GroupFilter::default()),
            ..Self::grpo_advantage(PolicyLoss::dapo())
        }
    }

    /// Dr. GRPO (<https://arxiv.org/abs/2503.20783>): no division by the standard deviation or by the response length.
    pub fn dr_grpo(length: f64) -> Self {
        Self::new(AdvantagePipeline::dr_grpo(), PolicyLoss::dr_grpo(length))
    }

    /// GSPO (<https://arxiv.org/abs/2507.18071>).
    pub fn gspo() -> Self {
        Self::grpo_advantage(PolicyLoss::gspo())
    }

    /// GMPO (<https://arxiv.org/abs/2507.20673>).
    pub fn gmpo() -> Self {
        Self::grpo_advantage(PolicyLoss::gmpo())
    }

    /// CISPO (<https://arxiv.org/abs/2506.13585>).
    pub fn cispo() -> Self {
        Self::grpo_advantage(PolicyLoss::cispo())
    }

    /// SAPO (<https://arxiv.org/abs/2511.20347>).
    pub fn sapo() -> Self {
        Self::grpo_advantage(PolicyLoss::sapo())
    }

    /// GPG (<https://arxiv.org/abs/2504.02546>): centered rewards, scaled up to compensate for
    /// groups without a signal, and the plain policy gradient.
    pub fn gpg() -> Self {
        Self::new(AdvantagePipeline::gpg(), PolicyLoss::gpg())
    }

    /// RLOO (<https://arxiv.org/abs/2402.14740>): leave-one-out without scaling, and the policy
    /// gradient over whole sequences.
    pub fn rloo() -> Self {
        Self::new(AdvantagePipeline::rloo(), PolicyLoss::rloo())
    }

    /// REINFORCE++ (<https://arxiv.org/abs/2501.03262>): a k1 penalty with coefficient `kl_coef` in
    /// each token's reward, returns, and whitening over the batch.
    pub fn reinforce_plus_plus(kl_coef: f64) -> Self {
        let advantage = AdvantagePipeline {
            kl_penalty: Some(KlPenalty {
                coef: kl_coef,
                kl: Kl::new(KlEstimator::K1),
            }),
            ..AdvantagePipeline::reinforce_plus_plus()
        };
        Self::new(advantage, PolicyLoss::reinforce_plus_plus())
    }

    /// REINFORCE++-baseline (<https://arxiv.org/abs/2501.03262>): REINFORCE++ after subtracting the group mean.
    pub fn reinforce_plus_plus_baseline() -> Self {
        Self::new(
            AdvantagePipeline::reinforce_plus_plus_baseline(),
            PolicyLoss::reinforce_plus_plus(),
        )
    }

    /// TRL's GRPO defaults: epsilon 1e-4, clip 0.2, token-mean, no KL.
    pub fn trl() -> Self {
        Self::new(
            group_deviation(1e-4, SingletonGroup::Zero),
            PolicyLoss::bnpo(),
        )
    }

    /// verl's GRPO defaults: clip 0.2 and dual clip 3, token-mean, no KL.
    pub fn verl() -> Self {
        Self::new(
            group_deviation(1e-6, SingletonGroup::Raw),
            PolicyLoss::verl(),
        )
    }

    /// The GRPO example in ROLL's documentation: rewards normalized in their group and clipped to
    /// 10, advantages whitened and clipped to 2, dual clip.
    pub fn roll() -> Self {
        let advantage = group_norm().then(TokenAdvantage {
            whiten_advantages: true,
            advantage_clip: Some(2.),
            ..TokenAdvantage::default()
        });
        Self::new(advantage, PolicyLoss::roll())
    }

    /// twinkle's GRPO defaults: epsilon 1e-8, clip 0.2, no KL.
    pub fn twinkle() -> Self {
        Self::new(
            group_deviation(1e-8, SingletonGroup::Raw),
            PolicyLoss::twinkle(),
        )
    }

    /// OpenRLHF's `group_norm`: epsilon 1e-9, advantages clipped to 10, a k1 penalty with
    /// coefficient 0.01 in the reward, clip 0.2, token-mean.
    pub fn openrlhf() -> Self {
        let advantage = AdvantagePipeline {
            epsilon: Some(1e-9),
            kl_penalty: Some(KlPenalty {
                coef: 0.01,
                kl: Kl {
                    log_ratio_clamp: None,
                    value_clamp: Some(10.),
                    ..Kl::new(KlEstimator::K1)
                },
            }),
            ..group_norm().then(TokenAdvantage::default())
        };
        Self::new(advantage, PolicyLoss::bnpo())
    }

    /// prime-rl's default loss, with advantages that are not divided. A sample that is alone in its
    /// group gets advantage 0.
    pub fn prime_rl() -> Self {
        let advantage = AdvantagePipeline {
            single_sample: Some(SingletonGroup::Zero),
            ..AdvantagePipeline::dr_grpo()
        };
        Self::new(advantage, PolicyLoss::prime_rl())
    }

    /// GKD (<https://arxiv.org/abs/2306.13649>) on the policy's own completions: the Jensen-Shannon
    /// divergence from a teacher with beta 0.5, without a reward term.
    pub fn gkd() -> Self {
        Self {
            distillation_loss: Some(DistillationLoss {
                beta: 0.5,
                ..DistillationLoss::default()
            }),
            ..Self::new(
                // No term learns from the advantages, so a group may have a single sample.
                AdvantagePipeline {
                    single_sample: Some(SingletonGroup::Zero),
                    ..AdvantagePipeline::default()
                },
                PolicyLoss {
                    loss_coef: 0.,
                    ..PolicyLoss::gpg()
                },
            )
        }
    }

    /// Returns the key for the first term that learns from a teacher's log-probs on the sampled
    /// tokens.
    pub fn teacher_log_probs_term(&self) -> Option<&'static str> {
        let tokens = self.advantage.pipeline().tokens.unwrap_or_default();
        let terms = [
            (
                "policy_loss.distillation",
                self.policy_loss.distillation.is_some(),
            ),
            (
                "advantage.tokens.distillation",
                tokens.distillation.is_some(),
            ),
            (
                "advantage.tokens.teacher_weight",
                tokens.teacher_weight.is_some(),
            ),
        ];
        terms
            .into_iter()
            .find_map(|(key, used)| used.then_some(key))
    }

    /// Checks the options and the combinations that the papers exclude.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid. The error names the option, its value and what it must be.
    pub fn validate(&self) -> Result<()> {
        let shaping = self.reward_shaping.validate();
        shaping.map_err(|e| e.within("reward_shaping"))?;
        if let Some(overlong) = &self.overlong {
            overlong.validate().map_err(|e| e.within("overlong"))?;
        }
        if let Some(penalty) = &self.length_penalty {
            let valid = penalty.validate();
            valid.map_err(|e| e.within("length_penalty"))?;
        }
        if let Some(filter) = &self.group_filter {
            filter.validate().map_err(|e| e.within("group_filter"))?;
        }
        self.advantage
            .validate()
            .map_err(|e| e.within("advantage"))?;
        let loss = self.policy_loss.validate();
        loss.map_err(|e| Invalid::within_error("policy_loss", e))?;
        if let Some(loss) = &self.distillation_loss {
            loss.validate()?;
            check(
                !matches!(loss.support, Support::Sampled { .. }),
                "distillation_loss.support",
                "sampled",
                "be another one: policy_loss.distillation learns from the sampled tokens",
            )?;
        }
        let aggregation = self.policy_loss.aggregation;
        if self.advantage.name == AdvantageName::DrGrpo
            && aggregation == Aggregation::SeqMeanTokenMean
        {
            let must = "be seq-mean-token-sum-norm with the advantage dr_grpo, which excludes a division by the length of each response (or use the advantage grpo with the scale none)";
            return Err(Invalid::new("policy_loss.aggregation", Name(&aggregation), must).into());
        }
        Ok(())
    }
}

/// GRPO's sequence advantages, clipped to 10.
fn group_norm() -> AdvantagePipeline {
    AdvantagePipeline::grpo().map_sequence(|sequence| sequence.clip = Some([-10., 10.]))
}

fn group_deviation(epsilon: f64, single_sample: SingletonGroup) -> AdvantagePipeline {
    AdvantagePipeline {
        epsilon: Some(epsilon),
        single_sample: Some(single_sample),
        ..AdvantagePipeline::default()
    }
}
