//! From a decoder to the responses of a batch.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor, Var};
use candle_grpo_kernels::{add_embedding_gradient, embedding};
use candle_grpo_loss::{
    LinearGradients, LinearLogProb, LogProbOptions, TokenLogProbs, linear_log_prob,
};
use candle_grpo_nn::{Decoder, Gradients, Parameters, Recorded};

use crate::TokenBatch;

/// Log-probs and entropies `[B, T]` of the responses of `batch` at `temperature`, 0 outside the response mask, without a graph.
/// No logits are held.
pub(crate) fn response_log_probs(
    decoder: &Decoder,
    batch: &TokenBatch,
    temperature: f64,
) -> Result<TokenLogProbs> {
    Ok(linear_log_prob(
        &predicting_states(decoder, batch)?,
        decoder.output_weight(),
        None,
        &batch.targets,
        temperature,
        LogProbOptions {
            mask: Some(&batch.response_mask),
            ..Default::default()
        },
    )?)
}

/// The hidden states `[B, T, H]` of the positions that predict the responses of `batch`, without a graph.
pub(crate) fn predicting_states(decoder: &Decoder, batch: &TokenBatch) -> Result<Tensor> {
    let packed = Packed::new(batch)?;
    let hidden = decoder.packed_hidden_states(&packed.ids, &packed.lengths)?;
    Ok(embedding(&packed.places, &hidden)?)
}

/// A forward pass over a batch, and where its backward pass begins.
pub(crate) struct RecordedStates<'a> {
    /// The hidden states `[B, T, H]` of the positions that predict the responses.
    pub(crate) states: Var,
    places: Tensor,
    hidden: (usize, usize, DType),
    decoder: &'a Decoder,
    recorded: Recorded<'a>,
}

impl<'a> RecordedStates<'a> {
    /// `checkpointing` as in [`Decoder::record`].
    pub(crate) fn new(
        decoder: &'a Decoder,
        batch: &TokenBatch,
        checkpointing: bool,
    ) -> Result<Self> {
        let packed = Packed::new(batch)?;
        let (hidden, recorded) = decoder.record(&packed.ids, &packed.lengths, checkpointing)?;
        let (tokens, width) = hidden.dims2()?;
        Ok(Self {
            states: Var::from_tensor(&embedding(&packed.places, &hidden)?)?,
            places: packed.places,
            hidden: (tokens, width, hidden.dtype()),
            decoder,
            recorded,
        })
    }

    /// The output layer of `decoder`, of which `trained` may hold the weight, on the states.
    pub(crate) fn output_layer(
        &self,
        trained: &Parameters,
        batch: &TokenBatch,
        temperature: f64,
    ) -> Result<LinearLogProb> {
        let weight = match trained.get(self.decoder.output_name()) {
            Some(variable) => variable.as_tensor(),
            None => self.decoder.output_weight(),
        };
        Ok(LinearLogProb::new(
            &self.states,
            weight,
            None,
            &batch.targets,
            temperature,
            LogProbOptions {
                mask: Some(&batch.response_mask),
                ..Default::default()
            },
        )?)
    }

    /// Adds the gradients of the weights in `trained`, from those of the arguments of the [output layer](Self::output_layer).
    pub(crate) fn backward(
        self,
        of_output: LinearGradients,
        trained: &Parameters,
        gradients: &mut Gradients,
    ) -> Result<()> {
        if let Some(gradient) = of_output.weight {
            gradients.add(self.decoder.output_name(), &gradient)?;
        }
        let of_states = of_output
            .hidden
            .context("hidden states: no gradient, though they are a variable")?;
        self.backward_of_states(&of_states, trained, gradients)
    }

    /// Adds the gradients of the weights in `trained`, from that of the states.
    pub(crate) fn backward_of_states(
        self,
        gradient: &Tensor,
        trained: &Parameters,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let (tokens, width, dtype) = self.hidden;
        let of_hidden = Tensor::zeros((tokens, width), DType::F32, gradient.device())?;
        add_embedding_gradient(&of_hidden, &self.places, gradient)?;
        self.recorded
            .backward(&of_hidden.to_dtype(dtype)?, trained, gradients)?;
        gradients.ensure_complete(trained)?;
        Ok(())
    }
}

/// The tokens of a batch that its responses depend on, one sequence after another.
struct Packed {
    /// u32 `[N]`
    ids: Tensor,
    lengths: Vec<usize>,
    /// For each response token the place in `ids` of the one that predicts it, u32 `[B, T]`; 0 outside the response mask.
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
        let (mut packed, mut lengths, mut places) = (Vec::new(), Vec::with_capacity(b), Vec::new());
        for (row, ids) in ids.iter().enumerate() {
            let (real, counts) = (&real[row], &counts[row]);
            // What stands behind the last token that counts is not read.
            let read = before + counts.iter().rposition(|&counts| counts != 0).unwrap_or(0) + 1;
            let first = packed.len();
            let mut place_of = vec![None; read];
            for (column, place) in place_of.iter_mut().enumerate() {
                if real[column] != 0 {
                    *place = Some(packed.len() as u32);
                    packed.push(ids[column]);
                }
            }
            ensure!(
                packed.len() > first,
                "attention_mask: sequence {row} has no token to read, must have at least one"
            );
            lengths.push(packed.len() - first);
            for (column, &counts) in counts.iter().enumerate() {
                let place = place_of.get(before + column).copied().flatten();
                ensure!(
                    counts == 0 || place.is_some(),
                    "response_mask: 1 at [{row}, {column}], must be 0, as attention_mask is at the position before"
                );
                places.push(place.filter(|_| counts != 0).unwrap_or(0));
            }
        }
        Ok(Self {
            ids: Tensor::new(packed, device)?,
            lengths,
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
        assert_eq!(packed.ids.to_vec1::<u32>().unwrap(), [1, 2, 3, 5, 6, 9]);
        assert_eq!(packed.lengths, [3, 2, 1]);
        assert_eq!(
            packed.places.to_vec2::<u32>().unwrap(),
            [[2, 0, 0], [0, 4, 0], [0, 0, 0]]
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
