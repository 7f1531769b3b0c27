//! A likelihood term on high-scoring samples.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::{Mask, Metrics};
use serde::{Deserialize, Serialize};

use candle_grpo_core::validate::{finite, non_negative};

/// `-coef * log_prob` on the tokens in samples whose score is above a threshold (VAPO,
/// <https://arxiv.org/abs/2504.05118>).
///
/// Use it if right answers are rare, so that the policy imitates its own successes. The term is
/// added to policy and KL terms, with the same denominators.
#[doc(alias = "VAPO")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PositiveNll {
    /// Coefficient.
    pub coef: f64,
    /// Threshold: samples with a higher score are positive. Default 0.
    #[serde(default)]
    pub score_above: f64,
}

impl PositiveNll {
    pub(crate) fn validate(&self) -> Result<()> {
        non_negative("positive_nll.coef", self.coef)?;
        finite("positive_nll.score_above", self.score_above)?;
        Ok(())
    }

    /// Computes the negative log-prob for tokens in positive samples, without the coefficient; 0
    /// elsewhere.
    pub(crate) fn per_token(
        &self,
        log_probs: &Tensor,
        scores: Option<&Tensor>,
        metrics: &mut Metrics,
        mask: &Mask,
    ) -> Result<Tensor> {
        let Some(scores) = scores else {
            bail!("scores: absent, a positive likelihood term needs the score of each sample");
        };
        let positive = scores.gt(self.score_above)?;
        metrics.push_masked_mean("positive_nll_fraction", &positive, mask)?;
        positive.where_cond(&log_probs.neg()?, &log_probs.zeros_like()?)
    }
}
