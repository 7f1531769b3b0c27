//! Fused operators with backward passes for training on Candle, on the CPU and on CUDA.
//!
//! `candle_nn::ops::{rms_norm, layer_norm, softmax_last_dim, sdpa}` and
//! `candle_nn::rotary_emb::{rope, rope_i, rope_thd}` have no backward pass. A model that calls them
//! trains without those gradients, and Candle reports no error. [`ensure_gradients`] names the
//! affected variables. The training operators here differentiate with respect to all float inputs,
//! except the angle tables in [`rope`](rope()). Inference operators return an error for inputs that
//! are in a graph.
//!
//! ```
//! use candle_core::{DType, Device, Tensor, Var};
//! use candle_grpo_kernels::rms_norm;
//!
//! let x = Var::new(&[[1f32, 2., 3.], [4., 5., 6.]], &Device::Cpu)?;
//! let weight = Var::ones(3, DType::F32, &Device::Cpu)?;
//! let gradients = rms_norm(&x, &weight, 1e-6)?.sqr()?.sum_all()?.backward()?;
//! assert!(gradients.get(&x).is_some() && gradients.get(&weight).is_some());
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! # Operators
//!
//! A drop-in has the same arguments and result as the function that it replaces. For the others,
//! the table says what is different. Heads are side by side: `[B, S, heads * D]`, as a linear layer
//! returns them.
//!
//! | operator | computes | in place of | CUDA kernel |
//! | --- | --- | --- | --- |
//! | [`log_prob`] | log-probs, entropy and log-sum-exp from logits | `candle_nn::ops::log_softmax` and `gather` | yes |
//! | [`linear_log_prob`] | the same from hidden states and the output weight, without the logits | `candle_nn::Linear`, `log_softmax` and `gather` | yes |
//! | [`attention`](attention()) | causal grouped-query attention, padded or packed, without the score matrix | `candle_nn::ops::sdpa`, and `softmax_last_dim` between products; heads side by side | yes |
//! | [`rms_norm`](rms_norm()) | root mean square normalization | drop-in for `candle_nn::ops::rms_norm`, with an f64 epsilon | yes |
//! | [`add_rms_norm`] | a sum and its `rms_norm` | `+` and `candle_nn::ops::rms_norm` | yes |
//! | [`rope`](rope()) | rotary position embedding | `candle_nn::rotary_emb::rope`; heads side by side | yes |
//! | [`rope_angles`] | cosines and sines for positions | | yes |
//! | [`swiglu`](swiglu()) | the SwiGLU gate in a feed-forward layer | `candle_nn::ops::swiglu`; gate and up apart | yes |
//! | [`geglu`] | the GeGLU gate in a feed-forward layer | `gelu` and `*` | yes |
//! | [`soft_cap`] | logit soft caps | `tanh` between two scalings | no |
//! | [`HeadTransform`] | head norms and the rotation in one launch, before attention | `rms_norm` and `rope` | yes |
//! | [`gate_heads`](gate_heads()) | gates for the attention output | | yes |
//! | [`sigmoid`] | the sigmoid | drop-in for `candle_nn::ops::sigmoid` | no |
//! | [`embedding`](embedding()) | table rows by id | `candle_nn::Embedding`; ids first | yes |
//! | [`RowMap`] | row selections, and row sums | `Tensor::index_select`, `Tensor::index_add` | yes |
//! | [`add`](add()) | the sum of two tensors | drop-in for `Tensor::add` | yes |
//! | [`add_bias`](add_bias()) | biases for several linear maps | `Tensor::broadcast_add` | yes |
//! | [`matmul`] | a matrix product | `Tensor::matmul` | cuBLAS |
//! | [`add_matmul`](add_matmul()) | a matrix product added to a sum in place | | cuBLAS |
//! | [`adamw`](adamw()) | one AdamW step over all parameters in place, with f32 masters for bf16 and f16, or stochastic rounding for bf16 | `candle_nn::AdamW` | yes |
//! | [`moment_blocks`], [`moment_codes`], [`NUMBERS_IN_BLOCK`] | 8-bit averages for `adamw` | | yes |
//! | [`squared_gradient_norms`], [`scale_gradients`] | clipping by the global norm | | yes |
//! | [`gated_delta_rule`](gated_delta_rule()) | the linear attention in Qwen3.5, also for shared prefixes | | yes |
//! | [`causal_conv`](causal_conv()) | queries, keys and values for the gated delta rule | | yes |
//! | [`delta_gates`](delta_gates()) | gates for the gated delta rule | | yes |
//! | [`DeltaStates`] | `gated_delta_rule` and `causal_conv` for decoding, with a state per sequence | | yes |
//! | [`paged_attention`](paged_attention()) | attention to [`KeyValuePages`], for decoding | | yes |
//! | [`linear_rows`](linear_rows()), [`packed_linear_rows`] | several linear maps with independent rows, for decoding | `candle_nn::Linear` | cuBLAS; quantized weights: yes |
//! | [`route`](route()), [`expert_gates`] | a router's choice of experts, and their gates | `arg_sort_last_dim`, `gather` and `softmax` | `route` |
//! | [`experts`](experts()) | a mixture of experts with few rows, from [`ExpertWeights`], for decoding | a `candle_nn::Linear` for each expert and map | yes |
//! | [`quantize`], [`dequantize`](dequantize()), [`block_type`] | GGUF blocks from a matrix, and back | | `dequantize` |
//! | [`draw_tokens`](draw_tokens()) | tokens sampled from logits, with top-k, top-p and min-p | | yes |
//! | [`policy_loss`](policy_loss()) | a policy loss with its derivatives and metrics, for `PolicyLoss` in `candle-grpo-loss` | | yes |
//! | [`top_k`] | indices of the largest entries per row | | no |
//!
//! # Conventions
//!
//! - Inputs are f32, bf16 or f16 tensors in any layout. f64 stays f64.
//! - Arithmetic is in f32. Log-probs are f32; layers return the dtype of their input.
//! - A mask can have any dtype; nonzero entries are selected. NaN at a masked position never
//!   reaches a result or a gradient.
//! - Each layer's backward pass is also a function without a graph, such as [`rms_norm_gradient`].
//! - [`arithmetic_dtype`] returns the arithmetic dtype for an input dtype.
//! - An error names the argument, its value and the requirement.
//! - [`ensure_gradients`] and [`ensure_reached`] name the variables that a loss does not reach.
//! - [`default_device`] and [`cuda_device`] open a GPU, with one stream for all threads.
//!   [`cuda_device_count`] returns the number of GPUs, and [`cuda_memory`] the free and total
//!   memory of one. [`release_cuda_memory`] leaves unused memory to other processes.
//!   [`cuda_is_enabled`] is true if this process computes on them.
//! - [`TensorStack`] moves tensors of a GPU to main memory until they are needed again.
//! - [`with_room`] and [`rows_without_rest`] are sizes of memory that grows or is reused.
//!
//! # Implementations
//!
//! An operator has a CPU path (SIMD chosen at run time, all cores) and, with the feature `cuda`, a
//! CUDA path. Its composed twin, in plain Candle operations, is the fallback for f64 and for
//! devices without a path. The tests compare the paths with the twin in f64. The twin of
//! [`policy_loss`](policy_loss()) is in `candle-grpo-loss`.
//!
//! The folder `src/ops/OPERATOR/` contains an operator's parts. Short operators without paths are
//! files there.
//!
//! | file | content |
//! | --- | --- |
//! | `mod.rs` | the function, argument checks, path selection, the backward pass |
//! | `cpu.rs` | the CPU path |
//! | `cuda.rs` | the CUDA path, which launches the kernels in `kernels/OPERATOR.cu` |
//! | `composed.rs` | the twin |
//!
//! The paths build on `src/cpu/` (vectors, matrix products) and `src/cuda/` (launches, cuBLAS),
//! which depend on no operator.

// Loops over vector lanes are plain, because the compiler unrolls them but does not inline every
// iterator closure.
#![allow(clippy::needless_range_loop)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod blocks;
mod check;
#[doc(hidden)]
pub mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod ensure_gradients;
mod graph;
mod ops;
mod path;
mod precision;
mod prefix_tree;
mod sizes;
mod tensor_stack;

pub use blocks::{BLOCK_TYPES, block_type};
pub use check::TEMPERATURES;
pub use cpu::instructions::CpuInstructions;
#[cfg(feature = "cuda")]
pub use cuda::recording::Recording;
pub use device::{
    DeviceMemory, cuda_device, cuda_device_count, cuda_is_enabled, cuda_memory, default_device,
    release_cuda_memory,
};
pub use ensure_gradients::{ensure_gradients, ensure_reached};
pub use ops::adamw::moments::{NUMBERS_IN_BLOCK, moment_blocks, moment_codes};
pub use ops::adamw::rounding::Rounding;
pub use ops::adamw::{AdamWStep, AdamWTensors, adamw};
pub use ops::add::add;
pub use ops::add_bias::{add_bias, add_bias_gradient};
pub use ops::add_matmul::{add_matmul, matmul};
pub use ops::attention::scores::Scores;
pub use ops::attention::{CausalAttention, Sequences, attention, attention_gradient};
pub use ops::causal_conv::{causal_conv, causal_conv_gradient};
pub use ops::delta_gates::{delta_gates, delta_gates_gradient};
pub use ops::delta_states::{DeltaStates, SlotRows, StateBatch};
pub use ops::dequantize::{dequantize, quantize};
pub use ops::draw_tokens::{Draw, DrawOptions, DrawnToken, draw_tokens};
pub use ops::embedding::{add_embedding_gradient, embedding};
pub use ops::experts::{ExpertWeights, experts};
pub use ops::gate_heads::gate_heads;
pub use ops::gated_delta_rule::{DeltaHeads, gated_delta_rule, gated_delta_rule_gradient};
pub use ops::gradient_norm::{scale_gradients, squared_gradient_norms};
pub use ops::head_transform::{HeadGradients, HeadNorms, HeadTransform};
pub use ops::linear_log_prob::{
    CUDA_KEPT_LOGITS, CUDA_TILE_COLUMNS, CUDA_TILE_LOGITS, LinearGradients, LinearLogProb,
    linear_log_prob,
};
pub use ops::linear_rows::packed_weight::PackedWeight;
pub use ops::linear_rows::{linear_rows, packed_linear_rows};
pub use ops::log_prob::{LogProbOptions, TokenLogProbs, log_prob, log_prob_gradient};
#[cfg(feature = "cuda")]
pub use ops::paged_attention::cuda::{StepInputs, StepSize, StepTables};
pub use ops::paged_attention::{
    KeyValuePages, PAGE, PageSlot, PageSpan, PagedBatch, PagedRow, paged_attention,
};
pub use ops::policy_loss::{
    Divisor, EntropyBonus, KlEstimate, KlSlope, KlTerm, PolicyStatistic, PolicyTerms,
    RatioSurrogate, TokenShare, policy_loss,
};
pub use ops::rms_norm::{RmsNormOptions, add_rms_norm, rms_norm, rms_norm_gradient};
pub use ops::rope::{rope, rope_angles, rope_gradient};
pub use ops::route::{expert_gates, route};
pub use ops::row_map::RowMap;
pub use ops::sigmoid::sigmoid;
pub use ops::soft_cap::soft_cap;
pub use ops::swiglu::{geglu, geglu_gradient, swiglu, swiglu_gradient};
pub use ops::top_k::top_k;
pub use precision::arithmetic_dtype;
pub use prefix_tree::PrefixTree;
pub use sizes::{rows_without_rest, with_room};
pub use tensor_stack::TensorStack;
