//! The operators of a decoder's layers, at the size of SmolLM2-135M on 8 sequences of 128 tokens.
//! Those of linear attention have the size of Qwen3.5-4B.

use std::rc::Rc;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{
    DeltaHeads, PrefixTree, add_bias, add_bias_gradient, add_embedding_gradient, attention,
    attention_gradient, causal_conv, causal_conv_gradient, composed, embedding, gated_delta_rule,
    gated_delta_rule_gradient, rms_norm, rms_norm_gradient, rope, rope_gradient, swiglu,
    swiglu_gradient,
};

use crate::case::{Case, Direction, Pair};
use crate::noise::{ids, noise};
use crate::region::region;

const BATCH: usize = 8;
const POSITIONS: usize = 128;
const TOKENS: usize = BATCH * POSITIONS;
const HIDDEN: usize = 576;
const INTERMEDIATE: usize = 1536;
const VOCAB: usize = 49_152;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const EPSILON: f64 = 1e-5;
const DELTA_HEADS: DeltaHeads = DeltaHeads {
    key_heads: 16,
    value_heads: 32,
    key_dim: 128,
    value_dim: 128,
};
const TAPS: usize = 4;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for way in [
        Way::InGraph(Direction::Forward),
        Way::InGraph(Direction::Backward),
        Way::InGraph(Direction::Both),
        Way::Alone,
    ] {
        cases.extend([
            case("rms_norm", format!("[{TOKENS}, {HIDDEN}]"), way, |device| {
                let x = variable(&[TOKENS, HIDDEN], device)?;
                let weight = variable(&[HIDDEN], device)?;
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
            }),
            case(
                "rope",
                format!("[{TOKENS}, {HEADS} * {HEAD_DIM}]"),
                way,
                |device| {
                    let x = variable(&[TOKENS, HEADS * HEAD_DIM], device)?;
                    let angles = noise((TOKENS, HEAD_DIM / 2), 3.0, 5, DType::F32, device)?;
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
                },
            ),
            case(
                "swiglu",
                format!("[{TOKENS}, {INTERMEDIATE}]"),
                way,
                |device| {
                    let gate = variable(&[TOKENS, INTERMEDIATE], device)?;
                    let up = variable(&[TOKENS, INTERMEDIATE], device)?;
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
                },
            ),
            case("add_bias", format!("[{TOKENS}, {HIDDEN}]"), way, |device| {
                let x = variable(&[TOKENS, HIDDEN], device)?;
                let bias = variable(&[HIDDEN], device)?;
                let (constant, addend) = (x.as_detached_tensor(), bias.as_detached_tensor());
                let (gradient, sum) = (constant.ones_like()?, addend.zeros_like()?);
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
            }),
            case(
                "attention",
                format!("[{BATCH}, {POSITIONS}], {HEADS} and {KV_HEADS} heads of {HEAD_DIM}"),
                way,
                |device| {
                    let query = variable(&[BATCH, POSITIONS, HEADS * HEAD_DIM], device)?;
                    let key = variable(&[BATCH, POSITIONS, KV_HEADS * HEAD_DIM], device)?;
                    let value = variable(&[BATCH, POSITIONS, KV_HEADS * HEAD_DIM], device)?;
                    let mask = Tensor::ones((BATCH, POSITIONS), DType::U8, device)?;
                    let scale = (HEAD_DIM as f64).powf(-0.5);
                    let constants = [&query, &key, &value].map(|x| x.as_detached_tensor());
                    let gradient = constants[0].ones_like()?;
                    let masked = mask.clone();
                    Ok(Layer {
                        graph: Box::new(move |twin| match twin {
                            Twin::Fused => attention(&query, &key, &value, &mask, HEAD_DIM, scale),
                            Twin::Composed => {
                                composed::attention(&query, &key, &value, &mask, HEAD_DIM, scale)
                            }
                        }),
                        alone: Box::new(move || {
                            let [query, key, value] = &constants;
                            attention(query, key, value, &masked, HEAD_DIM, scale)?;
                            attention_gradient(
                                query, key, value, &masked, HEAD_DIM, scale, &gradient,
                            )
                            .map(drop)
                        }),
                    })
                },
            ),
            case(
                "causal_conv",
                format!(
                    "[{BATCH}, {POSITIONS}, {}], {TAPS} taps",
                    DELTA_HEADS.width()
                ),
                way,
                |device| {
                    let x = variable(&[TOKENS, DELTA_HEADS.width()], device)?;
                    let weight = variable(&[DELTA_HEADS.width(), TAPS], device)?;
                    let tree = PrefixTree::new(&[POSITIONS; BATCH])?;
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
                },
            ),
            case(
                "gated_delta_rule",
                format!("[{BATCH}, {POSITIONS}], 16 and 32 heads of 128"),
                way,
                |device| {
                    let qkv = variable(&[TOKENS, DELTA_HEADS.width()], device)?;
                    let gate = |seed| {
                        let shape = (TOKENS, DELTA_HEADS.value_heads);
                        noise(shape, 0.5, seed, DType::F32, device)? + 0.5
                    };
                    let g = Var::from_tensor(&gate(1)?.neg()?)?;
                    let beta = Var::from_tensor(&gate(2)?)?;
                    let tree = PrefixTree::new(&[POSITIONS; BATCH])?;
                    let constants = [&qkv, &g, &beta].map(|x| x.as_detached_tensor());
                    let shape = (TOKENS, DELTA_HEADS.values());
                    let gradient = Tensor::ones(shape, DType::F32, device)?;
                    let same = tree.clone();
                    Ok(Layer {
                        graph: Box::new(move |twin| match twin {
                            Twin::Fused => gated_delta_rule(&qkv, &g, &beta, DELTA_HEADS, &tree),
                            Twin::Composed => {
                                composed::gated_delta_rule(&qkv, &g, &beta, DELTA_HEADS, &tree)
                            }
                        }),
                        alone: Box::new(move || {
                            let inputs = constants.each_ref();
                            gated_delta_rule(inputs[0], inputs[1], inputs[2], DELTA_HEADS, &same)?;
                            gated_delta_rule_gradient(inputs, DELTA_HEADS, &same, &gradient)
                                .map(drop)
                        }),
                    })
                },
            ),
            case(
                "embedding",
                format!("[{TOKENS}] of [{VOCAB}, {HIDDEN}]"),
                way,
                |device| {
                    let ids = ids(TOKENS, VOCAB, 7, device)?;
                    let weight = variable(&[VOCAB, HIDDEN], device)?;
                    let (rows, table) = (ids.clone(), weight.as_detached_tensor());
                    let gradient = Tensor::ones((TOKENS, HIDDEN), DType::F32, device)?;
                    // The gradient of other uses of the table, to which the operator adds.
                    let sum = table.zeros_like()?;
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
                },
            ),
        ]);
    }
    cases
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

fn case(op: &'static str, shape: String, way: Way, layer: fn(&Device) -> Result<Layer>) -> Case {
    let (direction, how) = match way {
        Way::InGraph(direction) => (direction, ""),
        Way::Alone => (Direction::Both, ", alone"),
    };
    Case {
        op,
        shape: shape + how,
        dtype: DType::F32,
        direction,
        prepare: Box::new(move |device| {
            let layer = Rc::new(layer(device)?);
            let graph = |twin| {
                let layer = layer.clone();
                direction.run(device, move || (layer.graph)(twin)?.sum_all())
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

fn variable(shape: &[usize], device: &Device) -> Result<Var> {
    Var::from_tensor(&noise(shape, 1.0, shape.len() as u64, DType::F32, device)?)
}
