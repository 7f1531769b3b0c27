//! What the tests of `log_prob.cu` and `linear_log_prob.cu` share.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::TokenLogProbs;

/// Threads of a block, as in the kernels.
pub(crate) const THREADS: u32 = 256;

/// `[3, N]`, as the kernels give them.
pub(crate) fn stacked(tokens: TokenLogProbs) -> Result<Tensor> {
    Tensor::stack(&[tokens.log_probs, tokens.entropy, tokens.log_sum_exp], 0)
}
