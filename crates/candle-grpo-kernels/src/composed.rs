//! Composed twins: each operator in plain Candle operations.
//!
//! A twin has the same arguments and results as its operator, in every float dtype on every device.
//! It is the operator's fallback and the reference in its tests.

pub use crate::ops::adamw::composed::adamw;
pub use crate::ops::add_bias::composed::add_bias;
pub use crate::ops::add_matmul::composed::add_matmul;
pub use crate::ops::attention::composed::attention;
pub use crate::ops::causal_conv::composed::causal_conv;
pub use crate::ops::dequantize::composed::dequantize;
pub use crate::ops::embedding::composed::embedding;
pub use crate::ops::experts::composed::experts;
pub use crate::ops::gated_delta_rule::composed::gated_delta_rule;
pub use crate::ops::gradient_norm::composed::{scale_gradients, squared_gradient_norms};
pub use crate::ops::linear_log_prob::composed::linear_log_prob;
pub use crate::ops::linear_rows::composed::linear_rows;
pub use crate::ops::log_prob::composed::log_prob;
pub use crate::ops::paged_attention::composed::paged_attention;
pub use crate::ops::rms_norm::composed::rms_norm;
pub use crate::ops::rope::composed::rope;
pub use crate::ops::route::composed::route;
pub use crate::ops::swiglu::composed::{geglu, swiglu};
