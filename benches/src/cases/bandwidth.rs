//! `log_prob` next to a copy, on logits from large models. On a GPU it is memory-bound.

use candle_core::{DType, Device, Tensor};

use super::log_prob::{Backward, alone};
use crate::bandwidth::Bandwidth;
use crate::case::{Case, Direction, Pair, Run};
use crate::noise::{ids, noise};
use crate::region::region;

const ROWS: usize = 4096;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // The vocabularies of SmolLM2, Llama 3 and Qwen 3.
    for vocab in [49_152, 128_256, 151_936] {
        for dtype in [DType::BF16, DType::F32] {
            cases.push(case(vocab, dtype, Direction::Forward));
            cases.push(case(vocab, dtype, Direction::Both));
        }
    }
    cases
}

fn case(vocab: usize, dtype: DType, direction: Direction) -> Case {
    // One read of the logits forward; one read and one write backward.
    let (passes, goal) = match direction {
        Direction::Forward => (1, 0.85),
        _ => (3, 0.80),
    };
    Case {
        op: "log_prob/copy",
        shape: format!("[{ROWS}, {vocab}]"),
        dtype,
        direction,
        prepare: Box::new(move |device| {
            let logits = noise((ROWS, vocab), 8.0, 1, dtype, device)?;
            let targets = ids(ROWS, vocab, 2, device)?;
            // A copy reads and writes, so half the size makes one pass.
            let copied = Tensor::zeros((passes * ROWS / 2, vocab), dtype, device)?;
            Ok(Pair {
                ours: alone(&logits, &targets, direction, Backward::Alone, device)?,
                composed: copy(copied, device),
            })
        }),
        bandwidth: Some(Bandwidth {
            bytes: passes * ROWS * vocab * dtype.size_in_bytes(),
            goal,
        }),
    }
}

fn copy(source: Tensor, device: &Device) -> Run {
    let device = device.clone();
    Box::new(move || region(&device, || source.copy()))
}
