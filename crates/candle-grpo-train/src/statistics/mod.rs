//! Evaluation statistics: estimators over several completions per prompt, confidence intervals over
//! prompts, and paired tests between two policies.

mod estimators;
#[cfg(feature = "statistics")]
mod interval;
#[cfg(feature = "statistics")]
mod paired;

pub use estimators::{majority_at, pass_at};
#[cfg(feature = "statistics")]
pub use interval::{Estimate, IntervalMethod, mean, wilson};
#[cfg(feature = "statistics")]
pub use paired::{PairedComparison, PairedTest, compare_paired};

/// Confidence level for all intervals.
pub const CONFIDENCE: f64 = 0.95;
