//! Scores from a language model behind a server.

#[cfg(feature = "engines")]
mod answer;
#[cfg(feature = "engines")]
mod cache;
mod config;
#[cfg(feature = "engines")]
mod limits;
#[cfg(feature = "engines")]
mod reward;
mod score;

pub use config::{BudgetExhausted, JudgeConfig, OnBudget};
#[cfg(feature = "engines")]
pub use reward::JudgeReward;
pub use score::{JudgeScore, ScoreReader};
