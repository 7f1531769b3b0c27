//! The policy loss: ratio, surrogate, weights, regularisers and aggregation put together.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::{Mask, Metrics, arithmetic_dtype};
use serde::{Deserialize, Serialize};

use crate::aggregation::Aggregation;
use crate::batch::{OldPolicy, PolicyBatch, over_tokens};
use crate::importance::{ImportanceLevel, k3};
use crate::kl_loss::{KlLoss, KlValues};
use crate::limits::{check_not_negative, check_positive};
use crate::positive_nll::PositiveNll;
use crate::rollout_correction::RolloutCorrection;
use crate::surrogate::{Surrogate, SurrogateInputs};
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
    /// The log-ratio of a token, and its sum over a sequence, is clamped to plus and minus this before it is averaged and
    /// exponentiated; beyond it the gradient of the ratio is 0.
    pub log_ratio_clamp: Option<f64>,
    /// What one token scores.
    pub surrogate: Surrogate,
    /// Weights and filters for samples of another engine. They are computed over a whole step with
    /// [`RolloutCorrection::compute`]; that they are given is checked here.
    pub rollout_correction: Option<RolloutCorrection>,
    /// Sequences with a negative advantage whose mean of `rollout_log_probs - log_probs` (`old_log_probs` if there are
    /// none of the rollout) exceeds this leave the policy term (<https://arxiv.org/abs/2512.02556>).
    pub off_policy_threshold: Option<f64>,
    /// A likelihood term on samples that were right.
    pub positive_nll: Option<PositiveNll>,
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
    /// Whether a ratio of whole sequences (GSPO, GMPO) goes with an aggregation that weighs sequences by their length: such a
    /// loss is neither, and an error unless this says that it is meant.
    pub allow_length_weighting: bool,
}

impl Default for PolicyLoss {
    fn default() -> Self {
        Self {
            importance_level: ImportanceLevel::Token,
            log_ratio_clamp: Some(20.),
            surrogate: Surrogate::default(),
            rollout_correction: None,
            off_policy_threshold: None,
            positive_nll: None,
            loss_coef: 1.,
            kl: None,
            entropy_coef: 0.,
            entropy_aggregation: None,
            aggregation: Aggregation::default(),
            empty_sequences: EmptySequences::default(),
            allow_length_weighting: false,
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
    /// | `approx_kl`, `_abs`, `_k2`, `_k3` | the KL of the old policy from the policy, with `d = log_probs - old_log_probs`: -d, its absolute value, d^2 / 2, exp(d) - 1 - d |
    /// | `log_prob`, `old_log_prob` | means; `exp` of the first is twinkle's policy confidence |
    /// | `selected_fraction`, `dropped_fraction`, `positive_fraction`, `ratio_max_fraction` | of the surrogates that have them |
    /// | `positive_nll_fraction` | tokens of the likelihood term, if there is one |
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
        if let Some(c) = self.log_ratio_clamp {
            check_positive("log_ratio_clamp", c)?;
        }
        check_not_negative("loss_coef", self.loss_coef)?;
        check_not_negative("entropy_coef", self.entropy_coef)?;
        if let Some(x) = self.off_policy_threshold
            && !x.is_finite()
        {
            bail!("off_policy_threshold: {x}, must be finite");
        }
        self.surrogate.validate()?;
        self.surrogate.validate_level(self.importance_level)?;
        if let Some(correction) = &self.rollout_correction {
            correction.validate()?;
        }
        if let Some(term) = &self.positive_nll {
            term.validate()?;
        }
        if let Some(kl) = &self.kl {
            kl.validate()?;
        }
        if let Some(aggregation) = &self.entropy_aggregation {
            aggregation.validate()?;
        }
        self.aggregation.validate()?;
        self.check_length_weighting()
    }

    fn check_length_weighting(&self) -> Result<()> {
        let what = match (self.importance_level, &self.surrogate) {
            (_, Surrogate::GeometricMean(_)) => "the surrogate geometric_mean (GMPO)",
            (
                ImportanceLevel::Sequence
                | ImportanceLevel::SequenceToken
                | ImportanceLevel::SequenceProduct,
                _,
            ) => "an importance level of the sequence (GSPO)",
            _ => return Ok(()),
        };
        let aggregation = self.aggregation;
        if aggregation.weighs_by_length() && !self.allow_length_weighting {
            bail!(
                "aggregation: {aggregation:?} with {what} weighs sequences by their length, must be seq-mean-token-mean or, as LUSPO has it, seq-mean-token-sum (or set allow_length_weighting)"
            );
        }
        Ok(())
    }

    /// The loss of a micro-batch, whose gradient reaches `log_probs`, `entropy` and `kl_values`.
    ///
    /// `totals` are the counts of the whole optimiser step. The loss is f32, or f64 if `log_probs` are. Errs on options
    /// that do not fit, on shapes that differ, and if a term lacks its input. Numbers are not looked at: an advantage that is
    /// NaN gives a loss that is NaN.
    pub fn compute(&self, batch: &PolicyBatch, totals: &StepTotals) -> Result<PolicyLossOutput> {
        self.validate()?;
        totals.check()?;
        self.check_correction(batch)?;
        let totals = match self.empty_sequences {
            EmptySequences::Exclude => *totals,
            EmptySequences::Include => totals.with_empty(),
        };
        let inputs = Inputs::new(self, batch)?;
        let aggregate = |aggregation: &Aggregation, x: &Tensor| {
            aggregation.apply_with_prompts(x, &inputs.mask, &totals, batch.prompt_tokens)
        };
        let mut metrics = Metrics::new();

        let scored = self.surrogate.per_token(&inputs.for_surrogate())?;
        for (name, flag) in &scored.flags {
            metrics.push_masked_mean(name, flag, &inputs.mask)?;
        }
        inputs.push_ratio_metrics(&mut metrics)?;
        let policy = self.weighted(&scored.loss, &inputs)?;
        let mut loss = aggregate(&self.aggregation, &policy)?;

        let kl = self.kl_per_token(&inputs)?;
        if let (Some(kl), Some(config)) = (&kl, &self.kl) {
            metrics.push_masked_mean("kl", kl, &inputs.mask)?;
            loss = (loss + (aggregate(&self.aggregation, kl)? * config.coef)?)?;
        }
        if let Some(term) = &self.positive_nll {
            let nll = term.per_token(
                &inputs.log_probs,
                inputs.scores.as_ref(),
                &mut metrics,
                &inputs.mask,
            )?;
            loss = (loss + (aggregate(&self.aggregation, &nll)? * term.coef)?)?;
        }
        loss = (loss * self.loss_coef)?;

        if let Some(entropy) = &inputs.entropy {
            metrics.push_masked_mean("entropy", entropy, &inputs.mask)?;
            if self.entropy_coef > 0. {
                let bonus = match &inputs.entropy_mask {
                    Some(kept) => kept.where_cond(entropy, &entropy.zeros_like()?)?,
                    None => entropy.clone(),
                };
                let aggregation = self.entropy_aggregation.unwrap_or(self.aggregation);
                loss = (loss - (aggregate(&aggregation, &bonus)? * self.entropy_coef)?)?;
            }
        } else if self.entropy_coef > 0. {
            bail!(
                "entropy: absent, an entropy bonus needs the entropy of each position (or set entropy_coef to 0)"
            );
        }

        let constant = |x: &Tensor| inputs.mask.select(&x.detach());
        Ok(PolicyLossOutput {
            loss,
            metrics,
            tokens: TokenTerms {
                surrogate: constant(&scored.loss)?,
                policy: constant(&policy)?,
                kl: kl.as_ref().map(constant).transpose()?,
                log_ratio: constant(&inputs.log_ratio)?,
                clipped: scored
                    .flags
                    .into_iter()
                    .find(|(name, _)| *name == "clip_fraction")
                    .map(|(_, flag)| inputs.mask.select(&flag))
                    .transpose()?,
            },
        })
    }

    /// A correction must be given where one is configured, and must not where the ratio is one already.
    fn check_correction(&self, batch: &PolicyBatch) -> Result<()> {
        let configured = self
            .rollout_correction
            .as_ref()
            .is_some_and(|c| c.weight.is_some());
        match (batch.old, batch.importance_weights) {
            (OldPolicy::Rollout(_), Some(_)) => bail!(
                "importance_weights: given together with OldPolicy::Rollout, whose ratio corrects for the rollout already; leave one out"
            ),
            (OldPolicy::Rollout(_), None) if configured => bail!(
                "rollout_correction: configured together with OldPolicy::Rollout, whose ratio corrects for the rollout already; leave one out"
            ),
            _ if self.filters() && batch.policy_mask.is_none() => bail!(
                "policy_mask: absent, the configured rollout_correction has filters; pass on the kept tokens that RolloutCorrection::compute gives (also where they are the response mask already)"
            ),
            (_, None) if configured => bail!(
                "importance_weights: absent, the configured rollout_correction needs those that RolloutCorrection::compute gives for the whole step"
            ),
            _ => Ok(()),
        }
    }

    /// Whether tokens of the rollout are filtered.
    fn filters(&self) -> bool {
        self.rollout_correction
            .as_ref()
            .is_some_and(|c| !c.filters.is_empty())
    }

    /// The surrogate with everything that multiplies or masks the policy term.
    fn weighted(&self, surrogate: &Tensor, inputs: &Inputs) -> Result<Tensor> {
        let mut policy = surrogate.clone();
        if let Some(threshold) = self.off_policy_threshold {
            let kept = inputs.on_policy(threshold)?;
            policy = kept.where_cond(&policy, &policy.zeros_like()?)?;
        }
        if let Some(kept) = &inputs.policy_mask {
            policy = kept.where_cond(&policy, &policy.zeros_like()?)?;
        }
        if let Some(weights) = &inputs.importance_weights
            && !self.surrogate.absorbs_importance_weights()
        {
            policy = (policy * weights)?;
        }
        if let Some(weights) = &inputs.sample_weights {
            policy = (policy * weights)?;
        }
        Ok(policy)
    }

    fn kl_per_token(&self, inputs: &Inputs) -> Result<Option<Tensor>> {
        let Some(config) = &self.kl else {
            return Ok(None);
        };
        match (config.values, &inputs.kl_values) {
            (KlValues::Given, Some(values)) => return Ok(Some(values.clone())),
            (KlValues::Given, None) => bail!(
                "kl_values: absent, a KL loss of given values needs the divergence at each position (or set kl.values to estimated)"
            ),
            (KlValues::Estimated, Some(_)) => bail!(
                "kl_values: given, but kl.values is estimated; set it to given, or leave them out"
            ),
            (KlValues::Estimated, None) => (),
        }
        let Some(reference) = &inputs.ref_log_probs else {
            bail!(
                "ref_log_probs: absent, a KL loss needs the log-probs of the reference policy (or set kl to none)"
            );
        };
        let kl = config.per_token(
            &inputs.log_probs,
            reference,
            &inputs.old_log_probs,
            &inputs.token_log_ratio,
            &inputs.log_ratio,
        )?;
        Ok(Some(kl))
    }
}

/// The tensors of a batch, checked, in one dtype, `[B, T]` and 0 outside the mask.
struct Inputs {
    mask: Mask,
    /// With gradient.
    log_probs: Tensor,
    /// With gradient.
    kl_values: Option<Tensor>,
    /// With gradient.
    entropy: Option<Tensor>,
    old_log_probs: Tensor,
    rollout_log_probs: Option<Tensor>,
    ref_log_probs: Option<Tensor>,
    advantages: Tensor,
    scores: Option<Tensor>,
    importance_weights: Option<Tensor>,
    sample_weights: Option<Tensor>,
    /// u8
    policy_mask: Option<Tensor>,
    /// u8
    entropy_mask: Option<Tensor>,
    /// u8
    selected: Option<Tensor>,
    /// With gradient.
    token_log_ratio: Tensor,
    /// With gradient.
    log_ratio: Tensor,
}

impl Inputs {
    fn new(loss: &PolicyLoss, batch: &PolicyBatch) -> Result<Self> {
        let mask = Mask::new(batch.response_mask)?;
        let log_probs = batch.log_probs()?;
        if !log_probs.dtype().is_float() {
            bail!(
                "log_probs: {:?}, must be of a float dtype",
                log_probs.dtype()
            );
        }
        let dtype = arithmetic_dtype(log_probs.dtype());
        let selected = |name: &str, x: &Tensor| -> Result<Tensor> {
            mask.check_shape(name, x)?;
            mask.select(&x.to_dtype(dtype)?)
        };
        let spread = |name: &str, x: &Tensor| -> Result<Tensor> {
            selected(name, &over_tokens(name, &x.detach(), &mask)?)
        };
        let constant = |name: &str, x: Option<&Tensor>| -> Result<Option<Tensor>> {
            x.map(|x| selected(name, &x.detach())).transpose()
        };
        let flags = |name: &str, x: Option<&Tensor>| -> Result<Option<Tensor>> {
            x.map(|x| {
                mask.check_shape(name, x)?;
                mask.select(&x.detach().ne(0.)?)
            })
            .transpose()
        };

        let log_probs = selected("log_probs", log_probs)?;
        let old_log_probs = match constant("old_log_probs", batch.old.log_probs())? {
            Some(old) => old,
            None => log_probs.detach(),
        };
        let token_log_ratio = (&log_probs - &old_log_probs)?;
        let token_log_ratio = match loss.log_ratio_clamp {
            Some(c) => token_log_ratio.clamp(-c, c)?,
            None => token_log_ratio,
        };
        let log_ratio = loss.importance_level.log_ratio(&token_log_ratio, &mask)?;
        let log_ratio = match (loss.importance_level, loss.log_ratio_clamp) {
            // The sum over a sequence goes beyond what its tokens are clamped to.
            (ImportanceLevel::SequenceProduct, Some(c)) => log_ratio.clamp(-c, c)?,
            _ => log_ratio,
        };
        Ok(Self {
            log_ratio,
            token_log_ratio,
            kl_values: batch
                .kl_values
                .map(|x| selected("kl_values", x))
                .transpose()?,
            entropy: batch.entropy.map(|x| selected("entropy", x)).transpose()?,
            rollout_log_probs: constant("rollout_log_probs", batch.rollout_log_probs)?,
            ref_log_probs: constant("ref_log_probs", batch.ref_log_probs)?,
            advantages: spread("advantages", batch.advantages)?,
            scores: batch.scores.map(|x| spread("scores", x)).transpose()?,
            importance_weights: batch
                .importance_weights
                .map(|x| spread("importance_weights", x))
                .transpose()?,
            sample_weights: batch
                .sample_weights
                .map(|x| spread("sample_weights", x))
                .transpose()?,
            policy_mask: flags("policy_mask", batch.policy_mask)?,
            entropy_mask: flags("entropy_mask", batch.entropy_mask)?,
            selected: flags("selected_tokens", batch.selected_tokens)?,
            log_probs,
            old_log_probs,
            mask,
        })
    }

    fn for_surrogate(&self) -> SurrogateInputs<'_> {
        SurrogateInputs {
            log_probs: &self.log_probs,
            old_log_probs: &self.old_log_probs,
            token_log_ratio: &self.token_log_ratio,
            log_ratio: &self.log_ratio,
            advantages: &self.advantages,
            mask: &self.mask,
            scores: self.scores.as_ref(),
            importance_weights: self.importance_weights.as_ref(),
            selected: self.selected.as_ref(),
        }
    }

    /// 1 where the advantage is not negative or the sequence has not moved too far from the policy that drew it, u8.
    fn on_policy(&self, threshold: f64) -> Result<Tensor> {
        let drawn = self
            .rollout_log_probs
            .as_ref()
            .unwrap_or(&self.old_log_probs);
        let drift = (drawn - self.log_probs.detach())?;
        let mean = ImportanceLevel::Sequence.log_ratio(&drift, &self.mask)?;
        self.advantages.ge(0.)?.maximum(&mean.le(threshold)?)
    }

    fn push_ratio_metrics(&self, metrics: &mut Metrics) -> Result<()> {
        let mask = &self.mask;
        let ratio = self.log_ratio.detach().exp()?;
        metrics.push_masked_mean("ratio_mean", &ratio, mask)?;
        metrics.push_masked_max("ratio_max", &ratio, mask)?;
        metrics.push_masked_min("ratio_min", &ratio, mask)?;
        let d = self.token_log_ratio.detach();
        metrics.push_masked_max("token_ratio_max", &d.exp()?, mask)?;
        metrics.push_masked_mean("approx_kl", &d.neg()?, mask)?;
        metrics.push_masked_mean("approx_kl_abs", &d.abs()?, mask)?;
        metrics.push_masked_mean("approx_kl_k2", &(d.sqr()? * 0.5)?, mask)?;
        let k3 = k3(&d)?;
        metrics.push_masked_mean("approx_kl_k3", &k3, mask)?;
        metrics.push_masked_max("approx_kl_k3_max", &k3, mask)?;
        metrics.push_masked_mean("log_prob", &self.log_probs, mask)?;
        metrics.push_masked_mean("old_log_prob", &self.old_log_probs, mask)
    }
}
