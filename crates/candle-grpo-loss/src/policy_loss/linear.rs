//! The policy loss from hidden states, with its gradients and without logits.

use candle_core::{Result, Tensor, Var, bail};
use candle_grpo_kernels::{LinearGradients, LinearLogProb, TokenLogProbs};

use super::{PolicyBatch, PolicyLoss, PolicyLossOutput};
use crate::totals::StepTotals;

/// Output from [`linear_policy_loss`]. All tensors are detached.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LinearPolicyLossOutput {
    /// The loss and its metrics.
    pub output: PolicyLossOutput,
    /// Per-token log-probs, entropies and log-sum-exps, `[B, T]`.
    pub tokens: TokenLogProbs,
    /// Gradients with respect to hidden states, weight and bias.
    pub gradients: LinearGradients,
}

/// Computes the policy loss from hidden states `[B, T, H]`, and its gradients, in one call and
/// without logits.
///
/// Choose it if logits for the whole batch do not fit in memory. They only exist in small tiles,
/// once forward and once backward. If a loss in a graph is simpler for you, use
/// [`linear_log_prob`](crate::linear_log_prob) and [`PolicyLoss::compute`]. The values are the
/// same, but Candle's `backward` allocates one more tensor with the weight's size.
///
/// `layer` holds hidden states, weight and bias. Give it the response mask, so that masked
/// positions cost nothing. With [`PolicyLoss::observation_coef`], give it the union of the response
/// mask and the observation mask: log-probs outside of its mask are 0, and learn nothing. `batch`
/// must have [no log-probs](PolicyBatch::without_log_probs). The entropy is always computed. Any
/// [`PolicyLoss`] options work, since the loss itself is computed on `[B, T]`.
///
/// A constant argument in `layer` gets no gradient and costs no matrix product.
///
/// The hidden-state gradient starts your model's backward pass: multiply it by the hidden states,
/// and call `backward` on the sum.
///
/// # Errors
///
/// Fails in the same cases as [`PolicyLoss::compute`]. Also fails if `batch` has log-probs or an
/// entropy, or if given KL values carry a gradient.
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
/// let totals = StepTotals::count(&response_mask)?;
/// let result = linear_policy_loss(&PolicyLoss::dapo(), &layer, &batch, &totals)?;
///
/// let weight_gradient = result.gradients.weight.expect("the weight is a variable");
/// let hidden_gradient = result.gradients.hidden.expect("the hidden states come from one");
/// let of_the_model = (&hidden * hidden_gradient)?.sum_all()?.backward()?;
/// assert_eq!(weight_gradient.dims(), [16, 8]);
/// assert!(of_the_model.get(&inputs).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn linear_policy_loss(
    policy_loss: &PolicyLoss,
    layer: &LinearLogProb,
    batch: &PolicyBatch,
    totals: &StepTotals,
) -> Result<LinearPolicyLossOutput> {
    linear_policy_loss_of_part(policy_loss, layer, batch, totals, &Whole)
}

/// The place of an output layer in a batch that several layers divide, one on each of several
/// devices or processes.
pub trait LayerPart {
    /// Returns the results of all layers, `[B, T]`, from those of this one.
    ///
    /// # Errors
    ///
    /// If another layer fails.
    fn gather(&self, own: &TokenLogProbs) -> Result<TokenLogProbs>;

    /// Selects this layer's derivatives from those `[B, T]` of all layers, in the shape of its
    /// results.
    ///
    /// # Errors
    ///
    /// If shapes do not match.
    fn select(&self, all: &TokenLogProbs) -> Result<TokenLogProbs>;
}

/// [`linear_policy_loss`] for one of several layers that divide the batch.
///
/// Each layer gets the whole `batch`, and computes the whole loss from the log-probs of all layers.
/// [`LinearPolicyLossOutput::gradients`] are those of this layer: the weight gradients of all
/// layers add up to that of the batch.
///
/// # Errors
///
/// As in [`linear_policy_loss`], and if `part` fails.
pub fn linear_policy_loss_of_part(
    policy_loss: &PolicyLoss,
    layer: &LinearLogProb,
    batch: &PolicyBatch,
    totals: &StepTotals,
    part: &dyn LayerPart,
) -> Result<LinearPolicyLossOutput> {
    if batch.log_probs.is_some() || batch.entropy.is_some() {
        bail!(
            "batch: has log_probs or entropy, which linear_policy_loss computes; create it with PolicyBatch::without_log_probs"
        );
    }
    let own = layer.forward()?;
    let tokens = part.gather(&own)?;
    // A graph over [B, T] tensors that starts at the log-probs.
    let log_probs = Var::from_tensor(&tokens.log_probs)?;
    let entropy = Var::from_tensor(&tokens.entropy)?;
    let batch = batch.clone().log_probs(&log_probs).entropy(&entropy);
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
        gradients: layer.backward(&own, &part.select(&derivatives)?)?,
        tokens,
        output,
    })
}

/// A layer for the whole batch.
struct Whole;

impl LayerPart for Whole {
    fn gather(&self, own: &TokenLogProbs) -> Result<TokenLogProbs> {
        Ok(own.clone())
    }

    fn select(&self, all: &TokenLogProbs) -> Result<TokenLogProbs> {
        Ok(all.clone())
    }
}
