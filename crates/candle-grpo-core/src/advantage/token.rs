//! From rewards of samples to advantages of tokens.

use candle_core::{D, DType, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::advantage::returns::{
    MaskedTokens, check_discount, discounted_returns, generalized_advantages,
};
use crate::advantage::{
    AdvantageBatch, AdvantageEstimator, Advantages, OptimalTokenBaseline, Whitening,
};
use crate::dtype::{arithmetic_dtype, for_statistics};
use crate::kl::{Kl, KlGradient};
use crate::mask::Mask;
use crate::metrics::Metrics;
use crate::rewards::shaping::check_clip;
use crate::rewards::{NonFinite, check_finite, check_finite_tokens, combine, finite_mask};

/// A KL penalty that is taken off the reward of each token, or of the sequence: `coef * KL(old policy || reference)`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlPenalty {
    /// What multiplies the estimate.
    pub coef: f64,
    /// Which estimate (`kl_penalty` in ROLL).
    #[serde(default)]
    pub kl: Kl,
}

impl KlPenalty {
    /// Checks the options; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        self.validate_as("kl_penalty")
    }

    pub(crate) fn validate_as(&self, key: &str) -> Result<()> {
        if !self.coef.is_finite() {
            bail!("{key}.coef: {}, must be finite", self.coef);
        }
        if let KlGradient::ImportanceWeighted { .. } = self.kl.gradient {
            bail!(
                "{key}.kl.gradient: {:?}, must be Direct or StraightThrough for a penalty, which has no gradient",
                self.kl.gradient
            );
        }
        self.kl.validate()
    }

    /// The rewards `[B]` less `coef` times the sum of the estimates of each sequence's tokens, as TRL's RLOO has it. Needs
    /// `response_mask`, `old_log_probs` and `ref_log_probs`.
    pub fn off_sequences(&self, rewards: &Tensor, batch: &AdvantageBatch<'_>) -> Result<Tensor> {
        self.validate()?;
        let kl = self.per_token(batch, "ref_log_probs", batch.ref_log_probs)?;
        let kl = (kl.sum(D::Minus1)? * self.coef)?;
        if rewards.dims() != kl.dims() {
            bail!(
                "rewards: shape {:?}, must be {:?}, one for each row of response_mask",
                rewards.dims(),
                kl.dims()
            );
        }
        (for_statistics(rewards)? - kl)?.to_dtype(arithmetic_dtype(rewards.dtype()))
    }

    /// The estimates against the policy of that name, 0 outside the mask.
    fn per_token(
        &self,
        batch: &AdvantageBatch<'_>,
        name: &str,
        other: Option<&Tensor>,
    ) -> Result<Tensor> {
        let old = batch.on_tokens("old_log_probs", batch.old_log_probs)?;
        let other = batch.on_tokens(name, other)?;
        batch
            .mask()?
            .select(&self.kl.per_token(&old, &other, None)?)
    }
}

/// What is subtracted from the return of a token.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenBaseline {
    /// Nothing (or the value of the token, if [`TokenShaping::lambda`] is given).
    #[default]
    None,
    /// The `reward_baselines` of the batch, one number for all tokens of a sequence (ReMax,
    /// <https://arxiv.org/abs/2310.10505>).
    Given,
    /// What leaves the least variance in the group at this token.
    OptimalToken(OptimalTokenBaseline),
}

/// Rewards of samples, or of tokens, to advantages of tokens, in the order of the ROLL pipeline: the reward goes to the
/// last token, the KL penalty comes off each token, token rewards are clipped, whitened and summed from each token to the
/// end; the baseline and the divergence from a teacher are subtracted, and what remains is whitened, masked and clipped.
///
/// Unlike ROLL, the clip of the tokens is one of its own ([`Self::token_reward_clip`]) and not that of the samples, and
/// fractions count the tokens of the mask only.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::TokenShaping;
///
/// let device = Device::Cpu;
/// let rewards = Tensor::new(&[1f32, -1.], &device)?;
/// let mask = Tensor::new(&[[1u8, 1, 0], [1, 0, 0]], &device)?;
/// let shaping = TokenShaping { advantage_clip: Some(0.5), ..Default::default() };
/// let tokens = shaping.apply(&rewards, &mask, None)?;
/// assert_eq!(tokens.returns.to_vec2::<f32>()?, [[1., 1., 0.], [-1., 0., 0.]]);
/// assert_eq!(tokens.advantages.to_vec2::<f32>()?, [[0.5, 0.5, 0.], [-0.5, 0., 0.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TokenShaping {
    /// The KL penalty in the reward (`add_token_level_kl` in ROLL).
    pub kl_penalty: Option<KlPenalty>,
    /// Token rewards are clipped to plus and minus this, after the penalty.
    pub token_reward_clip: Option<f64>,
    /// Whether token rewards are whitened.
    pub whiten_rewards: bool,
    /// The discount from one token to the next.
    pub gamma: f64,
    /// If given, advantages are generalised ones (GAE, <https://arxiv.org/abs/1506.02438>), which need the values of a
    /// critic: 1 trusts the rewards, 0 the critic.
    pub lambda: Option<f64>,
    /// Whether a token outside the mask takes a step of time.
    pub masked_tokens: MaskedTokens,
    /// What is subtracted from the returns.
    pub baseline: TokenBaseline,
    /// Taken off the advantage of each token, against the `teacher_log_probs` of the batch: on-policy distillation (ROLL,
    /// NeMo-RL), pure where the rewards are 0.
    pub distillation: Option<KlPenalty>,
    /// Whether advantages are whitened over all tokens of the batch.
    pub whiten_advantages: bool,
    /// How rewards and advantages are whitened.
    pub whitening: Whitening,
    /// Advantages are clipped to plus and minus this, at last.
    pub advantage_clip: Option<f64>,
}

impl Default for TokenShaping {
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
            whiten_advantages: false,
            whitening: Whitening::default(),
            advantage_clip: None,
        }
    }
}

/// Advantages of tokens, and what they were made of.
#[derive(Debug, Clone)]
pub struct TokenAdvantages {
    /// `[B, T]`, 0 outside the mask.
    pub advantages: Tensor,
    /// The discounted sums of token rewards from each token to the end, before whitening and clipping: `[B, T]`, 0
    /// outside the mask.
    pub returns: Tensor,
    /// `reward_kl` and `teacher_kl` if there is such a penalty, `token_reward_clip_fraction` and `advantage_clip_fraction`
    /// if there are clips: over the tokens of the mask. `reward_kl_per_sequence` is the mean over sequences of their means,
    /// which a [`crate::KlController`] is updated with.
    pub metrics: Metrics,
}

impl TokenShaping {
    /// From `rewards` `[B]`, one for each sequence, all finite. A sequence without a token in `response_mask` `[B, T]` has
    /// no token that could carry its reward, and is left out.
    ///
    /// `policies` are the log-probs `[B, T]` of the old policy and of the reference, which the KL penalty needs.
    pub fn apply(
        &self,
        rewards: &Tensor,
        response_mask: &Tensor,
        policies: Option<(&Tensor, &Tensor)>,
    ) -> Result<TokenAdvantages> {
        let on_last = Mask::new(response_mask)?.place_on_last(rewards)?;
        let numbers = for_statistics(rewards)?;
        check_finite("rewards", &numbers, &finite_mask(&numbers)?)?;
        self.apply_to_tokens(&on_last, response_mask, policies)
    }

    /// From `token_rewards` `[B, T]`, finite at every position of the mask.
    pub fn apply_to_tokens(
        &self,
        token_rewards: &Tensor,
        response_mask: &Tensor,
        policies: Option<(&Tensor, &Tensor)>,
    ) -> Result<TokenAdvantages> {
        let mut batch = AdvantageBatch::from_token_rewards(token_rewards, response_mask);
        if let Some((old, reference)) = policies {
            batch = batch.old_log_probs(old).ref_log_probs(reference);
        }
        self.shape(token_rewards, &batch)
    }

    /// From `token_rewards` `[B, T]`, with all that the batch has besides.
    pub(crate) fn shape(
        &self,
        token_rewards: &Tensor,
        batch: &AdvantageBatch<'_>,
    ) -> Result<TokenAdvantages> {
        self.validate()?;
        let mask = batch.mask()?;
        let result_dtype = arithmetic_dtype(token_rewards.dtype());
        let mut metrics = Metrics::new();
        let mut rewards = batch.on_tokens("token_rewards", Some(token_rewards))?;
        check_finite_tokens("token_rewards", &rewards)?;
        if let Some(penalty) = &self.kl_penalty {
            let kl = penalty.per_token(batch, "ref_log_probs", batch.ref_log_probs)?;
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
            let kl = distillation.per_token(batch, "teacher_log_probs", batch.teacher_log_probs)?;
            metrics.push_masked_mean("teacher_kl", &kl, &mask)?;
            advantages = (advantages - (kl * distillation.coef)?)?;
        }
        if self.whiten_advantages {
            advantages = mask.select(&self.whitening.apply(&advantages, &mask)?)?;
        }
        if let Some(clip) = self.advantage_clip {
            advantages = clip_tokens("advantage_clip", &advantages, clip, &mask, &mut metrics)?;
        }
        Ok(TokenAdvantages {
            advantages: advantages.to_dtype(result_dtype)?,
            returns: returns.to_dtype(result_dtype)?,
            metrics,
        })
    }

    /// Checks the options; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        check_discount("gamma", self.gamma)?;
        if let Some(lambda) = self.lambda {
            check_discount("lambda", lambda)?;
        }
        if self.lambda.is_some() && self.baseline != TokenBaseline::None {
            bail!(
                "baseline: {:?}, must be None where lambda is given, as the values of the critic are the baseline",
                self.baseline
            );
        }
        if let TokenBaseline::OptimalToken(baseline) = &self.baseline {
            baseline.validate()?;
        }
        for (name, clip) in [
            ("token_reward_clip", self.token_reward_clip),
            ("advantage_clip", self.advantage_clip),
        ] {
            if let Some(clip) = clip {
                check_clip(name, clip)?;
            }
        }
        for (key, penalty) in [
            ("kl_penalty", &self.kl_penalty),
            ("distillation", &self.distillation),
        ] {
            if let Some(penalty) = penalty {
                penalty.validate_as(key)?;
            }
        }
        self.whitening.validate()
    }

    /// Returns and advantages before whitening.
    fn accumulate(
        &self,
        rewards: &Tensor,
        mask: &Mask,
        batch: &AdvantageBatch<'_>,
    ) -> Result<(Tensor, Tensor)> {
        if let Some(lambda) = self.lambda {
            let values = batch.on_tokens("values", batch.values)?;
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
                let Some(baselines) = batch.reward_baselines else {
                    bail!("reward_baselines: absent, must be given for this baseline");
                };
                let (sequences, _) = mask.dims()?;
                if baselines.dims() != [sequences] {
                    bail!(
                        "reward_baselines: shape {:?}, must be [{sequences}], one for each row of response_mask",
                        baselines.dims()
                    );
                }
                let baselines = for_statistics(baselines)?;
                let finite = finite_mask(&baselines)?;
                check_finite("reward_baselines", &baselines, &finite)?;
                (&returns - mask.spread(&baselines)?)?
            }
            TokenBaseline::OptimalToken(baseline) => {
                (&returns - baseline.of(&returns, mask, batch)?)?
            }
        };
        Ok((returns, advantages))
    }
}

impl AdvantageEstimator for TokenShaping {
    /// From the token rewards of the batch or, if it has none, from the rewards of its sequences, which go to the last
    /// token.
    fn estimate(&self, batch: &AdvantageBatch<'_>) -> Result<Advantages> {
        let placed;
        let token_rewards = match batch.token_rewards {
            Some(token_rewards) => token_rewards,
            None => {
                let rewards = batch.sequence_rewards()?;
                let (sums, _) = combine(&rewards, None, NonFinite::Error)?;
                placed = batch
                    .mask()?
                    .place_on_last(&sums.to_dtype(rewards.result_dtype)?)?;
                &placed
            }
        };
        Ok(self.shape(token_rewards, batch)?.into())
    }
}

impl From<TokenAdvantages> for Advantages {
    fn from(tokens: TokenAdvantages) -> Self {
        Self {
            advantages: tokens.advantages,
            returns: Some(tokens.returns),
            metrics: tokens.metrics,
        }
    }
}

/// Adds the mean over the sequences that have tokens of the means over these.
fn push_mean_of_means(metrics: &mut Metrics, name: &str, x: &Tensor, mask: &Mask) -> Result<()> {
    let lengths = mask.lengths(x.dtype())?;
    let means = (x.sum_keepdim(D::Minus1)? / lengths.maximum(1.)?)?;
    let count = lengths.gt(0.)?.to_dtype(x.dtype())?.sum_all()?;
    metrics.push_mean(name, &means.sum_all()?, &count)
}

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
