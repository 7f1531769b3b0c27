//! CUDA paths. Each file launches the kernels of the `.cu` file of the same name.

pub(crate) mod adamw;
pub(crate) mod add;
pub(crate) mod add_bias;
mod argument;
pub(crate) mod attention;
pub(crate) mod causal_conv;
pub(crate) mod dequantize;
pub(crate) mod device;
pub(crate) mod draw_tokens;
mod element;
mod elements;
pub(crate) mod embedding;
pub(crate) mod gated_delta_rule;
pub(crate) mod gradient_norm;
mod in_place;
mod launch;
pub(crate) mod linear_log_prob;
pub(crate) mod log_prob;
pub(crate) mod matmul;
mod output;
pub(crate) mod paged_attention;
pub(crate) mod prefix_tree;
pub(crate) mod recording;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod swiglu;
mod tensor_list;

use argument::{In, Out};
use element::{CudaElement, with_cuda_floats};
use launch::{grid, kernels};
use output::{alloc, as_tensor};
