//! The composed twins: each operator in plain Candle operations, slow and obvious.
//!
//! They take and give what the operators do, on every device and in f64 too.

mod adamw;
mod add_matmul;
mod attention;
mod embedding;
mod gradient;
mod gradient_norm;
mod linear_log_prob;
mod linear_rows;
mod log_prob;
mod paged_attention;
mod rms_norm;
mod rope;
mod swiglu;

pub use adamw::adamw;
pub(crate) use adamw::one as adamw_tensors;
pub(crate) use add_matmul::add as add_matmul_to;
pub use add_matmul::add_matmul;
pub use attention::attention;
pub(crate) use attention::unchecked as attention_unchecked;
pub(crate) use embedding::add as add_embedding_rows;
pub use embedding::embedding;
pub(crate) use embedding::rows as embedding_rows;
pub(crate) use gradient::gradients;
pub(crate) use gradient_norm::scale as scale_gradients_by;
pub(crate) use gradient_norm::squared_norms as squared_gradient_norms_of;
pub use gradient_norm::{scale_gradients, squared_gradient_norms};
pub use linear_log_prob::linear_log_prob;
pub(crate) use linear_log_prob::rows as linear_log_prob_rows;
pub use linear_rows::linear_rows;
pub(crate) use linear_rows::unchecked as linear_rows_unchecked;
pub use log_prob::log_prob;
pub(crate) use log_prob::rows as log_prob_rows;
pub use paged_attention::paged_attention;
pub(crate) use paged_attention::unchecked as paged_attention_unchecked;
pub(crate) use paged_attention::write as write_pages;
pub use rms_norm::rms_norm;
pub(crate) use rms_norm::unchecked as rms_norm_unchecked;
pub use rope::rope;
pub(crate) use rope::unchecked as rope_unchecked;
pub use swiglu::swiglu;
pub(crate) use swiglu::unchecked as swiglu_unchecked;
