//! The policy loss, which combines ratio, surrogate, weights, regularizers and aggregation.

mod batch;
mod checked_batch;
mod fused;
mod linear;
mod presets;
mod teacher_term;

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::dtype::arithmetic_dtype;
use candle_grpo_core::inputs::{Input, Inputs};
use candle_grpo_core::{Invalid, Mask, Metrics};
use serde::{Deserialize, Serialize};

pub use batch::{OldPolicy, PolicyBatch};
pub use linear::{
    LayerPart, LinearPolicyLossOutput, linear_policy_loss, linear_policy_loss_of_part,
};
pub use teacher_term::{EarlyWeight, Student, TeacherTerm, TeacherTermForm};

pub(crate) use checked_batch::over_tokens;

use crate::aggregation::Aggregation;
use crate::correction::RolloutCorrection;
use crate::importance_level::ImportanceLevel;
use crate::kl_loss::KlLoss;
use crate::positive_nll::PositiveNll;
use crate::surrogate::{Clip, LossLevel, Surrogate, TokenLoss};
use crate::totals::StepTotals;
use candle_grpo_core::validate::{Name, check, finite, non_negative, positive};
use checked_batch::{Checked, CheckedBatch};

/// Treatment for sequences without a valid token in a mean over sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum EmptySequences {
    /// They are not counted (ROLL, OpenRLHF). The default.
    #[default]
    Exclude,
    /// They are counted and reduce the mean (TRL, twinkle, Liger).
    Include,
}

/// Tokens in the entropy bonus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum EntropyTokens {
    /// All tokens in the response mask, or in [`PolicyBatch::entropy_mask`] if you set it. The
    /// default.
    #[default]
    All,
    /// The highest-entropy tokens in the whole step, as TRL's `top_entropy_quantile` selects them.
    /// Requires [`PolicyBatch::entropy_mask`].
    TopEntropy,
}

/// A policy loss: any importance level with any surrogate, regularizer and aggregation.
///
/// The default is [`PolicyLoss::grpo`].
///
/// # Start here
///
/// Most users choose a published loss, such as [`PolicyLoss::dapo`], and set at most three fields:
///
/// | field | sets | first choice |
/// | --- | --- | --- |
/// | [`surrogate`](Self::surrogate) | one token's loss: how far an update may move its probability | [`Clip::symmetric`]`(0.2)`; [`Clip::asymmetric`]`(0.2, 0.28)` keeps more exploration |
/// | [`aggregation`](Self::aggregation) | how much long and short responses count | [`Aggregation::TokenMean`], if lengths differ much |
/// | [`kl`](Self::kl) | the pull toward a reference policy | none; [`KlLoss::k3`]`(0.001)` if rewards are easy to game |
///
/// If completions come from another engine, or several updates use the same completions, also set
/// [`rollout_correction`](Self::rollout_correction). The other fields reproduce papers and
/// other libraries.
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
/// let output = policy_loss.compute(&batch, &StepTotals::count(&response_mask)?)?;
/// let gradients = output.loss.backward()?;
/// assert!(gradients.get(&log_probs).is_some());
/// assert_eq!(output.metrics.to_host()?.get("clip_fraction"), Some(0.));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct PolicyLoss {
    /// Reduction for the log-ratio: per token, or over a sequence or segment. Default `token`.
    pub importance_level: ImportanceLevel,
    /// The bound c: a token's log-ratio, and the sum over a sequence, are clamped to `[-c, c]`
    /// before `exp`. Beyond it, the ratio has no gradient. Default 20.
    pub log_ratio_clamp: Option<f64>,
    /// One token's loss. Default [`Surrogate::default`].
    pub surrogate: Surrogate,
    /// Weights and filters for samples from another engine. Compute them once per step with
    /// [`RolloutCorrection::compute`]; [`Self::compute`] checks that the batch has them. Absent by
    /// default.
    pub rollout_correction: Option<RolloutCorrection>,
    /// Drops a sequence with a negative advantage from the policy term if its mean
    /// `rollout_log_probs - log_probs` exceeds this threshold (<https://arxiv.org/abs/2512.02556>).
    /// Without rollout log-probs, `old_log_probs` are used. Absent by default.
    pub off_policy_threshold: Option<f64>,
    /// A likelihood term on high-scoring samples. Absent by default.
    pub positive_nll: Option<PositiveNll>,
    /// Coefficient for all terms except the entropy bonus and the observations (`rl_loss_coef` in
    /// ROLL).
    /// Default 1.
    pub loss_coef: f64,
    /// KL to a reference policy. Absent by default.
    pub kl: Option<KlLoss>,
    /// KL to the old policy, which is the sampling engine if its log-probs are the old ones
    /// (prime-rl). Absent by default.
    pub old_kl: Option<KlLoss>,
    /// A term from a teacher's log-probs. Absent by default.
    pub distillation: Option<TeacherTerm>,
    /// Coefficient for the mean entropy, which is subtracted from the loss. Default 0.
    pub entropy_coef: f64,
    /// Tokens in the entropy bonus. Default `all`.
    pub entropy_tokens: EntropyTokens,
    /// Aggregation for the entropies. If absent, it is `aggregation`. With an entropy mask, it is
    /// always the mean over the mask. Absent by default.
    pub entropy_aggregation: Option<Aggregation>,
    /// Coefficient for the cross entropy on observations, the response tokens that an environment
    /// or a tool wrote (ECHO, <https://arxiv.org/abs/2605.24517>, with 0.05). It is a mean over
    /// the observations in the optimizer step. Default 0.
    pub observation_coef: f64,
    /// Aggregation for the per-token losses. Default `seq-mean-token-mean`.
    pub aggregation: Aggregation,
    /// Treatment for sequences without a valid token in means over sequences. Default `exclude`.
    pub empty_sequences: EmptySequences,
    /// Accepts a ratio over whole sequences (GSPO, GMPO) with an aggregation that weights
    /// sequences by length. Default `false`.
    pub allow_length_weighting: bool,
}

impl Default for PolicyLoss {
    fn default() -> Self {
        Self {
            importance_level: ImportanceLevel::Token,
            log_ratio_clamp: Some(20.),
            surrogate: Surrogate::Clip(Clip::symmetric(0.2)),
            rollout_correction: None,
            off_policy_threshold: None,
            positive_nll: None,
            loss_coef: 1.,
            kl: None,
            old_kl: None,
            distillation: None,
            entropy_coef: 0.,
            entropy_tokens: EntropyTokens::All,
            entropy_aggregation: None,
            observation_coef: 0.,
            aggregation: Aggregation::SeqMeanTokenMean,
            empty_sequences: EmptySequences::Exclude,
            allow_length_weighting: false,
        }
    }
}

/// Output from [`PolicyLoss::compute`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PolicyLossOutput {
    /// A scalar with gradient: this micro-batch's contribution to the step's loss.
    pub loss: Tensor,
    /// Metrics over tokens in the mask, still on the device:
    ///
    /// | name | meaning |
    /// | --- | --- |
    /// | `clip_fraction`, `clip_fraction_low`, `clip_fraction_high` | fraction of tokens whose loss the clip changes, in total and by side |
    /// | `dual_clip_fraction` | fraction of tokens whose loss the dual clip changes, if there is one |
    /// | `ratio_mean`, `ratio_max`, `ratio_min` | mean, maximum and minimum ratio at the importance level; all are 1 before the first update |
    /// | `token_ratio_max`, `approx_kl_k3_max` | maximum over tokens |
    /// | `approx_kl`, `_abs`, `_k2`, `_k3` | estimates of the KL of the old policy from the policy: mean -d, abs(d), d^2 / 2 and exp(d) - 1 - d, with `d = log_probs - old_log_probs` |
    /// | `log_prob`, `old_log_prob` | means; the first one's `exp` is twinkle's policy confidence |
    /// | `selected_fraction`, `dropped_fraction`, `positive_fraction` | fraction of tokens that the surrogate selects, drops or treats as positive |
    /// | `ratio_max_fraction` | fraction of kept tokens whose weight is bounded (DPPO) |
    /// | `positive_nll_fraction` | fraction of tokens in the likelihood term, if there is one |
    /// | `kl`, `old_kl` | KL to the reference and to the old policy, if there is such a loss |
    /// | `future_kl`, `influence_weight`, `safety_fraction` | FIPO's metrics |
    /// | `teacher_log_ratio` | the teacher's log-prob minus the policy's, with distillation |
    /// | `teacher_kl`, `distillation_*` | metrics of the chosen distillation form |
    /// | `entropy` | mean entropy over the response mask, if given |
    /// | `observation_loss` | mean cross entropy on observations, if it has a coefficient |
    pub metrics: Metrics,
}

impl PolicyLoss {
    /// Checks the options and their combination.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid. The error names the option, its value and what it must be.
    pub fn validate(&self) -> Result<()> {
        if let Some(c) = self.log_ratio_clamp {
            positive("log_ratio_clamp", c)?;
        }
        non_negative("loss_coef", self.loss_coef)?;
        non_negative("entropy_coef", self.entropy_coef)?;
        non_negative("observation_coef", self.observation_coef)?;
        if let Some(x) = self.off_policy_threshold {
            finite("off_policy_threshold", x)?;
        }
        let surrogate = self.surrogate.validate();
        surrogate.map_err(|e| Invalid::within_error("surrogate", e))?;
        self.check_level()?;
        if let Some(correction) = &self.rollout_correction {
            correction.validate()?;
        }
        if let Some(term) = &self.positive_nll {
            term.validate()?;
        }
        if let Some(kl) = &self.kl {
            kl.validate("kl")?;
        }
        if let Some(kl) = &self.old_kl {
            kl.validate("old_kl")?;
        }
        if let Some(distillation) = &self.distillation {
            distillation.validate()?;
        }
        if let Some(aggregation) = &self.entropy_aggregation {
            aggregation.validate()?;
        }
        self.aggregation.validate()?;
        self.check_length_weighting()
    }

    fn check_level(&self) -> Result<()> {
        let needs = self.surrogate.needs();
        if let Some(input) = needs.iter().find(|&input| !PolicyBatch::accepts(input)) {
            let must = "be an input of a PolicyBatch";
            return Err(Invalid::new("surrogate.needs", input, must).into());
        }
        if self.surrogate.level() == LossLevel::Token {
            return Ok(());
        }
        let level = self.importance_level;
        let must = "be token with a surrogate that reduces over the sequence itself";
        let valid = level == ImportanceLevel::Token;
        check(valid, "importance_level", Name(&level), must)?;
        let weight = self.rollout_correction.as_ref().and_then(|c| c.weight);
        let must = "be absent with a surrogate that has no place for weights";
        let valid = weight.is_none() || needs.contains(Input::ImportanceWeights);
        check(valid, "rollout_correction.weight", "given", must)?;
        let valid = weight.is_none_or(|weight| weight.level != ImportanceLevel::Segment);
        let must =
            "be token, sequence or sequence_product with a surrogate of one weight per sequence";
        check(valid, "rollout_correction.weight.level", "segment", must)?;
        Ok(())
    }

    fn check_length_weighting(&self) -> Result<()> {
        let ratio = match (self.importance_level, &self.surrogate) {
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
        let valid = !aggregation.weights_by_length() || self.allow_length_weighting;
        let must = format!(
            "not weight sequences by their length with {ratio}; use seq-mean-token-mean or, for LUSPO, seq-mean-token-sum (or set allow_length_weighting)"
        );
        check(valid, "aggregation", Name(&aggregation), &must)?;
        Ok(())
    }

    /// Returns the inputs that the loss reads, so that a trainer computes them: those that the
    /// surrogate declares, and those that the other terms need. A batch from a trainer always has
    /// log-probs, advantages and response mask.
    pub fn needs(&self) -> Inputs {
        let correction = self.rollout_correction.as_ref();
        let student = self.distillation.map(|term| term.student());
        let aggregations = [
            Some(self.aggregation),
            self.entropy_aggregation,
            self.distillation.and_then(|term| term.aggregation),
        ];
        let by_prompt = aggregations.contains(&Some(Aggregation::PromptMeanTokenMean));
        let by_entropy = self.entropy_tokens == EntropyTokens::TopEntropy;
        let by_rollout = self.off_policy_threshold.is_some() || student == Some(Student::Rollout);
        self.surrogate.needs()
            | Inputs::when(self.kl.is_some(), Input::RefLogProbs)
            | Inputs::when(self.distillation.is_some(), Input::TeacherLogProbs)
            | Inputs::when(by_rollout, Input::RolloutLogProbs)
            | Inputs::when(self.positive_nll.is_some(), Input::Scores)
            | Inputs::when(self.entropy_coef > 0., Input::Entropy)
            | Inputs::when(by_entropy, Input::EntropyMask)
            | Inputs::when(by_prompt, Input::PromptTokens)
            | Inputs::when(
                correction.is_some_and(|correction| correction.weight.is_some()),
                Input::ImportanceWeights,
            )
            | Inputs::when(
                correction.is_some_and(RolloutCorrection::rejects),
                Input::PolicyMask,
            )
    }

    /// Computes a micro-batch's loss. Its gradient reaches `log_probs` and `entropy`.
    ///
    /// `totals` are counts over the whole optimizer step. The loss is f32, or f64 if `log_probs`
    /// are f64. Values are not checked: a NaN advantage gives a NaN loss.
    ///
    /// # Errors
    ///
    /// Fails if options are invalid, shapes differ, a term lacks its input, or `log_probs` are
    /// detached, because such a loss would train nothing.
    pub fn compute(&self, batch: &PolicyBatch, totals: &StepTotals) -> Result<PolicyLossOutput> {
        self.validate()?;
        totals.check()?;
        self.check_correction(batch)?;
        let totals = match self.empty_sequences {
            EmptySequences::Exclude => *totals,
            EmptySequences::Include => totals.with_empty(),
        };
        let checked = Checked::new(batch)?;
        let mut output = match fused::compute(self, &checked, &totals)? {
            Some(output) => output,
            None => self.composed(&checked, &totals)?,
        };
        if self.observation_coef > 0. {
            let mean = observation_loss(batch, &totals, &mut output.metrics)?;
            output.loss = (output.loss + (mean * self.observation_coef)?)?;
        }
        Ok(output)
    }

    /// Computes all terms except that on observations, in plain Candle operations.
    fn composed(&self, checked: &Checked, totals: &StepTotals) -> Result<PolicyLossOutput> {
        let prompt_tokens = checked.batch.prompt_tokens.as_ref();
        let mut inputs = CheckedBatch::new(self, checked)?;
        let mut metrics = Metrics::new();
        let distilled = match &self.distillation {
            Some(distillation) => distillation.apply(&mut inputs, &mut metrics)?,
            None => None,
        };
        let aggregate_by = |aggregation: Aggregation, x: &Tensor| {
            let weighted = match &inputs.token_weights {
                Some(weights) => (x * weights)?,
                None => x.clone(),
            };
            aggregation.apply_with_prompts(&weighted, &inputs.mask, totals, prompt_tokens)
        };
        let aggregate = |x: &Tensor| aggregate_by(self.aggregation, x);

        let scored = self
            .surrogate
            .per_token(&inputs.for_surrogate(&self.surrogate))?;
        for (name, flag) in &scored.flags {
            metrics.push_masked_mean(name, flag, &inputs.mask)?;
        }
        inputs.push_ratio_metrics(&mut metrics)?;
        let mut loss = aggregate(&self.weighted(&scored.loss, &inputs)?)?;
        if let Some(config) = &self.kl {
            let kl = inputs.kl(config, required_reference(&inputs.ref_log_probs)?)?;
            metrics.push_masked_mean("kl", &kl, &inputs.mask)?;
            loss = (loss + (aggregate(&kl)? * config.coef)?)?;
        }
        if let Some(config) = &self.old_kl {
            let kl = inputs.kl(config, &inputs.old_log_probs)?;
            metrics.push_masked_mean("old_kl", &kl, &inputs.mask)?;
            loss = (loss + (aggregate(&kl)? * config.coef)?)?;
        }
        if let (Some(config), Some(term)) = (&self.distillation, &distilled) {
            let aggregation = config.aggregation.unwrap_or(self.aggregation);
            loss = (loss + (aggregate_by(aggregation, term)? * config.coef)?)?;
        }
        if let Some(term) = &self.positive_nll {
            let scores = inputs.scores.as_ref();
            let nll = term.per_token(&inputs.log_probs, scores, &mut metrics, &inputs.mask)?;
            loss = (loss + (aggregate(&nll)? * term.coef)?)?;
        }
        loss = (loss * self.loss_coef)?;
        if let Some(entropy) = &inputs.entropy {
            metrics.push_masked_mean("entropy", entropy, &inputs.mask)?;
        }
        if self.entropy_coef > 0. {
            let entropy = required_entropy(&inputs.entropy)?;
            let (aggregation, totals) = self.entropy_mean(checked.batch, totals)?;
            let mask = inputs.entropy_mask.as_ref().unwrap_or(&inputs.mask);
            let mean = aggregation.apply_with_prompts(entropy, mask, &totals, prompt_tokens)?;
            loss = (loss - (mean * self.entropy_coef)?)?;
        }
        Ok(PolicyLossOutput { loss, metrics })
    }

    /// Returns the aggregation in the entropy bonus, and its counts.
    fn entropy_mean(
        &self,
        batch: &PolicyBatch,
        totals: &StepTotals,
    ) -> Result<(Aggregation, StepTotals)> {
        match (&batch.entropy_mask, self.entropy_tokens) {
            (Some(_), _) => {
                let Some(tokens) = totals.entropy_tokens else {
                    bail!(
                        "totals.entropy_tokens: absent, an entropy mask needs the number of its tokens over the whole step (StepTotals::with_entropy_mask)"
                    );
                };
                // A step whose mask is empty has no bonus.
                let totals = StepTotals {
                    tokens: tokens.max(1.),
                    ..*totals
                };
                Ok((Aggregation::TokenMean, totals))
            }
            (None, EntropyTokens::TopEntropy) => bail!(
                "entropy_mask: absent, entropy_tokens: top_entropy needs the tokens of highest entropy (candle_grpo_core::selection::top_entropy_tokens)"
            ),
            (None, EntropyTokens::All) => {
                let aggregation = self.entropy_aggregation.unwrap_or(self.aggregation);
                Ok((aggregation, *totals))
            }
        }
    }

    /// Fails if a configured correction is missing, or if there is one although the ratio already
    /// corrects.
    fn check_correction(&self, batch: &PolicyBatch) -> Result<()> {
        let correction = self.rollout_correction.as_ref();
        let has_weight = correction.is_some_and(|c| c.weight.is_some());
        let has_filters = correction.is_some_and(RolloutCorrection::rejects);
        match (&batch.old, &batch.importance_weights) {
            (OldPolicy::Rollout(_), Some(_)) => bail!(
                "importance_weights: given together with OldPolicy::Rollout, whose ratio corrects for the rollout already; leave one out"
            ),
            (OldPolicy::Rollout(_), None) if has_weight => bail!(
                "rollout_correction: configured together with OldPolicy::Rollout, whose ratio corrects for the rollout already; leave one out"
            ),
            (_, Some(_))
                if self.surrogate.level() != LossLevel::Token
                    && !self.surrogate.needs().contains(Input::ImportanceWeights) =>
            {
                bail!(
                    "importance_weights: given, the surrogate has no place for weights; leave them out"
                )
            }
            _ if has_filters && batch.policy_mask.is_none() => bail!(
                "policy_mask: absent, the configured rollout_correction has filters; pass the kept tokens that RolloutCorrection::compute gives, even if they equal the response mask"
            ),
            (_, None) if has_weight => bail!(
                "importance_weights: absent, the configured rollout_correction needs those that RolloutCorrection::compute gives for the whole step"
            ),
            _ => Ok(()),
        }
    }

    /// Applies the policy term's masks and weights to the surrogate.
    fn weighted(&self, surrogate: &Tensor, inputs: &CheckedBatch) -> Result<Tensor> {
        let needs = self.surrogate.needs();
        let mut policy = surrogate.clone();
        if let Some(threshold) = self.off_policy_threshold {
            let kept = inputs.on_policy(threshold)?;
            policy = kept.where_cond(&policy, &policy.zeros_like()?)?;
        }
        if let Some(kept) = &inputs.policy_mask
            && !needs.contains(Input::PolicyMask)
        {
            policy = kept.where_cond(&policy, &policy.zeros_like()?)?;
        }
        if let Some(weights) = &inputs.importance_weights
            && !needs.contains(Input::ImportanceWeights)
        {
            policy = policy.broadcast_mul(weights)?;
        }
        if let Some(weights) = &inputs.sample_weights {
            policy = (policy * weights)?;
        }
        Ok(policy)
    }
}

/// Returns the reference's log-probs, which a KL loss needs.
fn required_reference(ref_log_probs: &Option<Tensor>) -> Result<&Tensor> {
    match ref_log_probs {
        Some(reference) => Ok(reference),
        None => bail!(
            "ref_log_probs: absent, a KL loss needs the log-probs of the reference policy (or set kl to none)"
        ),
    }
}

/// Returns the entropy, which an entropy bonus needs.
fn required_entropy(entropy: &Option<Tensor>) -> Result<&Tensor> {
    match entropy {
        Some(entropy) => Ok(entropy),
        None => bail!(
            "entropy: absent, an entropy bonus needs the entropy of each position (or set entropy_coef to 0)"
        ),
    }
}

/// Computes a micro-batch's share of the mean cross entropy on the step's observations.
fn observation_loss(
    batch: &PolicyBatch,
    totals: &StepTotals,
    metrics: &mut Metrics,
) -> Result<Tensor> {
    let Some(mask) = &batch.observation_mask else {
        bail!(
            "observation_mask: absent, a cross entropy on observations needs their positions (or set observation_coef to 0)"
        );
    };
    let Some(observations) = totals.observations else {
        bail!(
            "totals.observations: absent, an observation mask needs the number of its tokens over the whole step (StepTotals::with_observation_mask)"
        );
    };
    let mask = Mask::new(mask)?;
    let log_probs = batch.ensure_log_probs()?;
    mask.check("log_probs", log_probs)?;
    let dtype = arithmetic_dtype(log_probs.dtype());
    let nll = mask.select(&log_probs.to_dtype(dtype)?)?.neg()?;
    metrics.push_masked_mean("observation_loss", &nll, &mask)?;
    // A step without observations has no such term.
    let totals = StepTotals {
        tokens: observations.max(1.),
        ..*totals
    };
    Aggregation::TokenMean.apply(&nll, &mask, &totals)
}
