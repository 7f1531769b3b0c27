//! Run configuration, from a YAML or TOML file.

mod algorithm;
mod algorithm_keys;
mod bounds;
mod culprit;
mod document;
mod error;
mod former;
mod hub_files;
mod import;
mod merge;
mod other_names;
mod preset;
mod problem;
mod run;
mod schema;
mod sections;
mod sft;
mod sft_names;
mod suggestions;
mod suite;
mod syntax;
mod tree;

pub use algorithm::{AdvEstimator, AlgorithmConfig, PgVariant};
pub use document::Document;
pub use error::ConfigError;
pub use hub_files::{Configuration, HubFiles, Locate};
pub use import::{Import, ImportedKey, OtherDefault, Severity, Sizes, System, Verdict};
pub use preset::{Algorithm, Preset};
pub use run::RunConfig;
pub use schema::{run_schema, section_schema, sft_schema, suite_schema};
pub use sections::{CheckpointConfig, EvaluationConfig, ModelConfig, TeacherConfig};
pub use sft::{SftEvaluationConfig, SftRunConfig};
pub use suite::{ChoicesConfig, SuiteConfig};
