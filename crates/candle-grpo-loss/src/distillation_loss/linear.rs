//! Distillation from hidden states, in chunks of tokens.

use candle_core::{D, Result, Tensor, Var, bail};
use candle_grpo_core::{Mask, Metrics, arithmetic_dtype, statistics_dtype};
use candle_grpo_kernels::{LinearGradients, soft_cap};

use super::{DistillationLoss, Teacher};
use crate::policy_loss::StepTotals;
use crate::softmax::log_softmax;
use candle_grpo_core::validate::positive;

/// The largest number of logits of a chunk.
const LOGITS: usize = 1 << 24;

/// Hidden states and the layer that turns them into logits:
/// `soft_cap(logit_scale (hidden weight^T + bias))`.
#[derive(Debug, Clone, Copy)]
pub struct OutputLayer<'a> {
    /// Hidden states, `[B, T, H]`.
    pub hidden: &'a Tensor,
    /// Output weight, `[V, H]`.
    pub weight: &'a Tensor,
    /// Output bias, `[V]`.
    pub bias: Option<&'a Tensor>,
    /// Factor of the logits.
    pub logit_scale: f64,
    /// Bound of the logits, see [`soft_cap`].
    pub logit_cap: Option<f64>,
}

impl<'a> OutputLayer<'a> {
    /// A layer without bias, factor and bound.
    pub fn new(hidden: &'a Tensor, weight: &'a Tensor) -> Self {
        Self {
            hidden,
            weight,
            bias: None,
            logit_scale: 1.,
            logit_cap: None,
        }
    }

    /// Checks the options and returns H and V.
    fn dims(&self, name: &str, mask: &Mask) -> Result<(usize, usize)> {
        positive(&format!("{name}.logit_scale"), self.logit_scale)?;
        let (batch, tokens) = mask.dims()?;
        match (self.hidden.dims(), self.weight.dims()) {
            (&[b, t, h], &[v, width]) if (b, t, h) == (batch, tokens, width) && v > 0 => Ok((h, v)),
            (hidden, weight) => bail!(
                "{name}: hidden {hidden:?} and weight {weight:?}, must be [{batch}, {tokens}, H] and [V, H]"
            ),
        }
    }

    /// The logits of hidden states `[N, H]` in the dtype of arithmetic.
    fn logits(&self, hidden: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let dtype = arithmetic_dtype(hidden.dtype());
        let mut z = hidden
            .to_dtype(dtype)?
            .matmul(&weight.to_dtype(dtype)?.t()?)?;
        if let Some(bias) = bias {
            z = z.broadcast_add(&bias.to_dtype(dtype)?)?;
        }
        soft_cap(&(z * self.logit_scale)?, self.logit_cap)
    }
}

/// The output of [`linear_distillation_loss`]. All tensors are detached.
#[derive(Debug, Clone)]
pub struct LinearDistillationOutput {
    /// The loss: the contribution of this micro-batch to the step.
    pub loss: Tensor,
    /// `distillation_loss`, and `entropy` of the student, over the mask.
    pub metrics: Metrics,
    /// The gradients of the loss with respect to the student's hidden states, weight and bias.
    /// `None` for an argument that is neither a variable nor computed from one.
    pub gradients: LinearGradients,
}

/// Computes the distillation loss of hidden states and its gradients, in one call.
///
/// The logits of both models exist for a chunk of tokens at a time, of at most 2^24 logits each.
/// Tokens outside the mask are not computed. Synchronizes with the device: the mask is copied to
/// the host.
///
/// # Errors
///
/// Fails as [`DistillationLoss::compute`]. A support of sampled tokens is an error.
pub fn linear_distillation_loss(
    loss: &DistillationLoss,
    student: &OutputLayer<'_>,
    teacher: &OutputLayer<'_>,
    response_mask: &Tensor,
    totals: &StepTotals,
) -> Result<LinearDistillationOutput> {
    let mask = Mask::new(response_mask)?;
    let (batch, tokens) = mask.dims()?;
    let (width, vocabulary) = student.dims("student", &mask)?;
    let (teacher_width, teacher_vocabulary) = teacher.dims("teacher", &mask)?;
    if vocabulary != teacher_vocabulary {
        bail!("teacher: {teacher_vocabulary} logits, must be those of the student, {vocabulary}");
    }
    let device = student.hidden.device();
    let dtype = arithmetic_dtype(student.hidden.dtype());
    let flags = mask.selected().flatten_all()?.to_vec1::<u8>()?;
    let places: Vec<u32> = (0u32..)
        .zip(&flags)
        .filter(|(_, f)| **f != 0)
        .map(|(i, _)| i)
        .collect();
    // The derivative of the loss by the divergence of each token.
    let zeros = Var::zeros((batch, tokens), dtype, device)?;
    let sum = loss.aggregation.apply(&zeros, &mask, totals)?;
    let slopes = match sum.backward()?.get(&zeros) {
        Some(slopes) => slopes.flatten_all()?,
        None => zeros.flatten_all()?,
    };

    let rows = |x: &Tensor, width: usize| x.detach().reshape((batch * tokens, width));
    let (hidden, teacher_hidden) = (
        rows(student.hidden, width)?,
        rows(teacher.hidden, teacher_width)?,
    );
    let weight = Var::from_tensor(&student.weight.detach())?;
    let bias = student.bias.map(|b| Var::from_tensor(&b.detach()));
    let bias = bias.transpose()?;
    let mut losses = Tensor::zeros(batch * tokens, dtype, device)?;
    let mut entropies = losses.clone();
    let mut hidden_gradient = hidden.zeros_like()?;
    let mut weight_gradient = Tensor::zeros(weight.shape(), dtype, device)?;
    let mut bias_gradient = bias.as_ref().map(|b| b.zeros_like()).transpose()?;
    for chunk in places.chunks((LOGITS / vocabulary).max(1)) {
        let at = Tensor::new(chunk, device)?;
        let part = Var::from_tensor(&hidden.index_select(&at, 0)?)?;
        let logits = student.logits(&part, &weight, bias.as_deref())?;
        let teacher_bias = teacher.bias.map(Tensor::detach);
        let teacher_logits = teacher.logits(
            &teacher_hidden.index_select(&at, 0)?,
            &teacher.weight.detach(),
            teacher_bias.as_ref(),
        )?;
        let divergence = loss.per_token(&logits, &Teacher::Logits(&teacher_logits), None)?;
        let weighted = (&divergence * slopes.index_select(&at, 0)?)?.sum_all()?;
        let store = weighted.backward()?;
        losses = losses.index_add(&at, &divergence.detach(), 0)?;
        let p = log_softmax(&(logits.detach() / loss.temperature)?)?;
        entropies = entropies.index_add(&at, &entropy(&p)?, 0)?;
        if let Some(gradient) = store.get(&part) {
            hidden_gradient = hidden_gradient.index_add(&at, gradient, 0)?;
        }
        if let Some(gradient) = store.get(&weight) {
            weight_gradient = (weight_gradient + gradient.to_dtype(dtype)?)?;
        }
        if let (Some(sum), Some(bias)) = (&mut bias_gradient, &bias)
            && let Some(gradient) = store.get(bias)
        {
            *sum = (&*sum + gradient)?;
        }
    }
    let on_tokens = |x: &Tensor| x.reshape((batch, tokens));
    let (losses, entropies) = (on_tokens(&losses)?, on_tokens(&entropies)?);
    let mut metrics = Metrics::new();
    metrics.push_masked_mean("distillation_loss", &losses, &mask)?;
    metrics.push_masked_mean("entropy", &entropies, &mask)?;
    let wanted = |x: &Tensor, gradient: Tensor| x.track_op().then(|| gradient.detach());
    Ok(LinearDistillationOutput {
        loss: loss.aggregation.apply(&losses, &mask, totals)?,
        metrics,
        gradients: LinearGradients {
            hidden: wanted(
                student.hidden,
                hidden_gradient.reshape(student.hidden.shape())?,
            ),
            weight: wanted(student.weight, weight_gradient),
            bias: student
                .bias
                .zip(bias_gradient)
                .and_then(|(bias, gradient)| wanted(bias, gradient)),
        },
    })
}

/// The entropy of log-distributions `[N, V]`.
fn entropy(log_probs: &Tensor) -> Result<Tensor> {
    let present = log_probs.gt(f64::NEG_INFINITY)?;
    let log_probs = present.where_cond(log_probs, &log_probs.zeros_like()?)?;
    let terms = (log_probs.exp()? * &log_probs)?;
    let statistics = statistics_dtype(terms.device());
    let sum = terms.to_dtype(statistics)?.sum(D::Minus1)?;
    sum.neg()?.to_dtype(log_probs.dtype())
}
