//! Configuration for a decoder that scores whole sequences.

use candle_core::{Result, bail};

use crate::DecoderConfig;

/// Name of the linear layer.
pub(crate) const SCORE: &str = "score.weight";

/// Configuration for a [`SequenceClassifier`](crate::SequenceClassifier).
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceClassifierConfig {
    /// The decoder. Its output layer is not used.
    pub decoder: DecoderConfig,
    /// Number of scores per sequence; 1 for a reward model.
    pub num_labels: usize,
    /// Padding token. A sequence is scored at its last token with another id.
    pub pad_token_id: Option<u32>,
}

impl SequenceClassifierConfig {
    /// The decoder without an output layer or logit scale.
    pub(crate) fn body(&self) -> DecoderConfig {
        DecoderConfig {
            tie_word_embeddings: true,
            logits_scaling: DecoderConfig::default().logits_scaling,
            ..self.decoder.clone()
        }
    }

    /// Shape of `score.weight`.
    pub(crate) fn score_shape(&self) -> Result<(usize, usize)> {
        if self.num_labels == 0 {
            bail!("num_labels: 0, must be at least 1");
        }
        Ok((self.num_labels, self.decoder.hidden_size))
    }
}
