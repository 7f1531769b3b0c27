//! Forward and backward passes over a batch's responses.

use std::collections::HashMap;

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_grpo_kernels::{add_embedding_gradient, embedding};
use candle_grpo_loss::{LayerPart, LinearLogProb, LogProbOptions, TokenLogProbs};
use candle_grpo_nn::model::ExpertBalance;
use candle_grpo_nn::{
    Backward, Decoder, DividedModel, Gradients, Held, LanguageModel, Lora, PackedTokens,
    Parameters, SequenceRanks,
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
    let packed = Packed::of_batch(batch)?;
    let states = packed.states(model)?;
    let _held = hold_output(model)?;
    let weight = model.output_weight().detach();
    let (targets, mask) = packed.responses(batch.targets(), batch.response_mask())?;
    let responses = (&targets, Some(&mask));
    let own = output_layer(model, &states, &weight, responses, temperature)?.forward()?;
    Ok(packed.cells.gather(&own)?)
}

/// Computes the detached hidden states `[B, T, H]` at the positions that predict the responses in
/// `batch`.
///
/// # Errors
///
/// If ranks divide the batch: each of them has the states of its own tokens.
pub(crate) fn predicting_states(model: &dyn LanguageModel, batch: &TokenBatch) -> Result<Tensor> {
    ensure!(
        batch.ranks().is_none(),
        "batch: divided between ranks, must be whole for the hidden states of all tokens"
    );
    Packed::of_batch(batch)?.states(model)
}

/// Computes `values` of the hidden states at the positions that predict the responses in `batch`,
/// detached. `values` maps `[.., H]` to f32 `[..]`. Returns f32 `[B, T]`.
pub(crate) fn predicting_values(
    model: &dyn LanguageModel,
    batch: &TokenBatch,
    values: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let packed = Packed::of_batch(batch)?;
    let own = values(&packed.states(model)?)?.detach();
    Ok(packed.cells.gather_one(&own)?)
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
    /// The states that predict the responses as a variable, where a loss's graph starts: those of
    /// [`Self::cells`].
    pub(crate) states: Var,
    pub(crate) cells: Cells,
    selected: Selected,
    weights: Vec<f32>,
    read_tokens: f64,
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
        packed.check_rows(&hidden)?;
        let (states, selected) = Selected::new(&hidden, packed.places)?;
        Ok(Self {
            states,
            selected,
            cells: packed.cells,
            read_tokens: packed.read_tokens,
            weights: packed.weights,
            backward,
        })
    }

    /// Returns the number of tokens in [`read_tokens`].
    pub(crate) fn read_tokens(&self) -> f64 {
        self.read_tokens
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
    /// For each token that this rank computes, the number of trained sequences that contain it,
    /// `[N]`.
    weights: Vec<f32>,
    /// The number of tokens in [`read_tokens`].
    read_tokens: f64,
    /// The response tokens of the places.
    pub(crate) cells: Cells,
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
        let whole = Self::new(batch.sequences(), Targets::Padded(width), device)?;
        match batch.ranks() {
            Some(ranks) => whole.divided(batch, ranks),
            None => Ok(whole),
        }
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
            read_tokens: weights.iter().copied().map(f64::from).sum(),
            weights,
            cells: Cells::Whole,
        })
    }

    /// Keeps what this one of `ranks` computes for `batch`, whose tokens these are.
    fn divided(self, batch: &TokenBatch, ranks: &SequenceRanks) -> Result<Self> {
        let tokens = self.tokens.divided(ranks);
        let computed = tokens.computed_rows();
        let own: HashMap<u32, u32> = if tokens.has_rows() {
            computed.iter().copied().zip(0..).collect()
        } else {
            HashMap::new()
        };
        let weights = computed.iter().map(|row| {
            if own.contains_key(row) {
                self.weights[*row as usize]
            } else {
                0.
            }
        });
        let (b, t) = batch.dims();
        let rows = self.places.flatten_all()?.to_vec1::<u32>()?;
        let predicted = batch.sequences().iter().flat_map(|sequence| {
            let padding = t - sequence.response().len();
            sequence
                .predicted()
                .chain(std::iter::repeat_n(false, padding))
        });
        let (mut places, mut cells) = (Vec::new(), Vec::new());
        for (cell, (row, is_predicted)) in rows.iter().zip(predicted).enumerate() {
            if let (true, Some(&place)) = (is_predicted, own.get(row)) {
                places.push(place);
                cells.push(cell as u32);
            }
        }
        let counts = u32::from(!cells.is_empty());
        if cells.is_empty() {
            // Tensors have at least one cell.
            places.push(0);
            cells.push(0);
        }
        let device = batch.targets().device();
        let (shape, m) = ((1, cells.len()), cells.len());
        Ok(Self {
            weights: weights.collect(),
            places: Tensor::from_vec(places, shape, device)?,
            cells: Cells::Own(OwnCells {
                cells: Tensor::new(cells, device)?,
                mask: Tensor::full(counts, (1, m), device)?,
                whole: (b, t),
                ranks: ranks.clone(),
            }),
            read_tokens: self.read_tokens,
            tokens,
        })
    }

    /// Returns the targets and the mask `[B, T]` of a batch at the places.
    pub(crate) fn responses(&self, targets: &Tensor, mask: &Tensor) -> Result<(Tensor, Tensor)> {
        Ok(self.cells.responses(targets, mask)?)
    }

    /// Computes the detached hidden states at the places, `[B, T, H]`, or those of the cells.
    pub(crate) fn states(&self, model: &dyn LanguageModel) -> Result<Tensor> {
        let hidden = model.hidden_states(&self.tokens)?.detach();
        self.check_rows(&hidden)?;
        Ok(embedding(&self.places, &hidden)?)
    }

    /// Checks that a model has computed the rows of this rank.
    fn check_rows(&self, hidden: &Tensor) -> Result<()> {
        ensure!(
            hidden.dims().first() == Some(&self.weights.len()),
            "hidden: shape {:?}, must have {} rows, one for each token that this rank computes",
            hidden.dims(),
            self.weights.len()
        );
        Ok(())
    }
}

/// The response tokens in a batch `[B, T]` whose log-probs this rank computes.
#[derive(Debug, Clone)]
pub(crate) enum Cells {
    /// All of them.
    Whole,
    /// The response tokens that its own tokens predict.
    Own(OwnCells),
}

/// M of the response tokens in a batch `[B, T]`. Other ranks have the others.
#[derive(Debug, Clone)]
pub(crate) struct OwnCells {
    /// u32 `[M]`, as numbers in the flat batch.
    cells: Tensor,
    /// u32 `[1, M]`: 0 if the only cell stands in for none.
    mask: Tensor,
    whole: (usize, usize),
    ranks: SequenceRanks,
}

impl Cells {
    /// Returns the targets and the mask `[B, T]` at the cells.
    pub(crate) fn responses(
        &self,
        targets: &Tensor,
        mask: &Tensor,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        match self {
            Self::Whole => Ok((targets.clone(), mask.clone())),
            Self::Own(own) => {
                let mask = own.at_cells(mask)?.to_dtype(DType::U32)?;
                Ok((own.at_cells(targets)?, (mask * &own.mask)?))
            }
        }
    }

    /// Returns one tensor `[B, T]` from those of all ranks at their cells.
    pub(crate) fn gather_one(&self, own: &Tensor) -> candle_core::Result<Tensor> {
        Ok(match self {
            Self::Whole => own.clone(),
            Self::Own(cells) => cells.gather([own])?.swap_remove(0),
        })
    }

    /// Computes `loss` of a function's values `own`, whose arguments are the states at the cells.
    /// `loss` gets the values `[B, T]`. Returns a loss with the same gradient in this rank's part
    /// of the graph, and the value of the loss with its other results.
    pub(crate) fn loss<T>(
        &self,
        own: &Tensor,
        loss: impl FnOnce(&Tensor) -> Result<(Tensor, T)>,
    ) -> Result<(Tensor, (Tensor, T))> {
        let Self::Own(cells) = self else {
            let (loss, others) = loss(own)?;
            return Ok((loss.clone(), (loss.detach(), others)));
        };
        let values = Var::from_tensor(&self.gather_one(&own.detach())?)?;
        let (loss, others) = loss(&values)?;
        let derivatives = match loss.backward()?.get(&values) {
            Some(gradient) => cells.select(&gradient.detach())?,
            None => own.zeros_like()?,
        };
        let own = (own * derivatives)?.sum_all()?;
        Ok((own, (loss.detach(), others)))
    }
}

impl LayerPart for Cells {
    fn gather(&self, own: &TokenLogProbs) -> candle_core::Result<TokenLogProbs> {
        let Self::Own(cells) = self else {
            return Ok(own.clone());
        };
        let all = cells.gather([&own.log_probs, &own.entropy, &own.log_sum_exp])?;
        let [log_probs, entropy, log_sum_exp] = all.as_slice() else {
            candle_core::bail!("log-probs: {} tensors, must be 3", all.len());
        };
        Ok(TokenLogProbs {
            log_probs: log_probs.clone(),
            entropy: entropy.clone(),
            log_sum_exp: log_sum_exp.clone(),
        })
    }

    fn select(&self, all: &TokenLogProbs) -> candle_core::Result<TokenLogProbs> {
        let Self::Own(cells) = self else {
            return Ok(all.clone());
        };
        Ok(TokenLogProbs {
            log_probs: cells.select(&all.log_probs)?,
            entropy: cells.select(&all.entropy)?,
            log_sum_exp: cells.select(&all.log_sum_exp)?,
        })
    }
}

impl OwnCells {
    /// Selects the cells in `x` `[B, T]`: `[1, M]`.
    fn at_cells(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        x.flatten_all()?.index_select(&self.cells, 0)?.unsqueeze(0)
    }

    /// Selects the cells in `x` `[B, T]`: `[1, M]`, and 0 for a cell that stands in for none.
    fn select(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.counted(&self.at_cells(x)?)
    }

    /// Zeroes `x` `[1, M]` at a cell that stands in for none.
    fn counted(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.mask.where_cond(x, &x.zeros_like()?)
    }

    /// Returns tensors `[B, T]` with the values `[1, M]` of all ranks at their cells, and 0 at
    /// others.
    fn gather<const N: usize>(&self, own: [&Tensor; N]) -> candle_core::Result<Vec<Tensor>> {
        let (b, t) = self.whole;
        let all = own.map(|own| {
            let own = self.counted(&own.detach())?.flatten_all()?;
            let all = Tensor::zeros(b * t, own.dtype(), own.device())?;
            all.index_add(&self.cells, &own, 0)
        });
        let all = all.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
        // Each sum has one term that is not 0.
        let ranks = self.ranks.collective();
        ranks.all_reduce_sum(&all.iter().collect::<Vec<_>>())?;
        all.iter().map(|all| all.reshape((b, t))).collect()
    }
}

#[cfg(test)]
mod tests {
    use candle_grpo_nn::{Decoder, DecoderConfig};
    use candle_grpo_test_support::{TINY_DECODER, on_ranks, stay_on_cpu};

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

    /// Two answers to one prompt, an answer with a token that does not train, and prompts of one
    /// token: some ranks have no token to predict from.
    #[test]
    fn each_token_of_a_team_has_the_bits_of_one_rank() {
        stay_on_cpu();
        let model: DecoderConfig = serde_json::from_str(TINY_DECODER).unwrap();
        let parameters = Parameters::init(&model, 3, &Device::Cpu).unwrap();
        let decoder = Decoder::new(&model, parameters.detached_var_builder()).unwrap();
        let pairs: [(&[u32], &[u32]); 4] = [
            (&[1, 2, 3], &[4, 5, 0, 1, 2]),
            (&[1, 2, 3], &[4, 1]),
            (&[5], &[0, 4, 1]),
            (&[3], &[1]),
        ];
        let sequences = pairs.iter().enumerate().map(|(at, (prompt, answer))| {
            let sequence = Sequence::of_answer(prompt, answer).unwrap();
            match at {
                2 => sequence.with_written(&[true, false, true]).unwrap(),
                _ => sequence,
            }
        });
        for sequences in [sequences.clone().collect(), sequences.skip(3).collect()] {
            let batch = Batch::new(sequences).unwrap();
            let batch = TokenBatch::of_batch(&batch, &Device::Cpu).unwrap();
            let found = |batch: &TokenBatch| {
                let found = response_log_probs(&decoder, batch, 0.7).unwrap();
                let bits = |x: Tensor| -> Vec<u32> {
                    let values = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    values.into_iter().map(f32::to_bits).collect()
                };
                [found.log_probs, found.entropy, found.log_sum_exp].map(bits)
            };
            let alone = found(&batch);
            assert!(alone[0].iter().any(|&bits| bits != 0));
            for count in [2, 3, 4] {
                for own in on_ranks(count, |collective| {
                    let ranks = SequenceRanks::new(collective);
                    found(&batch.clone().divided(Some(&ranks)))
                }) {
                    assert_eq!(own, alone, "{count} ranks");
                }
            }
        }
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
