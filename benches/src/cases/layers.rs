//! The operators of a decoder's layers, at the size of SmolLM2-135M on 8 sequences of 128 tokens.

use std::rc::Rc;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{attention, composed, embedding, rms_norm, rope, swiglu};

use crate::case::{Case, Direction, Pair};
use crate::noise::{ids, noise};

const BATCH: usize = 8;
const POSITIONS: usize = 128;
const TOKENS: usize = BATCH * POSITIONS;
const HIDDEN: usize = 576;
const INTERMEDIATE: usize = 1536;
const VOCAB: usize = 49_152;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for direction in Direction::ALL {
        let case = |op, shape, layer| case(op, shape, direction, layer);
        cases.extend([
            case("rms_norm", format!("[{TOKENS}, {HIDDEN}]"), |device| {
                let x = variable(&[TOKENS, HIDDEN], device)?;
                let weight = variable(&[HIDDEN], device)?;
                Ok(Box::new(move |twin| match twin {
                    Twin::Fused => rms_norm(&x, &weight, 1e-5),
                    Twin::Composed => composed::rms_norm(&x, &weight, 1e-5),
                }))
            }),
            case(
                "rope",
                format!("[{TOKENS}, {HEADS} * {HEAD_DIM}]"),
                |device| {
                    let x = variable(&[TOKENS, HEADS * HEAD_DIM], device)?;
                    let angles = noise((TOKENS, HEAD_DIM / 2), 3.0, 5, DType::F32, device)?;
                    let (cos, sin) = (angles.cos()?, angles.sin()?);
                    Ok(Box::new(move |twin| match twin {
                        Twin::Fused => rope(&x, &cos, &sin),
                        Twin::Composed => composed::rope(&x, &cos, &sin),
                    }))
                },
            ),
            case("swiglu", format!("[{TOKENS}, {INTERMEDIATE}]"), |device| {
                let gate = variable(&[TOKENS, INTERMEDIATE], device)?;
                let up = variable(&[TOKENS, INTERMEDIATE], device)?;
                Ok(Box::new(move |twin| match twin {
                    Twin::Fused => swiglu(&gate, &up),
                    Twin::Composed => composed::swiglu(&gate, &up),
                }))
            }),
            case(
                "attention",
                format!("[{BATCH}, {POSITIONS}], {HEADS} and {KV_HEADS} heads of {HEAD_DIM}"),
                |device| {
                    let query = variable(&[BATCH, POSITIONS, HEADS * HEAD_DIM], device)?;
                    let key = variable(&[BATCH, POSITIONS, KV_HEADS * HEAD_DIM], device)?;
                    let value = variable(&[BATCH, POSITIONS, KV_HEADS * HEAD_DIM], device)?;
                    let mask = Tensor::ones((BATCH, POSITIONS), DType::U8, device)?;
                    let scale = (HEAD_DIM as f64).powf(-0.5);
                    Ok(Box::new(move |twin| match twin {
                        Twin::Fused => attention(&query, &key, &value, &mask, HEAD_DIM, scale),
                        Twin::Composed => {
                            composed::attention(&query, &key, &value, &mask, HEAD_DIM, scale)
                        }
                    }))
                },
            ),
            case(
                "embedding",
                format!("[{TOKENS}] of [{VOCAB}, {HIDDEN}]"),
                |device| {
                    let ids = ids(TOKENS, VOCAB, 7, device)?;
                    let weight = variable(&[VOCAB, HIDDEN], device)?;
                    Ok(Box::new(move |twin| match twin {
                        Twin::Fused => embedding(&ids, &weight),
                        Twin::Composed => composed::embedding(&ids, &weight),
                    }))
                },
            ),
        ]);
    }
    cases
}

#[derive(Clone, Copy)]
enum Twin {
    Fused,
    Composed,
}

type Layer = Box<dyn Fn(Twin) -> Result<Tensor>>;

fn case(
    op: &'static str,
    shape: String,
    direction: Direction,
    layer: fn(&Device) -> Result<Layer>,
) -> Case {
    Case {
        op,
        shape,
        dtype: DType::F32,
        direction,
        prepare: Box::new(move |device| {
            let layer = Rc::new(layer(device)?);
            let run = |twin| {
                let layer = layer.clone();
                direction.run(device, move || layer(twin)?.sum_all())
            };
            Ok(Pair {
                ours: run(Twin::Fused),
                composed: run(Twin::Composed),
            })
        }),
        bandwidth: None,
    }
}

fn variable(shape: &[usize], device: &Device) -> Result<Var> {
    Var::from_tensor(&noise(shape, 1.0, shape.len() as u64, DType::F32, device)?)
}
