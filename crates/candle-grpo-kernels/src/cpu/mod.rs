//! The CPU paths: SIMD chosen at run time, rows shared out to all cores.

mod element;
pub(crate) mod log_prob;
mod output;
mod simd;
mod slice;

pub(crate) use slice::{range, with_floats};
