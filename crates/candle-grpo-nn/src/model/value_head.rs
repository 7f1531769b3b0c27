//! A critic's output layer.

use candle_core::{DType, Result, Tensor, bail};
use candle_nn::VarBuilder;

use crate::Parameters;
use crate::model::frozen_linear::linear;

/// A value per position: `hidden w^T + b`.
///
/// The parameters are `score.weight` `[1, H]` and `score.bias` `[1]`, as in Hugging Face token
/// classification models with one label, such as verl's critic.
///
/// ```
/// use candle_core::{Device, Result, Tensor};
/// use candle_grpo_nn::{Decoder, DecoderConfig, Parameters, ValueHead};
///
/// # fn main() -> Result<()> {
/// # let model = DecoderConfig { vocab_size: 11, hidden_size: 8, intermediate_size: 16,
/// #     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
/// #     max_position_embeddings: 8, tie_word_embeddings: true, ..DecoderConfig::default() };
/// let parameters = ValueHead::add_to(Parameters::init(&model, 7, &Device::Cpu)?, model.hidden_size)?;
/// let decoder = Decoder::new(&model, parameters.var_builder())?;
/// let head = ValueHead::new(model.hidden_size, parameters.var_builder())?;
///
/// let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
/// let values = head.forward(&decoder.padded_hidden_states(&ids, &ids.ones_like()?)?)?;
/// assert_eq!(values.to_vec2::<f32>()?, [[0., 0., 0.]]); // until it has been trained
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ValueHead {
    weight: Tensor,
    bias: Tensor,
}

const WEIGHT: &str = "score.weight";
const BIAS: &str = "score.bias";

impl ValueHead {
    /// Reads the weight and bias from `vb`, the whole critic's builder.
    pub fn new(hidden_size: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: vb.get((1, hidden_size), WEIGHT)?,
            bias: vb.get(1, BIAS)?,
        })
    }

    /// Adds value head parameters to `parameters`. They start at zero, so all values are 0 at
    /// first.
    pub fn add_to(parameters: Parameters, hidden_size: usize) -> Result<Parameters> {
        let device = parameters.device().clone();
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
        parameters
            .with(WEIGHT, &zeros(&[1, hidden_size])?)?
            .with(BIAS, &zeros(&[1])?)
    }

    /// Computes the values `[..]` from hidden states `[.., H]`, in their dtype.
    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let width = self.weight.dim(1)?;
        let Some((&last, outer)) = hidden.dims().split_last() else {
            bail!("hidden: a scalar, must be [.., {width}]");
        };
        if last != width || hidden.elem_count() == 0 {
            bail!(
                "hidden: shape {:?}, must be [.., {width}] and not empty",
                hidden.dims()
            );
        }
        let rows = hidden.contiguous()?.reshape(((), width))?;
        linear(&rows, &self.weight)?
            .broadcast_add(&self.bias)?
            .reshape(outer)
    }
}
