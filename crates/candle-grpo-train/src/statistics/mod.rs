//! Statistics of evaluations: estimators over several completions of a prompt, confidence
//! intervals over prompts, and paired tests between two policies.

mod estimators;
mod interval;
mod paired;

pub use estimators::{majority_at, pass_at};
pub use interval::{Estimate, IntervalMethod, mean, wilson};
pub use paired::{PairedComparison, PairedTest, compare_paired};

/// The level of all intervals.
pub const CONFIDENCE: f64 = 0.95;
