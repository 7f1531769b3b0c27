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
    pub(super) fn new(loss: &PolicyLoss, batch: &PolicyBatch) -> Result<Self> {
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
        let clean = Cleaner {
            mask: Mask::new(&batch.response_mask)?,
            dtype: arithmetic_dtype(log_probs.dtype()),
        };
        let log_probs = clean.per_token("log_probs", log_probs)?;
        let old_log_probs = match clean.constant("old_log_probs", batch.old.log_probs())? {
            Some(old) => old,
            None => log_probs.detach(),
        };
        let (token_log_ratio, log_ratio) =
            log_ratios(loss, &log_probs, &old_log_probs, &clean.mask)?;
        let entropy = batch.entropy.as_ref();
        let entropy = entropy.map(|x| clean.per_token("entropy", x));
        Ok(Self {
            log_ratio,
            token_log_ratio,
            entropy: entropy.transpose()?,
            rollout_log_probs: clean
                .constant("rollout_log_probs", batch.rollout_log_probs.as_ref())?,
            ref_log_probs: clean.constant("ref_log_probs", batch.ref_log_probs.as_ref())?,
            teacher_log_probs: clean
                .constant("teacher_log_probs", batch.teacher_log_probs.as_ref())?,
            taught: clean
                .both("teacher_mask", &batch.teacher_mask)?
                .unwrap_or_else(|| clean.mask.clone()),
            values: clean.constant("values", batch.values.as_ref())?,
            advantages: clean.spread("advantages", &batch.advantages)?,
            scores: clean.optional_spread("scores", &batch.scores)?,
            importance_weights: clean.importance_weights(&batch.importance_weights)?,
            sample_weights: clean.optional_spread("sample_weights", &batch.sample_weights)?,
            token_weights: clean.constant("token_weights", batch.token_weights.as_ref())?,
            groups: batch.groups.as_ref().map(Tensor::detach),
            policy_mask: clean.flags("policy_mask", &batch.policy_mask)?,
            entropy_mask: clean.both("entropy_mask", &batch.entropy_mask)?,
            selected_tokens: clean.flags("selected_tokens", &batch.selected_tokens)?,
            log_probs,
            old_log_probs,
            mask: clean.mask,
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

/// Checks tensors against the mask, and sets them to 0 outside it.
struct Cleaner {
    mask: Mask,
    dtype: DType,
}

impl Cleaner {
    /// Cleans a `[B, T]` tensor that keeps its gradient.
    fn per_token(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        self.mask.check(name, x)?;
        self.mask.select(&x.to_dtype(self.dtype)?)
    }

    /// Cleans a `[B, T]` tensor and detaches it.
    fn constant(&self, name: &str, x: Option<&Tensor>) -> Result<Option<Tensor>> {
        x.map(|x| self.per_token(name, &x.detach())).transpose()
    }

    /// Cleans a `[B]`, `[B, 1]` or `[B, T]` tensor and detaches it: `[B, T]`.
    fn spread(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        self.per_token(name, &over_tokens(name, &x.detach(), &self.mask)?)
    }

    fn optional_spread(&self, name: &str, x: &Option<Tensor>) -> Result<Option<Tensor>> {
        x.as_ref().map(|x| self.spread(name, x)).transpose()
    }

    /// Cleans weights `[B, T]`, or one per sequence as `[B, 1]` with 1 for an empty sequence.
    fn importance_weights(&self, x: &Option<Tensor>) -> Result<Option<Tensor>> {
        let Some(x) = x else {
            return Ok(None);
        };
        let spread = self.spread("importance_weights", x)?;
        let Some(per_sequence) = per_sequence(x, &self.mask)? else {
            return Ok(Some(spread));
        };
        let per_sequence = per_sequence.detach().to_dtype(self.dtype)?;
        let has_tokens = self.mask.lengths(self.dtype)?.gt(0.)?;
        let weights = has_tokens.where_cond(&per_sequence, &per_sequence.ones_like()?)?;
        Ok(Some(weights))
    }

    /// Returns the tokens in the mask that are also in `x` `[B, T]`.
    fn both(&self, name: &str, x: &Option<Tensor>) -> Result<Option<Mask>> {
        x.as_ref()
            .map(|x| {
                self.mask.check(name, x)?;
                self.mask.and(&x.detach())
            })
            .transpose()
    }

    /// Cleans a `[B, T]` tensor and detaches it, as u8 flags.
    fn flags(&self, name: &str, x: &Option<Tensor>) -> Result<Option<Tensor>> {
        x.as_ref()
            .map(|x| {
                self.mask.check(name, x)?;
                self.mask.select(&x.detach().ne(0.)?)
            })
            .transpose()
    }
}

/// Returns `[B]` and `[B, 1]` as `[B, 1]`. Moves CPU tensors to the mask's device.
fn per_sequence(x: &Tensor, mask: &Mask) -> Result<Option<Tensor>> {
    let (batch, _) = mask.dims()?;
    let column = match *x.dims() {
        [b] if b == batch => x.unsqueeze(1)?,
        [b, 1] if b == batch => x.clone(),
        _ => return Ok(None),
    };
    if column.device().is_cpu() {
        column.to_device(mask.selected().device()).map(Some)
    } else {
        Ok(Some(column))
    }
}

/// Repeats `[B]` and `[B, 1]` for each token. Returns `[B, T]` unchanged.
pub(crate) fn over_tokens(name: &str, x: &Tensor, mask: &Mask) -> Result<Tensor> {
    let (batch, tokens) = mask.dims()?;
    if let Some(column) = per_sequence(x, mask)? {
        return column.broadcast_as((batch, tokens))?.contiguous();
    }
    if *x.dims() != [batch, tokens] {
        bail!(
            "{name}: shape {:?}, must be [{batch}] or [{batch}, {tokens}]",
            x.dims()
        );
    }
    Ok(x.clone())
}
