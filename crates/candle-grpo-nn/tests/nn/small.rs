//! A decoder small enough to check by hand and a batch for it.

use std::collections::HashMap;

use candle_core::{D, DType, IndexOp, Result, Tensor, Var};
use candle_grpo_kernels::{LinearLogProb, LogProbOptions, TokenLogProbs};
use candle_grpo_nn::{
    ActivationCheckpointing, Decoder, DecoderConfig, DividedModel, Gradients, LanguageModel,
    LayerType, ModelType, PackedTokens, Parameters,
};
use candle_grpo_test_support::{TINY_DECODER, device, noise_tensor};
use rstest_reuse::template;

/// Two query heads per key head, and a head width that is not `hidden_size / num_attention_heads`.
pub(crate) fn config(tied: bool) -> DecoderConfig {
    DecoderConfig {
        vocab_size: 13,
        hidden_size: 12,
        intermediate_size: 20,
        head_dim: Some(6),
        rope_theta: 100.0,
        max_position_embeddings: 16,
        tie_word_embeddings: tied,
        ..serde_json::from_str(TINY_DECODER).expect("a configuration")
    }
}

/// Decoders covered by tests that run on all families.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Llama,
    LlamaWithBiases,
    Qwen2,
    Qwen3,
    SmolLm3,
    Mistral,
    Granite,
    Olmo2,
    Gemma2,
    Gemma3,
    Phi3,
    Qwen3Moe,
    Qwen3_5,
}

/// Cases for tests that run on all families.
#[template]
#[rstest]
pub(crate) fn each_family(
    #[values(
        Family::Llama,
        Family::LlamaWithBiases,
        Family::Qwen2,
        Family::Qwen3,
        Family::SmolLm3,
        Family::Mistral,
        Family::Granite,
        Family::Olmo2,
        Family::Gemma2,
        Family::Gemma3,
        Family::Phi3,
        Family::Qwen3Moe,
        Family::Qwen3_5
    )]
    family: Family,
) {
}

impl Family {
    /// [`config`] for this family.
    pub(crate) fn config(self, tied: bool) -> DecoderConfig {
        let config = config(tied);
        match self {
            Self::Llama => config,
            Self::LlamaWithBiases => DecoderConfig {
                attention_bias: true,
                mlp_bias: true,
                ..config
            },
            Self::Qwen2 => DecoderConfig {
                model_type: ModelType::Qwen2,
                ..config
            },
            Self::Qwen3 => DecoderConfig {
                model_type: ModelType::Qwen3,
                ..config
            },
            Self::SmolLm3 => DecoderConfig {
                model_type: ModelType::SmolLm3,
                // The last block does not rotate.
                no_rope_layers: vec![1, 0],
                ..config
            },
            Self::Mistral => DecoderConfig {
                model_type: ModelType::Mistral,
                sliding_window: Some(3),
                ..config
            },
            Self::Granite => DecoderConfig {
                model_type: ModelType::Granite,
                embedding_multiplier: 3.0,
                residual_multiplier: 0.5,
                attention_multiplier: 0.2,
                logits_scaling: 1.5,
                ..config
            },
            Self::Olmo2 => DecoderConfig {
                model_type: ModelType::Olmo2,
                ..config
            },
            Self::Gemma2 => DecoderConfig {
                model_type: ModelType::Gemma2,
                sliding_window: Some(2),
                layer_types: vec![LayerType::SlidingAttention, LayerType::FullAttention],
                query_pre_attn_scalar: Some(4.0),
                attn_logit_softcapping: Some(2.0),
                final_logit_softcapping: Some(3.0),
                ..config
            },
            Self::Gemma3 => DecoderConfig {
                model_type: ModelType::Gemma3,
                sliding_window: Some(2),
                layer_types: vec![LayerType::SlidingAttention, LayerType::FullAttention],
                rope_local_base_freq: Some(10.0),
                ..config
            },
            // Four of the six elements in a head rotate.
            Self::Phi3 => DecoderConfig {
                model_type: ModelType::Phi3,
                partial_rotary_factor: 0.7,
                sliding_window: Some(4),
                ..config
            },
            // The last block has no experts.
            Self::Qwen3Moe => DecoderConfig {
                model_type: ModelType::Qwen3Moe,
                num_experts: 3,
                num_experts_per_tok: 2,
                moe_intermediate_size: 8,
                mlp_only_layers: vec![1],
                ..config
            },
            Self::Qwen3_5 => DecoderConfig {
                model_type: ModelType::Qwen3_5,
                layer_types: vec![LayerType::LinearAttention, LayerType::FullAttention],
                // Two of six elements.
                partial_rotary_factor: 0.34,
                linear_conv_kernel_dim: Some(4),
                linear_key_head_dim: Some(3),
                linear_value_head_dim: Some(5),
                linear_num_key_heads: Some(2),
                linear_num_value_heads: Some(4),
                ..config
            },
        }
    }
}

/// A family, and the kind of all layers in a family with several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind(pub(crate) Family, pub(crate) Option<LayerType>);

impl From<Family> for Kind {
    fn from(family: Family) -> Self {
        Self(family, None)
    }
}

impl Kind {
    /// [`Family::config`] with this number of layers, each with experts where the family has them.
    pub(crate) fn config(self, layers: usize) -> DecoderConfig {
        DecoderConfig {
            num_hidden_layers: layers,
            layer_types: vec![self.1; layers].into_iter().flatten().collect(),
            mlp_only_layers: Vec::new(),
            ..self.0.config(true)
        }
    }
}

/// Weights ten times as large as `init` samples them, and norms different from one, so that every
/// part of the model matters.
pub(crate) fn lively_tensors(config: &DecoderConfig) -> Result<HashMap<String, Tensor>> {
    let drawn = Parameters::init(config, 5, device())?;
    let mut tensors = drawn.frozen_copy()?;
    for (name, tensor) in &mut tensors {
        *tensor = if tensor.rank() == 1 {
            noise_tensor(tensor.shape(), name.len() as u64, DType::F32, device())?
                .affine(0.3, 1.0)?
        } else {
            (&*tensor * 10.0)?
        };
    }
    Ok(tensors)
}

pub(crate) fn lively(config: &DecoderConfig) -> Result<Parameters> {
    Parameters::from_tensors(config, lively_tensors(config)?, device())
}

/// Three rows with different lengths, left-padded with zeros.
pub(crate) fn left_padded() -> Result<(Tensor, Tensor)> {
    let ids = Tensor::new(
        &[[0u32, 0, 3, 1, 4], [0, 5, 9, 2, 6], [7, 0, 8, 12, 11]],
        device(),
    )?;
    let mask = Tensor::new(
        &[[0u32, 0, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
        device(),
    )?;
    Ok((ids, mask))
}

/// Negative mean log-prob of the next token, over pairs of real tokens.
pub(crate) fn next_token_loss(decoder: &Decoder, ids: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let (log_probs, pairs) = next_token_log_probs(decoder, ids, mask)?;
    (log_probs.sum_all()? / pairs.sum_all()?)?.neg()
}

/// The log-prob [B, S - 1] for each next token, zero where it or its predecessor is padding; and
/// which are not.
pub(crate) fn next_token_log_probs(
    decoder: &Decoder,
    ids: &Tensor,
    mask: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let length = ids.dim(1)?;
    let logits = decoder
        .logits(&decoder.padded_hidden_states(ids, mask)?)?
        .narrow(1, 0, length - 1)?;
    let all = candle_nn::ops::log_softmax(&logits, D::Minus1)?;
    let next = ids.i((.., 1..))?.contiguous()?.unsqueeze(2)?;
    let mask = mask.to_dtype(all.dtype())?;
    let pairs = (mask.i((.., 1..))? * mask.i((.., ..length - 1))?)?;
    Ok(((all.gather(&next, 2)?.squeeze(2)? * &pairs)?, pairs))
}

/// Gradients of [`next_token_loss`] without a graph, from the real tokens alone.
pub(crate) fn recorded_gradients(
    decoder: &Decoder,
    trained: &Parameters,
    ids: &Tensor,
    mask: &Tensor,
    checkpointing: impl Into<ActivationCheckpointing>,
) -> Result<Gradients> {
    let mut gradients = Gradients::new();
    add_recorded(decoder, trained, ids, mask, checkpointing, &mut gradients)?;
    Ok(gradients)
}

/// Adds [`recorded_gradients`].
pub(crate) fn add_recorded(
    decoder: &Decoder,
    trained: &Parameters,
    ids: &Tensor,
    mask: &Tensor,
    checkpointing: impl Into<ActivationCheckpointing>,
    gradients: &mut Gradients,
) -> Result<()> {
    let ids = ids.to_dtype(DType::U32)?.to_vec2::<u32>()?;
    let mask = mask.to_dtype(DType::U32)?.to_vec2::<u32>()?;
    let (mut tokens, mut targets, mut counts) = (vec![], vec![], vec![]);
    for (ids, mask) in ids.iter().zip(&mask) {
        let real = ids.iter().zip(mask).filter(|&(_, &real)| real != 0);
        let real: Vec<u32> = real.map(|(&id, _)| id).collect();
        targets.extend(real.iter().skip(1).copied().chain([0]));
        counts.extend((1..=real.len()).map(|next| u8::from(next < real.len())));
        tokens.push(real);
    }
    let pairs = counts.iter().filter(|&&count| count == 1).count() as f64;
    let decoder = (decoder.clone()).with_activation_checkpointing(checkpointing)?;
    let (hidden, recorded) = decoder.record(&PackedTokens::new(&tokens, device())?)?;
    let hidden = Var::from_tensor(&hidden)?;
    let held = decoder.divided().map(DividedModel::hold_output);
    let held = held.transpose()?;
    let output_weight = match trained.get(decoder.output_name()) {
        Some(variable) => variable.as_tensor(),
        None => decoder.output_weight(),
    };
    let (targets, counts) = (
        Tensor::new(targets, device())?,
        Tensor::new(counts, device())?,
    );
    let options = LogProbOptions {
        mask: Some(&counts),
        logit_cap: decoder.logit_cap(),
        ..Default::default()
    };
    let layer = LinearLogProb::new(&hidden, output_weight, None, &targets, 1.0, options)?;
    let log_probs = layer.forward()?;
    let none = log_probs.entropy.zeros_like()?;
    let derivatives = TokenLogProbs {
        log_probs: (&none - 1.0 / pairs)?,
        entropy: none.clone(),
        log_sum_exp: none,
    };
    let found = layer.backward(&log_probs, &derivatives)?;
    drop(held);
    if let Some(gradient) = found.weight {
        gradients.add(decoder.output_name(), &gradient)?;
    }
    recorded.backward(
        &found.hidden.expect("a variable has one"),
        trained,
        gradients,
    )?;
    gradients.ensure_complete(trained)
}

/// Gradients that are exactly `of(name)`, from a loss that is linear in the variables.
pub(crate) fn exact_gradients(
    parameters: &Parameters,
    of: impl Fn(&str, &Tensor) -> Result<Tensor>,
) -> Result<Gradients> {
    let mut loss = Tensor::zeros((), parameters.dtype(), parameters.device())?;
    for (name, variable) in parameters.iter() {
        let slope = of(name, variable.as_tensor())?.detach();
        loss = (loss + (variable.as_tensor() * slope)?.sum_all()?)?;
    }
    let mut gradients = Gradients::new();
    gradients.accumulate(&loss, parameters)?;
    Ok(gradients)
}

/// All parameter bits in f64, which represents every f32.
pub(crate) fn bits(parameters: &Parameters) -> Result<Vec<(String, Vec<u64>)>> {
    parameters
        .iter()
        .map(|(name, variable)| {
            let values = variable.to_dtype(DType::F64)?.flatten_all()?;
            let values = values.to_vec1::<f64>()?.into_iter();
            Ok((name.to_owned(), values.map(f64::to_bits).collect()))
        })
        .collect()
}

/// The largest absolute difference; NaN counts as infinite.
pub(crate) fn max_difference(a: &Tensor, b: &Tensor) -> Result<f64> {
    assert_eq!(a.dims(), b.dims());
    let difference = (a.to_dtype(DType::F64)? - b.to_dtype(DType::F64)?)?
        .abs()?
        .flatten_all()?
        .to_vec1::<f64>()?;
    Ok(difference
        .into_iter()
        .map(|d| if d.is_nan() { f64::INFINITY } else { d })
        .fold(0.0, f64::max))
}
