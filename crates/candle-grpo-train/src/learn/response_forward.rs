//! Forward and backward passes of a model over the responses of a batch.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_grpo_kernels::{add_embedding_gradient, embedding};
use candle_grpo_loss::{LinearLogProb, LogProbOptions, TokenLogProbs};
use candle_grpo_nn::model::ExpertBalance;
use candle_grpo_nn::{Backward, Gradients, LanguageModel, PackedTokens, Parameters};

use crate::TokenBatch;

/// Computes log-probs and entropies `[B, T]` of the responses of `batch` at `temperature`.
///
/// The results are detached, and 0 outside the response mask. The logits are never allocated at
/// once.
pub(crate) fn response_log_probs(
    model: &dyn LanguageModel,
    batch: &TokenBatch,
    temperature: f64,
) -> Result<TokenLogProbs> {
    let states = predicting_states(model, batch)?;
    let weight = model.output_weight().detach();
    Ok(output_layer(model, &states, &weight, batch, temperature)?.forward()?)
}

/// Computes the detached hidden states `[B, T, H]` at the positions that predict the responses of
/// `batch`.
pub(super) fn predicting_states(model: &dyn LanguageModel, batch: &TokenBatch) -> Result<Tensor> {
    Packed::new(batch)?.states(model)
}

/// Creates the output layer of `model` over `states` `[B, T, H]`, which computes the log-probs of
/// the responses. `weight` is that of the layer, as a variable or not.
pub(super) fn output_layer(
    model: &dyn LanguageModel,
    states: &Tensor,
    weight: &Tensor,
    batch: &TokenBatch,
    temperature: f64,
) -> candle_core::Result<LinearLogProb> {
    let options = LogProbOptions {
        mask: Some(&batch.response_mask),
        logit_cap: model.logit_cap(),
        ..Default::default()
    };
    LinearLogProb::new(states, weight, None, &batch.targets, temperature, options)
}

/// Returns the output weight of `model`, as a variable if it is one of `trained`.
pub(super) fn output_weight(model: &dyn LanguageModel, trained: &Parameters) -> Tensor {
    match trained.get(model.output_name()) {
        Some(variable) => variable.as_tensor().clone(),
        None => model.output_weight().detach(),
    }
}

/// A forward pass over the responses of a batch, with its backward pass.
pub(super) struct RecordedResponses<'a> {
    /// The states of [`predicting_states`] as a variable, where the graph of a loss starts.
    pub(super) states: Var,
    places: Tensor,
    hidden_shape: Shape,
    hidden_dtype: DType,
    weights: Vec<f32>,
    backward: Box<dyn Backward + 'a>,
}

impl<'a> RecordedResponses<'a> {
    pub(super) fn new(model: &'a dyn LanguageModel, batch: &TokenBatch) -> Result<Self> {
        Self::of(model, Packed::new(batch)?)
    }

    pub(super) fn of(model: &'a dyn LanguageModel, packed: Packed) -> Result<Self> {
        let (hidden, backward) = model.record(&packed.tokens)?;
        Ok(Self {
            states: Var::from_tensor(&embedding(&packed.places, &hidden)?)?,
            places: packed.places,
            weights: packed.weights,
            hidden_shape: hidden.shape().clone(),
            hidden_dtype: hidden.dtype(),
            backward,
        })
    }

    /// The number of tokens of [`read_tokens`].
    pub(super) fn read_tokens(&self) -> f64 {
        self.weights.iter().copied().map(f64::from).sum()
    }

    /// Computes the balance of the experts, and adds `coef` times the gradient of its loss to that
    /// of [`Self::backward`]. `None` if the model has no experts, or no response counts.
    pub(super) fn balance_experts(&mut self, coef: f64) -> Result<Option<ExpertBalance>> {
        Ok(self.backward.balance_experts(&self.weights, coef)?)
    }

    /// Accumulates the gradients of `trained` from the gradient `[B, T, H]` of the states; `None`
    /// is 0.
    ///
    /// # Errors
    ///
    /// Returns an error if a variable receives no gradient. The gradients must then be cleared.
    pub(super) fn backward(
        self,
        states_gradient: Option<Tensor>,
        trained: &Parameters,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let sum = Tensor::zeros(self.hidden_shape, DType::F32, self.states.device())?;
        if let Some(states_gradient) = states_gradient {
            add_embedding_gradient(&sum, &self.places, &states_gradient)?;
        }
        drop(self.states);
        let hidden_gradient = sum.to_dtype(self.hidden_dtype)?;
        self.backward
            .backward(&hidden_gradient, trained, gradients)?;
        Ok(gradients.ensure_complete(trained)?)
    }
}

/// The packed tokens of a batch on which its responses depend. Shared prefixes, such as the prompt
/// of a group, occur once.
pub(super) struct Packed {
    tokens: PackedTokens,
    /// The index in `tokens` that predicts each response token, u32 `[B, T]`; 0 outside the
    /// response mask.
    places: Tensor,
    /// For each of `tokens` the number of sequences that have it and train, `[N]`.
    weights: Vec<f32>,
}

/// Returns the number of tokens that the model reads for the responses of `batch`, in all sequences
/// with a token in the response mask. A shared token counts once in each sequence.
///
/// # Errors
///
/// Returns an error if the shapes do not match, or the masks contradict each other.
pub fn read_tokens(batch: &TokenBatch) -> Result<f64> {
    let weights = Packed::new(batch)?.weights;
    Ok(weights.into_iter().map(f64::from).sum())
}

/// The tokens that a model reads of one sequence: those on which its responses depend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReadTokens {
    pub(crate) ids: Vec<u32>,
    /// The column of each in `input_ids`, ascending.
    pub(crate) columns: Vec<usize>,
    /// The number of them that are the prompt.
    pub(crate) prompt_len: usize,
    /// The experts of each that are replayed, one token after the other; empty without a replay.
    pub(crate) experts: Vec<u16>,
}

impl ReadTokens {
    pub(super) fn prompt(&self) -> &[u32] {
        &self.ids[..self.prompt_len]
    }

    /// The number of tokens of the prompt that a pass over both sequences computes once: those
    /// before the first one with another id or other experts.
    pub(super) fn shared_prompt(&self, other: &Self) -> usize {
        let experts = |token: usize| {
            [self, other].map(|sequence| {
                let choices = sequence.experts.len() / sequence.ids.len();
                &sequence.experts[token * choices..(token + 1) * choices]
            })
        };
        let prompts = self.prompt().iter().zip(other.prompt()).enumerate();
        prompts
            .take_while(|&(token, (own, others))| {
                let [of_own, of_others] = experts(token);
                own == others && of_own == of_others
            })
            .count()
    }
}

/// Returns the tokens that a model reads of each sequence of `batch`. Tokens after the last one
/// that counts are not read. Synchronizes with the device.
pub(crate) fn read_by_sequence(batch: &TokenBatch) -> Result<Vec<ReadTokens>> {
    let (_, t) = batch.dims()?;
    let ids = batch.input_ids.to_vec2::<u32>()?;
    let real = zero_one(&batch.attention_mask)?;
    let counts = zero_one(&batch.response_mask)?;
    let experts = match &batch.experts {
        Some(experts) => experts.to_vec3::<u32>()?,
        None => Vec::new(),
    };
    let prompt_width = batch.input_ids.dim(1)? + 1 - t;
    let sequences = ids.iter().zip(&real).zip(&counts).enumerate();
    let sequences = sequences.map(|(row, ((ids, real), counts))| {
        let last = counts.iter().rposition(|&counts| counts != 0).unwrap_or(0);
        let columns: Vec<usize> = (0..prompt_width + last)
            .filter(|&column| real[column] != 0)
            .collect();
        ReadTokens {
            ids: columns.iter().map(|&column| ids[column]).collect(),
            prompt_len: columns.partition_point(|&column| column < prompt_width),
            experts: match experts.get(row) {
                Some(of_row) => {
                    let of_read = columns.iter().flat_map(|&column| &of_row[column]);
                    of_read.map(|&expert| expert as u16).collect()
                }
                None => Vec::new(),
            },
            columns,
        }
    });
    Ok(sequences.collect())
}

impl Packed {
    fn new(batch: &TokenBatch) -> Result<Self> {
        let (b, t) = batch.dims()?;
        let device = batch.input_ids.device();
        let width = batch.input_ids.dim(1)?;
        let counts = zero_one(&batch.response_mask)?;
        let (mut packed, mut replayed) = (Vec::with_capacity(b), Vec::new());
        let (mut places, mut trains) = (Vec::new(), Vec::new());
        let mut first = 0;
        for (row, (read, counts)) in read_by_sequence(batch)?
            .into_iter()
            .zip(&counts)
            .enumerate()
        {
            ensure!(
                !read.ids.is_empty(),
                "attention_mask: sequence {row} has no token to read, must have at least one"
            );
            let mut place_of = vec![None; width];
            for (at, &column) in read.columns.iter().enumerate() {
                place_of[column] = Some(first + at);
            }
            replayed.push(read.experts);
            first += read.ids.len();
            let counted = u8::from(counts.contains(&1));
            trains.extend(std::iter::repeat_n(f32::from(counted), read.ids.len()));
            packed.push(read.ids);
            for (column, (&counts, place)) in counts.iter().zip(&place_of[width - t..]).enumerate()
            {
                ensure!(
                    counts == 0 || place.is_some(),
                    "response_mask: 1 at [{row}, {column}], must be 0, as attention_mask is at the position before"
                );
                places.push(place.filter(|_| counts != 0).unwrap_or(0));
            }
        }
        let tokens = match batch.experts {
            None => PackedTokens::sharing_prefixes(&packed, device)?,
            Some(_) => PackedTokens::replaying(&packed, &replayed, device)?,
        };
        let rows = tokens.rows();
        let places: Vec<u32> = places.into_iter().map(|place| rows[place]).collect();
        let mut weights = vec![0.; tokens.ids().dim(0)?];
        for (row, trains) in rows.into_iter().zip(trains) {
            weights[row as usize] += trains;
        }
        Ok(Self {
            tokens,
            places: Tensor::from_vec(places, (b, t), device)?,
            weights,
        })
    }

    /// Packs sequences of which all tokens are read and train. `predicting` has the places in the
    /// concatenated sequences whose states predict a token: their [`Self::places`] are `[1, M]`.
    pub(super) fn of_sequences(
        sequences: &[Vec<u32>],
        predicting: &[usize],
        device: &Device,
    ) -> Result<Self> {
        let tokens = PackedTokens::sharing_prefixes(sequences, device)?;
        let rows = tokens.rows();
        let places: Vec<u32> = predicting.iter().map(|&place| rows[place]).collect();
        let mut weights = vec![0.; tokens.ids().dim(0)?];
        for row in rows {
            weights[row as usize] += 1.;
        }
        let shape = (1, places.len());
        Ok(Self {
            tokens,
            places: Tensor::from_vec(places, shape, device)?,
            weights,
        })
    }

    /// Computes the detached hidden states of the places, `[B, T, H]`.
    pub(super) fn states(&self, model: &dyn LanguageModel) -> Result<Tensor> {
        let hidden = model.hidden_states(&self.tokens)?.detach();
        Ok(embedding(&self.places, &hidden)?)
    }
}

/// Copies the mask to the host as 0 and 1. Synchronizes with the device.
fn zero_one(mask: &Tensor) -> Result<Vec<Vec<u8>>> {
    Ok(mask.ne(0f64)?.to_vec2()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_no_response_depends_on_are_not_read() {
        let pairs: [(&[u32], &[u32]); 3] =
            [(&[1, 2, 3], &[4]), (&[5], &[6, 7, 8]), (&[9], &[1, 2])];
        let mut batch = TokenBatch::new(&pairs, &Device::Cpu).unwrap();
        // The last response is masked, and the one before except for its second token.
        batch.response_mask =
            Tensor::new(&[[1f32, 0., 0.], [0., 1., 0.], [0., 0., 0.]], &Device::Cpu).unwrap();
        let packed = Packed::new(&batch).unwrap();
        assert_eq!(
            packed.tokens.ids().to_vec1::<u32>().unwrap(),
            [1, 2, 3, 5, 6, 9]
        );
        assert_eq!(packed.tokens.lengths(), [3, 2, 1]);
        assert_eq!(
            packed.places.to_vec2::<u32>().unwrap(),
            [[2, 0, 0], [0, 4, 0], [0, 0, 0]]
        );
        // The last sequence does not train.
        assert_eq!(packed.weights, [1., 1., 1., 1., 1., 0.]);
        assert_eq!(read_tokens(&batch).unwrap(), 5.);
    }

    #[test]
    fn shared_prefixes_are_read_once() {
        let pairs: [(&[u32], &[u32]); 3] =
            [(&[1, 2], &[3, 4, 5]), (&[1, 2], &[3, 6, 7]), (&[1], &[2])];
        let batch = TokenBatch::new(&pairs, &Device::Cpu).unwrap();
        let packed = Packed::new(&batch).unwrap();
        assert_eq!(
            packed.tokens.ids().to_vec1::<u32>().unwrap(),
            [1, 2, 3, 4, 6]
        );
        assert_eq!(
            packed.places.to_vec2::<u32>().unwrap(),
            [[1, 2, 3], [1, 2, 4], [0, 0, 0]]
        );
        assert_eq!(packed.weights, [3., 2., 2., 1., 1.]);
        assert_eq!(read_tokens(&batch).unwrap(), 9.);
    }

    #[test]
    fn contradictory_masks_are_errors_with_their_names() {
        let pairs: [(&[u32], &[u32]); 2] = [(&[1], &[4]), (&[5], &[6, 7, 8])];
        let batch = TokenBatch::new(&pairs, &Device::Cpu).unwrap();
        let ones = batch.response_mask.ones_like().unwrap();
        let spoiled = TokenBatch {
            response_mask: ones,
            ..batch.clone()
        };
        let error = Packed::new(&spoiled).err().unwrap().to_string();
        assert!(
            error.starts_with("response_mask: 1 at [0, 2], must be 0"),
            "{error}"
        );
        let spoiled = TokenBatch {
            attention_mask: batch.attention_mask.zeros_like().unwrap(),
            ..batch
        };
        let error = Packed::new(&spoiled).err().unwrap().to_string();
        assert!(
            error.starts_with("attention_mask: sequence 0 has no token"),
            "{error}"
        );
    }
}
