//! Tests the operators on every device.
#![allow(clippy::too_many_lines, reason = "lists of cases")]

mod adamw;
mod add;
mod add_bias;
mod add_matmul;
mod attention;
mod causal_conv;
mod delta_gates;
mod delta_states;
mod dequantize;
#[cfg(feature = "cuda")]
mod device;
mod documentation;
mod draw_tokens;
mod embedding;
mod experts;
mod gated_delta_rule;
mod gradient_norm;
mod head_transform;
mod layout;
mod linear_log_prob;
mod linear_rows;
mod linear_rows_of_blocks;
mod log_prob;
mod paged_attention;
mod policy_loss;
mod prefixes;
mod rms_norm;
mod rope;
mod route;
mod row_map;
mod strategies;
mod swiglu;
mod tensor_stack;
mod token_results;
mod top_k;
mod twin;
