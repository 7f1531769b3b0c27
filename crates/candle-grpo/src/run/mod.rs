//! Runs of a configuration: the library behind the program `grpo`.

mod engine;
mod evaluation;
mod model;
mod prompts;
mod resume;
mod session;

pub use engine::engine;
pub use evaluation::evaluate_policy;
pub use model::{device, load_model, load_model_without_weights, load_policy, model_path};
pub use prompts::{RunPrompts, prompts};
pub use session::{Progress, Session, Start};
