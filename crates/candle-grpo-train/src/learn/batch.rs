//! Batches of prompts and responses as tensors.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::{Device, Tensor};
use candle_grpo_loss::{PolicyBatch, StepTotals};

use super::TeacherDistributions;
use crate::sequence::{Batch, Column, select};
use crate::{Rollout, Sequence};

/// B sequences with responses of up to T tokens, and the tensors of their responses.
#[derive(Debug, Clone)]
pub struct TokenBatch {
    sequences: Vec<Sequence>,
    /// u32 `[B, T]`
    targets: Tensor,
    /// u32 `[B, T]`
    response_mask: Tensor,
}

impl TokenBatch {
    /// Creates a batch of (prompt, response) pairs.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no pairs, or a prompt or a response has no tokens.
    pub fn new(pairs: &[(&[u32], &[u32])], device: &Device) -> Result<Self> {
        let sequences = pairs.iter().enumerate().map(|(i, (prompt, response))| {
            ensure!(
                !prompt.is_empty() && !response.is_empty(),
                "sequence {i}: {} prompt tokens and {} response tokens, must have at least one of each",
                prompt.len(),
                response.len()
            );
            Sequence::of_answer(prompt, response)
        });
        Self::of_batch(&Batch::new(sequences.collect::<Result<_>>()?)?, device)
    }

    /// Creates the batch of the sequences of `batch`. Tokens without a weight are not in the
    /// response mask.
    ///
    /// # Errors
    ///
    /// If the device has no memory for it.
    pub fn of_batch(batch: &Batch, device: &Device) -> Result<Self> {
        let sequences = batch.sequences().to_vec();
        let targets = sequences.iter().map(|x| x.response().to_vec()).collect();
        let targets = Column::per_token::<u32>(targets).padded(batch.width(), device)?;
        Self {
            response_mask: targets.clone(),
            sequences,
            targets,
        }
        .with_mask_of_sequences()
    }

    /// Creates the batch of `rollouts`. Tokens that the policy did not write are context: they are
    /// not in the response mask.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`].
    pub fn from_rollouts(rollouts: &[Rollout], device: &Device) -> Result<Self> {
        Self::of_batch(&batch_of(rollouts)?, device)
    }

    /// Returns this batch of `rollouts` with the experts that the sampler recorded. The policy then
    /// replays them in training and does not choose (rollout routing replay,
    /// <https://arxiv.org/abs/2510.11370>). Other models choose their experts.
    ///
    /// # Errors
    ///
    /// Returns an error that names a completion without [`experts`](crate::Completion::experts),
    /// with another number of them, or with other tokens than the batch.
    pub fn replaying(mut self, rollouts: &[Rollout]) -> Result<Self> {
        ensure!(
            self.sequences.len() == rollouts.len(),
            "rollouts: {}, must be {}, those of the batch",
            rollouts.len(),
            self.sequences.len()
        );
        for (sequence, rollout) in self.sequences.iter_mut().zip(rollouts) {
            *sequence = replayed(sequence, rollout).with_context(|| {
                format!(
                    "completion {} of prompt {}",
                    rollout.sample_index, rollout.prompt_index
                )
            })?;
        }
        Ok(self)
    }

    /// Returns this batch for a model that chooses its experts.
    pub(super) fn without_experts(&self) -> Self {
        let sequences = self.sequences.iter().map(Sequence::without_experts);
        Self {
            sequences: sequences.collect(),
            ..self.clone()
        }
    }

    /// Returns this batch without tokens to train on in the sequences that are not kept.
    pub(super) fn keeping(mut self, keep: impl IntoIterator<Item = bool>) -> Result<Self> {
        for (sequence, keep) in self.sequences.iter_mut().zip(keep) {
            if !keep {
                *sequence = sequence.masked();
            }
        }
        self.with_mask_of_sequences()
    }

    fn with_mask_of_sequences(self) -> Result<Self> {
        let (_, width) = self.dims();
        let rows = self.sequences.iter();
        let rows = rows.map(|sequence| sequence.trained().map(u32::from).collect());
        let mask = Column::per_token::<u32>(rows.collect()).padded(width, self.targets.device())?;
        Ok(Self {
            response_mask: mask,
            ..self
        })
    }

    /// Returns the sequences.
    pub fn sequences(&self) -> &[Sequence] {
        &self.sequences
    }

    /// Returns the response tokens, u32 `[B, T]`.
    pub fn targets(&self) -> &Tensor {
        &self.targets
    }

    /// Returns the response mask, u32 `[B, T]`: 1 at tokens of [`Self::targets`] that train, 0
    /// elsewhere, including padding.
    pub fn response_mask(&self) -> &Tensor {
        &self.response_mask
    }

    /// Returns the denominators of a step that is this batch: [`StepTotals::count`] of its mask,
    /// without waiting for the device.
    pub fn totals(&self) -> StepTotals {
        let tokens = self.sequences.iter().map(Sequence::num_trained_tokens);
        let tokens: Vec<usize> = tokens.collect();
        StepTotals {
            tokens: tokens.iter().sum::<usize>() as f64,
            sequences: tokens.iter().filter(|&&tokens| tokens > 0).count() as f64,
            rows: tokens.len() as f64,
            ..StepTotals::default()
        }
    }

    /// Returns the number of sequences (B) and the length of the longest response (T) of the batch
    /// that this one is a part of.
    pub fn dims(&self) -> (usize, usize) {
        (self.sequences.len(), self.targets.dims()[1])
    }

    /// Returns `len` sequences, starting at `start`.
    ///
    /// # Errors
    ///
    /// If there are not as many.
    pub fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        let b = self.sequences.len();
        ensure!(
            len > 0 && start < b && len <= b - start,
            "sequences: {len} from {start} on, there are {b}"
        );
        self.select(&(start..start + len).collect::<Vec<_>>())
    }

    /// Selects the sequences with these indices, in this order. An index may repeat.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no indices, or one is not below B.
    pub fn select(&self, sequences: &[usize]) -> Result<Self> {
        let selected = select(&self.sequences, sequences)?;
        let rows = rows(sequences, self.targets.device())?;
        Ok(Self {
            sequences: selected,
            targets: self.targets.index_select(&rows, 0)?,
            response_mask: self.response_mask.index_select(&rows, 0)?,
        })
    }
}

/// `sequence`, the tokens of `rollout`, with its experts.
fn replayed(sequence: &Sequence, rollout: &Rollout) -> Result<Sequence> {
    let (prompt, response) = (&rollout.prompt_tokens, &rollout.completion.tokens);
    ensure!(
        sequence.prompt() == prompt && sequence.response() == response,
        "{} prompt tokens and {} response tokens, must be the {} and {} of the batch",
        prompt.len(),
        response.len(),
        sequence.prompt().len(),
        sequence.response().len()
    );
    let Some(experts) = &rollout.completion.experts else {
        bail!("no experts, must have them to be replayed");
    };
    sequence.clone().with_experts(experts.clone())
}

/// The name of the log-probs that the generator reported, in [`batch_of`].
const ROLLOUT_LOG_PROBS: &str = "rollout_log_probs";

/// The sequences of `rollouts`, with the log-probs that the generator reported.
fn batch_of(rollouts: &[Rollout]) -> Result<Batch> {
    let sequences = rollouts.iter().enumerate().map(|(i, rollout)| {
        let sequence = rollout.sequence();
        sequence.map_err(|error| anyhow!("sequence {i}: {error}"))
    });
    let log_probs = rollouts.iter().map(Rollout::reported_log_probs);
    Batch::new(sequences.collect::<Result<_>>()?)?
        .with_column(ROLLOUT_LOG_PROBS, Column::per_token(log_probs.collect()))
}

/// The inputs of a policy update.
#[derive(Debug, Clone)]
pub struct TrainingBatch {
    tokens: TokenBatch,
    policy: PolicyBatch,
    /// Values of the critic at each token, f32 `[B, T]`, for a value loss that clips.
    pub values: Option<Tensor>,
    /// Returns, the targets of the critic, f32 `[B, T]`.
    pub returns: Option<Tensor>,
    /// Distributions of a teacher, for [`ActorConfig::distillation_loss`].
    ///
    /// [`ActorConfig::distillation_loss`]: crate::ActorConfig::distillation_loss
    pub teacher: Option<TeacherDistributions>,
}

impl TrainingBatch {
    /// Creates a batch with only advantages `[B]` or `[B, T]`, for a first update after sampling
    /// without a KL loss.
    pub fn new(tokens: TokenBatch, advantages: &Tensor) -> Self {
        Self {
            policy: PolicyBatch::without_log_probs(advantages, tokens.response_mask()),
            tokens,
            values: None,
            returns: None,
            teacher: None,
        }
    }

    /// Sets inputs of the policy loss except those that the update computes: log-probs and
    /// entropy. The response mask stays that of the sequences.
    pub fn with_policy(mut self, set: impl FnOnce(PolicyBatch) -> PolicyBatch) -> Self {
        self.policy = PolicyBatch {
            response_mask: self.tokens.response_mask().clone(),
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

    /// Returns the number of sequences (B) and the length of the longest response (T).
    ///
    /// # Errors
    ///
    /// Returns an error that names the field if the shapes do not match.
    pub fn dims(&self) -> Result<(usize, usize)> {
        let (b, t) = self.tokens.dims();
        self.policy.dims()?;
        for (name, tensor) in [("values", &self.values), ("returns", &self.returns)] {
            if let Some(tensor) = tensor {
                ensure_dims(name, tensor, &[b, t])?;
            }
        }
        let of_teacher = self
            .teacher
            .iter()
            .flat_map(|teacher| teacher.by_sequence());
        for (name, tensor) in of_teacher {
            let width = tensor.dims().last().copied().unwrap_or(0);
            ensure_dims(name, tensor, &[b, t, width])?;
        }
        Ok((b, t))
    }

    /// Splits the batch into parts of `size` sequences; the last part may be smaller.
    pub fn split(&self, size: usize) -> Result<Vec<Self>> {
        ensure!(size > 0, "micro_batch_size: 0, must be at least 1");
        let (total, _) = self.dims()?;
        let starts = (0..total).step_by(size);
        let part = |start: usize| {
            let len = size.min(total - start);
            let tokens = self.tokens.narrow(start, len)?;
            self.map(tokens, |x| x.narrow(0, start, len)?.contiguous())
        };
        starts.map(part).collect()
    }

    /// Selects the sequences with these indices, in this order. An index may repeat.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no indices, or one is not below B.
    pub fn select(&self, sequences: &[usize]) -> Result<Self> {
        self.dims()?;
        let tokens = self.tokens.select(sequences)?;
        let rows = rows(sequences, tokens.targets.device())?;
        self.map(tokens, |x| x.contiguous()?.index_select(&rows, 0))
    }

    /// Returns the first sequence without a token to train on, for a rank without work.
    pub(super) fn without_work(&self) -> Result<Self> {
        let mut first = self.select(&[0])?;
        first.tokens = first.tokens.keeping([false])?;
        Ok(first.with_policy(|policy| policy))
    }

    /// The parts `tokens` with `f` of each other tensor.
    fn map(
        &self,
        tokens: TokenBatch,
        f: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let optional = |x: &Option<Tensor>| x.as_ref().map(&f).transpose();
        let batch = Self {
            policy: self.policy.map(&f)?,
            tokens,
            values: optional(&self.values)?,
            returns: optional(&self.returns)?,
            teacher: self.teacher.as_ref().map(|x| x.map(&f)).transpose()?,
        };
        Ok(batch.with_policy(|policy| policy))
    }
}

/// The indices of sequences, u32.
fn rows(sequences: &[usize], device: &Device) -> Result<Tensor> {
    let rows: Vec<u32> = sequences.iter().map(|&number| number as u32).collect();
    Ok(Tensor::new(rows, device)?)
}

/// Counts the tokens per prompt over an optimizer step.
///
/// Returns, for each sequence, the number of tokens of `batch` that train in all sequences with its
/// prompt, f32 `[B]`, and the number of prompts with a token, for
/// [`StepTotals::prompts`](candle_grpo_loss::StepTotals::prompts). `prompts` has the prompt of each
/// sequence.
///
/// [`Aggregation::PromptMeanTokenMean`](candle_grpo_loss::Aggregation::PromptMeanTokenMean) needs
/// both.
pub fn count_prompt_tokens(batch: &TokenBatch, prompts: &[usize]) -> Result<(Tensor, f64)> {
    let (b, _) = batch.dims();
    ensure!(
        b == prompts.len(),
        "prompts: {} for {b} sequences, there must be one for each",
        prompts.len()
    );
    let mut tokens_by_prompt: BTreeMap<usize, f32> = BTreeMap::new();
    for (&prompt, sequence) in prompts.iter().zip(batch.sequences()) {
        *tokens_by_prompt.entry(prompt).or_default() += sequence.num_trained_tokens() as f32;
    }
    let counts: Vec<f32> = prompts
        .iter()
        .map(|prompt| tokens_by_prompt[prompt])
        .collect();
    let counting = tokens_by_prompt
        .values()
        .filter(|&&tokens| tokens > 0.)
        .count();
    Ok((
        Tensor::new(counts, batch.targets().device())?,
        counting as f64,
    ))
}

fn ensure_dims(name: &str, x: &Tensor, dims: &[usize]) -> Result<()> {
    ensure!(
        x.dims() == dims,
        "{name}: shape {:?}, must be {dims:?}",
        x.dims()
    );
    Ok(())
}

/// Returns the log-probs that the generator reported, f32 `[B, T]`: those of the policy, or of the
/// distribution drawn from if it does not compute these. 0 for padding and for tokens that the
/// policy did not write.
///
/// # Errors
///
/// If there are no rollouts, or one has no tokens.
pub fn rollout_log_probs(rollouts: &[Rollout], device: &Device) -> Result<Tensor> {
    batch_of(rollouts)?.tensor(ROLLOUT_LOG_PROBS, device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_grpo_loss::OldPolicy;
    use candle_grpo_test_support::message;

    fn rows(x: &Tensor) -> Vec<Vec<u32>> {
        x.to_vec2().unwrap()
    }

    #[test]
    fn responses_are_padded_on_the_right() {
        let pairs: [(&[u32], &[u32]); 2] = [(&[1, 2, 3], &[4]), (&[5], &[6, 7, 8])];
        let batch = TokenBatch::new(&pairs, &Device::Cpu).unwrap();
        assert_eq!(rows(batch.targets()), [[4, 0, 0], [6, 7, 8]]);
        assert_eq!(rows(batch.response_mask()), [[1, 0, 0], [1, 1, 1]]);
        assert_eq!(batch.dims(), (2, 3));
        let kept = batch.keeping([true, false]).unwrap();
        assert_eq!(rows(kept.response_mask()), [[1, 0, 0], [0, 0, 0]]);
    }

    #[test]
    fn the_totals_are_those_of_the_mask() {
        let batch = three().tokens.keeping([true, false, true]).unwrap();
        let counted = StepTotals::count(batch.response_mask()).unwrap();
        assert_eq!(batch.totals(), counted);
        assert_eq!(
            (counted.tokens, counted.sequences, counted.rows),
            (3., 2., 3.)
        );
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

    #[test]
    fn tokens_are_counted_by_prompt() {
        let pairs: [(&[u32], &[u32]); 5] = [
            (&[1], &[2, 3]),
            (&[1], &[2]),
            (&[1], &[2]),
            (&[1], &[2, 3]),
            (&[1], &[2]),
        ];
        let batch = TokenBatch::new(&pairs, &Device::Cpu).unwrap();
        let batch = batch.keeping([true, true, false, true, false]).unwrap();
        let (tokens, prompts) = count_prompt_tokens(&batch, &[7, 3, 3, 7, 5]).unwrap();
        assert_eq!(tokens.to_vec1::<f32>().unwrap(), [4., 1., 1., 4., 0.]);
        assert_eq!(prompts, 2.);
        let error = count_prompt_tokens(&batch, &[1]).unwrap_err().to_string();
        assert!(error.starts_with("prompts: 1 for 5 sequences"), "{error}");
    }

    #[test]
    fn sequences_that_are_not_there_are_an_error() {
        let tokens = three().tokens;
        for (start, len) in [(3, 1), (2, 2), (1, 0), (1, usize::MAX)] {
            let error = tokens.narrow(start, len).unwrap_err().to_string();
            assert_eq!(
                error,
                format!("sequences: {len} from {start} on, there are 3")
            );
        }
    }

    #[test]
    fn empty_batches_and_sequences_are_errors() {
        let error = |pairs: &[(&[u32], &[u32])]| message(TokenBatch::new(pairs, &Device::Cpu));
        assert_eq!(
            error(&[]),
            "sequences: none, a batch must have at least one"
        );
        let pairs: [(&[u32], &[u32]); 2] = [(&[1], &[2]), (&[1, 1], &[])];
        assert_eq!(
            error(&pairs),
            "sequence 1: 2 prompt tokens and 0 response tokens, must have at least one of each"
        );
    }
}
