//! Losses with a special case for tokens whose log-prob and advantage have a high covariance.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::token_loss::without;
use super::{Clip, SurrogateInputs, TokenLoss, TokenLosses};
use candle_grpo_core::Invalid;
use candle_grpo_core::inputs::{Input, Inputs};
use candle_grpo_core::validate::{check, non_negative, share};

/// The clip, with zero loss on some high-covariance tokens (Clip-Cov,
/// <https://arxiv.org/abs/2505.22617>). It slows down entropy collapse.
///
/// A token's covariance is `(A - mean A) (log_prob - mean log_prob)`. The selection depends on the
/// whole step: call [`crate::PolicyLoss::select_tokens`] once and pass the result to
/// [`crate::PolicyBatch::selected_tokens`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ClipCov {
    /// Clip for the tokens that are not selected. Default [`Clip::default`].
    pub clip: Clip,
    /// Fraction of all tokens that is selected, at random among the candidates. Default 0.0002.
    pub ratio: f64,
    /// Lower bound for a candidate's covariance, exclusive. Default 1.
    pub lower: f64,
    /// Upper bound for a candidate's covariance, exclusive. Default 5.
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

/// `-r A`, plus `coef |d|` on the highest-covariance tokens, with the log-ratio d (KL-Cov,
/// <https://arxiv.org/abs/2505.22617>).
///
/// Select the tokens as for [`ClipCov`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct KlCov {
    /// Fraction of all tokens that is selected. Default 0.0002.
    pub ratio: f64,
    /// Penalty coefficient. Default 1.
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

impl TokenLoss for ClipCov {
    fn validate(&self) -> Result<()> {
        let clip = self.clip.validate();
        clip.map_err(|e| Invalid::within_error("clip_cov", e))?;
        share("clip_cov.ratio", self.ratio)?;
        let must = format!("be below clip_cov.upper, {}", self.upper);
        check(self.lower < self.upper, "clip_cov.lower", self.lower, &must)?;
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let selected = selected("clip_cov", inputs)?;
        let TokenLosses { loss, mut flags } = self.clip.per_token(inputs)?;
        flags.push(("selected_fraction", selected.clone()));
        Ok(TokenLosses {
            loss: without(selected, &loss)?,
            flags,
        })
    }

    fn needs(&self) -> Inputs {
        Input::SelectedTokens.into()
    }
}

impl TokenLoss for KlCov {
    fn validate(&self) -> Result<()> {
        share("kl_cov.ratio", self.ratio)?;
        non_negative("kl_cov.coef", self.coef)?;
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let selected = selected("kl_cov", inputs)?;
        let d = inputs.log_ratio;
        let loss = (d.exp()? * inputs.advantages)?.neg()?;
        // d * sign(d) has gradient 0 at 0.
        let distance = (d * d.detach().sign()?)?;
        let penalty = selected.where_cond(&(distance * self.coef)?, &d.zeros_like()?)?;
        Ok(TokenLosses {
            loss: (loss + penalty)?,
            flags: vec![("selected_fraction", selected.clone())],
        })
    }

    fn needs(&self) -> Inputs {
        Input::SelectedTokens.into()
    }
}

fn selected<'a>(name: &str, inputs: &'a SurrogateInputs) -> Result<&'a Tensor> {
    match inputs.selected_tokens {
        Some(selected) => Ok(selected),
        None => bail!(
            "selected_tokens: absent, {name} needs the tokens that PolicyLoss::select_tokens selects from the whole step"
        ),
    }
}
