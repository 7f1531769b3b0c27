//! Batches of prompts and responses as tensors.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use candle_grpo_loss::{Mask, PaddedTokens, PolicyBatch};

use super::TeacherDistributions;
use crate::Rollout;

/// The tokens of B sequences as in [`PaddedTokens`], and the experts that a policy replays.
#[derive(Debug, Clone)]
pub struct TokenBatch {
    /// Input tokens of the decoder, u32 `[B, P + T - 1]`.
    pub input_ids: Tensor,
    /// 1 at tokens of `input_ids` and 0 at padding, u32 `[B, P + T - 1]`.
    pub attention_mask: Tensor,
    /// Response tokens, u32 `[B, T]`.
    pub targets: Tensor,
    /// Response mask, `[B, T]` of any dtype: 1 at trained tokens of `targets`, 0 elsewhere,
    /// including padding.
    pub response_mask: Tensor,
    /// The experts of each of `input_ids` that the policy replays, u32 `[B, P + T - 1, choices]`;
    /// see [`Self::replaying`].
    pub experts: Option<Tensor>,
}

impl TokenBatch {
    /// Creates a batch of (prompt, response) pairs.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no pairs, or a prompt or a response has no tokens.
    pub fn new(pairs: &[(&[u32], &[u32])], device: &Device) -> Result<Self> {
        let PaddedTokens {
            input_ids,
            attention_mask,
            targets,
            response_mask,
        } = PaddedTokens::new(pairs, device)?;
        Ok(Self {
            input_ids,
            attention_mask,
            targets,
            response_mask,
            experts: None,
        })
    }

    /// Creates the batch of `rollouts`. Tokens that the policy did not write are context: they are
    /// not in the response mask.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`].
    pub fn from_rollouts(rollouts: &[Rollout], device: &Device) -> Result<Self> {
        let pairs: Vec<(&[u32], &[u32])> = rollouts
            .iter()
            .map(|r| (r.prompt_tokens.as_slice(), r.completion.tokens.as_slice()))
            .collect();
        let batch = Self::new(&pairs, device)?;
        if rollouts.iter().all(|r| r.completion.written.is_none()) {
            return Ok(batch);
        }
        let (b, t) = batch.dims()?;
        let mut mask = vec![0u32; b * t];
        for (rollout, mask) in rollouts.iter().zip(mask.chunks_exact_mut(t)) {
            for (at, cell) in mask[..rollout.completion.tokens.len()]
                .iter_mut()
                .enumerate()
            {
                *cell = u32::from(rollout.completion.is_written(at));
            }
        }
        Ok(Self {
            response_mask: Tensor::from_vec(mask, (b, t), device)?,
            ..batch
        })
    }

    /// Returns this batch of `rollouts` with the experts that the sampler recorded. The policy then
    /// replays them in training and does not choose (rollout routing replay,
    /// <https://arxiv.org/abs/2510.11370>). Other models choose their experts.
    ///
    /// # Errors
    ///
    /// Returns an error that names a completion without [`experts`](crate::Completion::experts),
    /// with another number of them, or longer than the batch.
    pub fn replaying(self, rollouts: &[Rollout]) -> Result<Self> {
        let (b, t) = self.dims()?;
        ensure!(
            b == rollouts.len(),
            "rollouts: {}, must be {b}, those of the batch",
            rollouts.len()
        );
        let width = self.input_ids.dim(1)?;
        let mut padded = Vec::new();
        let mut choices = None;
        for rollout in rollouts {
            let name = || {
                format!(
                    "completion {} of prompt {}",
                    rollout.sample_index, rollout.prompt_index
                )
            };
            let Some(experts) = &rollout.completion.experts else {
                bail!("{}: no experts, must have them to be replayed", name());
            };
            let prompt = rollout.prompt_tokens.len();
            let response = rollout.completion.tokens.len();
            ensure!(
                (1..=width + 1 - t).contains(&prompt) && (1..=t).contains(&response),
                "{}: {prompt} prompt tokens and {response} response tokens, must be from 1 to {} and from 1 to {t}, as in the batch",
                name(),
                width + 1 - t
            );
            let read = prompt + response - 1;
            let of_token = *choices.get_or_insert(experts.len() / read);
            ensure!(
                of_token > 0 && experts.len() == of_token * read,
                "{}: {} experts of {read} tokens, must be as many of each token",
                name(),
                experts.len()
            );
            let before = width + 1 - t - prompt;
            let start = padded.len() + before * of_token;
            padded.resize(padded.len() + width * of_token, 0);
            for (cell, &expert) in padded[start..].iter_mut().zip(experts) {
                *cell = u32::from(expert);
            }
        }
        let shape = (b, width, choices.unwrap_or(0));
        let experts = Tensor::from_vec(padded, shape, self.targets.device())?;
        Ok(Self {
            experts: Some(experts),
            ..self
        })
    }

    /// Returns this batch for a model that chooses its experts.
    pub(super) fn without_experts(&self) -> Self {
        Self {
            experts: None,
            ..self.clone()
        }
    }

    /// Returns the number of sequences (B) and the length of the longest response (T).
    ///
    /// # Errors
    ///
    /// Returns an error that names the field if the shapes do not match.
    pub fn dims(&self) -> Result<(usize, usize)> {
        let &[b, t] = self.targets.dims() else {
            bail!("targets: shape {:?}, must be [B, T]", self.targets.dims());
        };
        ensure!(
            b > 0 && t > 0,
            "targets: shape [{b}, {t}], must have at least one sequence and one token"
        );
        ensure_dims("response_mask", &self.response_mask, &[b, t])?;
        match *self.input_ids.dims() {
            [rows, width] if rows == b && width >= t => {
                ensure_dims("attention_mask", &self.attention_mask, &[b, width])?;
                if let Some(experts) = &self.experts {
                    let choices = experts.dims().last().copied().unwrap_or(0);
                    ensure_dims("experts", experts, &[b, width, choices])?;
                }
            }
            _ => bail!(
                "input_ids: shape {:?}, must be [{b}, P + T - 1] with P at least 1 and T {t}",
                self.input_ids.dims()
            ),
        }
        Ok((b, t))
    }

    /// Returns `len` sequences, starting at `start`.
    pub fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        let (b, _) = self.dims()?;
        ensure!(
            len > 0 && start < b && len <= b - start,
            "sequences: {len} from {start} on, there are {b}"
        );
        self.map(|x| x.narrow(0, start, len)?.contiguous())
    }

    /// Selects the sequences with these indices, in this order.
    pub(super) fn select(&self, sequences: &[usize]) -> Result<Self> {
        let (b, _) = self.dims()?;
        let rows = rows(sequences, b, self.targets.device())?;
        self.map(|x| x.contiguous()?.index_select(&rows, 0))
    }

    /// Applies `f` to each tensor.
    fn map(&self, f: impl Fn(&Tensor) -> candle_core::Result<Tensor>) -> Result<Self> {
        Ok(Self {
            input_ids: f(&self.input_ids)?,
            attention_mask: f(&self.attention_mask)?,
            targets: f(&self.targets)?,
            response_mask: f(&self.response_mask)?,
            experts: self.experts.as_ref().map(&f).transpose()?,
        })
    }
}

/// The inputs of a policy update.
#[derive(Debug, Clone)]
pub struct TrainingBatch {
    /// The sequences.
    pub tokens: TokenBatch,
    /// The inputs of the policy loss except those that the update computes: log-probs and entropy.
    /// Its response mask is that of `tokens`.
    pub policy: PolicyBatch,
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
            policy: PolicyBatch::without_log_probs(advantages, &tokens.response_mask),
            tokens,
            values: None,
            returns: None,
            teacher: None,
        }
    }

    /// Returns the number of sequences (B) and the length of the longest response (T).
    ///
    /// # Errors
    ///
    /// Returns an error that names the field if the shapes do not match.
    pub fn dims(&self) -> Result<(usize, usize)> {
        let (b, t) = self.tokens.dims()?;
        ensure!(
            self.policy.response_mask.id() == self.tokens.response_mask.id(),
            "policy.response_mask: another tensor, must be tokens.response_mask"
        );
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
        (0..total)
            .step_by(size)
            .map(|start| self.narrow(start, size.min(total - start)))
            .collect()
    }

    /// Returns `len` sequences, starting at `start`.
    fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        self.map(|x| x.narrow(0, start, len)?.contiguous())
    }

    /// Selects the sequences with these indices, in this order. An index may repeat.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no indices, or one is not below B.
    pub fn select(&self, sequences: &[usize]) -> Result<Self> {
        let (b, _) = self.dims()?;
        let rows = rows(sequences, b, self.tokens.targets.device())?;
        self.map(|x| x.contiguous()?.index_select(&rows, 0))
    }

    /// Applies `f` to each tensor.
    fn map(&self, f: impl Fn(&Tensor) -> candle_core::Result<Tensor>) -> Result<Self> {
        let tokens = self.tokens.map(&f)?;
        let mut policy = self.policy.map(&f)?;
        policy.response_mask = tokens.response_mask.clone();
        let optional = |x: &Option<Tensor>| x.as_ref().map(&f).transpose();
        Ok(Self {
            tokens,
            policy,
            values: optional(&self.values)?,
            returns: optional(&self.returns)?,
            teacher: self.teacher.as_ref().map(|x| x.map(&f)).transpose()?,
        })
    }
}

/// The indices of some of `total` sequences, u32.
fn rows(sequences: &[usize], total: usize, device: &Device) -> Result<Tensor> {
    ensure!(
        !sequences.is_empty(),
        "sequences: none, must be at least one"
    );
    if let Some(number) = sequences.iter().find(|&&number| number >= total) {
        bail!("sequences: {number}, there are {total}");
    }
    let rows: Vec<u32> = sequences.iter().map(|&number| number as u32).collect();
    Ok(Tensor::new(rows, device)?)
}

/// Counts the tokens per prompt over an optimizer step.
///
/// Returns, for each sequence, the number of tokens in `response_mask` `[B, T]` of all sequences
/// with its prompt, f32 `[B]`, and the number of prompts with a token, for
/// [`StepTotals::prompts`](candle_grpo_loss::StepTotals::prompts). `prompts` has the prompt of each
/// sequence.
///
/// [`Aggregation::PromptMeanTokenMean`](candle_grpo_loss::Aggregation::PromptMeanTokenMean) needs
/// both. Synchronizes with the device.
pub fn count_prompt_tokens(response_mask: &Tensor, prompts: &[usize]) -> Result<(Tensor, f64)> {
    let lengths = Mask::new(response_mask)?
        .lengths(DType::F32)?
        .flatten_all()?
        .to_vec1::<f32>()?;
    ensure!(
        lengths.len() == prompts.len(),
        "prompts: {} for {} sequences, there must be one for each",
        prompts.len(),
        lengths.len()
    );
    let mut tokens_by_prompt: BTreeMap<usize, f32> = BTreeMap::new();
    for (&prompt, length) in prompts.iter().zip(lengths) {
        *tokens_by_prompt.entry(prompt).or_default() += length;
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
        Tensor::new(counts, response_mask.device())?,
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
/// If no rollout has a token.
pub fn rollout_log_probs(rollouts: &[Rollout], device: &Device) -> Result<Tensor> {
    let lengths = rollouts.iter().map(|r| r.completion.tokens.len());
    let width = lengths.max().unwrap_or(0);
    ensure!(width > 0, "rollouts: no tokens, there must be at least one");
    let mut cells = vec![0f32; rollouts.len() * width];
    for (rollout, cells) in rollouts.iter().zip(cells.chunks_exact_mut(width)) {
        let completion = &rollout.completion;
        let log_probs = completion.log_probs.as_ref();
        let log_probs = log_probs.unwrap_or(&completion.drawn_log_probs);
        for (at, (cell, &log_prob)) in cells.iter_mut().zip(log_probs).enumerate() {
            if completion.is_written(at) {
                *cell = log_prob;
            }
        }
    }
    Ok(Tensor::from_vec(cells, (rollouts.len(), width), device)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_grpo_loss::OldPolicy;
    use candle_grpo_test_support::message;

    #[test]
    fn prompts_are_padded_on_the_left_and_responses_on_the_right() {
        let pairs: [(&[u32], &[u32]); 2] = [(&[1, 2, 3], &[4]), (&[5], &[6, 7, 8])];
        let batch = TokenBatch::new(&pairs, &Device::Cpu).unwrap();
        let rows = |x: &Tensor| x.to_vec2::<u32>().unwrap();
        assert_eq!(rows(&batch.input_ids), [[1, 2, 3, 4, 0], [0, 0, 5, 6, 7]]);
        assert_eq!(
            rows(&batch.attention_mask),
            [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
        );
        assert_eq!(rows(&batch.targets), [[4, 0, 0], [6, 7, 8]]);
        assert_eq!(rows(&batch.response_mask), [[1, 0, 0], [1, 1, 1]]);
        assert_eq!(batch.dims().unwrap(), (2, 3));
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
        assert_eq!(pieces[1].tokens.targets.to_vec2::<u32>().unwrap(), [[6]]);
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
        let targets = drawn.tokens.targets.to_vec2::<u32>().unwrap();
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
    #[case(|b: &mut TrainingBatch| b.tokens.targets = shaped(&[3]), "targets: shape [3], must be [B, T]")]
    #[case(|b: &mut TrainingBatch| b.tokens.targets = shaped(&[]), "targets: shape [], must be [B, T]")]
    #[case(|b: &mut TrainingBatch| b.tokens.targets = shaped(&[3, 0]), "targets: shape [3, 0], must have")]
    #[case(|b: &mut TrainingBatch| b.tokens.response_mask = shaped(&[3, 1]), "response_mask: shape [3, 1], must be [3, 2]")]
    #[case(|b: &mut TrainingBatch| b.tokens.input_ids = shaped(&[3, 1]), "input_ids: shape [3, 1], must be [3, P")]
    #[case(|b: &mut TrainingBatch| b.tokens.input_ids = shaped(&[2, 2]), "input_ids: shape [2, 2], must be [3, P")]
    #[case(|b: &mut TrainingBatch| b.tokens.attention_mask = shaped(&[3, 3]), "attention_mask: shape [3, 3], must be [3, 2]")]
    #[case(|b: &mut TrainingBatch| b.policy.advantages = shaped(&[2]), "advantages: shape [2], must be [3] or [3, 2]")]
    #[case(|b: &mut TrainingBatch| b.policy.old = OldPolicy::Recomputed(shaped(&[3])), "old_log_probs: shape [3], must be [3, 2]")]
    #[case(|b: &mut TrainingBatch| b.policy.ref_log_probs = Some(shaped(&[2, 2])), "ref_log_probs: shape [2, 2], must be [3, 2]")]
    #[case(|b: &mut TrainingBatch| b.policy.scores = Some(shaped(&[3, 2])), "scores: shape [3, 2], must be [3]")]
    #[case(|b: &mut TrainingBatch| b.returns = Some(shaped(&[3])), "returns: shape [3], must be [3, 2]")]
    #[case(|b: &mut TrainingBatch| b.policy.response_mask = b.tokens.response_mask.copy().unwrap(), "policy.response_mask: another tensor")]
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
        let mask = Tensor::new(&[[1u8, 1], [1, 0], [0, 0], [1, 1], [0, 0]], &Device::Cpu).unwrap();
        let (tokens, prompts) = count_prompt_tokens(&mask, &[7, 3, 3, 7, 5]).unwrap();
        assert_eq!(tokens.to_vec1::<f32>().unwrap(), [4., 1., 1., 4., 0.]);
        assert_eq!(prompts, 2.);
        let error = count_prompt_tokens(&mask, &[1]).unwrap_err().to_string();
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
