//! Distillation from hidden states, chunked over tokens.

use candle_core::{DType, Result, Tensor, Var};
use candle_grpo_core::dtype::arithmetic_dtype;
use candle_grpo_core::{Mask, Metrics};
use candle_grpo_kernels::{LinearGradients, add_matmul};

use super::output_layer::{products, same_dtype};
use super::teacher_logits::TeacherRows;
use super::{DistillationLoss, MASSES, OutputLayer, TeacherLogits, row_width};
use crate::totals::StepTotals;

/// Returns the largest number of logits in a chunk for [`linear_distillation_loss`]: 2^22, or 2^25
/// on a GPU, where a chunk needs many rows to be fast.
fn logits_of_chunk(on_gpu: bool) -> usize {
    if on_gpu { 1 << 25 } else { 1 << 22 }
}

/// Returns the bytes of the chunk-sized tensors that exist at once in
/// [`linear_distillation_loss`], for this number of logits.
pub fn linear_distillation_bytes(loss: &DistillationLoss, logits: usize, on_gpu: bool) -> usize {
    // On the CPU the divergence is one operator, unless log-probs have a floor.
    let is_composed = on_gpu || loss.log_prob_floor.is_some();
    let tensors = if is_composed { 10 } else { 5 };
    let chunk = logits.min(logits_of_chunk(on_gpu));
    tensors * chunk * DType::F32.size_in_bytes()
}

/// Output from [`linear_distillation_loss`]. All tensors are detached.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LinearDistillationOutput {
    /// The loss: this micro-batch's contribution to the step.
    pub loss: Tensor,
    /// Metrics as in [`DistillationLoss::compute`], and `student_entropy` at
    /// [`DistillationLoss::temperature`].
    pub metrics: Metrics,
    /// Gradients with respect to the student's hidden states, weight and bias. `None` for an
    /// argument that is neither a variable nor computed from one.
    pub gradients: LinearGradients,
}

/// Computes the distillation loss from hidden states, and its gradients, in one call.
///
/// Choose it over [`DistillationLoss::compute`] if logits for all tokens do not fit in memory: only
/// one chunk's logits exist at a time, see [`linear_distillation_bytes`]. Tokens outside the mask
/// are not computed. Copies the mask to the host, which synchronizes with the device.
///
/// # Shapes
///
/// - `student`: hidden states `[B, T, H]`, weight `[V, H]`, bias `[V]`
/// - `teacher`: as in [`TeacherLogits`], with the same B, T and V, on the same device
/// - `response_mask`: `[B, T]`
/// - gradients: the same shapes as the student's tensors
///
/// # Errors
///
/// Fails in the same cases as [`DistillationLoss::compute`]. Also fails with
/// [`Support::Sampled`](crate::Support::Sampled).
pub fn linear_distillation_loss(
    loss: &DistillationLoss,
    student: &OutputLayer<'_>,
    teacher: &TeacherLogits<'_>,
    response_mask: &Tensor,
    totals: &StepTotals,
) -> Result<LinearDistillationOutput> {
    loss.validate()?;
    let mask = Mask::new(response_mask)?;
    let (batch, tokens) = mask.dims()?;
    let device = student.hidden.device();
    let places = places(&mask)?;
    let dtype = arithmetic_dtype(student.hidden.dtype());
    let slopes = slopes(
        loss,
        &mask,
        totals,
        &Var::zeros((batch, tokens), dtype, device)?,
    )?;
    let mut pass = Pass::new(loss, *student, dtype, &mask)?;
    let rows = |name: &str, x: &Tensor| {
        let width = row_width(name, x, &mask)?;
        x.detach().reshape((batch * tokens, width))
    };
    let logits = logits_of_chunk(device.is_cuda());
    for chunk in places.chunks((logits / pass.weight.dim(0)?).max(1)) {
        let at = Tensor::new(chunk, device)?;
        let teacher = teacher.rows(|name, x| rows(name, x)?.index_select(&at, 0))?;
        pass.add(&at, &teacher, &slopes.index_select(&at, 0)?)?;
    }
    let parts = &pass.parts;
    // The row for each place in the chunks. Places outside the mask share a row of zeros at the
    // end.
    let mut rows_of = vec![places.len() as u32; batch * tokens];
    for (row, &place) in (0u32..).zip(&places) {
        rows_of[place as usize] = row;
    }
    let rows_of = Tensor::new(rows_of, device)?;
    let spread = |parts: &[Tensor], row: &[usize]| {
        let none = Tensor::zeros([&[1], row].concat(), dtype, device)?;
        Tensor::cat(&[parts, &[none]].concat(), 0)?.index_select(&rows_of, 0)
    };
    let on_tokens = |parts: &[Tensor]| spread(parts, &[])?.reshape((batch, tokens));
    let losses = on_tokens(&parts.losses)?;
    let mut metrics = Metrics::new();
    metrics.push_masked_mean("divergence", &losses, &mask)?;
    metrics.push_masked_mean("student_entropy", &on_tokens(&parts.entropies)?, &mask)?;
    for (name, mass) in MASSES.into_iter().zip(&parts.masses) {
        if !mass.is_empty() {
            metrics.push_masked_mean(name, &on_tokens(mass)?, &mask)?;
        }
    }
    let hidden_gradient = if student.hidden.track_op() {
        let rows = spread(&parts.hidden, &pass.hidden.dims()[1..])?;
        let rows = rows.reshape(student.hidden.shape())?;
        Some(rows.to_dtype(student.hidden.dtype())?)
    } else {
        None
    };
    Ok(LinearDistillationOutput {
        loss: loss.reduce(&losses, &mask, totals)?,
        metrics,
        gradients: LinearGradients {
            hidden: hidden_gradient,
            weight: pass.weight_gradient,
            bias: match (student.bias, pass.bias_gradient) {
                (Some(bias), Some(sum)) => Some(sum.to_dtype(bias.dtype())?),
                _ => None,
            },
        },
    })
}

/// Returns the masked-in tokens' places in the flattened batch.
fn places(mask: &Mask) -> Result<Vec<u32>> {
    let flags = mask.selected().flatten_all()?.to_vec1::<u8>()?;
    Ok((0u32..)
        .zip(&flags)
        .filter(|(_, f)| **f != 0)
        .map(|(i, _)| i)
        .collect())
}

/// Returns the loss's derivative by each token's divergence, `[B * T]`. `none` holds divergences
/// `[B, T]` that are 0.
fn slopes(loss: &DistillationLoss, mask: &Mask, totals: &StepTotals, none: &Var) -> Result<Tensor> {
    let sum = loss.reduce(none, mask, totals)?;
    match sum.backward()?.get(none) {
        Some(slopes) => slopes.flatten_all(),
        None => none.flatten_all(),
    }
}

/// One pass over the chunks: the student's tensors in one dtype, and gradient sums.
struct Pass<'a> {
    loss: &'a DistillationLoss,
    student: OutputLayer<'a>,
    dtype: DType,
    /// `[B * T, H]`
    hidden: Tensor,
    weight: Tensor,
    bias: Option<Var>,
    weight_gradient: Option<Tensor>,
    bias_gradient: Option<Tensor>,
    parts: Parts,
}

impl<'a> Pass<'a> {
    fn new(
        loss: &'a DistillationLoss,
        student: OutputLayer<'a>,
        dtype: DType,
        mask: &Mask,
    ) -> Result<Self> {
        let (batch, tokens) = mask.dims()?;
        let width = row_width("student.hidden", student.hidden, mask)?;
        let hidden = student.hidden.detach().reshape((batch * tokens, width))?;
        student.check("student", width)?;
        let (hidden, weight) = same_dtype(&hidden, student.weight)?;
        let bias = student.bias.map(|x| x.detach().to_dtype(dtype));
        let bias = bias.transpose()?.map(|x| Var::from_tensor(&x));
        let device = student.hidden.device();
        let zeros = |x: &Tensor| Tensor::zeros(x.shape(), dtype, device);
        let wanted = |x: &Tensor| x.track_op().then(|| zeros(x)).transpose();
        Ok(Self {
            weight_gradient: wanted(student.weight)?,
            bias_gradient: student.bias.map(wanted).transpose()?.flatten(),
            bias: bias.transpose()?,
            parts: Parts::default(),
            loss,
            student,
            dtype,
            hidden,
            weight,
        })
    }

    /// Adds losses and gradients for the tokens at `at`.
    fn add(&mut self, at: &Tensor, teacher: &TeacherRows, slopes: &Tensor) -> Result<()> {
        let part = self.hidden.index_select(at, 0)?;
        // The graph starts at the products. Their gradient is multiplied here.
        let products = Var::from_tensor(&products(&part, &self.weight)?)?;
        let layer = OutputLayer {
            bias: self.bias.as_deref(),
            ..self.student
        };
        let compared = self
            .loss
            .compare(&layer.logits(&products)?, teacher, None)?;
        let weighted = (&compared.losses * slopes)?.sum_all()?;
        let store = weighted.backward()?;
        if let (Some(sum), Some(gradient)) = (
            &mut self.bias_gradient,
            self.bias.as_ref().and_then(|bias| store.get(bias)),
        ) {
            *sum = (&*sum + gradient.detach())?;
        }
        let gradient = match store.get(&products) {
            Some(gradient) => gradient.detach(),
            None => products.zeros_like()?,
        };
        let gradient = gradient.to_dtype(part.dtype())?;
        if let Some(sum) = &self.weight_gradient {
            add_matmul(sum, &gradient.t()?, &part)?;
        }
        if self.student.hidden.track_op() {
            let sum = Tensor::zeros(part.shape(), self.dtype, part.device())?;
            add_matmul(&sum, &gradient, &self.weight)?;
            self.parts.hidden.push(sum);
        }
        self.parts.entropies.push(compared.entropy);
        self.parts.losses.push(compared.losses.detach());
        let masses = compared.masses.into_iter().flatten();
        for (parts, mass) in self.parts.masses.iter_mut().zip(masses) {
            parts.push(mass);
        }
        Ok(())
    }
}

/// Chunk results, each for its own tokens.
#[derive(Default)]
struct Parts {
    losses: Vec<Tensor>,
    entropies: Vec<Tensor>,
    /// Probabilities that the compared entries have: under the student and the teacher.
    masses: [Vec<Tensor>; 2],
    hidden: Vec<Tensor>,
}
