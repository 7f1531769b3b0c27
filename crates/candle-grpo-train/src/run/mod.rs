//! Runs on disk: directories, checkpoints and TensorBoard events. Also evaluation and trackers.

mod checkpoints;
pub(crate) mod checksums;
mod dir;
mod evaluation;
mod inputs;
pub(crate) mod rollout_log;
mod step_record;
mod tensorboard;
mod tracker;
pub(crate) mod trainer_state;

pub use checkpoints::{Checkpoints, LatestCheckpoint, StepCheckpoint};
pub use dir::{ReplacedRun, ResumedRun, RunDir, StoppedRun};
pub use evaluation::{EvaluatedSample, Evaluation, evaluate};
pub use inputs::{InputChanges, RowDigest, RunInputs, prompt_digest, row_digest};
pub use rollout_log::{RolloutLogConfig, RolloutRecord, RolloutTurn, TurnRole};
pub use step_record::StepRecord;
pub use tensorboard::EventFile;
pub use tracker::{Tracker, TrackerConfig};
pub use trainer_state::TrainerState;
