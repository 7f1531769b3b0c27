//! Evaluation suites: prompts of a benchmark, the results of a model on them, and comparisons of
//! two models.

mod comparison;
mod prompts;
mod results;

pub use comparison::{SuiteComparison, compare};
pub use prompts::{SuitePrompts, read_rows};
pub use results::{PromptResult, SampleResult, SuiteSummary, evaluate_suite};
