//! What a run is, from a file of YAML or TOML.

mod algorithm;
mod algorithm_keys;
mod document;
mod error;
mod merge;
mod preset;
mod roll;
mod run;
mod sections;

pub use algorithm::{
    AdvEstimator, AlgorithmConfig, ImportanceSampling, KlPenaltyName, LossAggMode, PgVariant,
};
pub use document::Document;
pub use error::ConfigError;
pub use preset::Preset;
pub use roll::{RollFile, RollKey, Verdict};
pub use run::RunConfig;
pub use sections::{CheckpointConfig, EvaluationConfig, ModelConfig};
