//! Supervised fine-tuning (SFT): maximizes the likelihood of given answers.
//!
//! ```text
//! rows ──SftDataConfig::load──▶ SftDataset: tokens and weights ──SftTrainer──▶ policy
//! ```
//!
//! A row is a conversation, a prompt and its completion, or text. [`SftTrainer`] minimizes the mean
//! negative log-prob of the tokens that train. You can start a [`Trainer`](crate::Trainer) from its
//! checkpoints.

mod assistant_turns;
mod config;
mod data_config;
mod dataset;
mod marked_text;
mod memory_plan;
mod metrics;
mod parts;
mod row_encoder;
mod trainer;

pub use config::{SftConfig, SftSchedule};
pub use data_config::{SftDataConfig, TrainOn, Truncation};
pub use dataset::{SftDataset, SftRows};
pub use marked_text::marked_text;
pub use metrics::{SftMetrics, SftSeconds};
pub use parts::SftParts;
pub use trainer::SftTrainer;
