//! The distributions of teachers that a step learns from.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use candle_grpo_core::Invalid;
use candle_grpo_loss::{DistillationLoss, Support};
use candle_grpo_nn::LanguageModel;

use super::micro_batches::MicroBatches;
use super::teachers::Teachers;
use crate::teacher::{Teacher, TeacherDistributions};
use crate::{Progress, TokenBatch, TrainConfig, TrainingBatch};

/// The distributions that a step learns from.
pub(super) struct Distillation<'a> {
    teachers: Vec<(&'a str, &'a dyn Teacher)>,
    loss: &'a DistillationLoss,
}

impl TrainConfig {
    /// The term of the loss that learns the distributions of `teachers`, if there is one.
    pub(super) fn distillation<'a, M: LanguageModel + Send + Sync>(
        &'a self,
        teachers: &'a Teachers<M>,
    ) -> Option<Distillation<'a>> {
        let teachers: Vec<_> = teachers.iter().collect();
        let loss = self.recipe.distillation_loss.as_ref();
        let loss = loss.filter(|_| !teachers.is_empty())?;
        Some(Distillation { teachers, loss })
    }
}

impl Distillation<'_> {
    /// Checks that each sequence has one of the teachers, and asks those that take all sequences of
    /// a rank at once, before the step changes weights.
    pub(super) fn of_step(
        &self,
        tokens: &TokenBatch,
        micro_batches: MicroBatches<'_>,
    ) -> Result<BTreeMap<String, TeacherDistributions>> {
        tokens.ensure_teachers(self.teachers.iter().map(|(name, _)| *name))?;
        let mut all = BTreeMap::new();
        for &(name, teacher) in &self.teachers {
            if teacher.takes_micro_batches() {
                continue;
            }
            let Support::Teacher { k } = self.loss.support else {
                let support = format!("{:?}", self.loss.support);
                let must = "be teacher with a teacher that takes all sequences at once";
                let invalid = Invalid::new("recipe.distillation_loss.support", support, must);
                return Err(invalid.into());
            };
            let Some((read, rows)) = tokens.for_teacher(name)? else {
                continue;
            };
            let pieces = micro_batches.at_once().pieces(&read, |piece| {
                let found = self.ask(teacher, piece, micro_batches.progress)?;
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
            let found = TeacherDistributions::TopK {
                ids: pieces.joined(|(ids, _)| ids)?,
                log_probs: pieces.joined(|(_, log_probs)| log_probs)?,
            };
            all.insert(name.to_owned(), found.map(|x| tokens.spread(x, &rows))?);
        }
        Ok(all)
    }

    /// Asks for the distributions of a micro-batch that it has not got from [`Self::of_step`].
    pub(super) fn complete(
        &self,
        micro_batch: &mut TrainingBatch,
        progress: &dyn Progress,
    ) -> Result<()> {
        for &(name, teacher) in &self.teachers {
            if micro_batch.teachers.contains_key(name) {
                continue;
            }
            let tokens = micro_batch.tokens();
            let Some((read, rows)) = tokens.for_teacher(name)? else {
                continue;
            };
            let found = self.ask(teacher, &read, progress)?;
            let found = found.map(|x| tokens.spread(x, &rows))?;
            micro_batch.teachers.insert(name.to_owned(), found);
        }
        Ok(())
    }

    /// The number of the most likely entries to compare; absent for other supports.
    pub(super) fn entries(loss: &DistillationLoss) -> Option<usize> {
        match loss.support {
            Support::Teacher { k } => Some(k),
            _ => None,
        }
    }

    fn ask(
        &self,
        teacher: &dyn Teacher,
        read: &TokenBatch,
        progress: &dyn Progress,
    ) -> Result<TeacherDistributions> {
        teacher.distributions(read, Self::entries(self.loss), progress)
    }
}
