//! Distillation from hidden states, in chunks of tokens.

use candle_core::{Result, Tensor, Var, bail};
use candle_grpo_core::{Mask, Metrics, arithmetic_dtype};
use candle_grpo_kernels::LinearGradients;

use super::{DistillationLoss, MASSES, OutputLayer, Teacher};
use crate::policy_loss::StepTotals;

/// The largest number of logits of a chunk.
const LOGITS: usize = 1 << 22;

/// The output of [`linear_distillation_loss`]. All tensors are detached.
#[derive(Debug, Clone)]
pub struct LinearDistillationOutput {
    /// The loss: the contribution of this micro-batch to the step.
    pub loss: Tensor,
    /// The metrics of [`DistillationLoss::compute`], and `student_entropy`, which is at
    /// [`DistillationLoss::temperature`].
    pub metrics: Metrics,
    /// The gradients of the loss with respect to the student's hidden states, weight and bias.
    /// `None` for an argument that is neither a variable nor computed from one.
    pub gradients: LinearGradients,
}

/// Computes the distillation loss of hidden states and its gradients, in one call.
///
/// The logits of both models exist for a chunk of tokens at a time, of at most 2^22 logits each.
/// Tokens outside the mask are not computed. Synchronizes with the device: the mask is copied to
/// the host.
///
/// # Errors
///
/// Fails as [`DistillationLoss::compute`]. A support of sampled tokens is an error.
pub fn linear_distillation_loss(
    loss: &DistillationLoss,
    student: &OutputLayer<'_>,
    teacher: &Teacher<'_>,
    response_mask: &Tensor,
    totals: &StepTotals,
) -> Result<LinearDistillationOutput> {
    let mask = Mask::new(response_mask)?;
    let (batch, tokens) = mask.dims()?;
    let device = student.hidden.device();
    let dtype = arithmetic_dtype(student.hidden.dtype());
    let flags = mask.selected().flatten_all()?.to_vec1::<u8>()?;
    teacher.ensure_entries(student.weight.dims().first().copied().unwrap_or(0))?;
    let places: Vec<u32> = (0u32..)
        .zip(&flags)
        .filter(|(_, f)| **f != 0)
        .map(|(i, _)| i)
        .collect();
    // The derivative of the loss by the divergence of each token.
    let zeros = Var::zeros((batch, tokens), dtype, device)?;
    let sum = loss.reduce(&zeros, &mask, totals)?;
    let slopes = match sum.backward()?.get(&zeros) {
        Some(slopes) => slopes.flatten_all()?,
        None => zeros.flatten_all()?,
    };

    let rows = |name: &str, x: &Tensor| match *x.dims() {
        [b, t, width] if (b, t) == (batch, tokens) => x.detach().reshape((batch * tokens, width)),
        _ => bail!(
            "{name}: shape {:?}, must be [{batch}, {tokens}, ..]",
            x.dims()
        ),
    };
    let hidden = rows("student.hidden", student.hidden)?;
    let weight = variable(student.weight)?;
    let bias = student.bias.map(variable).transpose()?;
    let layer = OutputLayer {
        weight: &weight,
        bias: bias.as_ref(),
        ..*student
    };
    let mut parts = Parts::default();
    let vocabulary = student.weight.dims().first().map_or(1, |&v| v.max(1));
    for chunk in places.chunks((LOGITS / vocabulary).max(1)) {
        let at = Tensor::new(chunk, device)?;
        let part = Var::from_tensor(&hidden.index_select(&at, 0)?)?;
        let logits = layer.logits("student", &part)?;
        let teacher = teacher.rows(|name, x| rows(name, x)?.index_select(&at, 0))?;
        let compared = loss.compare(&logits, &teacher, None)?;
        let weighted = (&compared.losses * slopes.index_select(&at, 0)?)?.sum_all()?;
        let store = weighted.backward()?;
        parts.hidden.extend(store.get(&part).cloned());
        add(&mut parts.weight, store.get(&weight))?;
        if let Some(bias) = &bias {
            add(&mut parts.bias, store.get(bias))?;
        }
        parts.entropies.push(compared.entropy);
        parts.losses.push(compared.losses.detach());
        for (parts, mass) in parts
            .masses
            .iter_mut()
            .zip(compared.masses.into_iter().flatten())
        {
            parts.push(mass);
        }
    }
    let at = Tensor::new(places, device)?;
    let spread = |parts: &[Tensor], zeros: Tensor| match parts {
        [] => Ok(zeros),
        parts => zeros.index_add(&at, &Tensor::cat(parts, 0)?, 0),
    };
    let on_tokens = |parts: &[Tensor]| {
        let zeros = Tensor::zeros(batch * tokens, dtype, device)?;
        spread(parts, zeros)?.reshape((batch, tokens))
    };
    let losses = on_tokens(&parts.losses)?;
    let mut metrics = Metrics::new();
    metrics.push_masked_mean("divergence", &losses, &mask)?;
    metrics.push_masked_mean("student_entropy", &on_tokens(&parts.entropies)?, &mask)?;
    for (name, mass) in MASSES.into_iter().zip(&parts.masses) {
        if !mass.is_empty() {
            metrics.push_masked_mean(name, &on_tokens(mass)?, &mask)?;
        }
    }
    let summed = |x: &Tensor, sum: Option<Tensor>| {
        let zeros = || Tensor::zeros(x.shape(), dtype, device);
        x.track_op().then(|| sum.map_or_else(zeros, Ok)).transpose()
    };
    let hidden_gradient = match student.hidden.track_op() {
        false => None,
        true => {
            let rows = spread(&parts.hidden, hidden.zeros_like()?)?;
            Some(rows.reshape(student.hidden.shape())?)
        }
    };
    Ok(LinearDistillationOutput {
        loss: loss.reduce(&losses, &mask, totals)?,
        metrics,
        gradients: LinearGradients {
            hidden: hidden_gradient,
            weight: summed(student.weight, parts.weight)?,
            bias: match student.bias {
                Some(bias) => summed(bias, parts.bias)?,
                None => None,
            },
        },
    })
}

/// Results of the chunks, each for its tokens.
#[derive(Default)]
struct Parts {
    losses: Vec<Tensor>,
    entropies: Vec<Tensor>,
    /// Probabilities of the compared entries: of the student and of the teacher.
    masses: [Vec<Tensor>; 2],
    hidden: Vec<Tensor>,
    /// The sums of the gradients.
    weight: Option<Tensor>,
    bias: Option<Tensor>,
}

/// A variable in place of `x`, if it is computed from one. Otherwise `x`.
fn variable(x: &Tensor) -> Result<Tensor> {
    match x.track_op() && !x.is_variable() {
        true => Ok(Var::from_tensor(&x.detach())?.into_inner()),
        false => Ok(x.clone()),
    }
}

/// Adds a gradient in the dtype of arithmetic.
fn add(sum: &mut Option<Tensor>, gradient: Option<&Tensor>) -> Result<()> {
    if let Some(gradient) = gradient {
        let gradient = gradient
            .detach()
            .to_dtype(arithmetic_dtype(gradient.dtype()))?;
        *sum = Some(match sum.take() {
            None => gradient,
            Some(sum) => (sum + gradient)?,
        });
    }
    Ok(())
}
