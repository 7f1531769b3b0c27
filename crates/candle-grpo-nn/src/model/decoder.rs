//! The decoder: token ids in, hidden states and logits out.

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_grpo_kernels::{Sequences, embedding};
use candle_nn::VarBuilder;

use crate::decoding::KvCache;
use crate::model::attention::Pass;
use crate::model::attention_mask;
use crate::model::block::{Block, BlockRecord};
use crate::model::frozen_linear::linear;
use crate::model::language_model::check_hidden_gradient;
use crate::model::named_weight::Weight;
use crate::model::norm::RmsNorm;
use crate::model::rope::{Rope, RopeAngles};
use crate::optim::grad_sink::GradientSink;
use crate::packing::shared_rows::SharedRows;
use crate::{Backward, DecoderConfig, Gradients, LanguageModel, PackedTokens, Parameters};

/// A decoder-only transformer in the layout of Hugging Face's Llama: RMSNorm, rotary positions, grouped-query
/// attention, SwiGLU; with what [`ModelType`](crate::ModelType) adds for Qwen2, Qwen3 and SmolLM3.
///
/// Every operator differentiates. Built from [`Parameters::var_builder`](crate::Parameters::var_builder) it records
/// a graph; built from [`Parameters::detached_var_builder`](crate::Parameters::detached_var_builder) it does not.
///
/// It computes in the dtype of the builder; normalisation, rotation and softmax in f32 at least. A builder that
/// casts (`VarBuilder::to_dtype`) makes its cast copies here, once: build the decoder anew after the variables
/// change.
#[derive(Debug, Clone)]
pub struct Decoder {
    config: DecoderConfig,
    pub(crate) embedding: Weight,
    pub(crate) blocks: Vec<Block>,
    pub(crate) norm: RmsNorm,
    output: Weight,
    pub(crate) rope: Rope,
    activation_checkpointing: bool,
}

/// The checked input of a forward pass.
struct Input {
    /// [N]
    ids: Tensor,
    angles: RopeAngles,
    /// Number of sequences.
    sequences: usize,
    places: Places,
    shared: Option<SharedRows>,
}

/// Where the sequences lie.
enum Places {
    /// [B, past + S] of u8.
    Mask(Tensor),
    Lengths(Vec<usize>),
}

impl Input {
    fn pass(&self) -> Pass<'_> {
        Pass {
            angles: &self.angles,
            sequences: match &self.places {
                Places::Mask(mask) => Sequences::Padded(mask),
                Places::Lengths(lengths) => Sequences::Packed(lengths),
            },
            shared: self.shared.as_ref(),
        }
    }
}

/// A recorded forward pass of a decoder: what its backward pass needs.
struct DecoderBackward<'a> {
    decoder: &'a Decoder,
    input: Input,
    blocks: Vec<Kept>,
    /// What the final norm is of.
    last: Tensor,
}

/// What is kept of a block.
enum Kept {
    All(BlockRecord),
    /// To compute it again.
    Input(Tensor),
}

impl Backward for DecoderBackward<'_> {
    /// Frees memory block by block.
    fn backward(
        self: Box<Self>,
        hidden_gradient: &Tensor,
        trained: &Parameters,
        gradients: &mut Gradients,
    ) -> Result<()> {
        self.add_gradients(hidden_gradient, &mut GradientSink::new(trained, gradients))
            .inspect_err(|_| gradients.clear())
    }
}

impl DecoderBackward<'_> {
    fn add_gradients(self, hidden_gradient: &Tensor, sink: &mut GradientSink) -> Result<()> {
        let Self {
            decoder,
            input,
            mut blocks,
            last,
        } = self;
        check_hidden_gradient(hidden_gradient, &last)?;
        let mut gradient = decoder
            .norm
            .backward(&last, &hidden_gradient.detach(), sink)?;
        drop(last);
        for block in decoder.blocks.iter().rev() {
            let record = match blocks.pop() {
                Some(Kept::All(record)) => record,
                Some(Kept::Input(x)) => block.forward(&x, &input.pass(), None)?.1,
                None => bail!("a block was not recorded"),
            };
            gradient = block.backward(record, &input.pass(), gradient, sink)?;
        }
        sink.add_rows(&decoder.embedding, &input.ids, &gradient)
    }
}

impl Decoder {
    /// Takes the weights from `vb` under the names of [`DecoderConfig::parameter_shapes`].
    pub fn new(config: &DecoderConfig, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        if !vb.dtype().is_float() {
            bail!(
                "vb has dtype {:?}, it must be a floating-point type",
                vb.dtype()
            );
        }
        let model = vb.pp("model");
        let shape = (config.vocab_size, config.hidden_size);
        let embedding = Weight::get(&model.pp("embed_tokens"), shape, "weight")?;
        let blocks = (0..config.num_hidden_layers)
            .map(|layer| Block::new(config, layer, model.pp("layers").pp(layer)))
            .collect::<Result<Vec<_>>>()?;
        let output = if config.tie_word_embeddings {
            embedding.clone()
        } else {
            Weight::get(&vb.pp("lm_head"), shape, "weight")?
        };
        Ok(Self {
            config: config.clone(),
            blocks,
            norm: RmsNorm::new(config.hidden_size, config.rms_norm_eps, model.pp("norm"))?,
            rope: Rope::new(config, vb.dtype(), vb.device())?,
            embedding,
            output,
            activation_checkpointing: false,
        })
    }

    /// Whether [`LanguageModel::record`] keeps only the input of each block, and the block is computed again when its turn comes: the memory of one
    /// block in place of all, for a third more time.
    pub fn with_activation_checkpointing(mut self, on: bool) -> Self {
        self.activation_checkpointing = on;
        self
    }

    /// The hidden states after the final norm, `[B, S, H]`.
    ///
    /// - `input_ids`: `[B, S]` of u32, below the vocabulary size. On CPU this is checked; on other devices it is not,
    ///   as that would wait for the device, and an id out of range is undefined.
    /// - `attention_mask`: `[B, past + S]`, zero at padding and one (anything but zero) at real tokens, in any dtype.
    ///   `past` is the length of the cache, 0 without one. Padding may stand on either side. The position of a token
    ///   is `max(cumsum(mask) - 1, 0)`. Hidden states at padding are finite and mean nothing.
    /// - `cache`: past keys and values, which the new ones join. With it the result is detached: for sampling only.
    ///
    /// past + S, padding included, is at most `max_position_embeddings`.
    pub fn hidden_states(
        &self,
        input_ids: &Tensor,
        attention_mask: &Tensor,
        mut cache: Option<&mut KvCache>,
    ) -> Result<Tensor> {
        let (batch, new) = self.check_padded(input_ids, attention_mask, cache.as_deref())?;
        let x = self.forward(
            &self.padded(input_ids, attention_mask)?,
            cache.as_deref_mut(),
        )?;
        let x = x.reshape((batch, new, self.config.hidden_size))?;
        // A gradient that has lost its past would be wrong, so there is none.
        Ok(if cache.is_some() { x.detach() } else { x })
    }

    /// The hidden states after the final norm of sequences without padding, `[N, H]`, each at most `max_position_embeddings` long. See
    /// [`Self::hidden_states`]: the same numbers, but nothing is computed at padding, and what sequences share is computed once.
    pub fn packed_hidden_states(&self, tokens: &PackedTokens) -> Result<Tensor> {
        self.forward(&self.packed(tokens)?, None)
    }

    fn forward(&self, input: &Input, mut cache: Option<&mut KvCache>) -> Result<Tensor> {
        let mut x = embedding(&input.ids, &self.embedding.tensor)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            let cache = cache
                .as_deref_mut()
                .map(|cache| (cache, layer, input.sequences));
            (x, _) = block.forward(&x, &input.pass(), cache)?;
        }
        self.norm.forward(&x)
    }

    fn padded(&self, input_ids: &Tensor, attention_mask: &Tensor) -> Result<Input> {
        let seen = attention_mask::to_zero_one(attention_mask)?;
        let positions = attention_mask::positions(&seen, input_ids.dim(1)?)?;
        Ok(Input {
            ids: input_ids.flatten_all()?,
            angles: self.rope.angles(&positions)?,
            sequences: input_ids.dim(0)?,
            places: Places::Mask(seen.to_dtype(DType::U8)?),
            shared: None,
        })
    }

    fn packed(&self, tokens: &PackedTokens) -> Result<Input> {
        let limit = self.config.max_position_embeddings;
        let lengths = tokens.lengths();
        if let Some(row) = lengths.iter().position(|&length| length > limit) {
            bail!(
                "tokens: sequence {row} has {} positions, they must be at most max_position_embeddings, which is {limit}",
                lengths[row]
            );
        }
        let ids = tokens.ids();
        self.check_ids("tokens", ids, ids.elem_count())?;
        let positions: Vec<f32> = lengths
            .iter()
            .flat_map(|&length| (0..length).map(|position| position as f32))
            .collect();
        let first = tokens.first_tokens().into_iter();
        let positions: Vec<f32> = first.map(|token| positions[token as usize]).collect();
        let positions = Tensor::new(positions, ids.device())?;
        Ok(Input {
            ids: ids.clone(),
            angles: self.rope.angles(&positions)?,
            sequences: lengths.len(),
            places: Places::Lengths(lengths.to_vec()),
            shared: SharedRows::new(tokens)?,
        })
    }

    /// Whether a gradient can reach a weight through Candle's graph.
    fn is_tracked(&self) -> bool {
        self.embedding.tensor.track_op() || self.output.tensor.track_op()
    }

    /// The matrix `[V, H]` of the output layer; the embedding when tied.
    pub fn output_weight(&self) -> &Tensor {
        &self.output.tensor
    }

    /// The name of [`Self::output_weight`] among the parameters.
    pub fn output_name(&self) -> &str {
        &self.output.name
    }

    /// The logits `[.., V]` of hidden states `[.., H]`, in their dtype.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let dims = hidden.dims();
        if dims.last() != Some(&self.config.hidden_size) || hidden.elem_count() == 0 {
            bail!(
                "hidden has shape {dims:?}, it must be [.., {}] and not empty",
                self.config.hidden_size
            );
        }
        if hidden.dtype() != self.output.tensor.dtype() {
            bail!(
                "hidden has dtype {:?}, it must be that of the weights, {:?}",
                hidden.dtype(),
                self.output.tensor.dtype()
            );
        }
        let rows = hidden
            .contiguous()?
            .reshape(((), self.config.hidden_size))?;
        let mut shape = dims.to_vec();
        shape[dims.len() - 1] = self.config.vocab_size;
        linear(&rows, &self.output.tensor)?.reshape(shape)
    }

    /// The shape of this decoder.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Returns B and S.
    fn check_padded(
        &self,
        ids: &Tensor,
        attention_mask: &Tensor,
        cache: Option<&KvCache>,
    ) -> Result<(usize, usize)> {
        let &[batch, new] = ids.dims() else {
            bail!("input_ids has shape {:?}, it must be [B, S]", ids.dims());
        };
        if batch == 0 || new == 0 {
            bail!(
                "input_ids has shape {:?}, it must have at least one row and one position",
                ids.dims()
            );
        }
        let past = cache.map_or(0, KvCache::len);
        let total = past + new;
        if total > self.config.max_position_embeddings {
            bail!(
                "input_ids has {new} positions after {past} in the cache, together they must be at most \
                 max_position_embeddings, which is {}",
                self.config.max_position_embeddings
            );
        }
        if attention_mask.dims() != [batch, total] {
            bail!(
                "attention_mask has shape {:?}, it must be [{batch}, {total}]",
                attention_mask.dims()
            );
        }
        if let Some(cache) = cache {
            if cache.num_layers() != self.blocks.len() {
                bail!(
                    "cache is for {} layers, it must be for {}",
                    cache.num_layers(),
                    self.blocks.len()
                );
            }
            if let Some(rows) = cache.batch_size().filter(|&rows| rows != batch) {
                bail!("cache has {rows} rows, it must have {batch}, as input_ids");
            }
        }
        self.check_device("attention_mask", attention_mask)?;
        self.check_ids("input_ids", ids, new)?;
        Ok((batch, new))
    }

    /// Checks the tokens; there are `columns` in a row.
    fn check_ids(&self, name: &str, ids: &Tensor, columns: usize) -> Result<()> {
        if ids.dtype() != DType::U32 {
            bail!("{name} has dtype {:?}, it must be u32", ids.dtype());
        }
        self.check_device(name, ids)?;
        if matches!(ids.device(), Device::Cpu) {
            let rank = ids.rank();
            let ids = ids.flatten_all()?.to_vec1::<u32>()?;
            if let Some(at) = ids
                .iter()
                .position(|&id| id as usize >= self.config.vocab_size)
            {
                let place = match rank {
                    1 => at.to_string(),
                    _ => format!("{}, {}", at / columns, at % columns),
                };
                bail!(
                    "{name}[{place}] is {}, it must be below vocab_size, which is {}",
                    ids[at],
                    self.config.vocab_size
                );
            }
        }
        Ok(())
    }

    fn check_device(&self, name: &str, tensor: &Tensor) -> Result<()> {
        let device = self.embedding.tensor.device();
        if !tensor.device().same_device(device) {
            bail!(
                "{name} is on {:?}, it must be on the device of the weights, {:?}",
                tensor.device().location(),
                device.location()
            );
        }
        Ok(())
    }
}

impl LanguageModel for Decoder {
    fn hidden_states(&self, tokens: &PackedTokens) -> Result<Tensor> {
        self.packed_hidden_states(tokens)
    }

    fn output_weight(&self) -> &Tensor {
        &self.output.tensor
    }

    fn output_name(&self) -> &str {
        &self.output.name
    }

    /// Computes the hidden states without a graph, and keeps what the backward pass needs.
    ///
    /// The decoder must be built from
    /// [`Parameters::detached_var_builder`](crate::Parameters::detached_var_builder) or another builder without a graph.
    ///
    /// ```
    /// use candle_core::{Device, Result};
    /// use candle_grpo_nn::{Decoder, DecoderConfig, Gradients, LanguageModel, PackedTokens, Parameters};
    ///
    /// # fn main() -> Result<()> {
    /// # let model: DecoderConfig = serde_json::from_str(r#"{"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16,
    /// #     "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8,
    /// #     "tie_word_embeddings": true}"#).map_err(candle_core::Error::wrap)?;
    /// let parameters = Parameters::init(&model, 7, &Device::Cpu)?;
    /// let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    ///
    /// // The loss is the sum of all hidden states.
    /// let tokens = PackedTokens::new(&[vec![1, 2, 3], vec![4]], &Device::Cpu)?;
    /// let (hidden, recorded) = decoder.record(&tokens)?;
    /// let mut gradients = Gradients::new();
    /// recorded.backward(&hidden.ones_like()?, &parameters, &mut gradients)?;
    /// assert_eq!(gradients.iter().count(), parameters.len());
    /// # Ok(())
    /// # }
    /// ```
    fn record<'a>(&'a self, tokens: &PackedTokens) -> Result<(Tensor, Box<dyn Backward + 'a>)> {
        if self.is_tracked() {
            bail!(
                "the decoder records Candle's graph, it must be one of detached_var_builder to be recorded without"
            );
        }
        let input = self.packed(tokens)?;
        let mut x = embedding(&input.ids, &self.embedding.tensor)?;
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let (y, record) = block.forward(&x, &input.pass(), None)?;
            blocks.push(match self.activation_checkpointing {
                true => Kept::Input(x),
                false => Kept::All(record),
            });
            x = y;
        }
        let hidden = self.norm.forward(&x)?;
        let recorded = DecoderBackward {
            decoder: self,
            input,
            blocks,
            last: x,
        };
        Ok((hidden, Box::new(recorded)))
    }
}
