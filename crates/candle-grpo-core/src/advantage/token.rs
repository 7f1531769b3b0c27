//! Token advantages: token rewards, returns, baseline, whitening and clipping.

use candle_core::{D, DType, Result, Tensor};
use serde::{Deserialize, Serialize};

use super::returns::{discounted_returns, generalized_advantages};
use super::{
    AdvantageBatch, AdvantageEstimator, Advantages, KlPenalty, MaskedTokens, OptimalTokenBaseline,
    TeacherWeight, Whitening,
};
use crate::Invalid;
use crate::dtype::arithmetic_dtype;
use crate::inputs::{Input, Inputs};
use crate::mask::Mask;
use crate::metrics::Metrics;
use crate::rewards::{
    NonFinite, RewardTensor, check_all_finite, check_finite_tokens, combine, to_result_dtype,
};
use crate::validate::{self, Checked};

/// Baseline that is subtracted from a token's return.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TokenBaseline {
    /// 0, or the token's value if you set [`TokenAdvantage::lambda`]. The default.
    #[default]
    None,
    /// The batch's `reward_baselines`, the same number for all tokens in a sequence (ReMax,
    /// <https://arxiv.org/abs/2310.10505>).
    Given,
    /// The group's minimum-variance baseline at this token.
    OptimalToken(OptimalTokenBaseline),
}

/// Token advantages from sequence or token rewards, in the ROLL pipeline's order:
///
/// 1. A sequence reward goes to its last token.
/// 2. The KL penalty is subtracted from token rewards, which are then clipped and whitened.
/// 3. Returns accumulate them from each token to the end. With `lambda`, GAE does.
/// 4. The baseline and the divergence from a teacher are subtracted. A teacher may weight the
///    result.
/// 5. The result is whitened, masked and clipped.
///
/// Choose it when credit differs between tokens: with token rewards, a critic, a KL penalty in the
/// reward, or a discount. If one reward per sequence is all you have,
/// [`GroupAdvantage`](crate::GroupAdvantage) is enough.
///
/// Unlike in ROLL, [`Self::token_reward_clip`] does not also clip sequence rewards, and fractions
/// only count tokens in the mask.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, TokenAdvantage};
///
/// let rewards = Tensor::new(&[1f32, -1.], &Device::Cpu)?;
/// let mask = Tensor::new(&[[1u8, 1, 0], [1, 0, 0]], &Device::Cpu)?;
/// let batch = AdvantageBatch::new(&rewards, 1).response_mask(&mask);
///
/// let clipped = TokenAdvantage { advantage_clip: Some(0.5), ..Default::default() };
/// let tokens = clipped.estimate(&batch)?;
/// assert_eq!(tokens.advantages.to_vec2::<f32>()?, [[0.5, 0.5, 0.], [-0.5, 0., 0.]]);
/// let returns = tokens.returns.expect("a stage of tokens has returns");
/// assert_eq!(returns.to_vec2::<f32>()?, [[1., 1., 0.], [-1., 0., 0.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Metrics
///
/// All are computed over tokens in the mask. `reward_kl` and `teacher_kl` are the penalties'
/// divergences. `token_reward_clip_fraction` and `advantage_clip_fraction` are the fractions that
/// were clipped. `reward_kl_per_sequence` averages each sequence's mean: pass it to
/// [`crate::kl::KlController`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct TokenAdvantage {
    /// KL penalty in the reward (`add_token_level_kl` in ROLL). Absent by default.
    pub kl_penalty: Option<KlPenalty>,
    /// Token rewards are clipped to plus and minus this bound, after the penalty. Absent by
    /// default.
    pub token_reward_clip: Option<f64>,
    /// Whitens token rewards. Default `false`.
    pub whiten_rewards: bool,
    /// Discount from one token to the next. Default 1.
    pub gamma: f64,
    /// GAE's lambda (<https://arxiv.org/abs/1506.02438>), which needs critic values: 0 uses the
    /// critic only, 1 the rewards only. If absent, advantages are returns minus the baseline.
    /// Absent by default.
    pub lambda: Option<f64>,
    /// Treatment for tokens outside the mask. Default `skipped`.
    pub masked_tokens: MaskedTokens,
    /// Baseline, subtracted from the returns. Default `none`.
    pub baseline: TokenBaseline,
    /// Teacher penalty: the divergence from `teacher_log_probs`, subtracted from each advantage
    /// (on-policy distillation in ROLL and NeMo-RL). Absent by default.
    pub distillation: Option<KlPenalty>,
    /// Teacher weight for each advantage, applied after `distillation` (RLSD). Absent by default.
    pub teacher_weight: Option<TeacherWeight>,
    /// Whitens advantages over all tokens in the batch. Default `false`.
    pub whiten_advantages: bool,
    /// Whitening for rewards and advantages. Default [`Whitening::default`].
    pub whitening: Whitening,
    /// Advantages are clipped to plus and minus this bound, after everything else. Absent by
    /// default.
    pub advantage_clip: Option<f64>,
}

impl Default for TokenAdvantage {
    fn default() -> Self {
        Self {
            kl_penalty: None,
            token_reward_clip: None,
            whiten_rewards: false,
            gamma: 1.,
            lambda: None,
            masked_tokens: MaskedTokens::Skipped,
            baseline: TokenBaseline::None,
            distillation: None,
            teacher_weight: None,
            whiten_advantages: false,
            whitening: Whitening::default(),
            advantage_clip: None,
        }
    }
}

impl TokenAdvantage {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        validate::unit_interval("gamma", self.gamma)?;
        if let Some(lambda) = self.lambda {
            validate::unit_interval("lambda", lambda)?;
        }
        if self.lambda.is_some() && self.baseline != TokenBaseline::None {
            return Err(Invalid::new(
                "baseline",
                "given",
                "be none where lambda is given, as the values of the critic are the baseline",
            ));
        }
        if let TokenBaseline::OptimalToken(baseline) = &self.baseline {
            baseline
                .validate()
                .map_err(|e| e.within("baseline.optimal_token"))?;
        }
        for (field, clip) in [
            ("token_reward_clip", self.token_reward_clip),
            ("advantage_clip", self.advantage_clip),
        ] {
            if let Some(clip) = clip {
                validate::positive(field, clip)?;
            }
        }
        for (field, penalty) in [
            ("kl_penalty", &self.kl_penalty),
            ("distillation", &self.distillation),
        ] {
            if let Some(penalty) = penalty {
                penalty.validate().map_err(|e| e.within(field))?;
            }
        }
        if let Some(weight) = &self.teacher_weight {
            weight.validate().map_err(|e| e.within("teacher_weight"))?;
        }
        self.whitening.validate().map_err(|e| e.within("whitening"))
    }

    /// Computes the advantages from `token_rewards` `[B, T]`, which replace the batch's rewards.
    pub(super) fn estimate_from(
        &self,
        token_rewards: &Tensor,
        result_dtype: DType,
        batch: &AdvantageBatch,
    ) -> Result<Advantages> {
        self.validate()?;
        let mask = batch.mask()?;
        let mut metrics = Metrics::new();
        let mut rewards = batch.on_tokens("token_rewards", Some(token_rewards))?;
        check_finite_tokens("token_rewards", &rewards)?;
        if let Some(penalty) = &self.kl_penalty {
            let kl = penalty.per_token(batch, "ref_log_probs", batch.ref_log_probs.as_ref())?;
            metrics.push_masked_mean("reward_kl", &kl, &mask)?;
            push_mean_of_means(&mut metrics, "reward_kl_per_sequence", &kl, &mask)?;
            rewards = (rewards - (kl * penalty.coef)?)?;
        }
        if let Some(clip) = self.token_reward_clip {
            rewards = clip_tokens("token_reward_clip", &rewards, clip, &mask, &mut metrics)?;
        }
        if self.whiten_rewards {
            rewards = mask.select(&self.whitening.apply(&rewards, &mask)?)?;
        }
        let (returns, mut advantages) = self.accumulate(&rewards, &mask, batch)?;
        if let Some(distillation) = &self.distillation {
            let kl = distillation.per_token(
                batch,
                "teacher_log_probs",
                batch.teacher_log_probs.as_ref(),
            )?;
            let taught = batch.taught()?;
            let kl = taught.select(&kl)?;
            metrics.push_masked_mean("teacher_kl", &kl, &taught)?;
            advantages = (advantages - (kl * distillation.coef)?)?;
        }
        if let Some(weight) = &self.teacher_weight {
            advantages = weight.apply(&advantages, batch)?;
        }
        if self.whiten_advantages {
            advantages = mask.select(&self.whitening.apply(&advantages, &mask)?)?;
        }
        if let Some(clip) = self.advantage_clip {
            advantages = clip_tokens("advantage_clip", &advantages, clip, &mask, &mut metrics)?;
        }
        Ok(Advantages {
            advantages: to_result_dtype("advantage", &advantages, result_dtype)?,
            returns: Some(to_result_dtype("return", &returns, result_dtype)?),
            metrics,
        })
    }

    /// Computes returns and advantages before whitening.
    fn accumulate(
        &self,
        rewards: &Tensor,
        mask: &Mask,
        batch: &AdvantageBatch,
    ) -> Result<(Tensor, Tensor)> {
        if let Some(lambda) = self.lambda {
            let values = batch.on_tokens("values", batch.values.as_ref())?;
            let advantages = generalized_advantages(
                rewards,
                &values,
                self.gamma,
                lambda,
                mask,
                self.masked_tokens,
            )?;
            return Ok(((&advantages + values)?, advantages));
        }
        let returns = discounted_returns(rewards, self.gamma, mask, self.masked_tokens)?;
        let advantages = match &self.baseline {
            TokenBaseline::None => returns.clone(),
            TokenBaseline::Given => {
                let baselines = batch.baselines()?;
                mask.check_sequences("reward_baselines", &baselines)?;
                let baselines = mask.select_sequences(&baselines)?;
                check_all_finite("reward_baselines", &baselines)?;
                (&returns - mask.spread(&baselines)?)?
            }
            TokenBaseline::OptimalToken(baseline) => {
                (&returns - baseline.compute(&returns, mask, batch)?)?
            }
        };
        Ok((returns, advantages))
    }
}

impl AdvantageEstimator for TokenAdvantage {
    /// Computes advantages `[B, T]` and returns from the batch's token rewards. If they are absent,
    /// each sequence reward goes to the last token. A sequence without a token in the mask is left
    /// out, and its reward may be NaN.
    fn estimate(&self, batch: &AdvantageBatch) -> Result<Advantages> {
        if let Some(token_rewards) = &batch.token_rewards {
            let result_dtype = arithmetic_dtype(token_rewards.dtype());
            return self.estimate_from(token_rewards, result_dtype, batch);
        }
        let mask = batch.mask()?;
        let rewards = batch.sequence_rewards()?;
        let rewards = RewardTensor {
            values: mask.select_rows("rewards", &rewards.values)?,
            ..rewards
        };
        let (sums, _) = combine(&rewards, None, NonFinite::Exclude)?;
        // No option excludes missing scores here.
        check_all_finite("rewards", &rewards.values)?;
        let placed = mask.place_on_last(&sums)?;
        self.estimate_from(&placed, rewards.result_dtype, batch)
    }

    fn needs(&self) -> Inputs {
        let penalty = self.kl_penalty.is_some();
        let teacher = self.distillation.is_some() || self.teacher_weight.is_some();
        let optimal = matches!(self.baseline, TokenBaseline::OptimalToken(_));
        let given = self.baseline == TokenBaseline::Given;
        Inputs::when(penalty || teacher || optimal, Input::OldLogProbs)
            | Inputs::when(penalty, Input::RefLogProbs)
            | Inputs::when(teacher, Input::TeacherLogProbs)
            | Inputs::when(self.lambda.is_some(), Input::Values)
            | Inputs::when(
                optimal,
                [Input::SumOfSquaredProbs, Input::ImportanceWeights],
            )
            | Inputs::when(given, Input::RewardBaselines)
    }
}

/// Adds the metric that averages each sequence's mean of `x`, over sequences that have tokens.
fn push_mean_of_means(metrics: &mut Metrics, name: &str, x: &Tensor, mask: &Mask) -> Result<()> {
    let lengths = mask.lengths(x.dtype())?;
    let means = (x.sum_keepdim(D::Minus1)? / lengths.maximum(1.)?)?;
    let count = lengths.gt(0.)?.to_dtype(x.dtype())?.sum_all()?;
    metrics.push_mean(name, &means.sum_all()?, &count)
}

/// Clips `x` to plus and minus `clip`, and adds the metric `{name}_fraction`.
fn clip_tokens(
    name: &str,
    x: &Tensor,
    clip: f64,
    mask: &Mask,
    metrics: &mut Metrics,
) -> Result<Tensor> {
    let outside = x.abs()?.gt(clip)?.to_dtype(DType::F32)?;
    metrics.push_masked_mean(&format!("{name}_fraction"), &outside, mask)?;
    x.clamp(-clip, clip)
}
