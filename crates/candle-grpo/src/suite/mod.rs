//! Evaluation suites: benchmark prompts, a model's results on them, and comparisons between two
//! models.

mod choices;
mod comparison;
mod prompts;
mod results;

pub use comparison::{SuiteComparison, compare};
pub use prompts::{SuitePrompts, read_rows};
pub use results::{PromptResult, SampleResult, SuiteSummary, evaluate_suite};
