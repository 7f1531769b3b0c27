//! Runs from a configuration: what the program `grpo` does, for programs of one's own.

mod evaluation;
mod model;
mod prompts;
mod resume;
mod session;

pub use evaluation::evaluate_policy;
pub use model::{load_model, model_path};
pub use prompts::{RunPrompts, prompts};
pub use session::{Progress, Session, Start};
