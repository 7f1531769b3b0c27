//! Fused operators with backward passes, for Candle on CPU and CUDA.
//!
//! Each operator is one function on tensors. Behind it stand a CPU path (SIMD, all cores), a CUDA path, and the
//! composed twin in plain Candle operations in [`composed`], which is the reference, and the fallback for f64 and for
//! devices without a path of their own. Candle's own fused operators cut the gradient without a word; every operator
//! here has a gradient for every input that can have one.
//!
//! Inputs may be f32, bf16 or f16, of any layout; arithmetic is in f32 and results are f32, unless an operator says
//! otherwise. f64 stays f64.
//!
//! | operator | file in `src/`, `src/cpu/`, `src/cuda/`, `src/composed/` and `kernels/` |
//! | --- | --- |
//! | [`log_prob`]: selected log-probs, entropy and log-sum-exp of logits | `log_prob` |

mod check;
pub mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod log_prob;
mod path;
mod precision;

pub use log_prob::{LogProbOptions, TokenLogProbs, log_prob, log_prob_gradient};
pub use precision::arithmetic_dtype;
