//! From logits to the policy loss and the logit gradient, in place, like Liger-Kernel's GRPO
//! kernel.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{LogProbOptions, TokenLogProbs, composed, log_prob, log_prob_gradient};
use candle_grpo_loss::{PolicyBatch, PolicyLoss};

use super::step::Step;
use crate::case::{Case, Direction, Pair, Run};
use crate::noise::{ids, noise};
use crate::region::region;

const BATCH: usize = 8;
const TOKENS: usize = 512;
const TEMPERATURE: f64 = 1.0;

pub(super) fn cases() -> Vec<Case> {
    [49_152, 128_256, 151_936]
        .map(|vocab| Case {
            op: "log_prob/policy_loss",
            shape: format!("[{BATCH}, {TOKENS}, {vocab}]"),
            dtype: DType::BF16,
            direction: Direction::Both,
            prepare: Box::new(move |device| pair(vocab, device)),
            bandwidth: None,
        })
        .into()
}

fn pair(vocab: usize, device: &Device) -> Result<Pair> {
    let logits = || noise((BATCH, TOKENS, vocab), 8.0, 1, DType::BF16, device);
    let targets = ids(BATCH * TOKENS, vocab, 3, device)?.reshape((BATCH, TOKENS))?;
    let old = noise((BATCH, TOKENS), 1.0, 5, DType::F32, device)?.affine(1.0, -12.0)?;
    Ok(Pair {
        ours: in_place(logits()?, old.clone(), Step::new(&targets)?, device),
        composed: in_a_graph(logits()?, old, Step::new(&targets)?, device)?,
    })
}

fn in_place(logits: Tensor, old: Tensor, step: Step, device: &Device) -> Run {
    let device = device.clone();
    Box::new(move || {
        region(&device, || {
            let options = LogProbOptions {
                gradient_into_logits: true,
                ..Default::default()
            };
            let tokens = log_prob(&logits, &step.targets, TEMPERATURE, options)?;
            // A graph of [B, T] tensors that starts at the log-probs.
            let log_probs = Var::from_tensor(&tokens.log_probs)?;
            let store = loss(&log_probs, &old, &step)?.backward()?;
            let zeros = log_probs.zeros_like()?;
            let derivatives = TokenLogProbs {
                log_probs: store.get(&log_probs).unwrap_or(&zeros).detach(),
                entropy: zeros.clone(),
                log_sum_exp: zeros,
            };
            log_prob_gradient(
                &logits,
                &step.targets,
                TEMPERATURE,
                options,
                &tokens,
                &derivatives,
            )
        })
    })
}

fn in_a_graph(logits: Tensor, old: Tensor, step: Step, device: &Device) -> Result<Run> {
    let logits = Var::from_tensor(&logits)?;
    Ok(Direction::Both.run(device, move || {
        let options = LogProbOptions::default();
        let tokens = composed::log_prob(&logits, &step.targets, TEMPERATURE, options)?;
        loss(&tokens.log_probs, &old, &step)
    }))
}

fn loss(log_probs: &Tensor, old: &Tensor, step: &Step) -> Result<Tensor> {
    let batch = PolicyBatch::new(log_probs, &step.advantages, &step.mask).old_log_probs(old);
    Ok(PolicyLoss::dapo().compute(&batch, &step.totals)?.loss)
}
