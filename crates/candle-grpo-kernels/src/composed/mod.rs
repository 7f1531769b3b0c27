//! Composed twins: each operator in plain Candle operations.
//!
//! A twin takes the arguments of its operator and returns the same results, in every float dtype on
//! every device. It is the fallback of the operator and the reference of its tests.

pub(crate) mod adamw;
pub(crate) mod add_bias;
pub(crate) mod add_matmul;
pub(crate) mod attention;
pub(crate) mod causal_conv;
pub(crate) mod delta_states;
pub(crate) mod dequantize;
pub(crate) mod embedding;
pub(crate) mod gated_delta_rule;
mod gradient;
pub(crate) mod gradient_norm;
pub(crate) mod linear_log_prob;
pub(crate) mod linear_rows;
pub(crate) mod log_prob;
pub(crate) mod paged_attention;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod swiglu;

pub use adamw::adamw;
pub use add_bias::add_bias;
pub use add_matmul::add_matmul;
pub use attention::attention;
pub use causal_conv::causal_conv;
pub use dequantize::dequantize;
pub use embedding::embedding;
pub use gated_delta_rule::gated_delta_rule;
pub(crate) use gradient::gradients;
pub use gradient_norm::{scale_gradients, squared_gradient_norms};
pub use linear_log_prob::linear_log_prob;
pub use linear_rows::linear_rows;
pub use log_prob::log_prob;
pub use paged_attention::paged_attention;
pub use rms_norm::rms_norm;
pub use rope::rope;
pub use swiglu::{geglu, swiglu};
