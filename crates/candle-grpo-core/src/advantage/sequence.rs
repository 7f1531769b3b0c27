//! From rewards of sequences to advantages of sequences.

use candle_core::{DType, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::advantage::{
    AdvantageBatch, AdvantageEstimator, Advantages, GroupAdvantage, KlPenalty, Scale,
    SequenceInputs,
};
use crate::metrics::Metrics;
use crate::rewards::{RewardTensor, combine};

/// Advantages `[B]`: the KL penalty comes off the rewards, then `group` and `scale` make them advantages, which are
/// clipped at last.
///
/// [`GroupAdvantage::compute`] with the scale as one of the settings, and with the tensors of a batch at hand.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SequenceAdvantage {
    /// Taken off the reward of each sequence (TRL's RLOO).
    pub kl_penalty: Option<KlPenalty>,
    /// What is subtracted, and everything else but the scale.
    pub group: GroupAdvantage,
    /// What is divided by.
    pub scale: Scale,
    /// Advantages are clipped to lie from the first to the second (OpenRLHF's `reward.clip_range`, which it applies after
    /// the baseline).
    pub clip: Option<[f64; 2]>,
}

impl Default for SequenceAdvantage {
    /// GRPO.
    fn default() -> Self {
        Self::new(GroupAdvantage::grpo(), Scale::Group)
    }
}

impl SequenceAdvantage {
    /// Without KL penalty and clip.
    pub fn new(group: GroupAdvantage, scale: Scale) -> Self {
        Self {
            kl_penalty: None,
            group,
            scale,
            clip: None,
        }
    }

    /// Checks the options; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        self.group.validate_with(self.scale)?;
        if let Some(penalty) = &self.kl_penalty {
            penalty.validate_as("kl_penalty")?;
        }
        if let Some(clip) = self.clip {
            check_range("clip", clip)?;
        }
        Ok(())
    }

    /// The rewards after the KL penalty. Only the sum of several components can be penalised.
    fn penalised(
        &self,
        rewards: RewardTensor,
        batch: &AdvantageBatch<'_>,
    ) -> Result<(GroupAdvantage, RewardTensor)> {
        let Some(penalty) = &self.kl_penalty else {
            return Ok((self.group.clone(), rewards));
        };
        let group = &self.group;
        let (sums, scored) = combine(&rewards, group.reward_weights.as_deref(), group.non_finite)?;
        // A sample without a score stays one.
        let missing = (sums.zeros_like()? + f64::NAN)?;
        let penalised = penalty.off_sequences(&scored.where_cond(&sums, &missing)?, batch)?;
        let group = GroupAdvantage {
            reward_weights: None,
            ..group.clone()
        };
        let values = penalised.to_dtype(rewards.values.dtype())?;
        Ok((group, RewardTensor { values, ..rewards }))
    }
}

impl AdvantageEstimator for SequenceAdvantage {
    /// From the rewards `[B]` or `[B, K]` of the batch or, if it has none, from the sums of its token rewards.
    fn estimate(&self, batch: &AdvantageBatch<'_>) -> Result<Advantages> {
        self.validate()?;
        let (group, rewards) = self.penalised(batch.sequence_rewards()?, batch)?;
        let mask = match batch.response_mask {
            Some(_) => Some(batch.mask()?),
            None => None,
        };
        let inputs = SequenceInputs {
            rewards,
            groups: &batch.groups,
            mask: mask.as_ref(),
            reward_baselines: batch.reward_baselines,
        };
        let mut advantages = Advantages::new(group.compute_on(&inputs, self.scale)?);
        if let Some([low, high]) = self.clip {
            let x = &advantages.advantages;
            let clipped = x.clamp(low, high)?;
            count_changed(
                "sequence_clip_fraction",
                x,
                &clipped,
                &mut advantages.metrics,
            )?;
            advantages.advantages = clipped;
        }
        Ok(advantages)
    }
}

/// An error that names the two bounds of a clip unless they are finite and in order.
pub(crate) fn check_range(name: &str, [low, high]: [f64; 2]) -> Result<()> {
    if !(low < high && low.is_finite() && high.is_finite()) {
        bail!("{name}: [{low}, {high}], must be two finite numbers, the smaller one first");
    }
    Ok(())
}

fn count_changed(name: &str, x: &Tensor, clipped: &Tensor, metrics: &mut Metrics) -> Result<()> {
    let changed = x.ne(clipped)?.to_dtype(DType::F32)?;
    metrics.push_mean(name, &changed.sum_all()?, &changed.ones_like()?.sum_all()?)
}
