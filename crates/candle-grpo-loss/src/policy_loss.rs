//! The policy loss: ratio, surrogate, weights, regularisers and aggregation put together.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::{Mask, Metrics, result_dtype};
use serde::{Deserialize, Serialize};

use crate::aggregation::Aggregation;
use crate::batch::PolicyBatch;
use crate::importance::ImportanceLevel;
use crate::kl_loss::KlLoss;
use crate::surrogate::{Surrogate, SurrogateInputs, push_flags};
use crate::totals::StepTotals;

/// Whether a sequence without a token that counts is counted in the mean over sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EmptySequences {
    /// It is not (ROLL, OpenRLHF).
    #[default]
    Exclude,
    /// It is, and makes the loss smaller (TRL, twinkle, Liger).
    Include,
}

/// A policy loss is a point of a product: any importance level with any surrogate, regulariser and aggregation.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_grpo_loss::{Aggregation, Clip, KlLoss, PolicyBatch, PolicyLoss, StepTotals, Surrogate};
///
/// let device = Device::Cpu;
/// let log_probs = Var::new(&[[-1f32, -0.5], [-2., -1.2]], &device)?;
/// let old_log_probs = log_probs.as_detached_tensor();
/// let ref_log_probs = Tensor::new(&[[-0.9f32, -0.9], [-1.5, -1.]], &device)?;
/// let advantages = Tensor::new(&[1f32, -0.5], &device)?;
/// let response_mask = Tensor::new(&[[1u8, 1], [1, 0]], &device)?;
///
/// let policy_loss = PolicyLoss {
///     surrogate: Surrogate::Clip(Clip::asymmetric(0.2, 0.28)),
///     kl: Some(KlLoss::k3(0.001)),
///     aggregation: Aggregation::TokenMean,
///     ..Default::default()
/// };
/// let batch = PolicyBatch::new(&log_probs, &advantages, &response_mask)
///     .old_log_probs(&old_log_probs)
///     .ref_log_probs(&ref_log_probs);
/// let output = policy_loss.compute(&batch, &StepTotals::to_host(&response_mask)?)?;
/// let gradients = output.loss.backward()?;
/// assert!(gradients.get(&log_probs).is_some());
/// assert_eq!(output.metrics.to_host()?.get("clip_fraction"), Some(0.));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyLoss {
    /// Over what the log-ratio is averaged.
    pub importance_level: ImportanceLevel,
    /// The log-ratio of a token is clamped to plus and minus this before it is averaged and exponentiated; beyond it the
    /// gradient of the ratio is 0.
    pub log_ratio_clamp: Option<f64>,
    /// What one token scores.
    pub surrogate: Surrogate,
    /// Multiplies policy and KL term, but not the entropy bonus (`rl_loss_coef` in ROLL).
    pub loss_coef: f64,
    /// The KL to a reference policy.
    pub kl: Option<KlLoss>,
    /// What multiplies the mean entropy that is taken off the loss.
    pub entropy_coef: f64,
    /// How the entropies of tokens become one number; absent: as the losses do.
    pub entropy_aggregation: Option<Aggregation>,
    /// How the losses of tokens become one number.
    pub aggregation: Aggregation,
    /// Whether sequences without a token count in means over sequences.
    pub empty_sequences: EmptySequences,
}

impl Default for PolicyLoss {
    fn default() -> Self {
        Self {
            importance_level: ImportanceLevel::Token,
            log_ratio_clamp: Some(20.),
            surrogate: Surrogate::default(),
            loss_coef: 1.,
            kl: None,
            entropy_coef: 0.,
            entropy_aggregation: None,
            aggregation: Aggregation::default(),
            empty_sequences: EmptySequences::default(),
        }
    }
}

/// What [`PolicyLoss::compute`] returns.
#[derive(Debug, Clone)]
pub struct PolicyLossOutput {
    /// A scalar with gradient: the share of this micro-batch in the loss of the step.
    pub loss: Tensor,
    /// Figures over the tokens of the mask, still on the device:
    ///
    /// | name | meaning |
    /// | --- | --- |
    /// | `clip_fraction`, `clip_fraction_low`, `clip_fraction_high` | tokens whose loss the clip changed, and by the side on which it did |
    /// | `dual_clip_fraction` | tokens whose loss the dual clip changed, if there is one |
    /// | `ratio_mean`, `ratio_max`, `ratio_min` | of the ratio at the importance level |
    /// | `token_ratio_max`, `approx_kl_k3_max` | the largest of a token |
    /// | `approx_kl`, `approx_kl_k2`, `approx_kl_k3` | the KL of the old policy from the policy, with `d = log_probs - old_log_probs`: -d, d^2 / 2, exp(d) - 1 - d |
    /// | `kl` | the KL to the reference, if there is a KL loss |
    /// | `entropy` | if it was given |
    pub metrics: Metrics,
    /// What the loss is made of, token by token.
    pub tokens: TokenTerms,
}

/// The terms of the loss before aggregation, `[B, T]`, without gradient and 0 outside the mask.
#[derive(Debug, Clone)]
pub struct TokenTerms {
    /// The surrogate, before any weight.
    pub surrogate: Tensor,
    /// The surrogate times importance and sample weights.
    pub policy: Tensor,
    /// The KL estimate, without its coefficient.
    pub kl: Option<Tensor>,
    /// The log-ratio at the importance level.
    pub log_ratio: Tensor,
    /// 1 where the clip changed the loss, u8; absent for surrogates that do not clip.
    pub clipped: Option<Tensor>,
}

impl PolicyLoss {
    /// Checks the options and their combination; the error names what is wrong.
    pub fn validate(&self) -> Result<()> {
        if let Some(c) = self.log_ratio_clamp
            && !(c > 0. && c.is_finite())
        {
            bail!("log_ratio_clamp: {c}, must be positive and finite");
        }
        for (name, x) in [
            ("loss_coef", self.loss_coef),
            ("entropy_coef", self.entropy_coef),
        ] {
            if !(x >= 0. && x.is_finite()) {
                bail!("{name}: {x}, must be at least 0 and finite");
            }
        }
        self.surrogate.validate()?;
        if let Some(kl) = &self.kl {
            kl.validate()?;
        }
        if let Some(aggregation) = &self.entropy_aggregation {
            aggregation.validate()?;
        }
        self.aggregation.validate()
    }

    /// The loss of a micro-batch, whose gradient reaches `log_probs` and `entropy`.
    ///
    /// `totals` are the counts of the whole optimiser step. The loss is f32, or f64 if `log_probs` are. Errs on options
    /// that do not fit, on shapes that differ, and if a KL loss or an entropy bonus lacks its input.
    pub fn compute(&self, batch: &PolicyBatch, totals: &StepTotals) -> Result<PolicyLossOutput> {
        self.validate()?;
        let totals = match self.empty_sequences {
            EmptySequences::Exclude => *totals,
            EmptySequences::Include => totals.with_empty(),
        };
        let mask = Mask::new(batch.response_mask)?;
        let dtype = result_dtype(batch.log_probs.dtype());
        let selected = |name: &str, x: &Tensor| -> Result<Tensor> {
            mask.check_shape(name, x)?;
            mask.select(&x.to_dtype(dtype)?)
        };
        let constant = |name: &str, x: &Tensor| selected(name, &x.detach());

        let log_probs = selected("log_probs", batch.log_probs)?;
        let old_log_probs = match batch.old_log_probs {
            Some(old) => constant("old_log_probs", old)?,
            None => log_probs.detach(),
        };
        let advantages = constant(
            "advantages",
            &over_tokens("advantages", batch.advantages, &mask)?,
        )?;

        let token_log_ratio = (&log_probs - &old_log_probs)?;
        let token_log_ratio = match self.log_ratio_clamp {
            Some(c) => token_log_ratio.clamp(-c, c)?,
            None => token_log_ratio,
        };
        let log_ratio = self.importance_level.log_ratio(&token_log_ratio, &mask)?;

        let mut metrics = Metrics::new();
        let scored = self.surrogate.per_token(&SurrogateInputs {
            log_probs: &log_probs,
            log_ratio: &log_ratio,
            advantages: &advantages,
        })?;
        push_flags(&mut metrics, &scored.flags, &mask)?;
        push_ratio_metrics(&mut metrics, &token_log_ratio, &log_ratio, &mask)?;

        let mut policy = scored.loss.clone();
        for (name, weights) in [
            ("importance_weights", batch.importance_weights),
            ("sample_weights", batch.sample_weights),
        ] {
            if let Some(weights) = weights {
                policy = (policy * constant(name, &over_tokens(name, weights, &mask)?)?)?;
            }
        }
        let mut loss = self.aggregation.apply(&policy, &mask, &totals)?;

        let kl = match (&self.kl, batch.ref_log_probs) {
            (None, _) => None,
            (Some(_), None) => bail!(
                "ref_log_probs: absent, a KL loss needs the log-probs of the reference policy (or set kl to none)"
            ),
            (Some(config), Some(reference)) => {
                let reference = constant("ref_log_probs", reference)?;
                let kl = config.per_token(&log_probs, &reference, &old_log_probs, &log_ratio)?;
                metrics.push_masked_mean("kl", &kl, &mask)?;
                let term = self.aggregation.apply(&kl, &mask, &totals)?;
                loss = (loss + (term * config.coef)?)?;
                Some(kl)
            }
        };
        loss = (loss * self.loss_coef)?;

        match batch.entropy {
            None if self.entropy_coef > 0. => bail!(
                "entropy: absent, an entropy bonus needs the entropy of each position (or set entropy_coef to 0)"
            ),
            None => {}
            Some(entropy) => {
                let entropy = selected("entropy", entropy)?;
                metrics.push_masked_mean("entropy", &entropy, &mask)?;
                if self.entropy_coef > 0. {
                    let bonus = self
                        .entropy_aggregation
                        .unwrap_or(self.aggregation)
                        .apply(&entropy, &mask, &totals)?;
                    loss = (loss - (bonus * self.entropy_coef)?)?;
                }
            }
        }

        let clipped = scored
            .flags
            .into_iter()
            .find_map(|(name, flag)| (name == "clip_fraction").then_some(flag));
        Ok(PolicyLossOutput {
            loss,
            metrics,
            tokens: TokenTerms {
                surrogate: mask.select(&scored.loss.detach())?,
                policy: mask.select(&policy.detach())?,
                kl: kl.map(|kl| mask.select(&kl.detach())).transpose()?,
                log_ratio: mask.select(&log_ratio.detach())?,
                clipped,
            },
        })
    }
}

/// `[B]` and `[B, 1]` repeated for each token; `[B, T]` as it is.
fn over_tokens(name: &str, x: &Tensor, mask: &Mask) -> Result<Tensor> {
    let (batch, tokens) = mask.dims()?;
    let column = match *x.dims() {
        [b] if b == batch => x.unsqueeze(1)?,
        [b, 1] if b == batch => x.clone(),
        [b, t] if (b, t) == (batch, tokens) => return Ok(x.clone()),
        _ => bail!(
            "{name}: shape {:?}, must be [{batch}] or [{batch}, {tokens}]",
            x.dims()
        ),
    };
    column.broadcast_as((batch, tokens))?.contiguous()
}

fn push_ratio_metrics(
    metrics: &mut Metrics,
    token_log_ratio: &Tensor,
    log_ratio: &Tensor,
    mask: &Mask,
) -> Result<()> {
    let ratio = log_ratio.detach().exp()?;
    metrics.push_masked_mean("ratio_mean", &ratio, mask)?;
    metrics.push_masked_max("ratio_max", &ratio, mask)?;
    metrics.push_masked_min("ratio_min", &ratio, mask)?;
    let d = token_log_ratio.detach();
    metrics.push_masked_max("token_ratio_max", &d.exp()?, mask)?;
    metrics.push_masked_mean("approx_kl", &d.neg()?, mask)?;
    metrics.push_masked_mean("approx_kl_k2", &(d.sqr()? * 0.5)?, mask)?;
    let k3 = ((d.exp()? - 1.)? - &d)?;
    metrics.push_masked_mean("approx_kl_k3", &k3, mask)?;
    metrics.push_masked_max("approx_kl_k3_max", &k3, mask)
}
