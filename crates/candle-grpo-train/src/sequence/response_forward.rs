//! Forward and backward passes over a batch's responses.

use anyhow::Result;
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_grpo_kernels::{add_embedding_gradient, embedding};
use candle_grpo_loss::{LinearLogProb, LogProbOptions, TokenLogProbs};
use candle_grpo_nn::model::ExpertBalance;
use candle_grpo_nn::{
    Backward, Decoder, DividedModel, Gradients, Held, LanguageModel, Lora, PackedTokens, Parameters,
};

use super::{Sequence, TokenBatch};

/// Computes log-probs and entropies `[B, T]` for the responses in `batch` at `temperature`.
///
/// The results are detached, and 0 outside the response mask. The logits are never allocated all at
/// once.
pub(crate) fn response_log_probs(
    model: &dyn LanguageModel,
    batch: &TokenBatch,
    temperature: f64,
) -> Result<TokenLogProbs> {
    let states = predicting_states(model, batch)?;
    let _held = hold_output(model)?;
    let weight = model.output_weight().detach();
    let responses = (batch.targets(), Some(batch.response_mask()));
    Ok(output_layer(model, &states, &weight, responses, temperature)?.forward()?)
}

/// Computes the detached hidden states `[B, T, H]` at the positions that predict the responses in
/// `batch`.
pub(crate) fn predicting_states(model: &dyn LanguageModel, batch: &TokenBatch) -> Result<Tensor> {
    Packed::of_batch(batch)?.states(model)
}

/// Creates the model's output layer over `states` `[B, T, H]`, which computes the log-probs of
/// `targets` `[B, T]` under `mask`. `weight` is the layer's weight, either a variable or a
/// constant.
pub(crate) fn output_layer(
    model: &dyn LanguageModel,
    states: &Tensor,
    weight: &Tensor,
    (targets, mask): (&Tensor, Option<&Tensor>),
    temperature: f64,
) -> candle_core::Result<LinearLogProb> {
    let options = LogProbOptions {
        mask,
        logit_cap: model.logit_cap(),
        ..Default::default()
    };
    LinearLogProb::new(states, weight, None, targets, temperature, options)
}

/// Gathers the model's output weight until the result is dropped, if ranks divide it.
pub(crate) fn hold_output(model: &dyn LanguageModel) -> candle_core::Result<Option<Held>> {
    model.divided().map(DividedModel::hold_output).transpose()
}

/// Returns the number of states whose logits over a vocabulary are computed at once: 16 MiB of f32.
pub(crate) fn states_at_once(vocabulary: usize) -> usize {
    ((1 << 22) / vocabulary).max(1)
}

/// Returns the model's output weight, as a variable if `trained` contains it.
pub(crate) fn output_weight(model: &dyn LanguageModel, trained: &Parameters) -> Tensor {
    match trained.get(model.output_name()) {
        Some(variable) => variable.as_tensor().clone(),
        None => model.output_weight().detach(),
    }
}

/// A forward pass over a batch's responses, with its backward pass.
pub(crate) struct RecordedResponses<'a> {
    /// The [`predicting_states`] as a variable, where a loss's graph starts.
    pub(crate) states: Var,
    selected: Selected,
    weights: Vec<f32>,
    backward: Box<dyn Backward + 'a>,
}

/// The hidden states that predict the responses, among those of all tokens.
struct Selected {
    places: Tensor,
    hidden_shape: Shape,
    hidden_dtype: DType,
}

impl Selected {
    /// Selects the states in `hidden` `[N, H]`, and returns them as a variable.
    fn new(hidden: &Tensor, places: Tensor) -> Result<(Var, Self)> {
        let states = Var::from_tensor(&embedding(&places, hidden)?)?;
        let selected = Self {
            places,
            hidden_shape: hidden.shape().clone(),
            hidden_dtype: hidden.dtype(),
        };
        Ok((states, selected))
    }

    /// Returns the gradient `[N, H]`, given the state gradient; `None` is 0.
    fn hidden_gradient(&self, states_gradient: Option<Tensor>) -> Result<Tensor> {
        let device = self.places.device();
        let sum = Tensor::zeros(&self.hidden_shape, DType::F32, device)?;
        if let Some(states_gradient) = states_gradient {
            add_embedding_gradient(&sum, &self.places, &states_gradient)?;
        }
        Ok(sum.to_dtype(self.hidden_dtype)?)
    }
}

impl<'a> RecordedResponses<'a> {
    pub(crate) fn new(model: &'a dyn LanguageModel, packed: Packed) -> Result<Self> {
        let (hidden, backward) = model.record(&packed.tokens)?;
        let (states, selected) = Selected::new(&hidden, packed.places)?;
        Ok(Self {
            states,
            selected,
            weights: packed.weights,
            backward,
        })
    }

    /// Returns the number of tokens in [`read_tokens`].
    pub(crate) fn read_tokens(&self) -> f64 {
        self.weights.iter().copied().map(f64::from).sum()
    }

    /// Computes the expert balance, and adds `coef` times its loss gradient to [`Self::backward`].
    /// Returns `None` if the model has no experts, or if no response counts.
    pub(crate) fn balance_experts(&mut self, coef: f64) -> Result<Option<ExpertBalance>> {
        Ok(self.backward.balance_experts(&self.weights, coef)?)
    }

    /// Accumulates the gradients for `trained` from the state gradient `[B, T, H]`; `None` is 0.
    ///
    /// # Errors
    ///
    /// Fails if a variable receives no gradient. The gradients must then be cleared.
    pub(crate) fn backward(
        self,
        states_gradient: Option<Tensor>,
        trained: &Parameters,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let hidden_gradient = self.selected.hidden_gradient(states_gradient)?;
        drop((self.states, self.selected));
        self.backward
            .backward(&hidden_gradient, trained, gradients)?;
        Ok(gradients.ensure_complete(trained)?)
    }
}

/// A joined decoder's forward pass over the responses of several batches, one for each of its
/// adapters, with its backward pass.
pub(crate) struct JoinedResponses<'a> {
    /// The [`predicting_states`] of each batch as a variable.
    pub(crate) states: Vec<Var>,
    selected: Vec<Selected>,
    backward: Box<dyn Backward + 'a>,
}

impl<'a> JoinedResponses<'a> {
    pub(crate) fn new(model: &'a Decoder, batches: Vec<Packed>) -> Result<Self> {
        let tokens: Vec<&PackedTokens> = batches.iter().map(|packed| &packed.tokens).collect();
        let tokens = PackedTokens::joined(&tokens)?;
        let (hidden, backward) = model.record(&tokens)?;
        let (mut states, mut selected) = (Vec::new(), Vec::new());
        let mut first = 0;
        for (&rows, packed) in tokens.parts().iter().zip(batches) {
            let hidden = hidden.narrow(0, first, rows)?;
            let (own, places) = Selected::new(&hidden, packed.places)?;
            states.push(own);
            selected.push(places);
            first += rows;
        }
        Ok(Self {
            states,
            selected,
            backward,
        })
    }

    /// Accumulates the gradients for all adapters from the state gradients of all batches.
    ///
    /// # Errors
    ///
    /// Fails if a variable receives no gradient. All gradients must then be cleared.
    pub(crate) fn backward(
        self,
        states_gradients: Vec<Option<Tensor>>,
        mut adapters: Vec<(&Lora, &mut Gradients)>,
    ) -> Result<()> {
        let parts = self.selected.iter().zip(states_gradients);
        let parts: Vec<Tensor> = parts
            .map(|(selected, gradient)| selected.hidden_gradient(gradient))
            .collect::<Result<_>>()?;
        drop((self.states, self.selected));
        let hidden_gradient = Tensor::cat(&parts, 0)?;
        drop(parts);
        let sums = adapters.iter_mut().map(|(lora, sums)| (*lora, &mut **sums));
        self.backward
            .backward_joined(&hidden_gradient, sums.collect())?;
        for (lora, gradients) in adapters {
            gradients.ensure_complete(lora.parameters())?;
        }
        Ok(())
    }
}

/// The packed tokens on which a batch's responses depend. Shared prefixes, such as a group's
/// prompt, occur once.
pub(crate) struct Packed {
    tokens: PackedTokens,
    /// The index in `tokens` that predicts each response token, u32 `[B, T]`; 0 for those that
    /// neither train nor are observations.
    places: Tensor,
    /// For each token in `tokens`, the number of trained sequences that contain it, `[N]`.
    weights: Vec<f32>,
}

/// Returns the number of tokens that the model reads for the responses in `batch`, over all
/// sequences with a token in the response mask. A shared token counts once per sequence.
pub fn read_tokens(batch: &TokenBatch) -> f64 {
    let trained = batch
        .sequences()
        .iter()
        .filter(|x| x.num_trained_tokens() > 0);
    trained.map(|x| x.read_tokens().len()).sum::<usize>() as f64
}

/// The trained tokens whose log-probs a pass computes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Targets {
    /// One row per sequence, after its prompt: `[B, T]`.
    Padded(usize),
    /// One row for all sequences, one after another: `[1, M]`.
    Flat,
}

impl Packed {
    pub(crate) fn of_batch(batch: &TokenBatch) -> Result<Self> {
        let (_, width) = batch.dims();
        let device = batch.targets().device();
        Self::new(batch.sequences(), Targets::Padded(width), device)
    }

    /// Packs the tokens in `sequences` that a model reads.
    pub(crate) fn new(sequences: &[Sequence], targets: Targets, device: &Device) -> Result<Self> {
        let read: Vec<Vec<u32>> = sequences.iter().map(|x| x.read_tokens().to_vec()).collect();
        let replayed = sequences.iter().map(Sequence::read_experts);
        let replayed: Option<Vec<Vec<u16>>> = replayed.map(|x| Some(x?.to_vec())).collect();
        let tokens = match replayed {
            None => PackedTokens::sharing_prefixes(&read, device)?,
            Some(experts) => PackedTokens::replaying(&read, &experts, device)?,
        };
        let rows = tokens.rows();
        let mut weights = vec![0.; tokens.ids().dim(0)?];
        let mut places = Vec::new();
        let mut first = 0;
        for (sequence, read) in sequences.iter().zip(&read) {
            let trains = f32::from(sequence.num_trained_tokens() > 0);
            for &row in &rows[first..first + read.len()] {
                weights[row as usize] += trains;
            }
            let start = sequence.prompt().len();
            let predicting = sequence.predicted().enumerate();
            // The first token is neither trained nor observed, so each of these has a predecessor.
            let predicting = predicting.map(|(at, is_predicted)| {
                if is_predicted {
                    Some(rows[first + start + at - 1])
                } else {
                    None
                }
            });
            match targets {
                Targets::Padded(width) => {
                    let padding = width - sequence.response().len();
                    places.extend(predicting.map(|row| row.unwrap_or(rows[0])));
                    places.resize(places.len() + padding, rows[0]);
                }
                Targets::Flat => places.extend(predicting.flatten()),
            }
            first += read.len();
        }
        let shape = match targets {
            Targets::Padded(width) => (sequences.len(), width),
            Targets::Flat => (1, places.len()),
        };
        Ok(Self {
            tokens,
            places: Tensor::from_vec(places, shape, device)?,
            weights,
        })
    }

    /// Computes the detached hidden states at the places, `[B, T, H]`.
    pub(crate) fn states(&self, model: &dyn LanguageModel) -> Result<Tensor> {
        let hidden = model.hidden_states(&self.tokens)?.detach();
        Ok(embedding(&self.places, &hidden)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence::Batch;

    #[test]
    fn tokens_that_no_response_depends_on_are_not_read() {
        let pairs: [(&[u32], &[u32]); 3] =
            [(&[1, 2, 3], &[4]), (&[5], &[6, 7, 8]), (&[9], &[1, 2])];
        let [first, second, third] =
            pairs.map(|(prompt, response)| Sequence::of_answer(prompt, response).unwrap());
        // The last response is masked, and the one before except for its second token.
        let second = second.with_written(&[false, true, false]).unwrap();
        let sequences = vec![first, second, third.masked()];
        let batch = TokenBatch::of_batch(&Batch::new(sequences).unwrap(), &Device::Cpu).unwrap();
        let packed = Packed::of_batch(&batch).unwrap();
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
        assert_eq!(read_tokens(&batch), 5.);
    }

    #[test]
    fn logits_of_states_at_once_fill_16_mib_but_at_least_one_state_fits() {
        assert_eq!(states_at_once(1 << 20), 4);
        assert_eq!(states_at_once((1 << 20) + 1), 3);
        assert_eq!(states_at_once(1 << 23), 1);
    }

    #[test]
    fn shared_prefixes_are_read_once() {
        let pairs: [(&[u32], &[u32]); 3] =
            [(&[1, 2], &[3, 4, 5]), (&[1, 2], &[3, 6, 7]), (&[1], &[2])];
        let batch = TokenBatch::new(&pairs, &Device::Cpu).unwrap();
        let packed = Packed::of_batch(&batch).unwrap();
        assert_eq!(
            packed.tokens.ids().to_vec1::<u32>().unwrap(),
            [1, 2, 3, 4, 6]
        );
        assert_eq!(
            packed.places.to_vec2::<u32>().unwrap(),
            [[1, 2, 3], [1, 2, 4], [0, 0, 0]]
        );
        assert_eq!(packed.weights, [3., 2., 2., 1., 1.]);
        assert_eq!(read_tokens(&batch), 9.);
    }
}
