//! Fused operators with backward passes, for Candle on CPU and CUDA.
//!
//! Each operator is one function on tensors. Behind it stand a CPU path (SIMD, all cores), a CUDA path, and the
//! composed twin in plain Candle operations in [`composed`], which is the reference, and the fallback for f64 and for
//! devices without a path of their own. Candle's own fused operators cut the gradient without a word; every operator
//! here has a gradient for every input that can have one, and those for inference alone refuse what is in a graph.
//!
//! Inputs may be f32, bf16 or f16, of any layout, and arithmetic is in f32. Results of losses and log-probs are f32,
//! those of the layers of a model have the dtype of their input. f64 stays f64.
//!
//! An operator of a model's layers has its backward pass as a function of its own as well (`rms_norm_gradient` and so on), for loops without
//! a graph.
//!
//! | operator | file in `src/`, `src/cpu/`, `src/cuda/`, `src/composed/` and `kernels/` |
//! | --- | --- |
//! | [`adamw`](adamw()): one step of the optimiser over all parameters, in place | `adamw` |
//! | [`squared_gradient_norms`], [`scale_gradients`]: clipping by the global norm | `gradient_norm` |
//! | [`log_prob`]: selected log-probs, entropy and log-sum-exp of logits | `log_prob` |
//! | [`linear_log_prob`]: the same from hidden states and the output weight | `linear_log_prob` |
//! | [`linear_rows`](linear_rows()): several linear maps of few rows, each row by itself, for decoding | `linear_rows`, on CUDA the twin |
//! | [`attention`](attention()): causal grouped-query attention | `attention` |
//! | [`paged_attention`](paged_attention()): attention to keys and values kept in [`KeyValuePages`], for decoding | `paged_attention`, on CUDA the twin |
//! | [`embedding`](embedding()): rows of a table by number | `embedding` |
//! | [`add_matmul`](add_matmul()): a matrix product, added in place; no `cuda` | `add_matmul`, in `cpu/` `matmul` |
//! | [`rms_norm`](rms_norm()): root mean square normalisation | `rms_norm` |
//! | [`rope`](rope()): rotary position embedding | `rope` |
//! | [`swiglu`](swiglu()): the gate of a feed-forward layer | `swiglu` |

mod adamw;
mod add_matmul;
mod attention;
mod check;
pub mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod embedding;
mod gradient_norm;
mod linear_log_prob;
mod linear_rows;
mod log_prob;
mod paged_attention;
mod path;
mod precision;
mod rms_norm;
mod rope;
mod swiglu;

pub use adamw::{AdamWStep, AdamWTensors, adamw};
pub use add_matmul::add_matmul;
pub use attention::{Sequences, attention, attention_gradient};
pub use embedding::{add_embedding_gradient, embedding};
pub use gradient_norm::{scale_gradients, squared_gradient_norms};
pub use linear_log_prob::{LinearGradients, LinearLogProb, linear_log_prob};
pub use linear_rows::linear_rows;
pub use log_prob::{LogProbOptions, TokenLogProbs, log_prob, log_prob_gradient};
pub use paged_attention::{KeyValuePages, PAGE, PageSlot, PageSpan, PagedRow, paged_attention};
pub use precision::arithmetic_dtype;
pub use rms_norm::{rms_norm, rms_norm_gradient};
pub use rope::{rope, rope_gradient};
pub use swiglu::{swiglu, swiglu_gradient};
