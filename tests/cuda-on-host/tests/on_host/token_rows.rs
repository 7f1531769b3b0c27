//! Helpers of the tests of `log_prob.cu` and `linear_log_prob.cu`.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::TokenLogProbs;

/// Threads of a block, as in the kernels.
pub(crate) const THREADS: u32 = 256;

/// Stacks the results to `[3, N]`, like the kernels.
pub(crate) fn stacked(tokens: TokenLogProbs) -> Result<Tensor> {
    Tensor::stack(&[tokens.log_probs, tokens.entropy, tokens.log_sum_exp], 0)
}
