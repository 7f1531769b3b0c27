//! A likelihood term on samples that were right.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::{Mask, Metrics};
use serde::{Deserialize, Serialize};

use crate::limits::check_not_negative;

/// `-coef * log_prob` on the tokens of samples whose score is above a threshold, added to the policy and KL terms with the
/// same denominators (VAPO, <https://arxiv.org/abs/2504.05118>).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PositiveNll {
    /// The weight of the term.
    pub coef: f64,
    /// Samples with a score above this are positive.
    #[serde(default)]
    pub score_above: f64,
}

impl PositiveNll {
    pub(crate) fn validate(&self) -> Result<()> {
        check_not_negative("positive_nll.coef", self.coef)?;
        if !self.score_above.is_finite() {
            bail!(
                "positive_nll.score_above: {}, must be finite",
                self.score_above
            );
        }
        Ok(())
    }

    /// The negative log-prob of the tokens of positive samples, without the coefficient; 0 elsewhere.
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
