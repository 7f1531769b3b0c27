//! The likelihood of given tokens, and its gradient.

use anyhow::{Result, bail, ensure};
use candle_core::{D, DType, Device, Tensor};
use candle_grpo_kernels::linear_rows;
use candle_grpo_loss::surrogate::Likelihood;
use candle_grpo_loss::{LinearLogProb, LogProbOptions, TokenLogProbs};
use candle_grpo_nn::LanguageModel;
use candle_grpo_nn::model::ExpertBalance;
use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use super::response_forward::{Packed, RecordedResponses, output_weight};
use crate::Actor;
use crate::NotFinite;
use crate::rollout::decode::decode_tokens;

/// The largest number of logits that a comparison of tokens computes at once: 16 MiB of f32.
const PIECE_LOGITS: usize = 1 << 22;

/// A sequence of tokens and the weight of each in the loss: a row of supervised training.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    tokens: Vec<u32>,
    /// That of the first token is 0: nothing predicts it.
    weights: Vec<f32>,
}

impl Example {
    /// Creates an example. A token of weight 0 is only read. The weight of the first token counts
    /// as 0.
    ///
    /// # Errors
    ///
    /// If there is not one weight for each token, a weight is negative or not finite, or no token
    /// after the first one has a weight.
    pub fn new(tokens: Vec<u32>, mut weights: Vec<f32>) -> Result<Self> {
        ensure!(
            tokens.len() == weights.len(),
            "weights: {}, must be one for each of {} tokens",
            weights.len(),
            tokens.len()
        );
        if let Some(at) = weights.iter().position(|&x| !(x >= 0. && x.is_finite())) {
            bail!(
                "weights[{at}]: {}, must be finite and at least 0",
                weights[at]
            );
        }
        if let Some(first) = weights.first_mut() {
            *first = 0.;
        }
        ensure!(
            weights.iter().any(|&weight| weight > 0.),
            "weights: all 0 after the first token, must have a token to learn"
        );
        Ok(Self { tokens, weights })
    }

    /// Creates the example of a prompt and its answer, whose tokens have the weight 1. The answer
    /// should end with a stop token.
    ///
    /// # Errors
    ///
    /// If the answer is empty, or has one token after an empty prompt.
    pub fn of_answer(prompt: &[u32], answer: &[u32]) -> Result<Self> {
        let weights = [vec![0.; prompt.len()], vec![1.; answer.len()]].concat();
        Self::new([prompt, answer].concat(), weights)
    }

    /// Returns the tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the weight of each token in the loss; 0 for tokens that are only read.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Returns the number of tokens with a weight.
    pub fn num_trained_tokens(&self) -> usize {
        self.weights.iter().filter(|&&weight| weight > 0.).count()
    }

    /// Returns the sum of the weights.
    pub fn total_weight(&self) -> f64 {
        self.weights.iter().copied().map(f64::from).sum()
    }

    /// Returns the text of the first `max_tokens` tokens, with `⟦` and `⟧` around what trains.
    ///
    /// # Errors
    ///
    /// If the tokenizer cannot decode the tokens.
    pub fn marked_text(&self, tokenizer: &Tokenizer, max_tokens: usize) -> Result<String> {
        let shown = self.tokens.len().min(max_tokens);
        let trains: Vec<bool> = self.weights.iter().map(|&weight| weight > 0.).collect();
        let (mut text, mut start) = (String::new(), 0);
        for run in trains[..shown].chunk_by(|a, b| a == b) {
            let tokens = &self.tokens[start..start + run.len()];
            start += run.len();
            let piece = decode_tokens(tokens, tokenizer)?;
            match run[0] {
                true => text.extend(["⟦", piece.as_str(), "⟧"]),
                false => text.push_str(&piece),
            }
        }
        if shown < self.tokens.len() {
            text.push('…');
        }
        Ok(text)
    }

    /// The tokens that a model reads: those before the last one that trains.
    pub(crate) fn read_tokens(&self) -> &[u32] {
        let last = self.weights.iter().rposition(|&weight| weight > 0.);
        &self.tokens[..last.unwrap_or(0)]
    }
}

/// Sums over the trained tokens of examples. Those of parts of a step add up to those of the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
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
    /// Adds those of other examples.
    pub fn add(&mut self, other: &Self) {
        self.weight += other.weight;
        self.loss += other.loss;
        self.tokens += other.tokens;
        self.correct += other.correct;
        self.entropy += other.entropy;
        self.router_aux_loss += other.router_aux_loss;
        self.read_tokens += other.read_tokens;
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

/// The tokens that examples train, one after another.
struct Targets {
    /// u32 `[1, M]`
    tokens: Tensor,
    /// `[M]`
    ids: Vec<u32>,
    /// `[M]`
    weights: Vec<f32>,
}

impl Targets {
    /// Packs the tokens that a model reads of `examples`, and lists those that they train.
    fn pack(examples: &[&Example], device: &Device) -> Result<(Packed, Self)> {
        let (mut ids, mut weights, mut predicting) = (Vec::new(), Vec::new(), Vec::new());
        let mut first = 0;
        for example in examples {
            for (place, &weight) in example.weights.iter().enumerate().skip(1) {
                if weight > 0. {
                    ids.push(example.tokens[place]);
                    weights.push(weight);
                    predicting.push(first + place - 1);
                }
            }
            first += example.read_tokens().len();
        }
        let sequences = examples
            .iter()
            .map(|example| example.read_tokens().to_vec());
        let sequences: Vec<Vec<u32>> = sequences.collect();
        let packed = Packed::of_sequences(&sequences, &predicting, device)?;
        let tokens = Tensor::new(ids.as_slice(), device)?.unsqueeze(0)?;
        Ok((
            packed,
            Self {
                tokens,
                ids,
                weights,
            },
        ))
    }

    /// The output layer over the states `[1, M, H]` that predict the targets.
    fn layer(
        &self,
        model: &dyn LanguageModel,
        states: &Tensor,
        weight: &Tensor,
    ) -> Result<LinearLogProb> {
        let options = LogProbOptions {
            logit_cap: model.logit_cap(),
            ..Default::default()
        };
        Ok(LinearLogProb::new(
            states,
            weight,
            None,
            &self.tokens,
            1.,
            options,
        )?)
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
        let rows = (PIECE_LOGITS / weight.dim(0)?).max(1);
        for piece in open.chunks(rows) {
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
    /// `examples`, in one pass without padding. The loss of a token is that of `likelihood`. With
    /// the inverse of the total weight of an optimizer step, the gradients of its parts are those
    /// of its mean loss. Logits are at temperature 1. The returned sums are those of the negative
    /// log-probs.
    ///
    /// Examples do not attend to each other. Tokens of a common prefix are computed once.
    ///
    /// With [`ActorConfig::router_aux_loss_coef`](crate::ActorConfig::router_aux_loss_coef) the
    /// load-balancing loss of the pass is added with its share of `read_tokens`, the number of
    /// tokens that the step reads; without this loss the number is not needed.
    ///
    /// # Errors
    ///
    /// If there are no examples, and with [`NotFinite`] if the loss is not finite. An error may
    /// clear all gradients.
    pub fn forward_backward_examples(
        &mut self,
        examples: &[&Example],
        likelihood: Likelihood,
        scale: f64,
        read_tokens: f64,
    ) -> Result<LikelihoodSums> {
        let coef = self.config().router_aux_loss_coef;
        let (policy, trained, gradients) = self.learning();
        let (packed, targets) = Targets::pack(examples, trained.device())?;
        let mut recorded = RecordedResponses::of(policy, packed)?;
        let own_tokens = recorded.read_tokens();
        let coef = match coef {
            0. => 0.,
            coef => coef * own_tokens / read_tokens,
        };
        let balance = recorded.balance_experts(coef)?;
        let weight = output_weight(policy, trained);
        let layer = targets.layer(policy, &recorded.states, &weight)?;
        let tokens = layer.forward()?;
        let sums = targets.sums(&tokens, &recorded.states, policy.output_weight());
        let sums = sums.inspect_err(|_| gradients.clear())?;
        let derivatives = targets.derivatives(&tokens, likelihood, scale)?;
        let found = layer.backward(&tokens, &derivatives)?;
        drop(layer);
        if let Some(gradient) = found.weight {
            gradients.add(policy.output_name(), &gradient)?;
        }
        recorded.backward(found.hidden, trained, gradients)?;
        Ok(match balance {
            Some(ExpertBalance { loss, .. }) => LikelihoodSums {
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
    /// If there are no examples, and with [`NotFinite`] if the loss is not finite.
    pub fn likelihood(&self, examples: &[&Example]) -> Result<LikelihoodSums> {
        let policy = self.policy();
        let weight = policy.output_weight().detach();
        let (packed, targets) = Targets::pack(examples, weight.device())?;
        let states = packed.states(policy)?;
        let tokens = targets.layer(policy, &states, &weight)?.forward()?;
        targets.sums(&tokens, &states, &weight)
    }
}
