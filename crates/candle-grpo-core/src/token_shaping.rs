//! From rewards of samples to advantages of tokens.

use candle_core::{DType, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::kl::Kl;
use crate::mask::Mask;
use crate::metrics::Metrics;
use crate::precision::{for_statistics, result_dtype};
use crate::recurrence::reverse_recurrence;
use crate::reward_shaping::check_clip;
use crate::whiten::masked_whiten;

/// A KL penalty that is taken off the reward of each token: `coef * KL(old policy || reference)`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlPenalty {
    /// What multiplies the estimate.
    pub coef: f64,
    /// Which estimate (`kl_penalty` in ROLL).
    #[serde(default)]
    pub kl: Kl,
}

/// Rewards of samples, or of tokens, to advantages of tokens, in the order of the ROLL pipeline: the reward goes to the
/// last token, the KL penalty comes off each token, token rewards are clipped, whitened and summed from each token to the
/// end; the sums are whitened, masked and clipped.
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
    /// Whether advantages are whitened over all tokens of the batch.
    pub whiten_advantages: bool,
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
            whiten_advantages: false,
            advantage_clip: None,
        }
    }
}

/// Added to the variance by whitening, as in ROLL and verl.
const WHITEN_EPSILON: f64 = 1e-8;

/// Advantages of tokens, and what they were made of.
#[derive(Debug, Clone)]
pub struct TokenAdvantages {
    /// `[B, T]`, 0 outside the mask.
    pub advantages: Tensor,
    /// The discounted sums of token rewards from each token to the end, before whitening and clipping: `[B, T]`, 0
    /// outside the mask.
    pub returns: Tensor,
    /// `reward_kl` if there is a penalty, `token_reward_clip_fraction` and `advantage_clip_fraction` if there are clips:
    /// over the tokens of the mask.
    pub metrics: Metrics,
}

impl TokenShaping {
    /// From `rewards` `[B]`, one for each sequence. A sequence without a token in `response_mask` `[B, T]` has no token
    /// that could carry its reward, and is left out.
    ///
    /// `policies` are the log-probs `[B, T]` of the old policy and of the reference, which the KL penalty needs.
    pub fn apply(
        &self,
        rewards: &Tensor,
        response_mask: &Tensor,
        policies: Option<(&Tensor, &Tensor)>,
    ) -> Result<TokenAdvantages> {
        let mask = Mask::new(response_mask)?;
        let (batch, tokens) = mask.dims()?;
        if rewards.dims() != [batch] {
            bail!(
                "rewards: shape {:?}, must be [{batch}], one for each row of response_mask",
                rewards.dims()
            );
        }
        let spread = rewards.unsqueeze(1)?.broadcast_as((batch, tokens))?;
        let on_last = mask.last()?.where_cond(&spread, &spread.zeros_like()?)?;
        self.apply_to_tokens(&on_last, response_mask, policies)
    }

    /// From `token_rewards` `[B, T]`.
    pub fn apply_to_tokens(
        &self,
        token_rewards: &Tensor,
        response_mask: &Tensor,
        policies: Option<(&Tensor, &Tensor)>,
    ) -> Result<TokenAdvantages> {
        let mask = Mask::new(response_mask)?;
        mask.check_shape("token_rewards", token_rewards)?;
        if !(0. ..=1.).contains(&self.gamma) {
            bail!("gamma: {}, must be from 0 to 1", self.gamma);
        }
        let result_dtype = result_dtype(token_rewards.dtype());
        let mut metrics = Metrics::new();
        let mut rewards = mask.select(&for_statistics(token_rewards)?)?;
        if let Some(penalty) = &self.kl_penalty {
            let kl = penalty.per_token(&mask, policies)?;
            metrics.push_masked_mean("reward_kl", &kl, &mask)?;
            rewards = (rewards - (kl * penalty.coef)?)?;
        }
        if let Some(clip) = self.token_reward_clip {
            rewards = clip_tokens("token_reward_clip", &rewards, clip, &mask, &mut metrics)?;
        }
        if self.whiten_rewards {
            rewards = mask.select(&masked_whiten(&rewards, &mask, true, WHITEN_EPSILON)?)?;
        }
        let gamma = (rewards.ones_like()? * self.gamma)?;
        let returns = mask.select(&reverse_recurrence(&rewards, &gamma)?)?;
        let mut advantages = returns.clone();
        if self.whiten_advantages {
            advantages = mask.select(&masked_whiten(&advantages, &mask, true, WHITEN_EPSILON)?)?;
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
}

impl KlPenalty {
    fn per_token(&self, mask: &Mask, policies: Option<(&Tensor, &Tensor)>) -> Result<Tensor> {
        let Some((old, reference)) = policies else {
            bail!(
                "policies: absent, a KL penalty needs the log-probs of the old policy and of the reference"
            );
        };
        if !self.coef.is_finite() {
            bail!("kl_penalty.coef: {}, must be finite", self.coef);
        }
        mask.check_shape("old_log_probs", old)?;
        mask.check_shape("ref_log_probs", reference)?;
        let clean = |x: &Tensor| mask.select(&for_statistics(x)?);
        mask.select(&self.kl.per_token(&clean(old)?, &clean(reference)?, None)?)
    }
}

fn clip_tokens(
    name: &str,
    x: &Tensor,
    clip: f64,
    mask: &Mask,
    metrics: &mut Metrics,
) -> Result<Tensor> {
    check_clip(name, clip)?;
    let outside = x.abs()?.gt(clip)?.to_dtype(DType::F32)?;
    metrics.push_masked_mean(&format!("{name}_fraction"), &outside, mask)?;
    x.clamp(-clip, clip)
}
