//! Decoder architecture: blocks, their options, and weight names.

use std::collections::BTreeMap;

use candle_core::{Result, Shape, Tensor};
use candle_grpo_kernels::{DeltaHeads, Scores, geglu, geglu_gradient, swiglu, swiglu_gradient};

use crate::router::Router;
use crate::{DecoderConfig, RopeScaling};

/// Embedding name.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// Output layer name.
pub(crate) const OUTPUT: &str = "lm_head.weight";

/// A decoder's architecture. Each family builds one from its configuration.
#[derive(Debug, Clone)]
pub(crate) struct Architecture {
    /// Multiplies the embedding.
    pub(crate) embedding_scale: f64,
    /// Rotations that blocks can choose from.
    pub(crate) rotations: Vec<Rotation>,
    pub(crate) blocks: Vec<BlockPlan>,
    /// Norm after the last block.
    pub(crate) norm: NormPlan,
    /// Multiplies the hidden states after that norm, and therefore the logits.
    pub(crate) output_scale: f64,
    /// Soft cap for the logits.
    pub(crate) logit_cap: Option<f64>,
}

/// Rotates queries and keys by position.
#[derive(Debug, Clone)]
pub(crate) struct Rotation {
    /// Number of elements in each head that rotate, counted from the first.
    pub(crate) width: usize,
    /// Frequency base.
    pub(crate) theta: f64,
    pub(crate) scaling: RopeScaling,
}

/// A block: a token mixer, then a channel mixer.
#[derive(Debug, Clone)]
pub(crate) struct BlockPlan {
    pub(crate) tokens: SublayerPlan<TokenMixerPlan>,
    pub(crate) mlp: SublayerPlan<ChannelPlan>,
}

/// A mixer with a residual connection.
#[derive(Debug, Clone)]
pub(crate) struct SublayerPlan<M> {
    /// Norm before the mixer.
    pub(crate) before: Option<NormPlan>,
    pub(crate) mixer: M,
    /// Norm after the mixer.
    pub(crate) after: Option<NormPlan>,
    /// Multiplies the mixer output.
    pub(crate) scale: f64,
}

/// Mixes tokens along a sequence.
#[derive(Debug, Clone)]
pub(crate) enum TokenMixerPlan {
    Attention(AttentionPlan),
    GatedDelta(GatedDeltaPlan),
}

#[derive(Debug, Clone)]
pub(crate) struct AttentionPlan {
    /// Query, key and value maps.
    pub(crate) inputs: MapsPlan<3>,
    /// The query map interleaves each head with a gate for its output.
    pub(crate) output_gate: bool,
    pub(crate) output: MapPlan,
    /// Query and key norms, applied before the rotation.
    pub(crate) norms: Option<[NormPlan; 2]>,
    /// Index of the rotation, if query and key rotate.
    pub(crate) rotation: Option<usize>,
    pub(crate) head_dim: usize,
    pub(crate) scores: Scores,
}

/// A channel mixer.
#[derive(Debug, Clone)]
pub(crate) enum ChannelPlan {
    Mlp(MlpPlan),
    Experts(ExpertsPlan),
}

/// A mixture of experts.
#[derive(Debug, Clone)]
pub(crate) struct ExpertsPlan {
    /// Maps hidden states to one logit per expert.
    pub(crate) router: MapPlan,
    pub(crate) experts: Vec<MlpPlan>,
    pub(crate) routing: Router,
}

/// The gated delta rule and its surrounding maps.
#[derive(Debug, Clone)]
pub(crate) struct GatedDeltaPlan {
    pub(crate) heads: DeltaHeads,
    /// Convolution width in rows.
    pub(crate) taps: usize,
    /// Fused query, key and value; the output gate; and the gate inputs `b` and `a`.
    pub(crate) inputs: MapsPlan<4>,
    /// Norm for each output head.
    pub(crate) norm: NormPlan,
    pub(crate) output: MapPlan,
}

#[derive(Debug, Clone)]
pub(crate) struct MlpPlan {
    /// Gate and up maps.
    pub(crate) inputs: MapsPlan<2>,
    pub(crate) gate: Gate,
    pub(crate) down: MapPlan,
}

/// An operator that combines gate and up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gate {
    pub(crate) forward: fn(&Tensor, &Tensor) -> Result<Tensor>,
    /// Computes the gate and up gradients from gate, up and the output gradient.
    pub(crate) backward: fn(&Tensor, &Tensor, &Tensor) -> Result<(Tensor, Tensor)>,
    pub(crate) is_swiglu: bool,
}

impl Gate {
    pub(crate) const SWIGLU: Self = Self {
        forward: swiglu,
        backward: swiglu_gradient,
        is_swiglu: true,
    };
    pub(crate) const GEGLU: Self = Self {
        forward: geglu,
        backward: geglu_gradient,
        is_swiglu: false,
    };
}

/// Several linear maps with the same input.
#[derive(Debug, Clone)]
pub(crate) struct MapsPlan<const M: usize> {
    pub(crate) maps: [MapPlan; M],
    /// Name of the stacked map, if all of these are stored as one.
    pub(crate) joined: Option<&'static str>,
}

/// A linear map.
#[derive(Debug, Clone)]
pub(crate) struct MapPlan {
    /// Name within the block.
    pub(crate) name: String,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) bias: bool,
    /// The output is added to the hidden states.
    pub(crate) is_residual: bool,
}

/// An RMSNorm.
#[derive(Debug, Clone)]
pub(crate) struct NormPlan {
    /// Name within the block. The last norm has its full name here.
    pub(crate) name: String,
    pub(crate) width: usize,
    pub(crate) epsilon: f64,
    /// Multiplies by `1 + weight`.
    pub(crate) is_offset: bool,
}

/// A parameter of a decoder.
#[derive(Debug, Clone)]
pub(crate) struct Parameter {
    pub(crate) shape: Shape,
    pub(crate) initial: Initial,
}

/// The initial values of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Initial {
    Zeros,
    /// Zeros, for a norm that multiplies by `1 + weight`.
    OneLess,
    Ones,
    /// Logarithms of decay rates, evenly spaced between 0 and 16.
    Rates,
    Normal,
    /// Smaller normal values, for a map whose output is added to the hidden states.
    Residual,
}

impl Architecture {
    /// A Llama with the sizes and common options from `config`. Other families start from it.
    pub(crate) fn llama(config: &DecoderConfig) -> Self {
        Self {
            embedding_scale: 1.0,
            rotations: vec![Rotation {
                width: config.rotary_width(),
                theta: config.rope_theta,
                scaling: config.rope_scaling.clone(),
            }],
            blocks: vec![BlockPlan::llama(config); config.num_hidden_layers],
            norm: NormPlan::new(config, "model.norm", config.hidden_size),
            output_scale: 1.0,
            logit_cap: None,
        }
    }

    /// Iterates over the attention plans, in block order.
    pub(crate) fn attentions(&mut self) -> impl Iterator<Item = &mut AttentionPlan> {
        let blocks = self.blocks.iter_mut();
        blocks.filter_map(|block| block.tokens.mixer.attention())
    }

    /// Makes all norms multiply by `1 + weight`, except those on head outputs.
    pub(crate) fn offset_norms(&mut self) {
        let norms = self.blocks.iter_mut().flat_map(BlockPlan::norms_mut);
        for norm in norms.chain([&mut self.norm]) {
            norm.is_offset = true;
        }
    }

    /// Names of the maps that choose experts.
    pub(crate) fn routers(&self) -> Vec<String> {
        let blocks = self.blocks.iter().enumerate();
        let routers = blocks.filter_map(|(number, block)| match &block.mlp.mixer {
            ChannelPlan::Mlp(_) => None,
            ChannelPlan::Experts(plan) => {
                Some(format!("model.layers.{number}.{}", plan.router.name))
            }
        });
        routers.collect()
    }

    /// Every parameter by Hugging Face name, for a decoder with the sizes in `config`.
    pub(crate) fn parameters(&self, config: &DecoderConfig) -> BTreeMap<String, Parameter> {
        let mut parameters = BTreeMap::new();
        let mut add = |name: String, shape: Shape, initial| {
            parameters.insert(name, Parameter { shape, initial });
        };
        let outer = Shape::from((config.vocab_size, config.hidden_size));
        if !config.tie_word_embeddings {
            add(OUTPUT.to_owned(), outer.clone(), Initial::Normal);
        }
        add(EMBEDDING.to_owned(), outer, Initial::Normal);
        self.norm.parameters("", &mut add);
        for (number, block) in self.blocks.iter().enumerate() {
            let prefix = format!("model.layers.{number}.");
            let BlockPlan { tokens, mlp } = block;
            let norms = [&tokens.before, &tokens.after, &mlp.before, &mlp.after];
            for norm in norms.into_iter().flatten() {
                norm.parameters(&prefix, &mut add);
            }
            match &tokens.mixer {
                TokenMixerPlan::Attention(attention) => attention.parameters(&prefix, &mut add),
                TokenMixerPlan::GatedDelta(delta) => delta.parameters(&prefix, &mut add),
            }
            match &mlp.mixer {
                ChannelPlan::Mlp(mlp) => mlp.parameters(&prefix, &mut add),
                ChannelPlan::Experts(plan) => {
                    plan.router.parameters(&prefix, &mut add);
                    for mlp in &plan.experts {
                        mlp.parameters(&prefix, &mut add);
                    }
                }
            }
        }
        parameters
    }
}

/// Returns the names and shapes of all linear maps within blocks.
pub(crate) fn linear_maps(model: &DecoderConfig) -> Vec<(String, Shape)> {
    let shapes = model.parameter_shapes().into_iter();
    let maps = shapes.filter_map(|(name, shape)| {
        let module = name.strip_suffix(".weight")?;
        let linear = module.contains(".layers.") && shape.rank() == 2;
        linear.then(|| (module.to_owned(), shape))
    });
    maps.collect()
}

impl BlockPlan {
    fn llama(config: &DecoderConfig) -> Self {
        let hidden = config.hidden_size;
        Self {
            tokens: SublayerPlan {
                before: Some(NormPlan::new(config, "input_layernorm", hidden)),
                mixer: TokenMixerPlan::Attention(AttentionPlan::llama(config)),
                after: None,
                scale: 1.0,
            },
            mlp: SublayerPlan {
                before: Some(NormPlan::new(config, "post_attention_layernorm", hidden)),
                mixer: ChannelPlan::Mlp(MlpPlan::new(config, "mlp", config.intermediate_size)),
                after: None,
                scale: 1.0,
            },
        }
    }

    /// All norms, except those on head outputs.
    fn norms_mut(&mut self) -> impl Iterator<Item = &mut NormPlan> {
        let Self { tokens, mlp } = self;
        let of_heads = tokens.mixer.attention().and_then(|x| x.norms.as_mut());
        let of_tokens = tokens.before.iter_mut().chain(&mut tokens.after);
        let of_mlp = mlp.before.iter_mut().chain(&mut mlp.after);
        of_tokens
            .chain(of_heads.into_iter().flatten())
            .chain(of_mlp)
    }
}

impl TokenMixerPlan {
    /// Returns whether the mixer has a recurrent state.
    pub(crate) fn has_state(&self) -> bool {
        matches!(self, Self::GatedDelta(_))
    }

    fn attention(&mut self) -> Option<&mut AttentionPlan> {
        match self {
            Self::Attention(attention) => Some(attention),
            Self::GatedDelta(_) => None,
        }
    }
}

impl AttentionPlan {
    fn llama(config: &DecoderConfig) -> Self {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim());
        let queries = config.num_attention_heads.saturating_mul(head_dim);
        let keys = config.num_key_value_heads.saturating_mul(head_dim);
        let map = |name, inputs, outputs| MapPlan {
            bias: config.attention_bias,
            ..MapPlan::new(name, inputs, outputs)
        };
        Self {
            inputs: MapsPlan {
                maps: [
                    map("self_attn.q_proj", hidden, queries),
                    map("self_attn.k_proj", hidden, keys),
                    map("self_attn.v_proj", hidden, keys),
                ],
                joined: None,
            },
            output: MapPlan {
                is_residual: true,
                ..map("self_attn.o_proj", queries, hidden)
            },
            output_gate: false,
            norms: None,
            rotation: Some(0),
            head_dim,
            scores: (head_dim as f64).powf(-0.5).into(),
        }
    }

    fn parameters(&self, prefix: &str, add: &mut impl FnMut(String, Shape, Initial)) {
        for norm in self.norms.iter().flatten() {
            norm.parameters(prefix, add);
        }
        self.inputs.parameters(prefix, add);
        self.output.parameters(prefix, add);
    }

    /// Norms for each query and key head.
    pub(crate) fn head_norms(config: &DecoderConfig) -> [NormPlan; 2] {
        ["self_attn.q_norm", "self_attn.k_norm"]
            .map(|name| NormPlan::new(config, name, config.head_dim()))
    }
}

impl GatedDeltaPlan {
    /// Maps and sizes as in Qwen3.5.
    pub(crate) fn new(config: &DecoderConfig, heads: DeltaHeads, taps: usize) -> Self {
        let (hidden, values) = (config.hidden_size, heads.values());
        let map = |name, outputs| MapPlan::new(name, hidden, outputs);
        Self {
            heads,
            taps,
            inputs: MapsPlan {
                maps: [
                    map("linear_attn.in_proj_qkv", heads.width()),
                    map("linear_attn.in_proj_z", values),
                    map("linear_attn.in_proj_b", heads.value_heads),
                    map("linear_attn.in_proj_a", heads.value_heads),
                ],
                joined: None,
            },
            norm: NormPlan::new(config, "linear_attn.norm", heads.value_dim),
            output: MapPlan {
                is_residual: true,
                ..MapPlan::new("linear_attn.out_proj", values, hidden)
            },
        }
    }

    fn parameters(&self, prefix: &str, add: &mut impl FnMut(String, Shape, Initial)) {
        self.norm.parameters(prefix, add);
        self.inputs.parameters(prefix, add);
        self.output.parameters(prefix, add);
        for (name, shape, initial) in [
            (
                "conv1d.weight",
                Shape::from((self.heads.width(), 1, self.taps)),
                Initial::Normal,
            ),
            ("A_log", self.heads.value_heads.into(), Initial::Rates),
            ("dt_bias", self.heads.value_heads.into(), Initial::Ones),
        ] {
            add(format!("{prefix}linear_attn.{name}"), shape, initial);
        }
    }
}

impl MlpPlan {
    /// SwiGLU with inner width `inner`, named `name` within its block.
    pub(crate) fn new(config: &DecoderConfig, name: &str, inner: usize) -> Self {
        let map = |part, inputs, outputs| MapPlan {
            bias: config.mlp_bias,
            ..MapPlan::new(&format!("{name}.{part}"), inputs, outputs)
        };
        Self {
            inputs: MapsPlan {
                maps: ["gate_proj", "up_proj"].map(|part| map(part, config.hidden_size, inner)),
                joined: None,
            },
            gate: Gate::SWIGLU,
            down: MapPlan {
                is_residual: true,
                ..map("down_proj", inner, config.hidden_size)
            },
        }
    }

    fn parameters(&self, prefix: &str, add: &mut impl FnMut(String, Shape, Initial)) {
        self.inputs.parameters(prefix, add);
        self.down.parameters(prefix, add);
    }
}

impl<const M: usize> MapsPlan<M> {
    /// The stacked map, if all of these are stored as one.
    pub(crate) fn joined_map(&self) -> Option<MapPlan> {
        let (name, first) = (self.joined?, self.maps.first()?);
        let outputs = self
            .maps
            .iter()
            .fold(0, |sum: usize, map| sum.saturating_add(map.outputs));
        Some(MapPlan {
            name: name.to_owned(),
            outputs,
            ..first.clone()
        })
    }

    fn parameters(&self, prefix: &str, add: &mut impl FnMut(String, Shape, Initial)) {
        match self.joined_map() {
            Some(map) => map.parameters(prefix, add),
            None => self.maps.iter().for_each(|map| map.parameters(prefix, add)),
        }
    }
}

impl MapPlan {
    pub(crate) fn new(name: &str, inputs: usize, outputs: usize) -> Self {
        Self {
            name: name.to_owned(),
            inputs,
            outputs,
            bias: false,
            is_residual: false,
        }
    }

    fn parameters(&self, prefix: &str, add: &mut impl FnMut(String, Shape, Initial)) {
        let initial = if self.is_residual {
            Initial::Residual
        } else {
            Initial::Normal
        };
        let name = format!("{prefix}{}", self.name);
        if self.bias {
            let shape = Shape::from(self.outputs);
            add(format!("{name}.bias"), shape, Initial::Zeros);
        }
        let shape = Shape::from((self.outputs, self.inputs));
        add(format!("{name}.weight"), shape, initial);
    }
}

impl NormPlan {
    pub(crate) fn new(config: &DecoderConfig, name: &str, width: usize) -> Self {
        Self {
            name: name.to_owned(),
            width,
            epsilon: config.rms_norm_eps,
            is_offset: false,
        }
    }

    fn parameters(&self, prefix: &str, add: &mut impl FnMut(String, Shape, Initial)) {
        let name = format!("{prefix}{}.weight", self.name);
        let initial = if self.is_offset {
            Initial::OneLess
        } else {
            Initial::Ones
        };
        add(name, Shape::from(self.width), initial);
    }
}
