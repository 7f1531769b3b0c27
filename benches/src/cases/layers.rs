//! Operators in a decoder's layers. Linear attention has the size of Qwen3.5-4B.

use std::rc::Rc;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{
    CausalAttention, DeltaHeads, PrefixTree, Sequences, add_bias, add_bias_gradient,
    add_embedding_gradient, causal_conv, causal_conv_gradient, composed, embedding,
    gated_delta_rule, gated_delta_rule_gradient, rms_norm, rms_norm_gradient, rope, rope_gradient,
    swiglu, swiglu_gradient,
};

use crate::case::{Case, Direction, Pair};
use crate::noise::{ids, noise};
use crate::region::region;

/// A decoder's sizes, and the sequences in a pass.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    positions: usize,
    hidden: usize,
    intermediate: usize,
    vocab: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    dtype: DType,
}

/// SmolLM2-135M on 8 sequences of 128 tokens.
const SMALL: Sizes = Sizes {
    batch: 8,
    positions: 128,
    hidden: 576,
    intermediate: 1536,
    vocab: 49_152,
    heads: 9,
    kv_heads: 3,
    head_dim: 64,
    dtype: DType::F32,
};

/// Llama 3 8B on 4 sequences of 2,048 tokens.
const LARGE: Sizes = Sizes {
    batch: 4,
    positions: 2048,
    hidden: 4096,
    intermediate: 14_336,
    vocab: 128_256,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    dtype: DType::BF16,
};

impl Sizes {
    fn tokens(self) -> usize {
        self.batch * self.positions
    }

    fn variable(self, shape: &[usize], device: &Device) -> Result<Var> {
        Var::from_tensor(&noise(shape, 1.0, shape.len() as u64, self.dtype, device)?)
    }
}

const EPSILON: f64 = 1e-5;
const DELTA_HEADS: DeltaHeads = DeltaHeads {
    key_heads: 16,
    value_heads: 32,
    key_dim: 128,
    value_dim: 128,
};
const TAPS: usize = 4;

pub(super) fn small() -> Vec<Case> {
    let ways = Direction::ALL.map(Way::InGraph);
    ways.into_iter()
        .chain([Way::Alone])
        .flat_map(|way| cases(SMALL, way))
        .collect()
}

/// Cases for a GPU.
pub(super) fn large() -> Vec<Case> {
    [Way::InGraph(Direction::Forward), Way::Alone]
        .into_iter()
        .flat_map(|way| cases(LARGE, way))
        .collect()
}

fn cases(sizes: Sizes, way: Way) -> Vec<Case> {
    let operators = [
        rms_norm_case,
        rope_case,
        swiglu_case,
        add_bias_case,
        attention_case,
        causal_conv_case,
        gated_delta_rule_case,
        embedding_case,
    ];
    let cases = operators.into_iter().map(|operator| {
        let (op, shape, layer) = operator(sizes);
        case(op, shape, sizes.dtype, way, layer)
    });
    cases.collect()
}

fn rms_norm_case(sizes: Sizes) -> Operator {
    let Sizes { hidden, .. } = sizes;
    let tokens = sizes.tokens();
    let layer: MakeLayer = Box::new(move |device| {
        let x = sizes.variable(&[tokens, hidden], device)?;
        let weight = sizes.variable(&[hidden], device)?;
        let (constant, scale) = (x.as_detached_tensor(), weight.as_detached_tensor());
        let gradient = constant.ones_like()?;
        Ok(Layer {
            graph: Box::new(move |twin| match twin {
                Twin::Fused => rms_norm(&x, &weight, EPSILON),
                Twin::Composed => composed::rms_norm(&x, &weight, EPSILON),
            }),
            alone: Box::new(move || {
                rms_norm(&constant, &scale, EPSILON)?;
                rms_norm_gradient(&constant, &scale, EPSILON, &gradient).map(drop)
            }),
        })
    });
    ("rms_norm", format!("[{tokens}, {hidden}]"), layer)
}

fn rope_case(sizes: Sizes) -> Operator {
    let Sizes {
        heads, head_dim, ..
    } = sizes;
    let tokens = sizes.tokens();
    let layer: MakeLayer = Box::new(move |device| {
        let x = sizes.variable(&[tokens, heads * head_dim], device)?;
        let angles = noise((tokens, head_dim / 2), 3.0, 5, DType::F32, device)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let (constant, tables) = (x.as_detached_tensor(), (cos.clone(), sin.clone()));
        let gradient = constant.ones_like()?;
        Ok(Layer {
            graph: Box::new(move |twin| match twin {
                Twin::Fused => rope(&x, &cos, &sin),
                Twin::Composed => composed::rope(&x, &cos, &sin),
            }),
            alone: Box::new(move || {
                let (cos, sin) = &tables;
                rope(&constant, cos, sin)?;
                rope_gradient(cos, sin, &gradient).map(drop)
            }),
        })
    });
    ("rope", format!("[{tokens}, {heads} * {head_dim}]"), layer)
}

fn swiglu_case(sizes: Sizes) -> Operator {
    let Sizes { intermediate, .. } = sizes;
    let tokens = sizes.tokens();
    let layer: MakeLayer = Box::new(move |device| {
        let gate = sizes.variable(&[tokens, intermediate], device)?;
        let up = sizes.variable(&[tokens, intermediate], device)?;
        let constants = (gate.as_detached_tensor(), up.as_detached_tensor());
        let gradient = gate.as_detached_tensor().ones_like()?;
        Ok(Layer {
            graph: Box::new(move |twin| match twin {
                Twin::Fused => swiglu(&gate, &up),
                Twin::Composed => composed::swiglu(&gate, &up),
            }),
            alone: Box::new(move || {
                let (gate, up) = &constants;
                swiglu(gate, up)?;
                swiglu_gradient(gate, up, &gradient).map(drop)
            }),
        })
    });
    ("swiglu", format!("[{tokens}, {intermediate}]"), layer)
}

fn add_bias_case(sizes: Sizes) -> Operator {
    let Sizes { hidden, .. } = sizes;
    let tokens = sizes.tokens();
    let layer: MakeLayer = Box::new(move |device| {
        let x = sizes.variable(&[tokens, hidden], device)?;
        let bias = sizes.variable(&[hidden], device)?;
        let (constant, addend) = (x.as_detached_tensor(), bias.as_detached_tensor());
        let gradient = constant.ones_like()?;
        let sum = Tensor::zeros(hidden, DType::F32, device)?;
        Ok(Layer {
            graph: Box::new(move |twin| {
                let y = match twin {
                    Twin::Fused => add_bias(&[(&x, &bias)])?,
                    Twin::Composed => composed::add_bias(&[(&x, &bias)])?,
                };
                Ok(y[0].clone())
            }),
            alone: Box::new(move || {
                add_bias(&[(&constant, &addend)])?;
                add_bias_gradient(&sum, &gradient)
            }),
        })
    });
    ("add_bias", format!("[{tokens}, {hidden}]"), layer)
}

fn attention_case(sizes: Sizes) -> Operator {
    let Sizes {
        batch,
        positions,
        heads,
        kv_heads,
        head_dim,
        ..
    } = sizes;
    let tokens = sizes.tokens();
    let layer: MakeLayer = Box::new(move |device| {
        let query = sizes.variable(&[tokens, heads * head_dim], device)?;
        let key = sizes.variable(&[tokens, kv_heads * head_dim], device)?;
        let value = sizes.variable(&[tokens, kv_heads * head_dim], device)?;
        let mask = Tensor::ones((batch, positions), DType::U8, device)?;
        let scale = (head_dim as f64).powf(-0.5);
        let sequences = vec![positions; batch];
        let attention = CausalAttention::new(Sequences::Packed(&sequences), head_dim, scale);
        let constants = [&query, &key, &value].map(|x| x.as_detached_tensor());
        let gradient = constants[0].ones_like()?;
        let same = attention.clone();
        Ok(Layer {
            graph: Box::new(move |twin| match twin {
                Twin::Fused => Ok(attention.forward([&query, &key, &value])?.0),
                Twin::Composed => composed::attention(&query, &key, &value, &mask, head_dim, scale),
            }),
            alone: Box::new(move || {
                let inputs = constants.each_ref();
                let (y, log_sums) = same.forward(inputs)?;
                let forward = log_sums.as_ref().map(|log_sums| (&y, log_sums));
                same.backward(inputs, forward, &gradient).map(drop)
            }),
        })
    });
    (
        "attention",
        format!("[{batch}, {positions}], {heads} and {kv_heads} heads of {head_dim}"),
        layer,
    )
}

fn causal_conv_case(sizes: Sizes) -> Operator {
    let Sizes {
        batch, positions, ..
    } = sizes;
    let tokens = sizes.tokens();
    let layer: MakeLayer = Box::new(move |device| {
        let x = sizes.variable(&[tokens, DELTA_HEADS.width()], device)?;
        let weight = sizes.variable(&[DELTA_HEADS.width(), TAPS], device)?;
        let tree = PrefixTree::new(&vec![positions; batch])?;
        let (constant, taps) = (x.as_detached_tensor(), weight.as_detached_tensor());
        let (gradient, same) = (constant.ones_like()?, tree.clone());
        Ok(Layer {
            graph: Box::new(move |twin| match twin {
                Twin::Fused => causal_conv(&x, &weight, &tree),
                Twin::Composed => composed::causal_conv(&x, &weight, &tree),
            }),
            alone: Box::new(move || {
                causal_conv(&constant, &taps, &same)?;
                causal_conv_gradient(&constant, &taps, &same, &gradient).map(drop)
            }),
        })
    });
    (
        "causal_conv",
        format!(
            "[{batch}, {positions}, {}], {TAPS} taps",
            DELTA_HEADS.width()
        ),
        layer,
    )
}

fn gated_delta_rule_case(sizes: Sizes) -> Operator {
    let Sizes {
        batch,
        positions,
        dtype,
        ..
    } = sizes;
    let tokens = sizes.tokens();
    let layer: MakeLayer = Box::new(move |device| {
        let qkv = sizes.variable(&[tokens, DELTA_HEADS.width()], device)?;
        let gate = |seed| {
            let shape = (tokens, DELTA_HEADS.value_heads);
            noise(shape, 0.5, seed, DType::F32, device)? + 0.5
        };
        let g = Var::from_tensor(&gate(1)?.neg()?)?;
        let beta = Var::from_tensor(&gate(2)?)?;
        let tree = PrefixTree::new(&vec![positions; batch])?;
        let constants = [&qkv, &g, &beta].map(|x| x.as_detached_tensor());
        let shape = (tokens, DELTA_HEADS.values());
        let gradient = Tensor::ones(shape, dtype, device)?;
        let same = tree.clone();
        Ok(Layer {
            graph: Box::new(move |twin| match twin {
                Twin::Fused => gated_delta_rule(&qkv, &g, &beta, DELTA_HEADS, &tree),
                Twin::Composed => composed::gated_delta_rule(&qkv, &g, &beta, DELTA_HEADS, &tree),
            }),
            alone: Box::new(move || {
                let inputs = constants.each_ref();
                gated_delta_rule(inputs[0], inputs[1], inputs[2], DELTA_HEADS, &same)?;
                gated_delta_rule_gradient(inputs, DELTA_HEADS, &same, &gradient).map(drop)
            }),
        })
    });
    (
        "gated_delta_rule",
        format!("[{batch}, {positions}], 16 and 32 heads of 128"),
        layer,
    )
}

fn embedding_case(sizes: Sizes) -> Operator {
    let Sizes {
        hidden,
        vocab,
        dtype,
        ..
    } = sizes;
    let tokens = sizes.tokens();
    let layer: MakeLayer = Box::new(move |device| {
        let ids = ids(tokens, vocab, 7, device)?;
        let weight = sizes.variable(&[vocab, hidden], device)?;
        let (rows, table) = (ids.clone(), weight.as_detached_tensor());
        let gradient = Tensor::ones((tokens, hidden), dtype, device)?;
        // The gradient from other uses of the table, to which the operator adds.
        let sum = Tensor::zeros((vocab, hidden), DType::F32, device)?;
        Ok(Layer {
            graph: Box::new(move |twin| match twin {
                Twin::Fused => embedding(&ids, &weight),
                Twin::Composed => composed::embedding(&ids, &weight),
            }),
            alone: Box::new(move || {
                embedding(&rows, &table)?;
                add_embedding_gradient(&sum, &rows, &gradient)
            }),
        })
    });
    (
        "embedding",
        format!("[{tokens}] of [{vocab}, {hidden}]"),
        layer,
    )
}

/// The call of the fused operator.
#[derive(Clone, Copy)]
enum Way {
    /// In a graph, like its twin.
    InGraph(Direction),
    /// Forward, then the backward function, as in the decoder.
    Alone,
}

#[derive(Clone, Copy)]
enum Twin {
    Fused,
    Composed,
}

struct Layer {
    graph: Box<dyn Fn(Twin) -> Result<Tensor>>,
    alone: Box<dyn Fn() -> Result<()>>,
}

/// Creates a layer's inputs on a device.
type MakeLayer = Box<dyn Fn(&Device) -> Result<Layer>>;

/// The name of an operator, its shape, and its layer.
type Operator = (&'static str, String, MakeLayer);

fn case(op: &'static str, shape: String, dtype: DType, way: Way, layer: MakeLayer) -> Case {
    let (direction, how) = match way {
        Way::InGraph(direction) => (direction, ""),
        Way::Alone => (Direction::Both, ", alone"),
    };
    Case {
        op,
        shape: shape + how,
        dtype,
        direction,
        prepare: Box::new(move |device| {
            let layer = Rc::new(layer(device)?);
            let graph = |twin| {
                let layer = layer.clone();
                direction.run(device, move || {
                    let y = (layer.graph)(twin)?;
                    match direction {
                        Direction::Forward => Ok(y),
                        _ => y.sum_all(),
                    }
                })
            };
            let composed = graph(Twin::Composed);
            let ours = match way {
                Way::InGraph(_) => graph(Twin::Fused),
                Way::Alone => {
                    let (layer, device) = (layer.clone(), device.clone());
                    Box::new(move || region(&device, &layer.alone))
                }
            };
            Ok(Pair { ours, composed })
        }),
        bandwidth: None,
    }
}
