//! Configured runs: the library behind the program `grpo`.

mod engine;
mod evaluation;
mod folder;
mod hub;
mod memory;
mod model;
mod prompts;
mod resume;
mod run_session;
mod session;
mod sft;
mod teacher;
mod trajectories;

pub use engine::{adapter_engine, engine};
pub use evaluation::evaluate_policy;
pub use folder::Start;
pub use hub::{check_upload, locate, locate_files, upload};
pub use memory::{RankPlans, RunMemory, SftMemory, recorded_micro_batch_tokens, sft_memory};
pub use model::{
    clock_of_run, device, load_base, load_model, load_model_without_weights, load_policy,
    load_policy_on_ranks, model_path,
};
pub(crate) use prompts::all_prompts;
pub use prompts::{RunPrompts, prompts};
pub use resume::recorded_inputs;
pub use run_session::{Progress, RunSession};
pub use session::Session;
pub use sft::SftSession;
pub use trajectories::trajectories;
