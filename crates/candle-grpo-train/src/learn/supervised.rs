//! The likelihood of given tokens, and its gradient.

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};
use candle_grpo_kernels::linear_rows;
use candle_grpo_loss::TokenLogProbs;
use candle_grpo_loss::surrogate::Likelihood;
use candle_grpo_nn::LanguageModel;
use candle_grpo_nn::model::ExpertBalance;
use serde::{Deserialize, Serialize};

use super::Ranks;
use super::micro_batches::{Divided, MicroBatches};
use crate::sequence::Batch;
use crate::sequence::response_forward::{
    Packed, Targets, hold_output, output_layer, states_at_once,
};
use crate::{Actor, NotFinite, Sequence};

/// Sums over the trained tokens of sequences. Those of parts of a step add up to those of the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LikelihoodSums {
    /// The weights.
    pub weight: f64,
    /// The weighted negative log-probs, in nats.
    pub loss: f64,
    /// The number of tokens.
    pub tokens: f64,
    /// The number of tokens to which the model gives the highest probability.
    pub correct: f64,
    /// The entropies of the distributions, in nats.
    pub entropy: f64,
    /// The load-balancing loss of a model with experts, times `read_tokens`.
    pub router_aux_loss: f64,
    /// The number of tokens that the model has read in passes with a load-balancing loss.
    pub read_tokens: f64,
}

impl LikelihoodSums {
    /// Adds those of other sequences.
    pub fn add(&mut self, other: &Self) {
        self.weight += other.weight;
        self.loss += other.loss;
        self.tokens += other.tokens;
        self.correct += other.correct;
        self.entropy += other.entropy;
        self.router_aux_loss += other.router_aux_loss;
        self.read_tokens += other.read_tokens;
    }

    /// Adds those of the passes of all ranks, of which `own` are those of this one. All ranks must
    /// call it.
    pub(crate) fn over_ranks(own: Vec<Self>, ranks: &Ranks) -> Result<Self> {
        let mut total = Self::default();
        for part in ranks.gather(own)?.concat() {
            total.add(&part);
        }
        Ok(total)
    }

    /// Returns the loss: the weighted mean of the negative log-probs, in nats per token.
    pub fn mean_loss(&self) -> f64 {
        self.loss / self.weight
    }

    /// Returns the share of tokens to which the model gives the highest probability.
    pub fn token_accuracy(&self) -> f64 {
        self.correct / self.tokens
    }

    /// Returns the mean entropy in nats per token.
    pub fn mean_entropy(&self) -> f64 {
        self.entropy / self.tokens
    }
}

/// The tokens that sequences train, one after another.
struct Trained {
    /// u32 `[1, M]`
    tokens: Tensor,
    /// `[M]`
    ids: Vec<u32>,
    /// `[M]`
    weights: Vec<f32>,
}

impl Trained {
    fn new(sequences: &[Sequence], device: &Device) -> Result<Self> {
        let all = sequences.iter();
        let all = all.flat_map(|sequence| sequence.tokens().iter().zip(sequence.weights()));
        let trained = all.filter(|(_, weight)| **weight > 0.);
        let (ids, weights): (Vec<u32>, Vec<f32>) = trained.unzip();
        let tokens = Tensor::new(ids.as_slice(), device)?.unsqueeze(0)?;
        Ok(Self {
            tokens,
            ids,
            weights,
        })
    }

    /// Sums the results `tokens` of the layer. `weight` has the dtype of the states. Synchronizes
    /// with the device.
    fn sums(
        &self,
        tokens: &TokenLogProbs,
        states: &Tensor,
        weight: &Tensor,
    ) -> Result<LikelihoodSums> {
        let host = |x: &Tensor| -> Result<Vec<f32>> {
            Ok(x.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
        };
        let (log_probs, entropies) = (host(&tokens.log_probs)?, host(&tokens.entropy)?);
        let weighted = log_probs.iter().zip(&self.weights);
        let loss: f64 = weighted.map(|(&x, &w)| -f64::from(x) * f64::from(w)).sum();
        if !loss.is_finite() {
            return Err(NotFinite::new("loss").into());
        }
        Ok(LikelihoodSums {
            weight: self.weights.iter().copied().map(f64::from).sum(),
            loss,
            tokens: self.weights.len() as f64,
            correct: self.count_correct(&log_probs, &entropies, states, weight)? as f64,
            entropy: entropies.into_iter().map(f64::from).sum(),
            ..LikelihoodSums::default()
        })
    }

    /// Counts the targets that have the highest probability.
    ///
    /// A probability above 1/2 is the highest one, and one below `exp(-entropy)` is not: the
    /// highest is at least that. Logits are computed for other targets only.
    fn count_correct(
        &self,
        log_probs: &[f32],
        entropies: &[f32],
        states: &Tensor,
        weight: &Tensor,
    ) -> Result<usize> {
        // More than the rounding errors of both.
        const MARGIN: f32 = 1e-3;
        let (mut correct, mut open) = (0, Vec::new());
        for (place, (&log_prob, &entropy)) in log_probs.iter().zip(entropies).enumerate() {
            if log_prob > MARGIN - std::f32::consts::LN_2 {
                correct += 1;
            } else if log_prob >= -entropy - MARGIN {
                open.push(place as u32);
            }
        }
        let (states, weight) = (states.detach().squeeze(0)?, weight.detach());
        for piece in open.chunks(states_at_once(weight.dim(0)?)) {
            let index = Tensor::new(piece, states.device())?;
            let logits = linear_rows(&states.index_select(&index, 0)?, &[&weight])?;
            let logits = logits[0].to_dtype(DType::F32)?;
            let highest: Vec<u32> = logits.argmax(D::Minus1)?.to_vec1()?;
            let found = piece.iter().zip(highest);
            correct += found
                .filter(|&(&place, highest)| self.ids[place as usize] == highest)
                .count();
        }
        Ok(correct)
    }

    /// The derivatives of `scale` times the weighted sum of the losses of the tokens.
    fn derivatives(
        &self,
        tokens: &TokenLogProbs,
        likelihood: Likelihood,
        scale: f64,
    ) -> Result<TokenLogProbs> {
        let none = tokens.entropy.zeros_like()?;
        let weights = Tensor::new(self.weights.as_slice(), none.device())?.unsqueeze(0)?;
        let weights = weights.to_dtype(none.dtype())?;
        let weights = match likelihood.token_factors(&tokens.log_probs)? {
            Some(factors) => (weights * factors)?,
            None => weights,
        };
        Ok(TokenLogProbs {
            log_probs: (weights * -scale)?,
            entropy: none.clone(),
            log_sum_exp: none,
        })
    }
}

impl<M: LanguageModel> Actor<M> {
    /// Accumulates the gradient of `scale` times the weighted sum of the losses of the tokens of
    /// `sequences`, in one pass without padding. The loss of a token is that of `likelihood`. With
    /// the inverse of the total weight of an optimizer step, the gradients of its parts are those
    /// of its mean loss. Logits are at temperature 1. The returned sums are those of the negative
    /// log-probs.
    ///
    /// Sequences do not attend to each other. Tokens of a common prefix are computed once.
    ///
    /// With [`ActorConfig::router_aux_loss_coef`](crate::ActorConfig::router_aux_loss_coef) the
    /// load-balancing loss of the pass is added with its share of `read_tokens`, the number of
    /// tokens that the step reads; without this loss the number is not needed.
    ///
    /// # Errors
    ///
    /// If there are no sequences, or no token trains, and with [`NotFinite`] if the loss is not
    /// finite. An error may clear all gradients.
    pub fn forward_backward_examples(
        &mut self,
        sequences: &[Sequence],
        likelihood: Likelihood,
        scale: f64,
        read_tokens: f64,
    ) -> Result<LikelihoodSums> {
        let device = self.trained().device();
        let packed = Packed::new(sequences, Targets::Flat, device)?;
        let targets = Trained::new(sequences, device)?;
        let (sums, balance) = self.accumulate(packed, read_tokens, |mut output| {
            let layer = output.layer((&targets.tokens, None), 1.)?;
            let tokens = layer.forward()?;
            let sums = targets.sums(&tokens, output.states, output.policy.output_weight())?;
            let derivatives = targets.derivatives(&tokens, likelihood, scale)?;
            let found = layer.backward(&tokens, &derivatives)?;
            drop(layer);
            output.add(found.weight)?;
            Ok((found.hidden, sums))
        })?;
        Ok(match balance {
            Some((ExpertBalance { loss, .. }, own_tokens)) => LikelihoodSums {
                router_aux_loss: loss * own_tokens,
                read_tokens: own_tokens,
                ..sums
            },
            None => sums,
        })
    }

    /// Returns the sums of [`Self::forward_backward_examples`] without a gradient.
    ///
    /// # Errors
    ///
    /// If there are no sequences, or no token trains, and with [`NotFinite`] if the loss is not
    /// finite.
    pub fn likelihood(&self, sequences: &[Sequence]) -> Result<LikelihoodSums> {
        let policy = self.policy();
        let weight = policy.output_weight().detach();
        let packed = Packed::new(sequences, Targets::Flat, weight.device())?;
        let targets = Trained::new(sequences, weight.device())?;
        let states = packed.states(policy)?;
        let _held = hold_output(policy)?;
        let layer = output_layer(policy, &states, &weight, (&targets.tokens, None), 1.)?;
        let tokens = layer.forward()?;
        targets.sums(&tokens, &states, &weight)
    }
}

impl MicroBatches<'_> {
    /// Accumulates the gradient of `coef` times the weighted mean of the losses of the tokens of
    /// `rows`, and the load-balancing loss times `coef`, in the last passes of an update, over the
    /// micro-batches in `divided`. Returns the sums of this rank.
    ///
    /// # Errors
    ///
    /// As in [`Self::accumulate`].
    pub(crate) fn accumulate_likelihood<M: LanguageModel>(
        self,
        actor: &mut Actor<M>,
        (rows, divided): (&Batch, &Divided<Batch>),
        likelihood: Likelihood,
        coef: f64,
    ) -> Result<Vec<LikelihoodSums>> {
        let all = rows.sequences();
        let weight: f64 = all.iter().map(Sequence::total_weight).sum();
        let read: usize = all.iter().map(|row| row.read_tokens().len()).sum();
        let (scale, read) = (coef / weight, read as f64 / coef);
        self.accumulate(actor, (rows, divided), true, |actor, part, is_idle| {
            let (scale, read) = if is_idle {
                (0., f64::INFINITY)
            } else {
                (scale, read)
            };
            actor.forward_backward_examples(part.sequences(), likelihood, scale, read)
        })
    }
}
