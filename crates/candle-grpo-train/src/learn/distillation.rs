//! The distributions of a teacher that a step learns from.

use anyhow::{Result, bail, ensure};
use candle_grpo_core::Invalid;
use candle_grpo_loss::{DistillationLoss, Support};

use super::micro_batches::MicroBatches;
use crate::teacher::{Teacher, TeacherDistributions};
use crate::{Progress, TokenBatch, TrainConfig, TrainingBatch};

/// The distributions that a step learns from.
pub(super) struct Distillation<'a> {
    teacher: &'a dyn Teacher,
    loss: &'a DistillationLoss,
}

impl TrainConfig {
    /// The term of the loss that learns the distributions of `teacher`, if there is one.
    pub(super) fn distillation<'a>(
        &'a self,
        teacher: Option<&'a dyn Teacher>,
    ) -> Option<Distillation<'a>> {
        let loss = self.recipe.distillation_loss.as_ref();
        let (loss, teacher) = loss.zip(teacher)?;
        Some(Distillation { teacher, loss })
    }
}

impl Distillation<'_> {
    /// Asks a teacher that takes all sequences of a rank at once, before the step changes weights.
    /// `None` for a teacher that takes micro-batches.
    pub(super) fn of_step(
        &self,
        tokens: &TokenBatch,
        micro_batches: MicroBatches<'_>,
    ) -> Result<Option<TeacherDistributions>> {
        if self.teacher.takes_micro_batches() {
            return Ok(None);
        }
        let Support::Teacher { k } = self.loss.support else {
            let support = format!("{:?}", self.loss.support);
            let must = "be teacher with a teacher that takes all sequences at once";
            return Err(Invalid::new("recipe.distillation_loss.support", support, must).into());
        };
        let pieces = micro_batches.at_once().pieces(tokens, |piece| {
            let found = self.ask(piece, micro_batches.progress)?;
            let TeacherDistributions::TopK { ids, log_probs } = found else {
                bail!(
                    "teacher: whole distributions, must be the most likely entries of one that takes all sequences at once"
                );
            };
            let (rows, t) = piece.dims();
            for (name, x) in [("ids", &ids), ("log_probs", &log_probs)] {
                ensure!(
                    x.dims() == [rows, t, k],
                    "teacher.{name}: shape {:?}, must be [{rows}, {t}, {k}]",
                    x.dims()
                );
            }
            Ok((ids, log_probs))
        })?;
        Ok(Some(TeacherDistributions::TopK {
            ids: pieces.joined(|(ids, _)| ids)?,
            log_probs: pieces.joined(|(_, log_probs)| log_probs)?,
        }))
    }

    /// Asks for the distributions of a micro-batch that has none.
    pub(super) fn complete(
        &self,
        micro_batch: &mut TrainingBatch,
        progress: &dyn Progress,
    ) -> Result<()> {
        if micro_batch.teacher.is_none() {
            micro_batch.teacher = Some(self.ask(micro_batch.tokens(), progress)?);
        }
        Ok(())
    }

    fn ask(&self, batch: &TokenBatch, progress: &dyn Progress) -> Result<TeacherDistributions> {
        let entries = match self.loss.support {
            Support::Teacher { k } => Some(k),
            _ => None,
        };
        let read = batch.for_teacher();
        self.teacher.distributions(&read, entries, progress)
    }
}
