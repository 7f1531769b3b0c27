//! The operators. A folder has one operator's paths: `cpu`, `cuda` and its twin, `composed`.

pub(crate) mod adamw;
pub(crate) mod add;
pub(crate) mod add_bias;
pub(crate) mod add_matmul;
pub(crate) mod attention;
pub(crate) mod causal_conv;
pub(crate) mod delta_gates;
pub(crate) mod delta_states;
pub(crate) mod dequantize;
pub(crate) mod draw_tokens;
pub(crate) mod embedding;
pub(crate) mod gated_delta_rule;
pub(crate) mod gradient_norm;
pub(crate) mod head_transform;
pub(crate) mod linear_log_prob;
pub(crate) mod linear_rows;
pub(crate) mod log_prob;
pub(crate) mod paged_attention;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod route;
pub(crate) mod row_map;
pub(crate) mod sigmoid;
pub(crate) mod soft_cap;
pub(crate) mod swiglu;
pub(crate) mod top_k;
