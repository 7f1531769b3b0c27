//! The interface between the configuration of a model and its training.

use candle_core::{Result, bail};
use candle_nn::VarBuilder;
use serde::Serialize;

use crate::{Decoder, DecoderConfig, LanguageModel};

/// The configuration of a [`LanguageModel`]: everything but the weights.
///
/// A trainer builds the policy, its sampler and its reference with it, each from other tensors
/// under the same names. It writes the configuration as JSON beside the weights.
/// [`DecoderConfig`] is that of [`Decoder`].
///
/// ```
/// use candle_core::{DType, Device, Result, Tensor};
/// use candle_grpo_nn::{LanguageModel, ModelConfig, PackedTokens};
/// use candle_nn::{Linear, Module, VarBuilder, VarMap};
///
/// /// The next token depends on the last one only.
/// #[derive(Clone)]
/// struct Bigrams {
///     embedding: Tensor,
///     inner: Linear,
///     output: Tensor,
/// }
///
/// impl LanguageModel for Bigrams {
///     fn hidden_states(&self, tokens: &PackedTokens) -> Result<Tensor> {
///         let x = self.embedding.index_select(tokens.ids(), 0)?;
///         self.inner.forward(&x)?.gelu()
///     }
///     fn output_weight(&self) -> &Tensor {
///         &self.output
///     }
///     fn output_name(&self) -> &str {
///         "output"
///     }
/// }
///
/// #[derive(Clone, serde::Serialize, serde::Deserialize)]
/// struct BigramConfig {
///     vocabulary: usize,
///     width: usize,
/// }
///
/// impl ModelConfig for BigramConfig {
///     type Model = Bigrams;
///
///     fn build(&self, vb: VarBuilder) -> Result<Bigrams> {
///         Ok(Bigrams {
///             embedding: vb.get((self.vocabulary, self.width), "embedding")?,
///             inner: candle_nn::linear(self.width, self.width, vb.pp("inner"))?,
///             output: vb.get((self.vocabulary, self.width), "output")?,
///         })
///     }
///     fn vocab_size(&self) -> usize {
///         self.vocabulary
///     }
///     fn max_positions(&self) -> usize {
///         usize::MAX
///     }
/// }
///
/// let config = BigramConfig { vocabulary: 5, width: 4 };
/// let variables = VarMap::new();
/// let model = config.build(VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
/// let mut decoding = model.decoding()?;
/// let sequence = decoding.add();
/// let logits = decoding.next_logits(&[(sequence, &[1, 2])])?;
/// assert_eq!(logits.dims(), [1, 5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub trait ModelConfig: Clone + Serialize + Send + Sync + 'static {
    /// The model. A clone shares the weights.
    type Model: LanguageModel + Clone + Send + Sync + 'static;

    /// Builds the model from the weights of `vb`, by name.
    ///
    /// The policy that trains has variables, whose updates change the model. Sampler and reference
    /// have detached tensors, which record no graph. Keep the tensors of `vb` as they are, and
    /// transform them in the forward pass: a copy that is made here never changes.
    ///
    /// # Errors
    ///
    /// If the configuration is not valid, or a weight is absent or has another shape.
    fn build(&self, vb: VarBuilder) -> Result<Self::Model>;

    /// Returns the number of tokens of the vocabulary.
    fn vocab_size(&self) -> usize;

    /// Returns the largest number of tokens of a sequence, prompt and completion.
    fn max_positions(&self) -> usize;

    /// [`Self::build`] of a model whose [`LanguageModel::record`] keeps only the inputs of its
    /// blocks, and computes the rest again in the backward pass.
    ///
    /// # Errors
    ///
    /// As in [`Self::build`]. The provided implementation always returns an error.
    fn build_checkpointed(&self, vb: VarBuilder) -> Result<Self::Model> {
        let _ = vb;
        bail!(
            "activation_checkpointing: true, must be false for this model, which does not have it"
        )
    }

    /// Returns the configuration of the [`Decoder`] that the model is, which adapters, a critic
    /// and other dtypes than f32 need; `None` for a custom model.
    ///
    /// A model with one is built from detached tensors only, also to train: its
    /// [`LanguageModel::record`] needs no graph.
    fn decoder(&self) -> Option<&DecoderConfig> {
        None
    }
}

impl ModelConfig for DecoderConfig {
    type Model = Decoder;

    fn build(&self, vb: VarBuilder) -> Result<Decoder> {
        Decoder::new(self, vb)
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn max_positions(&self) -> usize {
        self.longest_row()
    }

    fn build_checkpointed(&self, vb: VarBuilder) -> Result<Decoder> {
        Ok(Decoder::new(self, vb)?.with_activation_checkpointing(true))
    }

    fn decoder(&self) -> Option<&DecoderConfig> {
        Some(self)
    }
}
