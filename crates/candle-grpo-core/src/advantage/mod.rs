//! From rewards to advantages.
//!
//! An estimator has up to two stages. [`GroupAdvantage`] is the sequence stage: it compares samples
//! for the same prompt. [`TokenAdvantage`] is the token stage: it computes returns and whitens over
//! tokens. An [`AdvantagePipeline`](crate::AdvantagePipeline) combines them, and has a constructor
//! for each published estimator. In a configuration file, you write the estimator's name and the
//! options that you change.
//!
//! Start with GRPO. Add a token stage if you have token rewards, a critic, or a KL penalty in the
//! reward.

pub(crate) mod batch;
pub(crate) mod estimator;
pub(crate) mod group;
pub(crate) mod group_options;
mod kl_penalty;
mod name;
mod optimal_token_baseline;
pub(crate) mod pipeline;
pub(crate) mod returns;
mod role_baseline;
mod teacher_weight;
pub(crate) mod token;
mod whiten;

pub use group::GroupStatistics;
pub use group_options::{
    Baseline, BaselinePopulation, ComponentOrder, DEFAULT_EPSILON, SingletonGroup,
    ZeroSignalScaling,
};
pub use kl_penalty::KlPenalty;
pub use name::AdvantageName;
pub use optimal_token_baseline::{OptimalTokenBaseline, TokenAlignment};
pub use returns::{MaskedTokens, reverse_recurrence};
pub use role_baseline::RoleBaselines;
pub use teacher_weight::TeacherWeight;
pub use token::TokenBaseline;
pub use whiten::{EpsilonPlacement, Whitening};

pub(crate) use batch::AdvantageBatch;
pub(crate) use estimator::{AdvantageEstimator, Advantages};
pub(crate) use group::GroupAdvantage;
pub(crate) use group_options::Scale;
pub(crate) use token::TokenAdvantage;
