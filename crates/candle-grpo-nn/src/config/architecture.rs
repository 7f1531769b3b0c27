//! The parts of a decoder: the blocks, their options, and the names of their weights.

use std::collections::BTreeMap;

use candle_core::{Result, Shape, Tensor};
use candle_grpo_kernels::{DeltaHeads, Scores, geglu, geglu_gradient, swiglu, swiglu_gradient};

use crate::router::Router;
use crate::{DecoderConfig, RopeScaling};

/// The name of the embedding.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The name of the output layer.
pub(crate) const OUTPUT: &str = "lm_head.weight";

/// The parts of a decoder. Each family describes its decoders with one.
#[derive(Debug, Clone)]
pub(crate) struct Architecture {
    /// The factor of the embedding.
    pub(crate) embedding_scale: f64,
    /// The rotations that blocks choose from.
    pub(crate) rotations: Vec<Rotation>,
    pub(crate) blocks: Vec<BlockPlan>,
    /// The norm after the last block.
    pub(crate) norm: NormPlan,
    /// The factor of the hidden states after that norm, and so of the logits.
    pub(crate) output_scale: f64,
    /// The soft cap of the logits.
    pub(crate) logit_cap: Option<f64>,
}

/// A rotation of query and key by their position.
#[derive(Debug, Clone)]
pub(crate) struct Rotation {
    /// Number of elements of a head that rotate, from the first.
    pub(crate) width: usize,
    /// Base of the frequencies.
    pub(crate) theta: f64,
    pub(crate) scaling: RopeScaling,
}

/// A block: a token mixer, then a channel mixer.
#[derive(Debug, Clone)]
pub(crate) struct BlockPlan {
    pub(crate) tokens: SublayerPlan<TokenMixerPlan>,
    pub(crate) mlp: SublayerPlan<ChannelPlan>,
}

/// A mixer whose result is added to its input.
#[derive(Debug, Clone)]
pub(crate) struct SublayerPlan<M> {
    /// The norm of the mixer's input.
    pub(crate) before: Option<NormPlan>,
    pub(crate) mixer: M,
    /// The norm of its result.
    pub(crate) after: Option<NormPlan>,
    /// The factor of its result.
    pub(crate) scale: f64,
}

/// The part that mixes the tokens of a sequence.
#[derive(Debug, Clone)]
pub(crate) enum TokenMixerPlan {
    Attention(AttentionPlan),
    GatedDelta(GatedDeltaPlan),
}

#[derive(Debug, Clone)]
pub(crate) struct AttentionPlan {
    /// Query, key and value.
    pub(crate) inputs: MapsPlan<3>,
    /// Each head of the query map is followed by a gate of the head's result.
    pub(crate) output_gate: bool,
    pub(crate) output: MapPlan,
    /// The norms of query and key before the rotation.
    pub(crate) norms: Option<[NormPlan; 2]>,
    /// The index of the rotation, if query and key rotate.
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
    /// From hidden states to a logit for each expert.
    pub(crate) router: MapPlan,
    pub(crate) experts: Vec<MlpPlan>,
    pub(crate) routing: Router,
}

/// The gated delta rule and the maps around it.
#[derive(Debug, Clone)]
pub(crate) struct GatedDeltaPlan {
    pub(crate) heads: DeltaHeads,
    /// Rows of the convolution.
    pub(crate) taps: usize,
    /// Queries with keys and values, the gate of the result, and the inputs `b` and `a` of the
    /// gates.
    pub(crate) inputs: MapsPlan<4>,
    /// The norm of each head of the result.
    pub(crate) norm: NormPlan,
    pub(crate) output: MapPlan,
}

#[derive(Debug, Clone)]
pub(crate) struct MlpPlan {
    /// Gate and up.
    pub(crate) inputs: MapsPlan<2>,
    pub(crate) gate: Gate,
    pub(crate) down: MapPlan,
}

/// An operator of gate and up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gate {
    pub(crate) forward: fn(&Tensor, &Tensor) -> Result<Tensor>,
    /// The gradients of gate and up, from both and the gradient of the result.
    pub(crate) backward: fn(&Tensor, &Tensor, &Tensor) -> Result<(Tensor, Tensor)>,
}

impl Gate {
    pub(crate) const SWIGLU: Self = Self {
        forward: swiglu,
        backward: swiglu_gradient,
    };
    pub(crate) const GEGLU: Self = Self {
        forward: geglu,
        backward: geglu_gradient,
    };
}

/// Several linear maps of one input.
#[derive(Debug, Clone)]
pub(crate) struct MapsPlan<const M: usize> {
    pub(crate) maps: [MapPlan; M],
    /// The name of the one map that has the rows of all of them, if they are stored so.
    pub(crate) joined: Option<&'static str>,
}

/// A linear map.
#[derive(Debug, Clone)]
pub(crate) struct MapPlan {
    /// The name of the map within its block.
    pub(crate) name: String,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) bias: bool,
    /// The result is added to the hidden states.
    pub(crate) is_residual: bool,
}

/// An RMSNorm.
#[derive(Debug, Clone)]
pub(crate) struct NormPlan {
    /// The name of the norm within its block; of the last norm, its whole name.
    pub(crate) name: String,
    pub(crate) width: usize,
    pub(crate) epsilon: f64,
    /// The factor is 1 more than the weight.
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
    /// Zeros of a norm whose factor is 1 more.
    OneLess,
    Ones,
    /// The logarithms of decay rates, spaced evenly between 0 and 16.
    Rates,
    Normal,
    /// Smaller normal numbers, for a map whose result is added to the hidden states.
    Residual,
}

impl Architecture {
    /// A Llama with the sizes and the common options of `config`. The other families start from it.
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

    /// The attention of each block that has it, in order.
    pub(crate) fn attentions(&mut self) -> impl Iterator<Item = &mut AttentionPlan> {
        let blocks = self.blocks.iter_mut();
        blocks.filter_map(|block| block.tokens.mixer.attention())
    }

    /// The gated delta rule of each block, `None` for other blocks.
    pub(crate) fn gated_deltas(&self) -> impl Iterator<Item = Option<&GatedDeltaPlan>> {
        self.blocks.iter().map(|block| match &block.tokens.mixer {
            TokenMixerPlan::GatedDelta(delta) => Some(delta),
            TokenMixerPlan::Attention(_) => None,
        })
    }

    /// Makes the factor of all norms 1 more than their weight, except in those of results of heads.
    pub(crate) fn offset_norms(&mut self) {
        let norms = self.blocks.iter_mut().flat_map(BlockPlan::norms_mut);
        for norm in norms.chain([&mut self.norm]) {
            norm.is_offset = true;
        }
    }

    /// The names of the maps that choose experts.
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

    /// The Hugging Face name of every parameter, for a decoder with the sizes of `config`.
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

/// Returns the names and shapes of the linear maps in blocks.
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

    /// All norms, except those of the results of heads.
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

    /// Norms of each head of query and key.
    pub(crate) fn head_norms(config: &DecoderConfig) -> [NormPlan; 2] {
        ["self_attn.q_norm", "self_attn.k_norm"]
            .map(|name| NormPlan::new(config, name, config.head_dim()))
    }
}

impl GatedDeltaPlan {
    /// The maps and sizes of Qwen3.5.
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
    /// SwiGLU of the width `inner`, under the name `name` within its block.
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
    /// The one map with the rows of all of them, if they are stored so.
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
