//! Scores from a language model behind a server.

#[cfg(feature = "judge")]
mod answer;
#[cfg(feature = "judge")]
mod cache;
mod config;
#[cfg(feature = "judge")]
mod limits;
#[cfg(feature = "judge")]
mod reward;
mod score;

pub use config::{BudgetExhausted, JudgeConfig, OnBudget};
#[cfg(feature = "judge")]
pub use reward::JudgeReward;
pub use score::{JudgeScore, ScoreReader};
