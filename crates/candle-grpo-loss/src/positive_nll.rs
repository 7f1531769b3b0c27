//! A likelihood term on samples with a high score.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::{Mask, Metrics};
use serde::{Deserialize, Serialize};

use candle_grpo_core::validate::{finite, non_negative};

/// `-coef * log_prob` on the tokens of samples whose score is above a threshold
/// (VAPO, <https://arxiv.org/abs/2504.05118>).
///
/// The term is added to the policy and KL terms and has the same denominators.
#[doc(alias = "VAPO")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PositiveNll {
    /// The coefficient of the term.
    pub coef: f64,
    /// The threshold: samples with a score above it are positive. Default 0.
    #[serde(default)]
    pub score_above: f64,
}

impl PositiveNll {
    pub(crate) fn validate(&self) -> Result<()> {
        non_negative("positive_nll.coef", self.coef)?;
        finite("positive_nll.score_above", self.score_above)?;
        Ok(())
    }

    /// Computes the negative log-prob of the tokens of positive samples, without the coefficient; 0
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
