//! The teacher term: distillation from a teacher's log-probs.

use candle_core::{D, Result, Tensor, bail};
use candle_grpo_core::advantage::reverse_recurrence;
use candle_grpo_core::{Kl, Mask, Metrics};
use serde::{Deserialize, Serialize};

use super::checked_batch::CheckedBatch;
use crate::aggregation::Aggregation;
use candle_grpo_core::validate::{finite, non_negative, positive};

/// On-policy distillation: a term from a teacher's log-probs on the tokens that the policy sampled.
/// Needs [`crate::PolicyBatch::teacher_log_probs`].
///
/// Choose it if the teacher only returns log-probs for the sampled tokens. There are two
/// alternatives: the teacher penalty in the advantage,
/// [`TokenAdvantage::distillation`](candle_grpo_core::TokenAdvantage::distillation), and the
/// distillation loss on whole distributions, [`crate::DistillationLoss`].
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_grpo_loss::{PolicyBatch, PolicyLoss, StepTotals, TeacherTerm};
///
/// let device = Device::Cpu;
/// let log_probs = Var::new(&[[-1f32, -3.]], &device)?;
/// let teacher_log_probs = Tensor::new(&[[-2f32, -1.]], &device)?;
/// let mask = Tensor::new(&[[1u8, 1]], &device)?;
/// let nothing = Tensor::new(&[0f32], &device)?; // no reward
/// let batch = PolicyBatch::new(&log_probs, &nothing, &mask).teacher_log_probs(&teacher_log_probs);
/// let loss = PolicyLoss { distillation: Some(TeacherTerm::new(1.)), ..PolicyLoss::gpg() };
/// let output = loss.compute(&batch, &StepTotals::count(&mask)?)?;
/// // The advantages are -1 and 2.
/// assert_eq!(output.loss.to_scalar::<f32>()?, (-1. + 6.) / 2.);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TeacherTerm {
    /// Coefficient.
    pub coef: f64,
    /// Form of the term. Default [`TeacherTermForm::default`].
    #[serde(default)]
    pub form: TeacherTermForm,
    /// Aggregation for a term that is added to the loss. If absent, the loss's aggregation is
    /// used. Absent by default.
    #[serde(default)]
    pub aggregation: Option<Aggregation>,
}

/// Forms for [`TeacherTerm`], with `a = teach - lp`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum TeacherTermForm {
    /// Adds `coef sg[w a]` to each token's advantage, so ratio, clip, weights and masks apply to
    /// it. In expectation, its gradient equals that of the reverse KL between policy and teacher.
    /// The default.
    Advantage {
        /// Gives early tokens in a sequence more weight. Absent by default.
        #[serde(default)]
        early_weight: Option<EarlyWeight>,
        /// Policy for `lp`: `current`, or the sampling engine. Default `current`.
        #[serde(default)]
        student: Student,
    },
    /// Adds `coef kl(lp, teach)` to each token's loss.
    ///
    /// With every estimator except k1, the gradient depends on the teacher. k1's gradient does not,
    /// and only lowers the log-probs; AReaL and verl have it.
    Loss {
        /// Estimator and its gradient.
        kl: Kl,
    },
    /// Adds `coef sg[sigmoid(beta a)] a` to each token's loss (SDAR, ms-swift).
    ///
    /// It raises log-probs for tokens that the teacher prefers. A token that the policy prefers by
    /// far has almost no gradient.
    Gated {
        /// Steepness.
        beta: f64,
    },
}

/// Policy whose log-probs are compared with the teacher's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Student {
    /// The policy itself. The default.
    #[default]
    Current,
    /// The sampling engine: [`crate::PolicyBatch::rollout_log_probs`].
    Rollout,
}

/// `w_t = 1 + gamma (1 - P_t / max(sum abs(a), epsilon))`, where `P_t` sums `abs(a)` over the
/// tokens before t: early disagreements count more (IW-OPD in TRL).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct EarlyWeight {
    /// Additional weight for the first token. Default 1.
    pub gamma: f64,
    /// Lower bound for the divisor. Default 1e-8.
    pub epsilon: f64,
}

impl Default for EarlyWeight {
    fn default() -> Self {
        Self {
            gamma: 1.,
            epsilon: 1e-8,
        }
    }
}

impl Default for TeacherTermForm {
    fn default() -> Self {
        Self::Advantage {
            early_weight: None,
            student: Student::Current,
        }
    }
}

impl TeacherTerm {
    /// Creates a term with a coefficient and the default form.
    pub fn new(coef: f64) -> Self {
        Self {
            coef,
            form: TeacherTermForm::default(),
            aggregation: None,
        }
    }

    pub(super) fn validate(&self) -> Result<()> {
        finite("distillation.coef", self.coef)?;
        match self.form {
            TeacherTermForm::Advantage { early_weight, .. } => {
                if let Some(weight) = early_weight {
                    non_negative(
                        "distillation.form.advantage.early_weight.gamma",
                        weight.gamma,
                    )?;
                    let epsilon = "distillation.form.advantage.early_weight.epsilon";
                    positive(epsilon, weight.epsilon)?;
                }
            }
            TeacherTermForm::Loss { kl } => kl.validate()?,
            TeacherTermForm::Gated { beta } => positive("distillation.form.gated.beta", beta)?,
        }
        match &self.aggregation {
            Some(aggregation) => aggregation.validate(),
            None => Ok(()),
        }
    }

    /// Returns the policy that is compared with the teacher.
    pub(super) fn student(&self) -> Student {
        match self.form {
            TeacherTermForm::Advantage { student, .. } => student,
            TeacherTermForm::Loss { .. } | TeacherTermForm::Gated { .. } => Student::Current,
        }
    }

    /// Adds the teacher's advantage to `inputs`, or returns each token's loss without the
    /// coefficient.
    pub(super) fn apply(
        &self,
        inputs: &mut CheckedBatch,
        metrics: &mut Metrics,
    ) -> Result<Option<Tensor>> {
        let Some(teacher) = &inputs.teacher_log_probs else {
            bail!(
                "teacher_log_probs: absent, distillation needs the log-probs of a teacher (or set distillation to none)"
            );
        };
        let mask = &inputs.taught;
        let current = &inputs.log_probs;
        // Without a teacher, the policy takes its place, so that no value is infinite.
        let teacher = &mask.selected().where_cond(teacher, &current.detach())?;
        let gap = (teacher - current.detach())?;
        metrics.push_masked_mean("teacher_log_ratio", &gap, mask)?;
        match self.form {
            TeacherTermForm::Advantage {
                early_weight,
                student,
            } => {
                let gap = match (student, &inputs.rollout_log_probs) {
                    (Student::Current, _) => gap,
                    (Student::Rollout, Some(rollout)) => mask.select(&(teacher - rollout)?)?,
                    (Student::Rollout, None) => bail!(
                        "rollout_log_probs: absent, distillation.form.advantage.student is rollout"
                    ),
                };
                metrics.push_masked_mean("distillation_gap_abs", &gap.abs()?, mask)?;
                let advantage = match early_weight {
                    Some(early) => {
                        let weight = early.weights(&gap, mask)?;
                        metrics.push_masked_mean("distillation_weight_mean", &weight, mask)?;
                        metrics.push_masked_max("distillation_weight_max", &weight, mask)?;
                        metrics.push_masked_min("distillation_weight_min", &weight, mask)?;
                        (gap * weight)?
                    }
                    None => gap,
                };
                metrics.push_masked_mean("distillation_advantage", &advantage, mask)?;
                inputs.advantages = (&inputs.advantages + (advantage * self.coef)?)?;
                Ok(None)
            }
            TeacherTermForm::Loss { kl } => {
                let kl = kl.per_token(current, teacher, Some(&inputs.old_log_probs))?;
                let kl = mask.select(&kl)?;
                metrics.push_masked_mean("teacher_kl", &kl, mask)?;
                Ok(Some(kl))
            }
            TeacherTermForm::Gated { beta } => {
                // sigmoid(x) = (1 + tanh(x / 2)) / 2 does not overflow.
                let gate = (((&gap * (beta / 2.))?.tanh()? + 1.)? * 0.5)?;
                metrics.push_masked_mean("distillation_gate", &gate, mask)?;
                metrics.push_masked_mean("distillation_gate_open", &gate.gt(0.5)?, mask)?;
                let loss = mask.select(&(gate * (teacher - current)?)?)?;
                metrics.push_masked_mean("distillation_loss", &loss, mask)?;
                Ok(Some(loss))
            }
        }
    }
}

impl EarlyWeight {
    fn weights(self, gap: &Tensor, mask: &Mask) -> Result<Tensor> {
        let size = mask.select(&gap.abs()?)?;
        let total = size.sum_keepdim(D::Minus1)?;
        let from_here = reverse_recurrence(&size, &size.ones_like()?)?;
        let before = from_here.neg()?.broadcast_add(&total)?.maximum(0.)?;
        let progress = before.broadcast_div(&total.maximum(self.epsilon)?)?;
        (progress.neg()? + 1.)?.affine(self.gamma, 1.)
    }
}
