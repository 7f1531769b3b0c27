//! Runs on disk: directories, checkpoints and TensorBoard events. Also evaluation and trackers.

mod alarms;
mod checkpoints;
mod dir;
mod evaluation;
mod inputs;
mod tensorboard;
mod tracker;
pub(crate) mod trainer_state;

pub use crate::folder_lock::FolderLock;
pub use crate::learn::{
    BranchPlace, RolloutBranch, RolloutLogConfig, RolloutRecord, RolloutTurn, TrainerState,
    TurnRole,
};
pub use crate::step_record::StepRecord;
pub use alarms::AlarmConfig;
pub use checkpoints::{Checkpoints, LatestCheckpoint, StepCheckpoint};
pub use dir::{ReplacedRun, ResumedRun, RunDir, StoppedRun};
pub use evaluation::{EvaluatedSample, Evaluation, evaluate};
pub use inputs::{InputChanges, RowDigest, RunInputs, prompt_digest, row_digest};
pub use tensorboard::EventFile;
pub use tracker::{Tracker, TrackerConfig};
