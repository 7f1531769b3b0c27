//! The inputs of a policy update.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use candle_core::Tensor;
use candle_grpo_core::validate::at_least_one;
use candle_grpo_loss::PolicyBatch;
use candle_grpo_nn::SequenceRanks;

use crate::TokenBatch;
use crate::teacher::TeacherDistributions;

/// The inputs of a policy update.
#[derive(Debug, Clone)]
pub struct TrainingBatch {
    tokens: TokenBatch,
    policy: PolicyBatch,
    /// Returns, the targets of the critic, f32 `[B, T]`.
    pub returns: Option<Tensor>,
    /// Distributions of teachers by name, for [`ActorConfig::distillation_loss`]. A single teacher
    /// has an empty name. Those of a sequence with [another teacher](crate::Sequence::teacher) are
    /// not used.
    ///
    /// [`ActorConfig::distillation_loss`]: crate::ActorConfig::distillation_loss
    pub teachers: BTreeMap<String, TeacherDistributions>,
}

impl TrainingBatch {
    /// Creates a batch with only advantages `[B]` or `[B, T]`, for a first update after sampling
    /// without a KL loss.
    pub fn new(tokens: TokenBatch, advantages: &Tensor) -> Self {
        let batch = Self {
            policy: PolicyBatch::without_log_probs(advantages, tokens.response_mask()),
            tokens,
            returns: None,
            teachers: BTreeMap::new(),
        };
        batch.with_policy(|policy| policy)
    }

    /// Sets inputs of the policy loss except those that the update computes: log-probs and
    /// entropy. The masks of responses and observations stay those of the sequences.
    #[must_use]
    pub fn with_policy(mut self, set: impl FnOnce(PolicyBatch) -> PolicyBatch) -> Self {
        self.policy = PolicyBatch {
            response_mask: self.tokens.response_mask().clone(),
            observation_mask: self.tokens.observation_mask().cloned(),
            ..set(self.policy)
        };
        self
    }

    /// Returns the sequences.
    pub fn tokens(&self) -> &TokenBatch {
        &self.tokens
    }

    /// Returns the inputs of the policy loss.
    pub fn policy(&self) -> &PolicyBatch {
        &self.policy
    }

    /// Returns the teachers that have a token to train on.
    pub(super) fn teachers_of_tokens(&self) -> Result<Vec<(&str, &TeacherDistributions)>> {
        ensure!(
            !self.teachers.is_empty() || !self.tokens.has_teacher(),
            "teacher: absent, must be given with a distillation_loss"
        );
        let all = self.teachers.iter();
        let all = all.map(|(name, teacher)| (name.as_str(), teacher));
        self.tokens
            .ensure_teachers(all.clone().map(|(name, _)| name))?;
        Ok(all
            .filter(|(name, _)| self.tokens.is_taught_by(name))
            .collect())
    }

    /// Returns the number of sequences (B) and the length of the longest response (T).
    ///
    /// # Errors
    ///
    /// Returns an error that names the field if the shapes do not match.
    pub fn dims(&self) -> Result<(usize, usize)> {
        let (b, t) = self.tokens.dims();
        self.policy.dims()?;
        if let Some(returns) = &self.returns {
            ensure_dims("returns", returns, &[b, t])?;
        }
        let of_teachers = self.teachers.values();
        for (name, tensor) in of_teachers.flat_map(TeacherDistributions::by_sequence) {
            let width = tensor.dims().last().copied().unwrap_or(0);
            ensure_dims(name, tensor, &[b, t, width])?;
        }
        Ok((b, t))
    }

    /// Splits the batch into parts of `size` sequences; the last part may be smaller.
    pub fn split(&self, size: usize) -> Result<Vec<Self>> {
        at_least_one("micro_batch_size", size)?;
        let (total, _) = self.dims()?;
        let sequences: Vec<usize> = (0..total).collect();
        let parts = sequences.chunks(size);
        parts.map(|part| self.select(part)).collect()
    }

    /// Selects the sequences with these indices, in this order. An index may repeat.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no indices, or one is not below B.
    pub fn select(&self, sequences: &[usize]) -> Result<Self> {
        let (total, _) = self.dims()?;
        if sequences.iter().copied().eq(0..total) {
            return Ok(self.clone());
        }
        let (tokens, rows) = self.tokens.select_with_rows(sequences)?;
        let of_rows = |x: &Tensor| x.contiguous()?.index_select(&rows, 0);
        let teachers = self.teachers.iter();
        let teachers = teachers.map(|(name, x)| Ok((name.clone(), x.map(of_rows)?)));
        let batch = Self {
            policy: self.policy.map(of_rows)?,
            tokens,
            returns: self.returns.as_ref().map(of_rows).transpose()?,
            teachers: teachers.collect::<candle_core::Result<_>>()?,
        };
        Ok(batch.with_policy(|policy| policy))
    }

    /// Lets `ranks` divide the tokens of each sequence: [`TokenBatch::divided`].
    #[must_use]
    pub(super) fn divided(self, ranks: Option<&SequenceRanks>) -> Self {
        Self {
            tokens: self.tokens.divided(ranks),
            ..self
        }
    }

    /// Returns the first sequence without a token to train on, for a rank without work.
    pub(super) fn without_work(&self) -> Result<Self> {
        let mut first = self.select(&[0])?;
        first.tokens = first.tokens.keeping([false])?;
        Ok(first.with_policy(|policy| policy))
    }
}

fn ensure_dims(name: &str, x: &Tensor, dims: &[usize]) -> Result<()> {
    ensure!(
        x.dims() == dims,
        "{name}: shape {:?}, must be {dims:?}",
        x.dims()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use candle_grpo_loss::OldPolicy;

    fn rows(x: &Tensor) -> Vec<Vec<u32>> {
        x.to_vec2().unwrap()
    }

    #[test]
    fn the_mask_of_the_policy_is_that_of_the_sequences() {
        let batch = three();
        let other = batch.policy().response_mask.zeros_like().unwrap();
        let set = |policy| PolicyBatch {
            response_mask: other,
            ..policy
        };
        let batch = batch.with_policy(set);
        assert_eq!(
            rows(&batch.policy().response_mask),
            [[1, 1], [1, 0], [1, 0]]
        );
        let none = batch.without_work().unwrap();
        assert_eq!(rows(&none.policy().response_mask), [[0, 0]]);
        assert_eq!(rows(none.tokens().response_mask()), [[0, 0]]);
    }

    #[test]
    fn a_batch_splits_into_pieces() {
        let pairs: [(&[u32], &[u32]); 3] = [(&[1], &[4]), (&[2], &[5]), (&[3], &[6])];
        let batch = TrainingBatch::new(
            TokenBatch::new(&pairs, &Device::Cpu).unwrap(),
            &Tensor::new(&[0.5f32, 1.5, 2.5], &Device::Cpu).unwrap(),
        );
        let pieces = batch.split(2).unwrap();
        assert_eq!(pieces.len(), 2);
        assert_eq!(pieces[1].tokens.targets().to_vec2::<u32>().unwrap(), [[6]]);
        assert_eq!(pieces[1].policy.advantages.to_vec1::<f32>().unwrap(), [2.5]);
        let error = batch.split(0).unwrap_err().to_string();
        assert_eq!(error, "micro_batch_size: 0, must be at least 1");
    }

    #[test]
    fn sequences_are_selected_and_repeated() {
        let batch = three();
        let drawn = batch.select(&[2, 0, 2]).unwrap();
        assert_eq!(
            drawn.policy.advantages.to_vec1::<f32>().unwrap(),
            [2.5, 0.5, 2.5]
        );
        let targets = drawn.tokens.targets().to_vec2::<u32>().unwrap();
        assert_eq!(targets, [[6, 0], [4, 1], [6, 0]]);
        for (numbers, words) in [
            (vec![], "sequences: none"),
            (vec![0, 3], "sequences: 3, there are 3"),
        ] {
            let error = batch.select(&numbers).unwrap_err().to_string();
            assert!(error.starts_with(words), "{error}");
        }
    }

    fn three() -> TrainingBatch {
        let pairs: [(&[u32], &[u32]); 3] = [(&[1], &[4, 1]), (&[2], &[5]), (&[3], &[6])];
        TrainingBatch::new(
            TokenBatch::new(&pairs, &Device::Cpu).unwrap(),
            &Tensor::new(&[0.5f32, 1.5, 2.5], &Device::Cpu).unwrap(),
        )
    }

    fn shaped(dims: &[usize]) -> Tensor {
        Tensor::ones(dims, candle_core::DType::U32, &Device::Cpu).unwrap()
    }

    #[rstest::rstest]
    #[case(|b: &mut TrainingBatch| b.policy.advantages = shaped(&[2]), "advantages: shape [2], must be [3] or [3, 2]")]
    #[case(|b: &mut TrainingBatch| b.policy.old = OldPolicy::Recomputed(shaped(&[3])), "old_log_probs: shape [3], must be [3, 2]")]
    #[case(|b: &mut TrainingBatch| b.policy.ref_log_probs = Some(shaped(&[2, 2])), "ref_log_probs: shape [2, 2], must be [3, 2]")]
    #[case(|b: &mut TrainingBatch| b.policy.scores = Some(shaped(&[3, 2])), "scores: shape [3, 2], must be [3]")]
    #[case(|b: &mut TrainingBatch| b.returns = Some(shaped(&[3])), "returns: shape [3], must be [3, 2]")]
    #[case(|b: &mut TrainingBatch| b.policy.policy_mask = Some(shaped(&[3])), "policy_mask: shape [3], must be [3, 2]")]
    fn shapes_that_do_not_belong_together_are_named(
        #[case] spoil: fn(&mut TrainingBatch),
        #[case] words: &str,
    ) {
        let mut batch = three();
        spoil(&mut batch);
        let error = batch.split(2).unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    }
}
