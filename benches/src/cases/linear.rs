//! `linear_log_prob` and `linear_policy_loss`: the output layer of SmolLM2-135M.
//!
//! Backward passes are called alone, as in training with `candle-grpo-train`; the rows "in a graph" go through Candle's
//! `backward`, which adds the gradient of the weight to zeros.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{
    LinearLogProb, LogProbOptions, TokenLogProbs, composed, linear_log_prob,
};
use candle_grpo_loss::{PolicyBatch, PolicyLoss, StepTotals, linear_policy_loss};
use gemm::Parallelism;

use crate::case::{Case, Direction, Pair, Run};
use crate::noise::{ids, noise};
use crate::region::region;

const HIDDEN: usize = 576;
const VOCAB: usize = 49_152;
/// Response tokens of each sequence.
const TOKENS: usize = 128;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for rows in [256, 1024] {
        cases.push(case("linear_log_prob", rows, "", |layer, device| {
            Ok(Pair {
                ours: layer.alone(device)?,
                composed: layer.graph(composed::linear_log_prob, device),
            })
        }));
    }
    cases.push(case(
        "linear_log_prob",
        1024,
        " in a graph",
        |layer, device| {
            Ok(Pair {
                ours: layer.graph(linear_log_prob, device),
                composed: layer.graph(composed::linear_log_prob, device),
            })
        },
    ));
    // In the column of the twin: the four matrix products alone, two that make logits and two that make gradients.
    cases.push(case(
        "linear_log_prob/products",
        1024,
        "",
        |layer, device| {
            Ok(Pair {
                ours: layer.alone(device)?,
                composed: layer.products(device)?,
            })
        },
    ));
    cases.push(case(
        "linear_log_prob/products",
        4096,
        "",
        |layer, device| {
            Ok(Pair {
                ours: layer.alone(device)?,
                composed: layer.products(device)?,
            })
        },
    ));
    cases.push(Case {
        op: "linear_policy_loss",
        shape: format!("[8, {TOKENS}, {HIDDEN}] x [{VOCAB}, {HIDDEN}]"),
        dtype: DType::F32,
        direction: Direction::Both,
        prepare: Box::new(|device| {
            let layer = Layer::new(8 * TOKENS, device)?;
            Ok(Pair {
                ours: layer.policy_loss(device)?,
                composed: layer.composed_policy_loss(device)?,
            })
        }),
    });
    cases
}

fn case(
    op: &'static str,
    rows: usize,
    how: &str,
    pair: fn(&Layer, &Device) -> Result<Pair>,
) -> Case {
    Case {
        op,
        shape: format!("[{rows}, {HIDDEN}] x [{VOCAB}, {HIDDEN}]{how}"),
        dtype: DType::F32,
        direction: Direction::Both,
        prepare: Box::new(move |device| pair(&Layer::new(rows, device)?, device)),
    }
}

type Operator =
    fn(&Tensor, &Tensor, Option<&Tensor>, &Tensor, f64, LogProbOptions) -> Result<TokenLogProbs>;

#[derive(Clone)]
struct Layer {
    hidden: Var,
    weight: Var,
    targets: Tensor,
}

impl Layer {
    fn new(rows: usize, device: &Device) -> Result<Self> {
        Ok(Self {
            hidden: Var::from_tensor(&noise((rows, HIDDEN), 1.0, 1, DType::F32, device)?)?,
            weight: Var::from_tensor(&noise((VOCAB, HIDDEN), 0.3, 2, DType::F32, device)?)?,
            targets: ids(rows, VOCAB, 3, device)?,
        })
    }

    fn graph(&self, operator: Operator, device: &Device) -> Run {
        let Self {
            hidden,
            weight,
            targets,
        } = self.clone();
        Direction::Both.run(device, move || {
            let options = LogProbOptions::default();
            operator(&hidden, &weight, None, &targets, 1.0, options)?
                .log_probs
                .sum_all()
        })
    }

    fn alone(&self, device: &Device) -> Result<Run> {
        let Self {
            hidden,
            weight,
            targets,
        } = self.clone();
        let ones = targets.ones_like()?.to_dtype(DType::F32)?;
        let zeros = ones.zeros_like()?;
        let derivatives = TokenLogProbs {
            log_probs: ones,
            entropy: zeros.clone(),
            log_sum_exp: zeros,
        };
        let device = device.clone();
        Ok(Box::new(move || {
            region(&device, || {
                let options = LogProbOptions::default();
                let layer = LinearLogProb::new(&hidden, &weight, None, &targets, 1.0, options)?;
                layer.backward(&layer.forward()?, &derivatives)
            })
        }))
    }

    /// The matrix products of both passes into memory that is there already: logits twice, and the gradients of hidden
    /// states and weight from a gradient of the logits.
    fn products(&self, device: &Device) -> Result<Run> {
        let rows = self.targets.elem_count();
        let hidden = self.hidden.flatten_all()?.to_vec1::<f32>()?;
        let weight = self.weight.flatten_all()?.to_vec1::<f32>()?;
        let mut logits = vec![0.5f32; rows * VOCAB];
        let mut of_hidden = vec![0f32; rows * HIDDEN];
        let mut of_weight = vec![0f32; VOCAB * HIDDEN];
        let device = device.clone();
        Ok(Box::new(move || {
            region(&device, || {
                for _ in 0..2 {
                    product(
                        [rows, VOCAB, HIDDEN],
                        &mut logits,
                        (&hidden, [HIDDEN, 1]),
                        (&weight, [1, HIDDEN]),
                    );
                }
                product(
                    [rows, HIDDEN, VOCAB],
                    &mut of_hidden,
                    (&logits, [VOCAB, 1]),
                    (&weight, [HIDDEN, 1]),
                );
                product(
                    [VOCAB, HIDDEN, rows],
                    &mut of_weight,
                    (&logits, [1, VOCAB]),
                    (&hidden, [HIDDEN, 1]),
                );
                Ok(())
            })
        }))
    }

    fn policy_loss(&self, device: &Device) -> Result<Run> {
        let Self {
            hidden,
            weight,
            targets,
        } = self.clone();
        let step = Step::new(&targets)?;
        let device = device.clone();
        Ok(Box::new(move || {
            region(&device, || {
                let options = LogProbOptions::default();
                let layer = LinearLogProb::new(
                    &step.rows(&hidden)?,
                    &weight,
                    None,
                    &step.targets,
                    1.0,
                    options,
                )?;
                let batch = PolicyBatch::without_log_probs(&step.advantages, &step.mask);
                linear_policy_loss(&PolicyLoss::dapo(), &layer, &batch, &step.totals)
            })
        }))
    }

    fn composed_policy_loss(&self, device: &Device) -> Result<Run> {
        let Self {
            hidden,
            weight,
            targets,
        } = self.clone();
        let step = Step::new(&targets)?;
        Ok(Direction::Both.run(device, move || {
            let options = LogProbOptions::default();
            let tokens = composed::linear_log_prob(
                &step.rows(&hidden)?,
                &weight,
                None,
                &step.targets,
                1.0,
                options,
            )?;
            let batch = PolicyBatch::new(&tokens.log_probs, &step.advantages, &step.mask)
                .entropy(&tokens.entropy);
            Ok(PolicyLoss::dapo().compute(&batch, &step.totals)?.loss)
        }))
    }
}

/// What the loss needs besides.
struct Step {
    targets: Tensor,
    mask: Tensor,
    advantages: Tensor,
    totals: StepTotals,
}

impl Step {
    fn new(targets: &Tensor) -> Result<Self> {
        let targets = targets.reshape(((), TOKENS))?;
        let mask = targets.ones_like()?;
        Ok(Self {
            advantages: noise(targets.dim(0)?, 1.0, 4, DType::F32, targets.device())?,
            totals: StepTotals::to_host(&mask)?,
            mask,
            targets,
        })
    }

    fn rows(&self, hidden: &Var) -> Result<Tensor> {
        hidden.reshape(((), TOKENS, HIDDEN))
    }
}

/// `target [m, n] = left [m, k] right [k, n]`, each matrix with its strides of rows and columns.
fn product(
    [m, n, k]: [usize; 3],
    target: &mut [f32],
    (left, left_strides): (&[f32], [usize; 2]),
    (right, right_strides): (&[f32], [usize; 2]),
) {
    let [left_row, left_column] = left_strides.map(|stride| stride as isize);
    let [right_row, right_column] = right_strides.map(|stride| stride as isize);
    assert!(target.len() == m * n && left.len() == m * k && right.len() == k * n);
    // SAFETY: the matrices are as long as their sizes say, and the strides walk them once.
    #[allow(unsafe_code)]
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            target.as_mut_ptr(),
            1,
            n as isize,
            false,
            left.as_ptr(),
            left_column,
            left_row,
            right.as_ptr(),
            right_column,
            right_row,
            0.0,
            1.0,
            false,
            false,
            false,
            Parallelism::Rayon(0),
        );
    }
}
