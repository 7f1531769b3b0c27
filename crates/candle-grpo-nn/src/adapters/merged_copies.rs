//! Weight copies with merged adapters.

use std::collections::BTreeMap;

use candle_core::{Result, Tensor, Var};

use crate::weights::parameters::copy_into;
use crate::{Lora, Parameters};

/// Copies of the weights that adapters extend, with the adapters merged into them. A model built
/// from them ([`Lora::merged_var_builder`]) computes without adapters.
///
/// [`Self::refresh`] writes into the existing copies, so models built from them see the change.
///
/// ```
/// use candle_core::{DType, Device, Result};
/// use candle_grpo_nn::{Decoder, DecoderConfig, Lora, LoraConfig, Parameters};
///
/// # fn main() -> Result<()> {
/// # let model = DecoderConfig { vocab_size: 11, hidden_size: 8, intermediate_size: 16,
/// #     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
/// #     max_position_embeddings: 8, tie_word_embeddings: true, ..DecoderConfig::default() };
/// let base = Parameters::init(&model, 7, &Device::Cpu)?;
/// let adapters = Lora::init(LoraConfig::all_linear(2, 4.0), &model, 1, &Device::Cpu)?;
/// let (vb, copies) = adapters.merged_var_builder(&base, DType::F32)?;
/// let decoder = Decoder::new(&model, vb)?; // computes without adapters
///
/// let name = "model.layers.0.mlp.up_proj";
/// let [b, weight] = ["lora_B.weight", "weight"].map(|part| format!("{name}.{part}"));
/// let b = adapters.parameters().get(&b).expect("every map has one");
/// b.set(&b.ones_like()?)?; // an update
/// let copy = || copies.get(&weight).expect("a copy").to_vec2::<f32>();
/// let before = copy()?;
/// copies.refresh(&adapters, &base)?;
/// assert_ne!(copy()?, before);
/// # let _ = decoder;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MergedCopies {
    /// By the name of the weight.
    copies: BTreeMap<String, Var>,
}

impl MergedCopies {
    pub(crate) fn new(copies: BTreeMap<String, Var>) -> Self {
        Self { copies }
    }

    /// Merges `adapters` into copies of the weights in `base`. Both may be on another device than
    /// the copies.
    ///
    /// Each weight is computed in f32, rounded once, and written before the next one is computed.
    ///
    /// # Errors
    ///
    /// If the adapters or the weights belong to another model, or there is not enough memory for
    /// one weight in f32. Some copies may then have changed.
    pub fn refresh(&self, adapters: &Lora, base: &Parameters) -> Result<()> {
        self.copies
            .iter()
            .try_for_each(|(name, copy)| copy_into(copy, &adapters.merged_weight(name, base)?))
    }

    /// The copy of the weight with this name, if it has one.
    pub fn get(&self, name: &str) -> Option<Tensor> {
        self.copies.get(name).map(Var::as_detached_tensor)
    }
}
