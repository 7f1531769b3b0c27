//! The divergence between a student's and a teacher's distributions.

mod distribution;
mod linear;
mod output_layer;
mod support;
mod teacher_logits;
mod whole;

use candle_core::{D, DType, Result, Tensor, bail};
use candle_grpo_core::dtype::arithmetic_dtype;
use candle_grpo_core::{Invalid, Kl, Mask, Metrics};
use serde::{Deserialize, Serialize};

pub use linear::{LinearDistillationOutput, linear_distillation_bytes, linear_distillation_loss};
pub use output_layer::OutputLayer;
pub use support::{Support, Tail};
pub use teacher_logits::TeacherLogits;

use crate::aggregation::Aggregation;
use crate::softmax::{check_temperature, log_add_exp};
use crate::totals::StepTotals;
use candle_grpo_core::validate::{Name, check, non_negative, positive, unit_interval};
use distribution::Distribution;
use teacher_logits::TeacherRows;

/// Metrics for the probability mass in the compared entries.
const MASSES: [&str; 2] = ["student_mass", "teacher_mass"];

/// Distillation loss: at each token, the generalized Jensen-Shannon divergence between a student's
/// distribution s and a teacher's t (GKD, <https://arxiv.org/abs/2306.13649>; TRL, ms-swift,
/// twinkle, verl).
///
/// With beta 0 it is `KL(t, s)`, with beta 1 `KL(s, t)`. In between it is
/// `beta KL(t, mix) + (1 - beta) KL(s, mix)` with `mix = (1 - beta) s + beta t`. The gradient
/// reaches only the student. A divergence of 0 means that the student matches the teacher.
///
/// Choose this loss if you have the teacher's logits, hidden states or top-k log-probs: it learns
/// from whole distributions. If the teacher only returns log-probs for the sampled tokens, use a
/// [`crate::TeacherTerm`], or the teacher penalty
/// [`TokenAdvantage::distillation`](candle_grpo_core::TokenAdvantage::distillation). In a training
/// run, set [`Recipe::distillation_loss`](crate::Recipe::distillation_loss).
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_grpo_loss::{DistillationLoss, StepTotals, TeacherLogits};
///
/// let device = Device::Cpu;
/// let student = Var::new(&[[[0f32, 0., 0.]]], &device)?; // [B, T, V]
/// let teacher = Tensor::new(&[[[2f32, 0., -1.]]], &device)?;
/// let mask = Tensor::new(&[[1u8]], &device)?;
/// let loss = DistillationLoss::default();
/// let totals = StepTotals::count(&mask)?;
/// let (loss, _) = loss.compute(&student, &TeacherLogits::Logits(&teacher), None, &mask, &totals)?;
/// assert!(loss.to_scalar::<f32>()? > 0.);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DistillationLoss {
    /// Factor for the loss. Default 1.
    pub coef: f64,
    /// Interpolation between the two directions, from 0 to 1. Default 0.
    pub beta: f64,
    /// Divisor for both models' logits, and for log-probs that the teacher returns. Default 1.
    pub temperature: f64,
    /// Vocabulary entries that are compared. Default `vocabulary`.
    pub support: Support,
    /// Treatment for the other entries. Default `bucket`.
    pub tail: Tail,
    /// Lower bound for the bucket's probability, 1e-7 in TRL. Below it, the bucket has no
    /// gradient. Absent by default.
    pub tail_floor: Option<f64>,
    /// Lower bound for both models' log-probs (verl). A token that the student finds less likely
    /// has no gradient, even if it is the worst mismatch. Absent by default.
    pub log_prob_floor: Option<f64>,
    /// Upper bound for a token's divergence, beyond which it has no gradient (verl). Absent by
    /// default.
    pub value_clamp: Option<f64>,
    /// Aggregation over tokens. Default `token-mean`.
    pub aggregation: Aggregation,
}

impl Default for DistillationLoss {
    fn default() -> Self {
        Self {
            coef: 1.,
            beta: 0.,
            temperature: 1.,
            support: Support::Vocabulary,
            tail: Tail::Bucket,
            tail_floor: None,
            log_prob_floor: None,
            value_clamp: None,
            aggregation: Aggregation::TokenMean,
        }
    }
}

impl DistillationLoss {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid. The error names the option, its value and what it must be.
    pub fn validate(&self) -> Result<()> {
        let valid = self.validate_options();
        valid.map_err(|error| Invalid::within_error("distillation_loss", error))
    }

    fn validate_options(&self) -> Result<()> {
        non_negative("coef", self.coef)?;
        unit_interval("beta", self.beta)?;
        check_temperature(self.temperature)?;
        if let Some(floor) = self.tail_floor {
            let valid = floor > 0. && floor < 1.;
            check(valid, "tail_floor", floor, "be above 0 and below 1")?;
            let must = "be absent unless the tail is bucket, which it bounds";
            check(self.tail == Tail::Bucket, "tail_floor", floor, must)?;
        }
        if let Some(floor) = self.log_prob_floor {
            let valid = floor.is_finite() && floor <= 0.;
            let must = "be finite and at most 0, as log-probs are";
            check(valid, "log_prob_floor", floor, must)?;
        }
        if let Some(clamp) = self.value_clamp {
            positive("value_clamp", clamp)?;
        }
        self.support.validate()?;
        check(
            self.aggregation != Aggregation::PromptMeanTokenMean,
            "aggregation",
            Name(&self.aggregation),
            "be token-mean, token-sum or one of the means over sequences: a mean over prompts is for policy losses",
        )?;
        self.aggregation.validate()
    }

    /// Computes a micro-batch's loss, with gradient in `student_logits` `[B, T, V]`.
    ///
    /// [`Support::Sampled`] needs `sampled_tokens` `[B, T]`. Logits outside the mask may be NaN.
    /// The metric `divergence` is measured after all bounds. If only a part of the vocabulary is
    /// compared, `student_mass` and `teacher_mass` are the probabilities of the compared entries: a
    /// low mass means that the comparison misses much, so raise k.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, or if a tensor is missing or has another shape.
    pub fn compute(
        &self,
        student_logits: &Tensor,
        teacher: &TeacherLogits<'_>,
        sampled_tokens: Option<&Tensor>,
        response_mask: &Tensor,
        totals: &StepTotals,
    ) -> Result<(Tensor, Metrics)> {
        let mask = Mask::new(response_mask)?;
        let clean = |name: &str, x: &Tensor| -> Result<Tensor> {
            row_width(name, x, &mask)?;
            let selected = mask.selected().unsqueeze(D::Minus1)?;
            let selected = selected.broadcast_as(x.shape())?.contiguous()?;
            selected.where_cond(x, &x.zeros_like()?)
        };
        let student = clean("student_logits", student_logits)?;
        let sampled = sampled_tokens.map(|x| mask.select(x)).transpose()?;
        let compared = self.compare(&student, &teacher.rows(clean)?, sampled.as_ref())?;
        let mut metrics = Metrics::new();
        metrics.push_masked_mean("divergence", &compared.losses, &mask)?;
        for (name, mass) in MASSES.iter().zip(compared.masses.iter().flatten()) {
            metrics.push_masked_mean(name, mass, &mask)?;
        }
        Ok((self.reduce(&compared.losses, &mask, totals)?, metrics))
    }

    /// Reduces all tokens' divergences to the loss.
    fn reduce(&self, divergences: &Tensor, mask: &Mask, totals: &StepTotals) -> Result<Tensor> {
        self.aggregation.apply(divergences, mask, totals)? * self.coef
    }

    /// Computes the divergence at each position, with gradient in `student_logits` `[.., V]`:
    /// `[..]`. The teacher's tensors are `[.., V]`, `[.., H]` or `[.., K]`. There is no mask.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`Self::compute`].
    pub fn per_token(
        &self,
        student_logits: &Tensor,
        teacher: &TeacherLogits<'_>,
        sampled_tokens: Option<&Tensor>,
    ) -> Result<Tensor> {
        let teacher = teacher.rows(|_, x| Ok(x.clone()))?;
        Ok(self
            .compare(student_logits, &teacher, sampled_tokens)?
            .losses)
    }

    fn compare(
        &self,
        student_logits: &Tensor,
        teacher: &TeacherRows,
        sampled_tokens: Option<&Tensor>,
    ) -> Result<Compared> {
        self.validate()?;
        let dtype = arithmetic_dtype(student_logits.dtype());
        let student = Distribution::new(&student_logits.to_dtype(dtype)?, self.temperature)?;
        let entropy = student.entropy.clone();
        let (teacher, entries) = match teacher {
            TeacherRows::Logits(logits) => {
                if logits.dims() != student_logits.dims() {
                    bail!(
                        "teacher: logits of shape {:?}, must be that of the student, {:?}",
                        logits.dims(),
                        student_logits.dims()
                    );
                }
                let logits = logits.detach().to_dtype(dtype)?;
                let teacher = Distribution::new(&logits, self.temperature)?;
                let (s, t) = (&student.logits, &teacher.logits);
                match self.support.entries(s, t, sampled_tokens)? {
                    Some(entries) => (support::Source::Whole(teacher), entries),
                    None => {
                        return Ok(Compared {
                            entropy,
                            losses: self.whole(&student, &teacher)?,
                            masses: None,
                        });
                    }
                }
            }
            TeacherRows::TopK { ids, log_probs } => {
                let log_probs = log_probs.detach().to_dtype(dtype)?;
                self.given_entries(ids, &log_probs, student_logits.dims())?
            }
        };
        let student = support::Source::Whole(student);
        let masses = [entries.mass(&student)?, entries.mass(&teacher)?];
        let s = self.floored(&entries.log_probs(&student, self.tail, self.tail_floor)?)?;
        let t = self.floored(&entries.log_probs(&teacher, self.tail, self.tail_floor)?)?;
        let losses = self.bounded(self.divergence(&s, &t)?, self.tail == Tail::Drop)?;
        Ok(Compared {
            entropy,
            losses,
            masses: Some(masses),
        })
    }

    /// Computes the divergence over the whole vocabulary.
    fn whole(&self, student: &Distribution, teacher: &Distribution) -> Result<Tensor> {
        let divergence = if self.log_prob_floor.is_none() && whole::is_fused(&student.logits) {
            whole::divergence(student, teacher, self.beta)?
        } else {
            let s = self.floored(&student.log_probs()?)?;
            let t = self.floored(&teacher.log_probs()?)?;
            self.divergence(&s, &t)?
        };
        self.bounded(divergence, false)
    }

    /// Returns entries and log-probs from a teacher. Synchronizes with the device.
    fn given_entries(
        &self,
        ids: &Tensor,
        log_probs: &Tensor,
        student: &[usize],
    ) -> Result<(support::Source, support::Entries)> {
        let (outer, vocabulary) = student.split_at(student.len() - 1);
        if ids.dims() != log_probs.dims()
            || !ids.dims().starts_with(outer)
            || ids.rank() != student.len()
            || ids.elem_count() == 0
        {
            bail!(
                "teacher.ids: shape {:?} with log_probs {:?}, must be {outer:?} and the number of entries",
                ids.dims(),
                log_probs.dims()
            );
        }
        let largest = ids.max_all()?.to_dtype(DType::U32)?.to_scalar::<u32>()?;
        if largest as usize >= vocabulary[0] {
            bail!(
                "teacher.ids: {largest}, must be below {}, the logits of the student",
                vocabulary[0]
            );
        }
        if self.temperature != 1. && self.tail != Tail::Renormalize {
            bail!(
                "distillation_loss.tail: {:?}, must be renormalize for top-k log-probs with a temperature of {}",
                self.tail,
                self.temperature
            );
        }
        Ok((
            support::Source::Entries((log_probs / self.temperature)?, vocabulary[0]),
            support::Entries::distinct(ids)?,
        ))
    }

    fn floored(&self, log_probs: &Tensor) -> Result<Tensor> {
        match self.log_prob_floor {
            None => Ok(log_probs.clone()),
            Some(floor) => {
                let below = log_probs.detach().lt(floor)?;
                // An absent entry stays absent.
                let present = log_probs.detach().gt(f64::NEG_INFINITY)?;
                let constant = (log_probs.zeros_like()? + floor)?;
                (below * present)?.where_cond(&constant, log_probs)
            }
        }
    }

    /// Computes the divergence between log-distributions `[.., K]`.
    fn divergence(&self, student: &Tensor, teacher: &Tensor) -> Result<Tensor> {
        let beta = self.beta;
        if beta == 0. {
            return Kl::full(teacher, student);
        }
        if beta == 1. {
            return Kl::full(student, teacher);
        }
        let mix = log_add_exp(&(student + (1. - beta).ln())?, &(teacher + beta.ln())?)?;
        let (forward, reverse) = (Kl::full(teacher, &mix)?, Kl::full(student, &mix)?);
        (forward * beta)? + (reverse * (1. - beta))?
    }

    /// Applies the bounds, beyond which there is no gradient. A partial sum may be negative.
    fn bounded(&self, losses: Tensor, is_partial: bool) -> Result<Tensor> {
        let mut bounded = losses.detach();
        if is_partial {
            bounded = bounded.maximum(0.)?;
        }
        if let Some(clamp) = self.value_clamp {
            bounded = bounded.minimum(clamp)?;
        }
        // NaN stays: on a GPU, it would become the bound.
        let same = bounded.eq(&losses.detach())?;
        let nan = losses.detach().ne(&losses.detach())?;
        (same + nan)?.gt(0u8)?.where_cond(&losses, &bounded)
    }
}

/// Returns the last dimension's size in `x`, which must be `[B, T, ..]` for a mask `[B, T]`.
fn row_width(name: &str, x: &Tensor, mask: &Mask) -> Result<usize> {
    let (batch, tokens) = mask.dims()?;
    match *x.dims() {
        [b, t, width] if (b, t) == (batch, tokens) => Ok(width),
        ref dims => bail!("{name}: shape {dims:?}, must be [{batch}, {tokens}, ..]"),
    }
}

/// Student and teacher compared at `[..]` places.
struct Compared {
    /// The student's entropy.
    entropy: Tensor,
    losses: Tensor,
    /// The student's and the teacher's mass.
    masses: Option<[Tensor; 2]>,
}
