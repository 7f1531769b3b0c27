//! The interface between a model's configuration and its training.

use candle_core::{Result, bail};
use candle_nn::VarBuilder;
use serde::Serialize;

use crate::{ActivationCheckpointing, Decoder, DecoderConfig, LanguageModel};

/// A [`LanguageModel`]'s configuration: everything except the weights.
///
/// A trainer uses it to build the policy, the sampler and the reference, each with different
/// tensors under the same names. It also writes the configuration as JSON next to the weights.
/// [`DecoderConfig`] configures a [`Decoder`].
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
    /// The model. Clones share the weights.
    type Model: LanguageModel + Clone + Send + Sync + 'static;

    /// Builds the model with the weights in `vb`, looked up by name.
    ///
    /// A policy in training gets variables, and their updates change the model. Samplers and
    /// references get detached tensors, which record no graph. Keep the tensors from `vb` as they
    /// are, and transform them in the forward pass: a copy made here would never change.
    ///
    /// # Errors
    ///
    /// If the configuration is invalid, or a weight is missing or has a different shape.
    fn build(&self, vb: VarBuilder) -> Result<Self::Model>;

    /// Returns the vocabulary size.
    fn vocab_size(&self) -> usize;

    /// Returns the maximum sequence length in tokens, prompt and completion together.
    fn max_positions(&self) -> usize;

    /// Like [`Self::build`], for a model whose backward pass recomputes the layers that
    /// `checkpointing` selects. With `offloading`, their inputs are in main memory until then, as
    /// in a [`TensorStack`](candle_grpo_kernels::TensorStack). If your model does not move
    /// them, return an error.
    ///
    /// # Errors
    ///
    /// Same as [`Self::build`]. The provided implementation always fails.
    fn build_checkpointed(
        &self,
        vb: VarBuilder,
        checkpointing: ActivationCheckpointing,
        offloading: bool,
    ) -> Result<Self::Model> {
        let _ = (vb, offloading);
        bail!(
            "activation_checkpointing: {checkpointing}, must be false for this model, which does not have it"
        )
    }

    /// Returns the configuration if the model is a [`Decoder`]. Adapters, critics and dtypes other
    /// than f32 require it. `None` for a custom model.
    ///
    /// A model with one is always built from detached tensors, even for training, because its
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

    fn build_checkpointed(
        &self,
        vb: VarBuilder,
        checkpointing: ActivationCheckpointing,
        offloading: bool,
    ) -> Result<Decoder> {
        let decoder = Decoder::new(self, vb)?.with_activation_checkpointing(checkpointing)?;
        Ok(decoder.with_activation_offloading(offloading))
    }

    fn decoder(&self) -> Option<&DecoderConfig> {
        Some(self)
    }
}
