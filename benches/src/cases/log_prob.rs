//! The operator `log_prob`.
//!
//! The composed twin only has Candle's `backward`, which adds each gradient to zeros and keeps the
//! sum: two more tensors as large as the logits. The rows "in a graph" include that cost for the
//! fused operator too; the others call its backward pass alone.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{LogProbOptions, TokenLogProbs, composed, log_prob, log_prob_gradient};

use crate::case::{Case, Direction, Pair, Run};
use crate::noise::{ids, noise};
use crate::region::region;

const TEMPERATURE: f64 = 1.0;
const ENTROPY_COEF: f64 = 0.01;

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Backward {
    Alone,
    InPlace,
    InGraph,
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        for direction in Direction::ALL {
            cases.push(case(256, dtype, direction, Backward::Alone));
        }
    }
    cases.push(case(256, DType::F32, Direction::Both, Backward::InPlace));
    cases.push(case(256, DType::F32, Direction::Both, Backward::InGraph));
    cases.push(case(1024, DType::F32, Direction::Both, Backward::Alone));
    cases
}

fn case(rows: usize, dtype: DType, direction: Direction, backward: Backward) -> Case {
    let vocab = 49_152;
    let how = match backward {
        Backward::Alone => "",
        Backward::InPlace => " in place",
        Backward::InGraph => " in a graph",
    };
    Case {
        op: "log_prob",
        shape: format!("[{rows}, {vocab}]{how}"),
        dtype,
        direction,
        prepare: Box::new(move |device| {
            let logits = Var::from_tensor(&noise((rows, vocab), 8.0, 1, dtype, device)?)?;
            let targets = ids(rows, vocab, 2, device)?;
            let graph = |operator: Operator| {
                let (logits, targets) = (logits.clone(), targets.clone());
                direction.run(device, move || loss(operator, &logits, &targets))
            };
            let ours = match backward {
                Backward::InGraph => graph(log_prob),
                _ => alone(
                    &logits.as_detached_tensor(),
                    &targets,
                    direction,
                    backward,
                    device,
                )?,
            };
            Ok(Pair {
                ours,
                composed: graph(composed::log_prob),
            })
        }),
        bandwidth: None,
    }
}

type Operator = fn(&Tensor, &Tensor, f64, LogProbOptions) -> Result<TokenLogProbs>;

/// Returns the log-probs plus a small entropy term, as in a training step.
fn loss(operator: Operator, logits: &Var, targets: &Tensor) -> Result<Tensor> {
    let tokens = operator(logits, targets, TEMPERATURE, LogProbOptions::default())?;
    tokens.log_probs.sum_all()? + (tokens.entropy.sum_all()? * ENTROPY_COEF)?
}

/// Runs the passes without Candle's autograd.
pub(super) fn alone(
    logits: &Tensor,
    targets: &Tensor,
    direction: Direction,
    backward: Backward,
    device: &Device,
) -> Result<Run> {
    let (logits, targets, device) = (logits.clone(), targets.clone(), device.clone());
    let options = LogProbOptions {
        gradient_into_logits: backward == Backward::InPlace,
        ..Default::default()
    };
    let ones = targets.ones_like()?.to_dtype(DType::F32)?;
    let derivatives = TokenLogProbs {
        log_probs: ones.clone(),
        entropy: (&ones * ENTROPY_COEF)?,
        log_sum_exp: ones.zeros_like()?,
    };
    let forward = {
        let (logits, targets) = (logits.clone(), targets.clone());
        move || log_prob(&logits, &targets, TEMPERATURE, options)
    };
    let gradient = move |tokens: &TokenLogProbs| {
        log_prob_gradient(
            &logits,
            &targets,
            TEMPERATURE,
            options,
            tokens,
            &derivatives,
        )
    };
    Ok(Box::new(move || match direction {
        Direction::Forward => region(&device, &forward),
        Direction::Backward => {
            let tokens = forward()?;
            region(&device, || gradient(&tokens))
        }
        Direction::Both => region(&device, || gradient(&forward()?)),
    }))
}
