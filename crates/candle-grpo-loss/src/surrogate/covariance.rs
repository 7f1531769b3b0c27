//! Losses that treat the tokens of high covariance between log-prob and advantage on their own.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::{Clip, SurrogateInputs, TokenLosses, not};
use crate::limits::check_not_negative;

/// The clip, with the loss of some tokens of high covariance set to 0
/// (Clip-Cov, <https://arxiv.org/abs/2505.22617>).
///
/// The covariance of a token is `(A - mean A) (log_prob - mean log_prob)`. Which tokens are taken depends on the whole
/// step: select them once with [`crate::PolicyLoss::select_tokens_to_host`] and pass them on with
/// [`crate::PolicyBatch::selected_tokens`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClipCov {
    /// The clip of the other tokens.
    pub clip: Clip,
    /// The share of all tokens that is taken, at random among the candidates.
    pub ratio: f64,
    /// Candidates have a covariance above this.
    pub lower: f64,
    /// Candidates have a covariance below this.
    pub upper: f64,
}

impl Default for ClipCov {
    fn default() -> Self {
        Self {
            clip: Clip::default(),
            ratio: 2e-4,
            lower: 1.,
            upper: 5.,
        }
    }
}

/// `-r A`, and `coef |d|` more for the tokens of highest covariance, with d the log-ratio
/// (KL-Cov, <https://arxiv.org/abs/2505.22617>). The tokens are selected as for [`ClipCov`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KlCov {
    /// The share of all tokens that is taken.
    pub ratio: f64,
    /// The weight of the penalty.
    pub coef: f64,
}

impl Default for KlCov {
    fn default() -> Self {
        Self {
            ratio: 2e-4,
            coef: 1.,
        }
    }
}

impl ClipCov {
    pub(super) fn validate(&self) -> Result<()> {
        self.clip.validate()?;
        check_share("clip_cov.ratio", self.ratio)?;
        if self.lower.is_nan() || self.upper.is_nan() || self.lower >= self.upper {
            bail!(
                "clip_cov.lower: {}, must be below clip_cov.upper, {}",
                self.lower,
                self.upper
            );
        }
        Ok(())
    }

    pub(super) fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let selected = selected("clip_cov", inputs)?;
        let TokenLosses { loss, mut flags } = self.clip.per_token(inputs)?;
        flags.push(("selected_fraction", selected.clone()));
        Ok(TokenLosses {
            loss: not(selected)?.where_cond(&loss, &loss.zeros_like()?)?,
            flags,
        })
    }
}

impl KlCov {
    pub(super) fn validate(&self) -> Result<()> {
        check_share("kl_cov.ratio", self.ratio)?;
        check_not_negative("kl_cov.coef", self.coef)
    }

    pub(super) fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let selected = selected("kl_cov", inputs)?;
        let d = inputs.log_ratio;
        let loss = (d.exp()? * inputs.advantages)?.neg()?;
        // d times its own sign, whose gradient at 0 is 0.
        let distance = (d * d.detach().sign()?)?;
        let penalty = selected.where_cond(&(distance * self.coef)?, &d.zeros_like()?)?;
        Ok(TokenLosses {
            loss: (loss + penalty)?,
            flags: vec![("selected_fraction", selected.clone())],
        })
    }
}

fn selected<'a>(name: &str, inputs: &'a SurrogateInputs) -> Result<&'a Tensor> {
    match inputs.selected {
        Some(selected) => Ok(selected),
        None => bail!(
            "selected_tokens: absent, {name} needs the tokens that PolicyLoss::select_tokens_to_host takes from the whole step"
        ),
    }
}

fn check_share(name: &str, x: f64) -> Result<()> {
    if !(x > 0. && x <= 1.) {
        bail!("{name}: {x}, must be above 0 and at most 1");
    }
    Ok(())
}
