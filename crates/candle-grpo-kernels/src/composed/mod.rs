//! Composed twins: each operator in plain Candle operations.
//!
//! A twin takes the arguments of its operator and returns the same results, in every float dtype on
//! every device. It is the fallback of the operator and the reference of its tests.

pub(crate) mod adamw;
pub(crate) mod add_bias;
pub(crate) mod add_matmul;
pub(crate) mod attention;
pub(crate) mod embedding;
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
pub use embedding::embedding;
pub(crate) use gradient::gradients;
pub use gradient_norm::{scale_gradients, squared_gradient_norms};
pub use linear_log_prob::linear_log_prob;
pub use linear_rows::linear_rows;
pub use log_prob::log_prob;
pub use paged_attention::paged_attention;
pub use rms_norm::rms_norm;
pub use rope::rope;
pub use swiglu::swiglu;
