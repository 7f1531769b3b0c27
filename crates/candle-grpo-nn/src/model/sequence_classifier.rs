//! A decoder that scores whole sequences.

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::VarBuilder;

use crate::config::SCORE;
use crate::model::frozen_linear::linear;
use crate::{Decoder, LanguageModel, PackedTokens, SequenceClassifierConfig};

/// A [`Decoder`] with a linear layer without bias in place of the output layer, such as a reward
/// model. It matches `LlamaForSequenceClassification` in Hugging Face transformers, and its
/// counterpart for each [`ModelType`](crate::ModelType).
///
/// A sequence is scored at its last token whose id differs from the padding token, whether or not
/// that token is masked. If a model uses one token for both padding and end of sequence, a sequence
/// that ends with it is scored one token earlier. A sequence with only padding tokens is scored at
/// its first token. Without a padding token, the last token is scored.
///
/// ```
/// use candle_core::{Device, Result};
/// use candle_grpo_nn::{
///     DecoderConfig, PackedTokens, SequenceClassifier, SequenceClassifierConfig,
/// };
///
/// # fn main() -> Result<()> {
/// # let decoder = DecoderConfig { vocab_size: 11, hidden_size: 8, intermediate_size: 16,
/// #     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
/// #     max_position_embeddings: 8, ..DecoderConfig::default() };
/// let config = SequenceClassifierConfig { decoder, num_labels: 1, pad_token_id: Some(0) };
/// let parameters = config.init(7, &Device::Cpu)?;
/// let classifier = SequenceClassifier::new(&config, parameters.var_builder())?;
///
/// let tokens = PackedTokens::new(&[vec![1, 2, 3], vec![4, 5]], &Device::Cpu)?;
/// let scores = classifier.scores(&tokens)?;
/// assert_eq!(scores.dims(), [2, 1]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct SequenceClassifier {
    decoder: Decoder,
    /// `[labels, H]`, at least f32.
    score: Tensor,
    pad_token_id: Option<u32>,
}

impl SequenceClassifier {
    /// Creates a classifier from `vb`, which must have the decoder weights without an output layer,
    /// and `score.weight` `[labels, H]`. The scores are differentiable if `vb` is
    /// [`Parameters::var_builder`](crate::Parameters::var_builder).
    ///
    /// # Errors
    ///
    /// If the configuration is invalid, or a weight is missing or has a different shape.
    pub fn new(config: &SequenceClassifierConfig, vb: VarBuilder) -> Result<Self> {
        let score = vb.get(config.score_shape()?, SCORE)?;
        Ok(Self {
            decoder: Decoder::new(&config.body(), vb)?,
            score: at_least_f32(&score)?,
            pad_token_id: config.pad_token_id,
        })
    }

    /// Computes the scores `[B, labels]` for `tokens`, in f32, or in f64 if the weights are f64.
    ///
    /// Synchronizes with the device.
    ///
    /// # Errors
    ///
    /// If a sequence is longer than `max_position_embeddings`, or an id is out of range.
    pub fn scores(&self, tokens: &PackedTokens) -> Result<Tensor> {
        if tokens.ranks().is_some() {
            bail!("tokens: divided between ranks, must be whole for a classifier");
        }
        let ids = tokens.ids().to_vec1::<u32>()?;
        let rows = tokens.rows();
        let mut rest = rows.as_slice();
        let scored = tokens.lengths().iter().map(|&length| {
            let (sequence, after) = rest.split_at(length);
            rest = after;
            let ids: Vec<u32> = sequence.iter().map(|&row| ids[row as usize]).collect();
            sequence[self.scored_position(&ids)]
        });
        self.scores_of(&self.decoder.hidden_states(tokens)?, scored.collect())
    }

    /// Computes the scores `[B, labels]` for padded sequences, like [`Self::scores`]. The arguments
    /// are the same as in [`Decoder::padded_hidden_states`].
    ///
    /// Synchronizes with the device.
    ///
    /// # Errors
    ///
    /// Same as [`Self::scores`].
    pub fn padded_scores(&self, input_ids: &Tensor, attention_mask: &Tensor) -> Result<Tensor> {
        let hidden = self
            .decoder
            .padded_hidden_states(input_ids, attention_mask)?;
        let sequences = input_ids.to_vec2::<u32>()?;
        let scored = sequences.iter().enumerate();
        let scored = scored.map(|(i, ids)| (i * ids.len() + self.scored_position(ids)) as u32);
        self.scores_of(&hidden.flatten_to(1)?, scored.collect())
    }

    /// Returns the position whose hidden state is scored.
    fn scored_position(&self, ids: &[u32]) -> usize {
        let is_padding = |id: u32| Some(id) == self.pad_token_id;
        ids.iter().rposition(|&id| !is_padding(id)).unwrap_or(0)
    }

    /// Scores the given `rows` in `hidden` `[N, H]`.
    fn scores_of(&self, hidden: &Tensor, rows: Vec<u32>) -> Result<Tensor> {
        let rows = Tensor::new(rows, hidden.device())?;
        linear(&at_least_f32(&hidden.index_select(&rows, 0)?)?, &self.score)
    }

    /// The device that holds the weights.
    pub fn device(&self) -> &Device {
        self.score.device()
    }
}

fn at_least_f32(x: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::F64 => Ok(x.clone()),
        _ => x.to_dtype(DType::F32),
    }
}
