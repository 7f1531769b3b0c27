//! The decoder: token ids in, hidden states and logits out.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use candle_grpo_kernels::{TensorStack, embedding, soft_cap};
use candle_nn::VarBuilder;

use crate::config::architecture::ChannelPlan;
use crate::decoding::PagedDecoding;
use crate::model::block::{Block, BlockRecord, scaled};
use crate::model::divided_model::{Ahead, DividedModel, Parts};
use crate::model::frozen_linear::linear;
use crate::model::input::Input;
use crate::model::language_model::check_hidden_gradient;
use crate::model::linear::shares_memory;
use crate::model::named_weight::NamedWeight;
use crate::model::norm::RmsNorm;
use crate::model::pass::Pass;
use crate::model::rope::{Rope, RopeAngles};
use crate::model::routes::{BalanceGradient, ExpertBalance, RouterChoice, Routes, balance};
use crate::optim::grad_sink::GradSink;
use crate::{
    ActivationCheckpointing, Backward, DecoderConfig, Decoding, Gradients, Held, LanguageModel,
    Lora, PackedTokens, PagedCache, Parameters,
};

/// A decoder-only transformer from one of the families in [`ModelType`](crate::ModelType), with the
/// options in [`DecoderConfig`].
///
/// Every operator is differentiable. If you build a decoder with
/// [`Parameters::var_builder`](crate::Parameters::var_builder), it records Candle's graph. With
/// [`Parameters::detached_var_builder`](crate::Parameters::detached_var_builder) it records none,
/// and can sample ([`Self::next_logits`]) and train ([`LanguageModel::record`]) with less memory.
///
/// It computes in the builder's dtype, but norms, rotation and softmax are at least f32. A builder
/// that casts (`VarBuilder::to_dtype`) copies the weights once, here. Build a new decoder after the
/// variables change.
#[derive(Debug, Clone)]
pub struct Decoder {
    config: DecoderConfig,
    embedding: NamedWeight,
    blocks: Vec<Block>,
    /// Number of experts that all routers together choose for a token.
    choices: usize,
    norm: RmsNorm,
    output: NamedWeight,
    embedding_scale: f64,
    ropes: Vec<Rope>,
    output_scale: f64,
    logit_cap: Option<f64>,
    /// Number of blocks that the backward pass recomputes, beginning with the first one.
    recomputed_blocks: usize,
    /// True if the inputs of these blocks are in main memory until then.
    offloads_inputs: bool,
    /// The weights, if ranks divide them.
    divided: Option<DividedModel>,
    /// Number of adapter sets; 1 without adapters.
    num_adapters: usize,
    /// The same in all clones, which share their weights.
    #[cfg(feature = "cuda")]
    identity: std::sync::Arc<()>,
}

impl Decoder {
    /// Creates a decoder with the weights in `vb`, named as in [`DecoderConfig::parameter_shapes`].
    pub fn new(config: &DecoderConfig, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        if !vb.dtype().is_float() {
            bail!("vb: dtype {:?}, must be a floating-point type", vb.dtype());
        }
        let model = vb.pp("model");
        let shape = (config.vocab_size, config.hidden_size);
        let embedding = NamedWeight::get(&model.pp("embed_tokens"), shape, "weight")?;
        let architecture = config.architecture();
        let layers = model.pp("layers");
        let blocks = architecture.blocks.iter().enumerate();
        let mut routing = None;
        let mut routers = 0;
        let blocks = blocks
            .map(|(layer, plan)| {
                let block = Block::new(plan, layer, routers, &layers.pp(layer))?;
                if let ChannelPlan::Experts(experts) = &plan.mlp.mixer {
                    routing = Some(experts.routing);
                    routers += 1;
                }
                Ok(block)
            })
            .collect::<Result<Vec<_>>>()?;
        let ropes = architecture.rotations.iter();
        let ropes = ropes
            .map(|rotation| Rope::new(rotation, vb.dtype(), vb.device()))
            .collect::<Result<Vec<_>>>()?;
        let output = if config.tie_word_embeddings {
            embedding.clone()
        } else {
            NamedWeight::get(&vb.pp("lm_head"), shape, "weight")?
        };
        Ok(Self {
            config: config.clone(),
            blocks,
            choices: routers * routing.map_or(0, |routing| routing.top_k()),
            norm: RmsNorm::new(&architecture.norm, &vb)?,
            embedding_scale: architecture.embedding_scale,
            ropes,
            output_scale: architecture.output_scale,
            logit_cap: architecture.logit_cap,
            embedding,
            output,
            recomputed_blocks: 0,
            offloads_inputs: false,
            divided: None,
            num_adapters: 1,
            #[cfg(feature = "cuda")]
            identity: std::sync::Arc::default(),
        })
    }

    /// Joins decoders that share their base weights and have different adapters, or none.
    ///
    /// A pass of the joined decoder computes the products with the base weights once for all
    /// sequences, and each sequence gets the adapters of its decoder. To sample, choose them with
    /// [`PagedCache::add_with_adapter`]. To train, pass [`PackedTokens::joined`] to
    /// [`LanguageModel::record`], and call [`Backward::backward_joined`]. On the CPU, the results
    /// are bit-identical to those of the separate decoders. It sees updates of adapters that the
    /// decoders share with variables.
    ///
    /// # Errors
    ///
    /// If there are no decoders, if they have different configurations or base weights in different
    /// memory, or if several have experts.
    ///
    /// ```
    /// use candle_core::{DType, Device, Result};
    /// use candle_grpo_nn::{Decoder, DecoderConfig, Lora, LoraConfig, PagedCache, Parameters};
    ///
    /// # fn main() -> Result<()> {
    /// # let model = DecoderConfig { vocab_size: 11, hidden_size: 8, intermediate_size: 16,
    /// #     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
    /// #     max_position_embeddings: 8, tie_word_embeddings: true, ..DecoderConfig::default() };
    /// let base = Parameters::init(&model, 7, &Device::Cpu)?;
    /// let lora = Lora::init(LoraConfig::all_linear(2, 4.0), &model, 1, &Device::Cpu)?;
    /// let plain = Decoder::new(&model, base.detached_var_builder())?;
    /// let adapted = Decoder::new(&model, lora.detached_var_builder(&base)?)?;
    ///
    /// let joined = Decoder::joined(&[&plain, &adapted])?;
    /// let mut cache = PagedCache::new(&model, DType::F32, &Device::Cpu)?;
    /// let (a, b) = (cache.add(), cache.add_with_adapter(1));
    /// let logits = joined.next_logits(&[(a, &[5, 6]), (b, &[7])], &mut cache)?;
    /// assert_eq!(logits.dims(), [2, 11]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn joined(decoders: &[&Self]) -> Result<Self> {
        let Some((first, others)) = decoders.split_first() else {
            bail!("decoders: none, must be at least one");
        };
        if let Some(at) = decoders.iter().position(|one| one.divided.is_some()) {
            bail!("decoders[{at}]: its weights are divided between ranks, must be whole");
        }
        let mut joined = (*first).clone();
        #[cfg(feature = "cuda")]
        {
            joined.identity = std::sync::Arc::default();
        }
        for (at, other) in others.iter().enumerate() {
            joined.join((*other).clone()).map_err(|error| {
                candle_core::Error::msg(format!("decoders[{}]: {error}", at + 1))
            })?;
        }
        Ok(joined)
    }

    fn join(&mut self, mut other: Self) -> Result<()> {
        if self.config != other.config {
            bail!("another configuration, must be that of the first decoder");
        }
        if self.choices > 0 {
            bail!("has experts, must have none");
        }
        for (own, other) in [
            (&self.embedding, &other.embedding),
            (&self.output, &other.output),
        ] {
            if !shares_memory(&own.tensor, &other.tensor) {
                bail!(
                    "{}: another tensor, must be that of the first decoder",
                    own.name
                );
            }
        }
        let maps = self.blocks.iter_mut().flat_map(Block::linear);
        let others = other.blocks.iter_mut().flat_map(Block::linear);
        for (map, other) in maps.zip(others) {
            map.join(other.clone())?;
        }
        self.num_adapters += other.num_adapters;
        Ok(())
    }

    /// Number of decoders that were [joined](Self::joined); 1 for one that was not.
    pub fn num_adapters(&self) -> usize {
        self.num_adapters
    }

    /// Returns whether both decoders are clones of one, with the same weights.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_clone_of(&self, other: &Self) -> bool {
        std::sync::Arc::ptr_eq(&self.identity, &other.identity)
    }

    /// Sets the blocks of which [`LanguageModel::record`] keeps only the input, and which the
    /// backward pass recomputes.
    ///
    /// # Errors
    ///
    /// If there are fewer blocks.
    pub fn with_activation_checkpointing(
        mut self,
        checkpointing: impl Into<ActivationCheckpointing>,
    ) -> Result<Self> {
        self.recomputed_blocks = checkpointing.into().layers(&self.config)?;
        Ok(self)
    }

    /// Sets whether the inputs of [checkpointed](Self::with_activation_checkpointing) blocks leave
    /// the GPU for page-locked main memory until the backward pass ([`TensorStack`]). The results
    /// have the same bits. On the CPU, there is nothing to move.
    #[must_use]
    pub fn with_activation_offloading(self, offloads_inputs: bool) -> Self {
        Self {
            offloads_inputs,
            ..self
        }
    }

    /// Computes the hidden states `[B, S, H]` after the final norm, divided by
    /// [`DecoderConfig::logits_scaling`].
    ///
    /// - `input_ids`: u32 `[B, S]`, below the vocabulary size. Only the CPU checks this, because it
    ///   would synchronize other devices. There an id out of range is undefined.
    /// - `attention_mask`: `[B, S]` in any dtype, zero at padding and nonzero at real tokens. You
    ///   can pad on either side. A token's position is `max(cumsum(mask) - 1, 0)`. Hidden states at
    ///   padding are finite but meaningless.
    ///
    /// S, padding included, is at most `max_position_embeddings`. [`LanguageModel::hidden_states`]
    /// computes the same without padding.
    pub fn padded_hidden_states(
        &self,
        input_ids: &Tensor,
        attention_mask: &Tensor,
    ) -> Result<Tensor> {
        let hidden = self.forward(&Input::padded(self, input_ids, attention_mask)?)?;
        let (batch, length) = input_ids.dims2()?;
        hidden.reshape((batch, length, self.config.hidden_size))
    }

    fn forward(&self, input: &Input) -> Result<Tensor> {
        let x = self.embed(&input.ids)?;
        let (x, change, _) = self.run_blocks(x, &input.pass())?;
        self.norm(&x, change.as_ref())
    }

    /// Gathers the weights in a part of the decoder, if ranks divide them, until the result is
    /// dropped.
    fn hold(&self, part: impl Fn(&DividedModel) -> &Arc<[String]>) -> Result<Option<Held>> {
        let divided = self.divided.as_ref();
        divided.map(|all| all.hold(part(all))).transpose()
    }

    /// Gathers the weights of the blocks one after the other, if ranks divide them and they are not
    /// held.
    fn ahead(&self) -> Result<Option<Ahead<'_>>> {
        let ahead = self.divided.as_ref().map(DividedModel::ahead);
        Ok(ahead.transpose()?.flatten())
    }

    /// Returns whether ranks divide the weights.
    pub(crate) fn is_divided(&self) -> bool {
        self.divided.is_some()
    }

    /// Checks that all weights are there, if ranks divide them.
    pub(crate) fn ensure_held(&self) -> Result<()> {
        self.divided
            .as_ref()
            .map_or(Ok(()), DividedModel::ensure_held)
    }

    /// Looks up the scaled embedding rows `[N, H]` for `ids` `[N]`.
    pub(crate) fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        let _held = self.hold(|all| &all.embedding)?;
        scaled(
            embedding(ids, &self.embedding.tensor)?,
            self.embedding_scale,
        )
    }

    /// Rotation angles at these positions, one entry per rotation.
    pub(crate) fn angles(&self, positions: &Tensor) -> Result<Vec<RopeAngles>> {
        let angles = self.ropes.iter().map(|rope| rope.angles(positions));
        angles.collect()
    }

    /// Returns whether any block has a recurrent state.
    pub(crate) fn has_states(&self) -> bool {
        self.blocks.iter().any(Block::has_state)
    }

    /// Returns whether the attention of a block can read pages that rows share once.
    pub(crate) fn shares_reads(&self) -> bool {
        self.blocks.iter().any(Block::shares_reads)
    }

    /// Returns whether decoding steps with this number of rows can be recorded.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_recordable(&self, rows: usize) -> bool {
        let mut blocks = self.blocks.iter();
        self.num_adapters == 1 && blocks.all(|block| block.is_recordable(rows))
    }

    /// Runs `[N, H]` through all blocks, and returns two tensors whose sum is the output, with the
    /// choices that all routers made. Without blocks there is no second tensor.
    pub(crate) fn run_blocks(
        &self,
        x: Tensor,
        pass: &Pass,
    ) -> Result<(Tensor, Option<Tensor>, Vec<RouterChoice>)> {
        let (mut x, mut change) = (x, None);
        let mut routers = Vec::new();
        let mut ahead = self.ahead()?;
        for block in &self.blocks {
            let _held = ahead.as_mut().map(Ahead::next).transpose()?;
            let ([sum, y], record) = block.forward(&x, change.as_ref(), pass)?;
            routers.extend(record.router().cloned());
            (x, change) = (sum, Some(y));
        }
        Ok((x, change, routers))
    }

    /// Computes the hidden states: the scaled final norm of `x + change`.
    pub(crate) fn norm(&self, x: &Tensor, change: Option<&Tensor>) -> Result<Tensor> {
        let _held = self.hold(|all| &all.norm)?;
        scaled(self.norm.forward_sum(x, change)?.1, self.output_scale)
    }

    /// Applies the soft cap to the logits.
    pub(crate) fn capped(&self, logits: Tensor) -> Result<Tensor> {
        soft_cap(&logits, self.logit_cap)
    }

    /// The output matrix `[V, H]`; the embedding if tied.
    pub fn output_weight(&self) -> &Tensor {
        &self.output.tensor
    }

    /// The parameter name for [`Self::output_weight`].
    pub fn output_name(&self) -> &str {
        &self.output.name
    }

    /// Computes the logits `[.., V]` from hidden states `[.., H]` in their dtype, with the soft cap
    /// applied.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let dims = hidden.dims();
        if dims.last() != Some(&self.config.hidden_size) || hidden.elem_count() == 0 {
            bail!(
                "hidden: shape {dims:?}, must be [.., {}] and not empty",
                self.config.hidden_size
            );
        }
        if hidden.dtype() != self.output.tensor.dtype() {
            bail!(
                "hidden: dtype {:?}, must be that of the weights, {:?}",
                hidden.dtype(),
                self.output.tensor.dtype()
            );
        }
        let rows = hidden
            .contiguous()?
            .reshape(((), self.config.hidden_size))?;
        let held = self.divided.as_ref().map(DividedModel::hold_output);
        let _held = held.transpose()?;
        let mut shape = dims.to_vec();
        shape[dims.len() - 1] = self.config.vocab_size;
        self.capped(linear(&rows, &self.output.tensor)?)?
            .reshape(shape)
    }

    /// Number of experts that all routers together choose for a token; 0 without experts.
    pub fn expert_choices(&self) -> usize {
        self.choices
    }

    /// The decoder configuration.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }
}

impl LanguageModel for Decoder {
    /// Computes the hidden states `[N, H]` after the final norm. Each sequence is at most
    /// `max_position_embeddings` long. Tokens that sequences share are computed once.
    ///
    /// If ranks divide the tokens, the decoder must be without a gated delta rule, and without a
    /// graph.
    fn hidden_states(&self, tokens: &PackedTokens) -> Result<Tensor> {
        self.forward(&Input::packed(self, tokens)?)
    }

    fn output_weight(&self) -> &Tensor {
        &self.output.tensor
    }

    fn output_name(&self) -> &str {
        &self.output.name
    }

    fn logit_cap(&self) -> Option<f64> {
        self.logit_cap
    }

    fn divided(&self) -> Option<&DividedModel> {
        self.divided.as_ref()
    }

    fn gathering(mut self, parameters: &Parameters) -> Result<Self> {
        let names = [&self.embedding, &self.output].map(|weight| weight.name.as_str());
        let divided = DividedModel::new(parameters, self.blocks.len(), names);
        if divided.is_some() {
            self.blocks.iter_mut().for_each(Block::release_addresses);
        }
        Ok(Self {
            // Weights that are gathered have other addresses.
            #[cfg(feature = "cuda")]
            identity: match &divided {
                Some(_) => Arc::default(),
                None => self.identity,
            },
            divided,
            ..self
        })
    }

    /// Computes the hidden states without a graph, and keeps what the backward pass needs.
    ///
    /// Build the decoder with
    /// [`Parameters::detached_var_builder`](crate::Parameters::detached_var_builder) or another
    /// builder without a graph.
    ///
    /// ```
    /// use candle_core::{Device, Result};
    /// use candle_grpo_nn::{Decoder, DecoderConfig, Gradients, LanguageModel, PackedTokens, Parameters};
    ///
    /// # fn main() -> Result<()> {
    /// # let model = DecoderConfig { vocab_size: 11, hidden_size: 8, intermediate_size: 16,
    /// #     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
    /// #     max_position_embeddings: 8, tie_word_embeddings: true, ..DecoderConfig::default() };
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
        if self.embedding.tensor.track_op() || self.output.tensor.track_op() {
            bail!(
                "decoder: records Candle's graph, must be built from detached_var_builder to be recorded without"
            );
        }
        let input = Input::packed(self, tokens)?;
        let (mut x, mut change) = (self.embed(&input.ids)?, None);
        let mut blocks = Vec::with_capacity(self.blocks.len() - self.recomputed_blocks);
        let mut inputs = if self.offloads_inputs {
            TensorStack::in_main_memory(input.ids.device())?
        } else {
            TensorStack::on_device()
        };
        let mut routers = Vec::new();
        let mut ahead = self.ahead()?;
        for (number, block) in self.blocks.iter().enumerate() {
            let _held = ahead.as_mut().map(Ahead::next).transpose()?;
            let ([sum, y], record) = block.forward(&x, change.as_ref(), &input.pass())?;
            routers.extend(record.router().cloned());
            if number < self.recomputed_blocks {
                inputs.push(&record.into_input())?;
            } else {
                blocks.push(record);
            }
            (x, change) = (sum, Some(y));
        }
        let held = self.hold(|all| &all.norm)?;
        let (x, hidden) = self.norm.forward_sum(&x, change.as_ref())?;
        drop(held);
        let hidden = scaled(hidden, self.output_scale)?;
        let recorded = DecoderBackward {
            decoder: self,
            input,
            inputs,
            blocks,
            routers,
            balance: None,
            last: x,
        };
        Ok((hidden, Box::new(recorded)))
    }

    /// Continues sequences with a [`PagedCache`], like [`Decoder::next_logits`].
    fn decoding(&self) -> Result<Box<dyn Decoding + '_>> {
        let weight = self.output_weight();
        self.decoding_with(PagedCache::new(
            &self.config,
            weight.dtype(),
            weight.device(),
        )?)
    }

    fn decoding_with(&self, cache: PagedCache) -> Result<Box<dyn Decoding + '_>> {
        self.ensure_held()?;
        Ok(Box::new(PagedDecoding {
            decoder: self,
            cache,
        }))
    }
}

/// A recorded forward pass of a decoder.
struct DecoderBackward<'a> {
    decoder: &'a Decoder,
    input: Input,
    /// The inputs of the first blocks, which are recomputed.
    inputs: TensorStack,
    /// The other blocks.
    blocks: Vec<BlockRecord>,
    /// The choices that all routers made.
    routers: Vec<RouterChoice>,
    balance: Option<BalanceGradient>,
    /// Input to the final norm.
    last: Tensor,
}

impl Backward for DecoderBackward<'_> {
    fn balance_experts(&mut self, weights: &[f32], coef: f64) -> Result<Option<ExpertBalance>> {
        let found = balance(&self.routers, weights, coef, self.input.ranks())?;
        let (found, gradient) = found.unzip();
        self.balance = gradient.filter(|_| coef != 0.0);
        Ok(found)
    }

    /// Frees memory block by block.
    fn backward(
        self: Box<Self>,
        hidden_gradient: &Tensor,
        trained: &Parameters,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let add = || match self.decoder.num_adapters {
            1 => self.add_gradients(hidden_gradient, &mut GradSink::new(trained, gradients)),
            number => bail!("decoder: {number} joined ones, must be one: call backward_joined"),
        };
        add().inspect_err(|_| gradients.clear())
    }

    fn backward_joined(
        self: Box<Self>,
        hidden_gradient: &Tensor,
        mut adapters: Vec<(&Lora, &mut Gradients)>,
    ) -> Result<()> {
        let (found, number) = (adapters.len(), self.decoder.num_adapters);
        let all = adapters.iter_mut();
        let sink = GradSink::joined(all.map(|(lora, sums)| (lora.parameters(), &mut **sums)));
        let added = match sink {
            Some(mut sink) if found == number => self.add_gradients(hidden_gradient, &mut sink),
            _ => Err(candle_core::Error::msg(format!(
                "adapters: {found}, must be {number}, one for each joined decoder"
            ))),
        };
        added.inspect_err(|_| adapters.iter_mut().for_each(|(_, sums)| sums.clear()))
    }
}

impl DecoderBackward<'_> {
    fn add_gradients(self, hidden_gradient: &Tensor, sink: &mut GradSink) -> Result<()> {
        let Self {
            decoder,
            input,
            mut inputs,
            mut blocks,
            last,
            balance,
            ..
        } = self;
        let pass = input.pass();
        let pass = Pass {
            routes: Routes {
                balance: balance.as_ref(),
                ..pass.routes
            },
            ..pass
        };
        check_hidden_gradient(hidden_gradient, &last)?;
        let of_norm = scaled(hidden_gradient.detach(), decoder.output_scale)?;
        let mut parts = decoder.divided.as_ref().map(Parts::backward);
        let mut hold = |sink: &mut GradSink| -> Result<Option<Held>> {
            let held = parts.as_mut().map(|parts| parts.next(sink.reduction()));
            held.transpose()
        };
        let held = hold(sink)?;
        let mut gradient = decoder.norm.backward(&last, &of_norm, sink)?;
        drop((last, held));
        if decoder.output.name != decoder.embedding.name {
            sink.complete(|name| name == decoder.output.name)?;
        }
        for (number, block) in decoder.blocks.iter().enumerate().rev() {
            let held = hold(sink)?;
            let record = match blocks.pop() {
                Some(record) => record,
                None => match inputs.pop()? {
                    Some(x) => block.forward(&x, None, &pass)?.1,
                    None => bail!("a block was not recorded"),
                },
            };
            gradient = block.backward(record, &pass, gradient, sink)?;
            drop(held);
            let part = format!("layers.{number}.");
            sink.complete(|name| name.contains(&part))?;
        }
        let gradient = scaled(gradient, decoder.embedding_scale)?;
        sink.add_rows(&decoder.embedding, &input.ids, &gradient)
    }
}
