//! `linear_log_prob` and `linear_policy_loss` on SmolLM2-135M's output layer, and one larger case
//! on a GPU. `linear_rows` on two of its linear layers, and on quantized ones on a GPU.
//!
//! Backward passes are called alone, as in training with `candle-grpo-train`. The rows "in a graph"
//! use Candle's `backward`, which adds the weight gradient to zeros.

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{
    LinearLogProb, LogProbOptions, TokenLogProbs, composed, dequantize, linear_log_prob,
    linear_rows, quantize,
};
use candle_grpo_loss::{PolicyBatch, PolicyLoss, linear_policy_loss};
use gemm::Parallelism;

use super::step::Step;
use crate::case::{Case, Direction, Pair, Run};
use crate::noise::{ids, noise};
use crate::region::region;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for sequences in [2, 8] {
        let pair: MakePair = |layer, device| {
            Ok(Pair {
                ours: layer.alone(device)?,
                composed: layer.graph(composed::linear_log_prob, device),
            })
        };
        cases.push(Sizes::smol(sequences).log_prob("linear_log_prob", "", pair));
    }
    let in_a_graph: MakePair = |layer, device| {
        Ok(Pair {
            ours: layer.graph(linear_log_prob, device),
            composed: layer.graph(composed::linear_log_prob, device),
        })
    };
    cases.push(Sizes::smol(8).log_prob("linear_log_prob", " in a graph", in_a_graph));
    cases.push(Sizes::smol(8).policy_loss(DType::F32));
    cases
}

/// Compares with the four matrix products alone: two for the logits and two for the gradients.
pub(super) fn products() -> Vec<Case> {
    let pair: MakePair = |layer, device| {
        Ok(Pair {
            ours: layer.alone(device)?,
            composed: layer.products(device)?,
        })
    };
    [8, 32]
        .map(|sequences| Sizes::smol(sequences).log_prob("linear_log_prob/products", "", pair))
        .into()
}

/// Compares with Candle's product, from the `gemm` crate.
pub(super) fn rows() -> Vec<Case> {
    const INPUTS: usize = 576;
    let case = |rows: usize, outputs: usize| Case {
        op: "linear_rows",
        shape: format!("[{rows}, {INPUTS}] x [{outputs}, {INPUTS}]"),
        dtype: DType::F32,
        direction: Direction::Forward,
        prepare: Box::new(move |device| {
            let x = noise((rows, INPUTS), 1.0, 1, DType::F32, device)?;
            let weight = noise((outputs, INPUTS), 0.05, 2, DType::F32, device)?;
            let (input, transposed) = (x.clone(), weight.t()?);
            Ok(Pair {
                ours: Direction::Forward.run(device, move || {
                    Ok(linear_rows(&x, &[&weight])?.swap_remove(0))
                }),
                composed: Direction::Forward.run(device, move || input.matmul(&transposed)),
            })
        }),
        bandwidth: None,
    };
    [1536, 49_152]
        .into_iter()
        .flat_map(|outputs| [1, 4, 16, 64, 1024].map(|rows| case(rows, outputs)))
        .collect()
}

/// Four linear layers in quantized blocks, which are larger than the caches of a GPU together.
/// Compares with dequantizing each and a product.
pub(super) fn blocks() -> Vec<Case> {
    const INPUTS: usize = 4096;
    const OUTPUTS: usize = 14_336;
    const WEIGHTS: usize = 4;
    // The host quantizes these rows, and a weight repeats them.
    const ROWS: usize = 256;
    let case = |rows: usize, block_type: GgmlDType| Case {
        op: "linear_rows",
        shape: format!("[{rows}, {INPUTS}] x {WEIGHTS} [{OUTPUTS}, {INPUTS}] in {block_type:?}"),
        dtype: DType::BF16,
        direction: Direction::Forward,
        prepare: Box::new(move |device| {
            let x = noise((rows, INPUTS), 1.0, 1, DType::BF16, device)?;
            let some = noise((ROWS, INPUTS), 0.05, 2, DType::F32, device)?;
            let some = quantize(&some, block_type)?;
            let weights = (0..WEIGHTS).map(|_| Tensor::cat(&[&some; OUTPUTS / ROWS], 0));
            let weights = weights.collect::<Result<Vec<_>>>()?;
            let (input, blocks) = (x.clone(), weights.clone());
            Ok(Pair {
                ours: Direction::Forward.run(device, move || {
                    let weights: Vec<_> = weights.iter().collect();
                    Ok(linear_rows(&x, &weights)?.swap_remove(0))
                }),
                composed: Direction::Forward.run(device, move || {
                    let products = blocks
                        .iter()
                        .map(|weight| input.matmul(&dequantize(weight, DType::BF16)?.t()?));
                    Ok(products.collect::<Result<Vec<_>>>()?.swap_remove(0))
                }),
            })
        }),
        bandwidth: None,
    };
    [GgmlDType::Q4_0, GgmlDType::Q4K, GgmlDType::Q8_0]
        .into_iter()
        .flat_map(|block_type| [1, 8, 16, 64].map(|rows| case(rows, block_type)))
        .collect()
}

/// The output layer of Llama 3 8B.
pub(super) fn large() -> Vec<Case> {
    let sizes = Sizes {
        sequences: 8,
        tokens: 512,
        width: 4096,
        vocab: 128_256,
    };
    vec![sizes.policy_loss(DType::BF16)]
}

type MakePair = fn(&Layer, &Device) -> Result<Pair>;

#[derive(Clone, Copy)]
struct Sizes {
    sequences: usize,
    /// Number of response tokens per sequence.
    tokens: usize,
    width: usize,
    vocab: usize,
}

impl Sizes {
    /// The output layer of SmolLM2-135M.
    fn smol(sequences: usize) -> Self {
        Self {
            sequences,
            tokens: 128,
            width: 576,
            vocab: 49_152,
        }
    }

    fn log_prob(self, op: &'static str, how: &str, pair: MakePair) -> Case {
        let Self { width, vocab, .. } = self;
        let rows = self.sequences * self.tokens;
        Case {
            op,
            shape: format!("[{rows}, {width}] x [{vocab}, {width}]{how}"),
            dtype: DType::F32,
            direction: Direction::Both,
            prepare: Box::new(move |device| pair(&Layer::new(self, DType::F32, device)?, device)),
            bandwidth: None,
        }
    }

    fn policy_loss(self, dtype: DType) -> Case {
        let Self {
            sequences,
            tokens,
            width,
            vocab,
        } = self;
        Case {
            op: "linear_policy_loss",
            shape: format!("[{sequences}, {tokens}, {width}] x [{vocab}, {width}]"),
            dtype,
            direction: Direction::Both,
            prepare: Box::new(move |device| {
                let layer = Layer::new(self, dtype, device)?;
                Ok(Pair {
                    ours: layer.policy_loss(device)?,
                    composed: layer.composed_policy_loss(device)?,
                })
            }),
            bandwidth: None,
        }
    }
}

type Operator =
    fn(&Tensor, &Tensor, Option<&Tensor>, &Tensor, f64, LogProbOptions) -> Result<TokenLogProbs>;

#[derive(Clone)]
struct Layer {
    sizes: Sizes,
    /// `[N, H]`
    hidden: Var,
    /// `[V, H]`
    weight: Var,
    /// `[N]`
    targets: Tensor,
}

impl Layer {
    fn new(sizes: Sizes, dtype: DType, device: &Device) -> Result<Self> {
        let Sizes { width, vocab, .. } = sizes;
        let rows = sizes.sequences * sizes.tokens;
        Ok(Self {
            sizes,
            hidden: Var::from_tensor(&noise((rows, width), 1.0, 1, dtype, device)?)?,
            weight: Var::from_tensor(&noise((vocab, width), 0.3, 2, dtype, device)?)?,
            targets: ids(rows, vocab, 3, device)?,
        })
    }

    /// The hidden states `[B, T, H]`.
    fn rows(&self) -> Result<Tensor> {
        let Sizes { tokens, width, .. } = self.sizes;
        self.hidden.reshape(((), tokens, width))
    }

    fn step(&self) -> Result<Step> {
        Step::new(&self.targets.reshape(((), self.sizes.tokens))?)
    }

    fn graph(&self, operator: Operator, device: &Device) -> Run {
        let Self {
            hidden,
            weight,
            targets,
            ..
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
            ..
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

    /// Runs both passes' matrix products into allocated memory: the logits twice, and the gradients
    /// with respect to hidden states and weight, given a logit gradient.
    fn products(&self, device: &Device) -> Result<Run> {
        let Sizes { width, vocab, .. } = self.sizes;
        let rows = self.targets.elem_count();
        let hidden = self.hidden.flatten_all()?.to_vec1::<f32>()?;
        let weight = self.weight.flatten_all()?.to_vec1::<f32>()?;
        let mut logits = vec![0.5f32; rows * vocab];
        let mut hidden_gradient = vec![0f32; rows * width];
        let mut weight_gradient = vec![0f32; vocab * width];
        let device = device.clone();
        Ok(Box::new(move || {
            region(&device, || {
                for _ in 0..2 {
                    product(
                        [rows, vocab, width],
                        &mut logits,
                        (&hidden, [width, 1]),
                        (&weight, [1, width]),
                    );
                }
                product(
                    [rows, width, vocab],
                    &mut hidden_gradient,
                    (&logits, [vocab, 1]),
                    (&weight, [width, 1]),
                );
                product(
                    [vocab, width, rows],
                    &mut weight_gradient,
                    (&logits, [1, vocab]),
                    (&hidden, [width, 1]),
                );
                Ok(())
            })
        }))
    }

    fn policy_loss(&self, device: &Device) -> Result<Run> {
        let (layer, step, device) = (self.clone(), self.step()?, device.clone());
        Ok(Box::new(move || {
            region(&device, || {
                let options = LogProbOptions::default();
                let output = LinearLogProb::new(
                    &layer.rows()?,
                    &layer.weight,
                    None,
                    &step.targets,
                    1.0,
                    options,
                )?;
                let batch = PolicyBatch::without_log_probs(&step.advantages, &step.mask);
                linear_policy_loss(&PolicyLoss::dapo(), &output, &batch, &step.totals)
            })
        }))
    }

    fn composed_policy_loss(&self, device: &Device) -> Result<Run> {
        let (layer, step) = (self.clone(), self.step()?);
        Ok(Direction::Both.run(device, move || {
            let options = LogProbOptions::default();
            let tokens = composed::linear_log_prob(
                &layer.rows()?,
                &layer.weight,
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

/// Computes `target [m, n] = left [m, k] right [k, n]`; each matrix has row and column strides.
fn product(
    [m, n, k]: [usize; 3],
    target: &mut [f32],
    (left, left_strides): (&[f32], [usize; 2]),
    (right, right_strides): (&[f32], [usize; 2]),
) {
    let [left_row, left_column] = left_strides.map(|stride| stride as isize);
    let [right_row, right_column] = right_strides.map(|stride| stride as isize);
    assert!(target.len() == m * n && left.len() == m * k && right.len() == k * n);
    // SAFETY: the slices cover the sizes, and the strides visit each element once.
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
