//! The composed twins: each operator in plain Candle operations, slow and obvious.
//!
//! They take and give what the operators do, on every device and in f64 too.

mod log_prob;

pub use log_prob::log_prob;
pub(crate) use log_prob::rows as log_prob_rows;
