//! From a model to the responses of a batch, and back.

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor, Var};
use candle_grpo_kernels::{add_embedding_gradient, embedding};
use candle_grpo_loss::{LinearGradients, LinearLogProb, LogProbOptions, TokenLogProbs};
use candle_grpo_nn::{Gradients, LanguageModel, PackedTokens, Parameters};

use crate::TokenBatch;

/// Log-probs and entropies `[B, T]` of the responses of `batch` at `temperature`, 0 outside the response mask, without a graph.
/// No logits are held.
pub(crate) fn response_log_probs(
    model: &dyn LanguageModel,
    batch: &TokenBatch,
    temperature: f64,
) -> Result<TokenLogProbs> {
    let states = predicting_states(model, batch)?;
    let weight = model.output_weight().detach();
    Ok(output_layer(&states, &weight, batch, temperature)?.forward()?)
}

/// The hidden states `[B, T, H]` of the positions that predict the responses of `batch`, without a graph.
pub(crate) fn predicting_states(model: &dyn LanguageModel, batch: &TokenBatch) -> Result<Tensor> {
    let packed = Packed::new(batch)?;
    let hidden = model.hidden_states(&packed.tokens)?.detach();
    Ok(embedding(&packed.places, &hidden)?)
}

/// Adds the gradients of the loss of `batch` that `loss` computes from an output layer, whose gradients it gives back.
pub(crate) fn learn_from_output(
    model: &dyn LanguageModel,
    batch: &TokenBatch,
    variables: &Parameters,
    temperature: f64,
    gradients: &mut Gradients,
    mut loss: impl FnMut(&LinearLogProb) -> candle_core::Result<LinearGradients>,
) -> Result<()> {
    let name = model.output_name();
    let weight = match variables.get(name) {
        Some(variable) => variable.as_tensor().clone(),
        None => model.output_weight().detach(),
    };
    learn_from_states(model, batch, variables, gradients, |states, gradients| {
        let found = loss(&output_layer(states, &weight, batch, temperature)?)?;
        if let Some(gradient) = found.weight {
            gradients.add(name, &gradient)?;
        }
        match found.hidden {
            Some(gradient) => Ok(gradient),
            None => states.zeros_like(),
        }
    })
}

/// Adds the gradients of a loss of the [states](predicting_states) of `batch`, by which `loss` gives back the gradient.
pub(crate) fn learn_from_states(
    model: &dyn LanguageModel,
    batch: &TokenBatch,
    variables: &Parameters,
    gradients: &mut Gradients,
    mut loss: impl FnMut(&Var, &mut Gradients) -> candle_core::Result<Tensor>,
) -> Result<()> {
    let packed = Packed::new(batch)?;
    let mut of_hidden = |hidden: &Tensor, gradients: &mut Gradients| {
        let states = Var::from_tensor(&embedding(&packed.places, hidden)?)?;
        let of_states = loss(&states, gradients)?;
        let sum = Tensor::zeros(hidden.shape(), DType::F32, hidden.device())?;
        add_embedding_gradient(&sum, &packed.places, &of_states)?;
        sum.to_dtype(hidden.dtype())
    };
    model.forward_backward(&packed.tokens, variables, &mut of_hidden, gradients)?;
    Ok(())
}

fn output_layer(
    states: &Tensor,
    weight: &Tensor,
    batch: &TokenBatch,
    temperature: f64,
) -> candle_core::Result<LinearLogProb> {
    let options = LogProbOptions {
        mask: Some(&batch.response_mask),
        ..Default::default()
    };
    LinearLogProb::new(states, weight, None, &batch.targets, temperature, options)
}

/// The tokens of a batch that its responses depend on, one sequence after another. What sequences have in common, above all the prompt
/// of a group, is there once.
struct Packed {
    tokens: PackedTokens,
    /// For each response token the place in `tokens` of the one that predicts it, u32 `[B, T]`; 0 outside the response mask.
    places: Tensor,
}

impl Packed {
    fn new(batch: &TokenBatch) -> Result<Self> {
        let (b, t) = batch.dims()?;
        let device = batch.input_ids.device();
        let ids = batch.input_ids.to_vec2::<u32>()?;
        let real = zero_one(&batch.attention_mask)?;
        let counts = zero_one(&batch.response_mask)?;
        // Not negative, as the inputs are at least as wide as the targets.
        let before = batch.input_ids.dim(1)? - t;
        let (mut packed, mut places) = (Vec::with_capacity(b), Vec::new());
        let mut first = 0;
        for (row, ids) in ids.iter().enumerate() {
            let (real, counts) = (&real[row], &counts[row]);
            // What stands behind the last token that counts is not read.
            let read = before + counts.iter().rposition(|&counts| counts != 0).unwrap_or(0) + 1;
            let mut sequence = Vec::new();
            let mut place_of = vec![None; read];
            for (column, place) in place_of.iter_mut().enumerate() {
                if real[column] != 0 {
                    *place = Some(first + sequence.len());
                    sequence.push(ids[column]);
                }
            }
            ensure!(
                !sequence.is_empty(),
                "attention_mask: sequence {row} has no token to read, must have at least one"
            );
            first += sequence.len();
            packed.push(sequence);
            for (column, &counts) in counts.iter().enumerate() {
                let place = place_of.get(before + column).copied().flatten();
                ensure!(
                    counts == 0 || place.is_some(),
                    "response_mask: 1 at [{row}, {column}], must be 0, as attention_mask is at the position before"
                );
                places.push(place.filter(|_| counts != 0).unwrap_or(0));
            }
        }
        let tokens = PackedTokens::sharing_prefixes(&packed, device)?;
        let rows = tokens.rows();
        let places: Vec<u32> = places.into_iter().map(|place| rows[place]).collect();
        Ok(Self {
            tokens,
            places: Tensor::from_vec(places, (b, t), device)?,
        })
    }
}

/// The mask on the host, 0 where it is 0.
fn zero_one(mask: &Tensor) -> Result<Vec<Vec<u8>>> {
    Ok(mask.ne(0f64)?.to_vec2()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn only_what_responses_depend_on_is_read() {
        let pairs: [(&[u32], &[u32]); 3] =
            [(&[1, 2, 3], &[4]), (&[5], &[6, 7, 8]), (&[9], &[1, 2])];
        let mut batch = TokenBatch::new(&pairs, &Device::Cpu).unwrap();
        // The last response does not count at all, and of the one before only the second token.
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
    }

    #[test]
    fn what_sequences_begin_with_is_read_once() {
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
    }

    #[test]
    fn masks_that_contradict_each_other_are_named() {
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
