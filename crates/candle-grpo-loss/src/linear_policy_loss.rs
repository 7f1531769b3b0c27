//! From hidden states to the policy loss and its gradients, without logits.

use candle_core::{Result, Tensor, Var, bail};
use candle_grpo_kernels::{LinearGradients, LinearLogProb, TokenLogProbs};

use crate::batch::PolicyBatch;
use crate::policy_loss::{PolicyLoss, PolicyLossOutput};
use crate::totals::StepTotals;

/// What [`linear_policy_loss`] returns; nothing in it has a graph.
#[derive(Debug, Clone)]
pub struct LinearPolicyLossOutput {
    /// The loss with its metrics and the terms of each token.
    pub output: PolicyLossOutput,
    /// Log-probs, entropies and log-sum-exps of the tokens, `[B, T]`.
    pub tokens: TokenLogProbs,
    /// The gradients of the loss by hidden states, weight and bias.
    pub gradients: LinearGradients,
}

/// The loss of hidden states `[B, T, H]` and its gradients by them, by the output weight and by the bias, in one call.
///
/// `layer` holds what the log-probs are computed from; give it the response mask, so that masked positions cost
/// nothing. `batch` is one [without log-probs](PolicyBatch::without_log_probs); the entropy is at hand always. Every
/// loss that [`PolicyLoss::compute`] knows, over tokens or sequences, is computed on `[B, T]`; the logits are made in
/// small tiles, once forward and once backward. An argument of `layer` that is neither a variable nor computed from one
/// gets no gradient and costs no product. KL values that are given must be constants.
///
/// The gradient of the hidden states is where the backward pass of the model begins: call `backward` on the sum of their
/// product with it. Where a loss in a graph is simpler, take [`linear_log_prob`](crate::linear_log_prob) and
/// [`PolicyLoss::compute`]: the same numbers, and Candle's `backward` takes the memory of one more weight.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_grpo_loss::{
///     LinearLogProb, LogProbOptions, PolicyBatch, PolicyLoss, StepTotals, linear_policy_loss,
/// };
///
/// let device = Device::Cpu;
/// let inputs = Var::ones((2, 3, 8), DType::F32, &device)?;
/// let weight = Var::ones((16, 8), DType::F32, &device)?;
/// let responses = Tensor::ones((2, 3), DType::U32, &device)?;
/// let response_mask = Tensor::new(&[[1u8, 1, 1], [1, 0, 0]], &device)?;
/// let advantages = Tensor::new(&[1f32, -1.], &device)?;
///
/// let hidden = inputs.tanh()?; // the model
/// let options = LogProbOptions { mask: Some(&response_mask), ..Default::default() };
/// let layer = LinearLogProb::new(&hidden, &weight, None, &responses, 1.0, options)?;
/// let batch = PolicyBatch::without_log_probs(&advantages, &response_mask);
/// let totals = StepTotals::to_host(&response_mask)?;
/// let result = linear_policy_loss(&PolicyLoss::dapo(), &layer, &batch, &totals)?;
///
/// let of_weight = result.gradients.weight.expect("the weight is a variable");
/// let of_hidden = result.gradients.hidden.expect("the hidden states come from one");
/// let of_the_model = (&hidden * of_hidden)?.sum_all()?.backward()?;
/// assert_eq!(of_weight.dims(), [16, 8]);
/// assert!(of_the_model.get(&inputs).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn linear_policy_loss(
    policy_loss: &PolicyLoss,
    layer: &LinearLogProb,
    batch: &PolicyBatch,
    totals: &StepTotals,
) -> Result<LinearPolicyLossOutput> {
    if batch.log_probs.is_some() || batch.entropy.is_some() {
        bail!(
            "batch: has log_probs or entropy, which linear_policy_loss computes; begin it with PolicyBatch::without_log_probs"
        );
    }
    if batch.kl_values.is_some_and(Tensor::track_op) {
        bail!(
            "kl_values: computed from a variable, must be a constant: their gradient is none that linear_policy_loss returns"
        );
    }
    let tokens = layer.forward()?;
    // A graph of [B, T] that begins at the log-probs.
    let log_probs = Var::from_tensor(&tokens.log_probs)?;
    let entropy = Var::from_tensor(&tokens.entropy)?;
    let batch = PolicyBatch {
        log_probs: Some(&log_probs),
        entropy: Some(&entropy),
        ..*batch
    };
    let mut output = policy_loss.compute(&batch, totals)?;
    let store = output.loss.backward()?;
    output.loss = output.loss.detach();
    let derivative = |variable: &Var| match store.get(variable) {
        Some(gradient) => Ok(gradient.detach()),
        None => variable.zeros_like(),
    };
    let derivatives = TokenLogProbs {
        log_probs: derivative(&log_probs)?,
        entropy: derivative(&entropy)?,
        log_sum_exp: Tensor::zeros_like(&tokens.log_sum_exp)?,
    };
    Ok(LinearPolicyLossOutput {
        gradients: layer.backward(&tokens, &derivatives)?,
        tokens,
        output,
    })
}
