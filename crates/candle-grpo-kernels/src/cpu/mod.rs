//! CPU paths, with SIMD chosen at run time and rows distributed over all cores.

// Loops over the lanes of a vector are plain: the compiler unrolls them, and does not inline every
// closure of an iterator.
#![allow(clippy::needless_range_loop)]

pub(crate) mod adamw;
pub(crate) mod add;
#[cfg(target_arch = "x86_64")]
mod amx;
pub(crate) mod attention;
pub(crate) mod causal_conv;
pub(crate) mod delta_states;
pub(crate) mod dequantize;
pub(crate) mod distribution;
mod element;
pub(crate) mod embedding;
pub(crate) mod gated_delta_rule;
pub(crate) mod gradient_norm;
pub(crate) mod instructions;
pub(crate) mod linear_log_prob;
pub(crate) mod linear_rows;
pub(crate) mod log_prob;
mod matmul;
mod output;
pub(crate) mod paged_attention;
pub(crate) mod panel;
pub(crate) mod rms_norm;
pub(crate) mod rope;
#[cfg(target_arch = "x86_64")]
mod row_product;
mod simd;
mod slice;
pub(crate) mod swiglu;
#[cfg(target_arch = "x86_64")]
mod tiles;
pub(crate) mod token_filters;
mod transpose;
mod word;

pub(crate) use matmul::{add_matmul, product};

pub(crate) use slice::{on_cpu, range, with_element, with_floats};
