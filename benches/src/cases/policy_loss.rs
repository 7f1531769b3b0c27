//! From log-probs to the policy loss, beside its composition.

use candle_core::{DType, Result, Tensor, Var};
use candle_grpo_loss::surrogate::{SurrogateInputs, TokenLosses};
use candle_grpo_loss::{PolicyBatch, PolicyLoss, Surrogate, TokenLoss};

use super::step::Step;
use crate::case::{Case, Direction, Pair};
use crate::noise::{ids, noise};

pub(super) fn cases() -> Vec<Case> {
    [(8, 512), (64, 1024)]
        .map(|(batch, tokens)| Case {
            op: "policy_loss",
            shape: format!("[{batch}, {tokens}]"),
            dtype: DType::F32,
            direction: Direction::Both,
            prepare: Box::new(move |device| {
                let (shape, n) = ((batch, tokens), batch * tokens);
                let log_probs = Var::from_tensor(&noise(shape, 0.5, 1, DType::F32, device)?)?;
                let old = noise(shape, 0.5, 2, DType::F32, device)?;
                let targets = ids(n, 2, 3, device)?.reshape(shape)?;
                let run = |policy_loss: PolicyLoss| -> Result<_> {
                    let (log_probs, old) = (log_probs.clone(), old.clone());
                    let step = Step::new(&targets)?;
                    Ok(Direction::Both
                        .run(device, move || loss(&policy_loss, &log_probs, &old, &step)))
                };
                let fused = PolicyLoss::dapo();
                Ok(Pair {
                    composed: run(PolicyLoss {
                        surrogate: Surrogate::custom(Composed(fused.surrogate.clone())),
                        ..fused.clone()
                    })?,
                    ours: run(fused)?,
                })
            }),
            bandwidth: None,
        })
        .into()
}

fn loss(policy_loss: &PolicyLoss, log_probs: &Var, old: &Tensor, step: &Step) -> Result<Tensor> {
    let batch = PolicyBatch::new(log_probs, &step.advantages, &step.mask).old_log_probs(old);
    let output = policy_loss.compute(&batch, &step.totals)?;
    output.metrics.to_host()?;
    Ok(output.loss)
}

/// A custom surrogate, which has no fused path.
#[derive(Debug)]
struct Composed(Surrogate);

impl TokenLoss for Composed {
    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        self.0.per_token(inputs)
    }
}
