//! A batch's checked tensors.

use candle_core::{DType, Result, Tensor, bail};
use candle_grpo_core::dtype::arithmetic_dtype;
use candle_grpo_core::inputs::{Input, Inputs};
use candle_grpo_core::{KlEstimator, Mask, Metrics};

use super::{PolicyBatch, PolicyLoss};
use crate::importance_level::ImportanceLevel;
use crate::kl_loss::KlLoss;
use crate::surrogate::{LossLevel, Surrogate, SurrogateInputs, TokenLoss};

/// A batch's tensors: checked, in one dtype, `[B, T]`, 0 outside the mask.
pub(super) struct CheckedBatch {
    pub(super) mask: Mask,
    /// With gradient.
    pub(super) log_probs: Tensor,
    /// With gradient.
    pub(super) entropy: Option<Tensor>,
    pub(super) old_log_probs: Tensor,
    pub(super) rollout_log_probs: Option<Tensor>,
    pub(super) ref_log_probs: Option<Tensor>,
    pub(super) teacher_log_probs: Option<Tensor>,
    /// The tokens that have a teacher.
    pub(super) taught: Mask,
    values: Option<Tensor>,
    pub(super) advantages: Tensor,
    pub(super) scores: Option<Tensor>,
    /// `[B, T]` or `[B, 1]`.
    pub(super) importance_weights: Option<Tensor>,
    pub(super) sample_weights: Option<Tensor>,
    pub(super) token_weights: Option<Tensor>,
    groups: Option<Tensor>,
    /// u8
    pub(super) policy_mask: Option<Tensor>,
    pub(super) entropy_mask: Option<Mask>,
    /// u8
    selected_tokens: Option<Tensor>,
    /// With gradient.
    pub(super) token_log_ratio: Tensor,
    /// With gradient.
    pub(super) log_ratio: Tensor,
}

impl CheckedBatch {
    pub(super) fn new(loss: &PolicyLoss, checked: &Checked) -> Result<Self> {
        let batch = checked.batch;
        let log_probs = checked.clean(checked.log_probs)?;
        let old_log_probs = match checked.constant(batch.old.log_probs())? {
            Some(old) => old,
            None => log_probs.detach(),
        };
        let (token_log_ratio, log_ratio) =
            log_ratios(loss, &log_probs, &old_log_probs, &checked.mask)?;
        let entropy = batch.entropy.as_ref().map(|x| checked.clean(x));
        Ok(Self {
            log_ratio,
            token_log_ratio,
            entropy: entropy.transpose()?,
            rollout_log_probs: checked.constant(batch.rollout_log_probs.as_ref())?,
            ref_log_probs: checked.constant(batch.ref_log_probs.as_ref())?,
            teacher_log_probs: checked.constant(batch.teacher_log_probs.as_ref())?,
            taught: checked
                .both(&batch.teacher_mask)?
                .unwrap_or_else(|| checked.mask.clone()),
            values: checked.constant(batch.values.as_ref())?,
            advantages: checked.spread(&checked.advantages)?,
            scores: checked.optional_spread(&checked.scores)?,
            importance_weights: checked.cleaned_importance_weights()?,
            sample_weights: checked.optional_spread(&checked.sample_weights)?,
            token_weights: checked.constant(batch.token_weights.as_ref())?,
            groups: batch.groups.as_ref().map(Tensor::detach),
            policy_mask: checked.flags(&batch.policy_mask)?,
            entropy_mask: checked.both(&batch.entropy_mask)?,
            selected_tokens: checked.flags(&batch.selected_tokens)?,
            log_probs,
            old_log_probs,
            mask: checked.mask.clone(),
        })
    }

    /// Returns the tensors that the surrogate declares.
    pub(super) fn for_surrogate(&self, surrogate: &Surrogate) -> SurrogateInputs<'_> {
        let needs = surrogate.needs();
        fn declared(needs: Inputs, input: Input, x: &Option<Tensor>) -> Option<&Tensor> {
            x.as_ref().filter(|_| needs.contains(input))
        }
        SurrogateInputs {
            log_probs: &self.log_probs,
            old_log_probs: &self.old_log_probs,
            token_log_ratio: &self.token_log_ratio,
            log_ratio: &self.log_ratio,
            advantages: &self.advantages,
            mask: &self.mask,
            rollout_log_probs: declared(needs, Input::RolloutLogProbs, &self.rollout_log_probs),
            ref_log_probs: declared(needs, Input::RefLogProbs, &self.ref_log_probs),
            teacher_log_probs: declared(needs, Input::TeacherLogProbs, &self.teacher_log_probs),
            values: declared(needs, Input::Values, &self.values),
            entropy: declared(needs, Input::Entropy, &self.entropy),
            scores: declared(needs, Input::Scores, &self.scores),
            importance_weights: declared(needs, Input::ImportanceWeights, &self.importance_weights),
            selected_tokens: declared(needs, Input::SelectedTokens, &self.selected_tokens),
            policy_mask: declared(needs, Input::PolicyMask, &self.policy_mask),
            groups: self
                .groups
                .as_ref()
                .filter(|_| surrogate.level() == LossLevel::Group),
        }
    }

    /// Returns 1 where the advantage is at least 0 or the drift from the sampling policy is within
    /// the threshold, u8.
    pub(super) fn on_policy(&self, threshold: f64) -> Result<Tensor> {
        let sampled = self
            .rollout_log_probs
            .as_ref()
            .unwrap_or(&self.old_log_probs);
        let drift = (sampled - self.log_probs.detach())?;
        let mean = ImportanceLevel::Sequence.log_ratio(&drift, &self.mask)?;
        self.advantages.ge(0.)?.maximum(&mean.le(threshold)?)
    }

    /// Computes a KL loss's estimate for each token, without its coefficient.
    pub(super) fn kl(&self, config: &KlLoss, reference: &Tensor) -> Result<Tensor> {
        config.per_token(
            &self.log_probs,
            reference,
            &self.old_log_probs,
            &self.token_log_ratio,
            &self.log_ratio,
        )
    }

    pub(super) fn push_ratio_metrics(&self, metrics: &mut Metrics) -> Result<()> {
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
        let k3 = KlEstimator::K3.estimate(&d.neg()?)?;
        metrics.push_masked_mean("approx_kl_k3", &k3, mask)?;
        metrics.push_masked_max("approx_kl_k3_max", &k3, mask)?;
        metrics.push_masked_mean("log_prob", &self.log_probs, mask)?;
        metrics.push_masked_mean("old_log_prob", &self.old_log_probs, mask)
    }
}

/// Computes each token's clamped log-ratio, and the log-ratio at the importance level.
fn log_ratios(
    loss: &PolicyLoss,
    log_probs: &Tensor,
    old_log_probs: &Tensor,
    mask: &Mask,
) -> Result<(Tensor, Tensor)> {
    let clamped = |x: Tensor| match loss.log_ratio_clamp {
        Some(c) => x.clamp(-c, c),
        None => Ok(x),
    };
    let per_token = clamped((log_probs - old_log_probs)?)?;
    let log_ratio = loss.importance_level.log_ratio(&per_token, mask)?;
    let log_ratio = match loss.importance_level {
        // A sum over clamped log-ratios can exceed the clamp.
        ImportanceLevel::SequenceProduct => clamped(log_ratio)?,
        _ => log_ratio,
    };
    Ok((per_token, log_ratio))
}

/// A batch whose tensors have the right shapes and are on the mask's device.
pub(super) struct Checked<'a> {
    pub(super) batch: &'a PolicyBatch,
    pub(super) log_probs: &'a Tensor,
    pub(super) mask: Mask,
    /// Detached, `[B, T]` or `[B, 1]`.
    pub(super) advantages: Tensor,
    /// Detached, `[B, T]` or `[B, 1]`.
    pub(super) importance_weights: Option<Tensor>,
    /// Detached, `[B, T]` or `[B, 1]`.
    pub(super) sample_weights: Option<Tensor>,
    scores: Option<Tensor>,
    dtype: DType,
}

impl<'a> Checked<'a> {
    pub(super) fn new(batch: &'a PolicyBatch) -> Result<Self> {
        let log_probs = batch.ensure_log_probs()?;
        if !log_probs.dtype().is_float() {
            bail!(
                "log_probs: {:?}, must be of a float dtype",
                log_probs.dtype()
            );
        }
        if !log_probs.track_op() {
            bail!(
                "log_probs: detached, must be computed from the variables of the policy, or the loss has no gradient (for the value alone, pass a Var)"
            );
        }
        let mask = Mask::new(&batch.response_mask)?;
        mask.check("log_probs", log_probs)?;
        for (name, x) in [
            ("old_log_probs", batch.old.log_probs()),
            ("entropy", batch.entropy.as_ref()),
            ("rollout_log_probs", batch.rollout_log_probs.as_ref()),
            ("ref_log_probs", batch.ref_log_probs.as_ref()),
            ("teacher_log_probs", batch.teacher_log_probs.as_ref()),
            ("teacher_mask", batch.teacher_mask.as_ref()),
            ("values", batch.values.as_ref()),
            ("token_weights", batch.token_weights.as_ref()),
            ("policy_mask", batch.policy_mask.as_ref()),
            ("entropy_mask", batch.entropy_mask.as_ref()),
            ("selected_tokens", batch.selected_tokens.as_ref()),
        ] {
            if let Some(x) = x {
                mask.check(name, x)?;
            }
        }
        let per_sequence = |name: &str, x: &Option<Tensor>| {
            let x = x.as_ref().map(|x| column_or_tokens(name, x, &mask));
            x.transpose()
        };
        Ok(Self {
            advantages: column_or_tokens("advantages", &batch.advantages, &mask)?,
            scores: per_sequence("scores", &batch.scores)?,
            importance_weights: per_sequence("importance_weights", &batch.importance_weights)?,
            sample_weights: per_sequence("sample_weights", &batch.sample_weights)?,
            dtype: arithmetic_dtype(log_probs.dtype()),
            batch,
            log_probs,
            mask,
        })
    }

    /// Sets a `[B, T]` tensor, which keeps its gradient, to 0 outside the mask.
    fn clean(&self, x: &Tensor) -> Result<Tensor> {
        self.mask.select(&x.to_dtype(self.dtype)?)
    }

    /// Cleans a `[B, T]` tensor and detaches it.
    fn constant(&self, x: Option<&Tensor>) -> Result<Option<Tensor>> {
        x.map(|x| self.clean(&x.detach())).transpose()
    }

    /// Cleans a `[B, 1]` or `[B, T]` tensor: `[B, T]`.
    fn spread(&self, x: &Tensor) -> Result<Tensor> {
        self.clean(&repeated(x, &self.mask)?)
    }

    fn optional_spread(&self, x: &Option<Tensor>) -> Result<Option<Tensor>> {
        x.as_ref().map(|x| self.spread(x)).transpose()
    }

    /// Cleans weights `[B, T]`, or one per sequence as `[B, 1]` with 1 for an empty sequence.
    fn cleaned_importance_weights(&self) -> Result<Option<Tensor>> {
        let Some(x) = &self.importance_weights else {
            return Ok(None);
        };
        if x.dim(1)? != 1 {
            return self.clean(x).map(Some);
        }
        let per_sequence = x.to_dtype(self.dtype)?;
        let has_tokens = self.mask.lengths(self.dtype)?.gt(0.)?;
        let weights = has_tokens.where_cond(&per_sequence, &per_sequence.ones_like()?)?;
        Ok(Some(weights))
    }

    /// Returns the tokens in the mask that are also in `x` `[B, T]`.
    fn both(&self, x: &Option<Tensor>) -> Result<Option<Mask>> {
        x.as_ref().map(|x| self.mask.and(&x.detach())).transpose()
    }

    /// Cleans a `[B, T]` tensor and detaches it, as u8 flags.
    fn flags(&self, x: &Option<Tensor>) -> Result<Option<Tensor>> {
        x.as_ref()
            .map(|x| self.mask.select(&x.detach().ne(0.)?))
            .transpose()
    }
}

/// Returns `[B]` and `[B, 1]` as `[B, 1]`, and `[B, T]` as it is, detached. Moves values per
/// sequence from the CPU to the mask's device.
fn column_or_tokens(name: &str, x: &Tensor, mask: &Mask) -> Result<Tensor> {
    let (batch, tokens) = mask.dims()?;
    let x = x.detach();
    let column = match *x.dims() {
        [b] if b == batch => x.unsqueeze(1)?,
        [b, 1] if b == batch => x,
        [b, t] if [b, t] == [batch, tokens] => {
            mask.check(name, &x)?;
            return Ok(x);
        }
        _ => bail!(
            "{name}: shape {:?}, must be [{batch}] or [{batch}, {tokens}]",
            x.dims()
        ),
    };
    let column = if column.device().is_cpu() {
        column.to_device(mask.selected().device())?
    } else {
        column
    };
    mask.check(name, &column.broadcast_as((batch, tokens))?)?;
    Ok(column)
}

/// Repeats `[B, 1]` for each token. Returns `[B, T]` unchanged.
fn repeated(x: &Tensor, mask: &Mask) -> Result<Tensor> {
    x.broadcast_as(mask.dims()?)?.contiguous()
}

/// Repeats `[B]` and `[B, 1]` for each token. Returns `[B, T]` unchanged, detached.
pub(crate) fn over_tokens(name: &str, x: &Tensor, mask: &Mask) -> Result<Tensor> {
    repeated(&column_or_tokens(name, x, mask)?, mask)
}
