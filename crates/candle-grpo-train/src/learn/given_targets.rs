//! Passes over rows that give the target of each position.

use std::ops::Range;

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use candle_grpo_core::validate::at_least_one;
use candle_grpo_loss::{Aggregation, OldPolicy, PolicyBatch, PolicyLoss, StepTotals};
use candle_grpo_nn::{DecoderConfig, LanguageModel};
use serde::{Deserialize, Serialize};

use super::actor::Output;
use crate::sequence::response_forward::{Packed, Targets, output_layer};
use crate::{Actor, NotFinite, Sequence};

/// Tokens that a model reads, with one value of each kind for each of them.
///
/// The target at a position need not be the token after it. Every position gets a log-prob. A
/// position with the advantage 0 has no loss.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TargetRow {
    /// Tokens that the model reads, `[T]`.
    pub tokens: Vec<u32>,
    /// Tokens whose log-probs count, `[T]`.
    pub targets: Vec<u32>,
    /// Advantages `[T]`; for a likelihood, the weights.
    pub advantages: Vec<f32>,
    /// Log-probs `[T]` of the sampler; absent for a loss without a ratio.
    pub rollout_log_probs: Option<Vec<f32>>,
}

impl TargetRow {
    /// Checks the row for a model.
    ///
    /// # Errors
    ///
    /// Names the first field that does not fit.
    pub fn validate(&self, model: &DecoderConfig) -> Result<()> {
        let length = self.tokens.len();
        ensure!(length > 0, "tokens: none, must be at least one");
        let positions = model.max_position_embeddings;
        ensure!(
            length <= positions,
            "tokens: {length}, must be at most {positions}, the positions of the model"
        );
        let log_probs = self.rollout_log_probs.as_deref();
        let lengths = [
            ("target_tokens", self.targets.len()),
            ("advantages", self.advantages.len()),
            ("logprobs", log_probs.map_or(length, <[f32]>::len)),
        ];
        for (name, found) in lengths {
            ensure!(
                found == length,
                "{name}: {found} values, must be {length}, one for each token"
            );
        }
        for (name, ids) in [("tokens", &self.tokens), ("target_tokens", &self.targets)] {
            if let Some(at) = ids.iter().position(|&id| id as usize >= model.vocab_size) {
                anyhow::bail!(
                    "{name}[{at}]: {}, must be below the vocabulary size {}",
                    ids[at],
                    model.vocab_size
                );
            }
        }
        for (name, values) in [
            ("advantages", Some(self.advantages.as_slice())),
            ("logprobs", log_probs),
        ] {
            let values = values.unwrap_or_default();
            if let Some(at) = values.iter().position(|value| !value.is_finite()) {
                anyhow::bail!("{name}[{at}]: {}, must be finite", values[at]);
            }
        }
        Ok(())
    }

    /// Returns the sequence whose passes read all tokens.
    fn sequence(&self) -> Result<Sequence> {
        let tokens: Vec<u32> = self
            .tokens
            .iter()
            .chain(self.targets.last())
            .copied()
            .collect();
        let weights = vec![1.; tokens.len()];
        Sequence::new(tokens, weights)
    }
}

/// The result of a pass over [`TargetRow`]s.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct TargetOutput {
    /// Loss, the sum over all positions.
    pub loss: f64,
    /// Log-probs of the targets before the update, `[T]` for each row.
    pub log_probs: Vec<Vec<f32>>,
}

/// A micro-batch of rows, whose positions are one sequence `[1, M]`.
struct Part<'a> {
    rows: &'a [TargetRow],
    packed: Packed,
    targets: Tensor,
    batch: PolicyBatch,
    totals: StepTotals,
}

impl<'a> Part<'a> {
    fn new(rows: &'a [TargetRow], device: &Device) -> Result<Self> {
        let sequences: Vec<Sequence> = rows
            .iter()
            .map(TargetRow::sequence)
            .collect::<Result<_>>()?;
        let flat = |values: Vec<f32>| Tensor::new(values, device)?.unsqueeze(0);
        let targets: Vec<u32> = rows.iter().flat_map(|row| row.targets.clone()).collect();
        let advantages: Vec<f32> = rows.iter().flat_map(|row| row.advantages.clone()).collect();
        let mut mask: Vec<f32> = advantages.iter().map(|&x| f32::from(x != 0.)).collect();
        if !mask.contains(&1.) {
            // The loss is 0 and so are its gradients, but a loss needs a token.
            mask.fill(1.);
        }
        let response_mask = flat(mask)?;
        let mut batch = PolicyBatch::without_log_probs(&flat(advantages)?, &response_mask);
        let old: Option<Vec<&[f32]>> = rows
            .iter()
            .map(|row| row.rollout_log_probs.as_deref())
            .collect();
        if let Some(old) = old {
            batch = batch.old_policy(OldPolicy::Rollout(flat(old.concat())?));
        }
        Ok(Self {
            packed: Packed::new(&sequences, Targets::Flat, device)?,
            targets: Tensor::new(targets, device)?.unsqueeze(0)?,
            totals: StepTotals::count(&response_mask)?,
            batch,
            rows,
        })
    }

    /// Divides rows into parts of at most `bound` tokens, or one row, in their order.
    fn bounds(rows: &[TargetRow], bound: usize) -> Vec<Range<usize>> {
        let mut parts: Vec<Range<usize>> = Vec::new();
        let mut tokens = 0;
        for (at, row) in rows.iter().enumerate() {
            match parts.last_mut() {
                Some(part) if tokens + row.tokens.len() <= bound => {
                    part.end = at + 1;
                    tokens += row.tokens.len();
                }
                _ => {
                    parts.push(at..at + 1);
                    tokens = row.tokens.len();
                }
            }
        }
        parts
    }
}

impl TargetOutput {
    /// Adds the results of a part. Synchronizes with the device.
    fn add(&mut self, rows: &[TargetRow], loss: &Tensor, log_probs: &Tensor) -> Result<()> {
        let loss = loss.to_dtype(DType::F32)?.to_scalar::<f32>()?;
        let all: Vec<f32> = log_probs.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        let finite = loss.is_finite() && all.iter().all(|x| x.is_finite());
        if !finite {
            return Err(NotFinite::new("loss").into());
        }
        self.loss += f64::from(loss);
        let mut start = 0;
        for row in rows {
            let end = start + row.targets.len();
            self.log_probs.push(all[start..end].to_vec());
            start = end;
        }
        Ok(())
    }
}

fn ensure_sum(loss: &PolicyLoss) -> Result<()> {
    let valid = loss.aggregation == Aggregation::TokenSum;
    ensure!(
        valid,
        "aggregation: {:?}, must be TokenSum for rows with given targets",
        loss.aggregation
    );
    Ok(loss.validate()?)
}

impl<M: LanguageModel> Actor<M> {
    /// Computes `policy_loss`, a sum over the positions of `rows`, without a gradient, in passes of
    /// at most `micro_batch_tokens` tokens. The temperature is 1.
    ///
    /// # Errors
    ///
    /// Fails if there are no rows, if the loss needs other inputs or another aggregation, and with
    /// [`NotFinite`] if it is not finite.
    pub fn forward_targets(
        &self,
        rows: &[TargetRow],
        policy_loss: &PolicyLoss,
        micro_batch_tokens: usize,
    ) -> Result<TargetOutput> {
        ensure_sum(policy_loss)?;
        let weight = self.policy().output_weight().detach();
        let mut output = TargetOutput::default();
        for part in parts(rows, micro_batch_tokens)? {
            let part = Part::new(part, weight.device())?;
            let states = part.packed.states(self.policy())?;
            let responses = (&part.targets, None);
            let layer = output_layer(self.policy(), &states, &weight, responses, 1.)?;
            let tokens = layer.forward()?;
            // A loss is computed of a variable, also for its value alone.
            let log_probs = Var::from_tensor(&tokens.log_probs)?;
            let batch = part.batch.log_probs(&log_probs);
            let found = policy_loss.compute(&batch, &part.totals)?;
            output.add(part.rows, &found.loss, &tokens.log_probs)?;
        }
        Ok(output)
    }

    /// Accumulates the gradient of [`Self::forward_targets`].
    ///
    /// # Errors
    ///
    /// As in [`Self::forward_targets`]. An error clears all gradients.
    pub fn forward_backward_targets(
        &mut self,
        rows: &[TargetRow],
        policy_loss: &PolicyLoss,
        micro_batch_tokens: usize,
    ) -> Result<TargetOutput> {
        ensure_sum(policy_loss)?;
        let found = self.accumulate_targets(rows, policy_loss, micro_batch_tokens);
        found.inspect_err(|_| self.zero_grad())
    }

    fn accumulate_targets(
        &mut self,
        rows: &[TargetRow],
        policy_loss: &PolicyLoss,
        micro_batch_tokens: usize,
    ) -> Result<TargetOutput> {
        let mut output = TargetOutput::default();
        let device = self.trained().device().clone();
        let read: usize = rows.iter().map(|row| row.tokens.len()).sum();
        for part in parts(rows, micro_batch_tokens)? {
            let part = Part::new(part, &device)?;
            let pass = |layer: Output<'_, M>| {
                layer.policy_loss(policy_loss, &part.targets, &part.batch, &part.totals)
            };
            let ((loss, log_probs), _) = self.accumulate(part.packed, read as f64, pass)?;
            output.add(part.rows, &loss, &log_probs)?;
        }
        Ok(output)
    }
}

/// Divides rows into the micro-batches of a pass.
fn parts(rows: &[TargetRow], tokens: usize) -> Result<impl Iterator<Item = &[TargetRow]>> {
    at_least_one("micro_batch_tokens", tokens)?;
    ensure!(!rows.is_empty(), "rows: none, must be at least one");
    let parts = Part::bounds(rows, tokens);
    Ok(parts.into_iter().map(|part| &rows[part]))
}
