//! Passes over rows that give the target of each position.

use std::ops::Range;

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Device, Tensor, Var};
use candle_grpo_core::validate::at_least_one;
use candle_grpo_loss::{Aggregation, OldPolicy, PolicyBatch, PolicyLoss, StepTotals};
use candle_grpo_nn::{Decoder, LanguageModel};
use serde::{Deserialize, Serialize};

use super::actor::Output;
use crate::sequence::response_forward::{
    JoinedResponses, Packed, Targets, hold_output, output_layer,
};
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
    /// Log-probs `[T]` of the sampler; absent, in all rows, for a loss without a ratio.
    pub rollout_log_probs: Option<Vec<f32>>,
}

impl TargetRow {
    /// Checks the row `at` for a model with `vocab_size` tokens.
    fn ensure(&self, at: usize, vocab_size: usize) -> Result<()> {
        let length = self.tokens.len();
        ensure!(
            length > 0,
            "rows[{at}].tokens: none, must be at least one token"
        );
        let log_probs = self.rollout_log_probs.as_deref();
        let lengths = [
            ("targets", self.targets.len()),
            ("advantages", self.advantages.len()),
            ("rollout_log_probs", log_probs.map_or(length, <[f32]>::len)),
        ];
        for (name, found) in lengths {
            ensure!(
                found == length,
                "rows[{at}].{name}: {found} values, must be {length}, one for each token"
            );
        }
        for (name, ids) in [("tokens", &self.tokens), ("targets", &self.targets)] {
            if let Some(place) = ids.iter().position(|&id| id as usize >= vocab_size) {
                bail!(
                    "rows[{at}].{name}[{place}]: {}, must be below the vocabulary size {vocab_size}",
                    ids[place]
                );
            }
        }
        for (name, values) in [
            ("advantages", self.advantages.as_slice()),
            ("rollout_log_probs", log_probs.unwrap_or_default()),
        ] {
            if let Some(place) = values.iter().position(|value| !value.is_finite()) {
                let value = values[place];
                bail!("rows[{at}].{name}[{place}]: {value}, must be finite");
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
    /// Fails if there are no rows or a wrong one, if the loss needs other inputs or another
    /// aggregation, and with [`NotFinite`] if it is not finite.
    pub fn forward_targets(
        &self,
        rows: &[TargetRow],
        policy_loss: &PolicyLoss,
        micro_batch_tokens: usize,
    ) -> Result<TargetOutput> {
        ensure_sum(policy_loss)?;
        let weight = self.policy().output_weight().detach();
        let mut output = TargetOutput::default();
        for part in parts(rows, weight.dim(0)?, micro_batch_tokens)? {
            let part = Part::new(part, weight.device())?;
            let states = part.packed.states(self.policy())?;
            let _held = hold_output(self.policy())?;
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
        let vocab_size = self.policy().output_weight().dim(0)?;
        let read: usize = rows.iter().map(|row| row.tokens.len()).sum();
        for part in parts(rows, vocab_size, micro_batch_tokens)? {
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

/// A pass over an actor's rows, see [`Actor::forward_backward_targets_joined`].
pub struct TargetPass<'a> {
    /// The actor. It has adapters.
    pub actor: &'a mut Actor,
    /// The rows.
    pub rows: &'a [TargetRow],
    /// The loss, a sum over the positions of the rows.
    pub policy_loss: &'a PolicyLoss,
}

impl Actor {
    /// Accumulates the gradients that [`Self::forward_backward_targets`] accumulates for each of
    /// `passes`, in one pass over the rows of all of them. It computes the products with the base
    /// weights once for all rows: see [`Decoder::joined`]. With few tokens this is faster.
    ///
    /// On the CPU in f32, the results and the gradients have the bits of separate passes with the
    /// rows in one micro-batch, if one of the rows of each actor has at least two tokens.
    ///
    /// # Errors
    ///
    /// As in [`Self::forward_backward_targets`] and [`Decoder::joined`], and if an actor has no
    /// adapters. An error, such as a loss of one of the passes that is not finite, clears all
    /// gradients of all actors.
    pub fn forward_backward_targets_joined(
        mut passes: Vec<TargetPass<'_>>,
    ) -> Result<Vec<TargetOutput>> {
        let found = accumulate_joined(&mut passes);
        if found.is_err() {
            passes.iter_mut().for_each(|pass| pass.actor.zero_grad());
        }
        found
    }
}

fn accumulate_joined(passes: &mut [TargetPass<'_>]) -> Result<Vec<TargetOutput>> {
    let mut batches = Vec::new();
    let mut losses = Vec::new();
    for TargetPass {
        actor,
        rows,
        policy_loss,
    } in passes.iter()
    {
        ensure_sum(policy_loss)?;
        ensure_rows(rows, actor.policy().output_weight().dim(0)?)?;
        let part = Part::new(rows, actor.trained().device())?;
        batches.push(part.packed);
        losses.push((part.targets, part.batch, part.totals));
    }
    let decoders: Vec<&Decoder> = passes.iter().map(|pass| pass.actor.policy()).collect();
    let joined = Decoder::joined(&decoders)?;
    let recorded = JoinedResponses::new(&joined, batches)?;
    let (mut outputs, mut gradients) = (Vec::new(), Vec::new());
    for ((pass, (targets, batch, totals)), states) in
        passes.iter_mut().zip(&losses).zip(&recorded.states)
    {
        let policy_loss = pass.policy_loss;
        let (gradient, (loss, log_probs)) = pass.actor.at_states(states, |layer| {
            layer.policy_loss(policy_loss, targets, batch, totals)
        })?;
        let mut output = TargetOutput::default();
        output.add(pass.rows, &loss, &log_probs)?;
        outputs.push(output);
        gradients.push(gradient);
    }
    let adapters = passes.iter_mut();
    let adapters = adapters.map(|pass| pass.actor.adapters_and_gradients());
    recorded.backward(gradients, adapters.collect::<Result<_>>()?)?;
    Ok(outputs)
}

/// Divides rows into the micro-batches of a pass.
fn parts(
    rows: &[TargetRow],
    vocab_size: usize,
    tokens: usize,
) -> Result<impl Iterator<Item = &[TargetRow]>> {
    at_least_one("micro_batch_tokens", tokens)?;
    ensure_rows(rows, vocab_size)?;
    let parts = Part::bounds(rows, tokens);
    Ok(parts.into_iter().map(|part| &rows[part]))
}

fn ensure_rows(rows: &[TargetRow], vocab_size: usize) -> Result<()> {
    let Some(first) = rows.first() else {
        bail!("rows: none, must be at least one");
    };
    for (at, row) in rows.iter().enumerate() {
        row.ensure(at, vocab_size)?;
        ensure!(
            row.rollout_log_probs.is_some() == first.rollout_log_probs.is_some(),
            "rows[{at}].rollout_log_probs: {}, must be given in all rows or in none",
            row.rollout_log_probs.as_ref().map_or("absent", |_| "given")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> TargetRow {
        TargetRow {
            tokens: vec![1, 2],
            targets: vec![2, 0],
            advantages: vec![1., -1.],
            rollout_log_probs: Some(vec![-1., -2.]),
        }
    }

    /// A change that makes a row invalid, and the error.
    type Case = (fn(&mut TargetRow), &'static str);

    #[test]
    fn wrong_rows_are_errors_that_name_the_field() {
        let cases: [Case; 8] = [
            (
                |row| *row = TargetRow::default(),
                "rows[1].tokens: none, must be at least one token",
            ),
            (
                |row| row.targets.push(1),
                "rows[1].targets: 3 values, must be 2, one for each token",
            ),
            (
                |row| row.advantages.truncate(1),
                "rows[1].advantages: 1 values, must be 2, one for each token",
            ),
            (
                |row| row.rollout_log_probs = Some(vec![0.]),
                "rows[1].rollout_log_probs: 1 values, must be 2, one for each token",
            ),
            (
                |row| row.targets[1] = 3,
                "rows[1].targets[1]: 3, must be below the vocabulary size 3",
            ),
            (
                |row| row.advantages[0] = f32::NAN,
                "rows[1].advantages[0]: NaN, must be finite",
            ),
            (
                |row| row.rollout_log_probs = Some(vec![0., f32::INFINITY]),
                "rows[1].rollout_log_probs[1]: inf, must be finite",
            ),
            (
                |row| row.rollout_log_probs = None,
                "rows[1].rollout_log_probs: absent, must be given in all rows or in none",
            ),
        ];
        for (change, words) in cases {
            let mut rows = [row(), row()];
            change(&mut rows[1]);
            let error = parts(&rows, 3, 4).err().map(|error| error.to_string());
            assert_eq!(error.as_deref(), Some(words));
        }
        assert_eq!(parts(&[row(), row()], 3, 3).unwrap().count(), 2);
        assert_eq!(parts(&[row(), row()], 3, 4).unwrap().count(), 1);
    }
}
