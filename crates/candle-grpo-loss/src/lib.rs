//! Differentiable policy losses of the GRPO family for Candle: log-probs and advantages in, a scalar to call `backward` on
//! out.
//!
//! 1. [`log_prob`] turns logits, [`linear_log_prob`] hidden states, into log-probs (and entropies) of the sampled tokens.
//! 2. [`PolicyLoss`] says which loss; [`PolicyBatch`] holds its tensors, [`StepTotals`] its denominators.
//! 3. [`PolicyLoss::compute`] gives the loss and its [`candle_grpo_core::Metrics`].
//!
//! [`linear_policy_loss`] goes from hidden states to loss and gradients in one call, without logits.
//!
//! A [`Recipe`] adds what is done to rewards and which advantage is taken: the algorithm section of a configuration file.
//!
//! A loss is a product of [`ImportanceLevel`], [`Surrogate`], [`KlLoss`], entropy bonus and [`Aggregation`]; published
//! names are constructors such as [`PolicyLoss::grpo`].
//!
//! Shapes: B sequences, T response tokens, V vocabulary. Masks are 0/1 of any dtype; a position outside the mask never
//! influences a value or a gradient, even if it holds NaN. Arithmetic runs in f32 whatever the inputs are; f64 stays f64.

mod adaptive_entropy;
mod aggregation;
mod batch;
mod importance;
mod kl_loss;
mod limits;
mod linear_policy_loss;
mod policy_loss;
mod positive_nll;
mod presets;
mod recipe;
mod rollout_correction;
mod sample_weights;
mod selection;
mod sum_of_squared_probs;
mod surrogate;
mod totals;
mod value_loss;

pub use adaptive_entropy::AdaptiveEntropy;
pub use aggregation::Aggregation;
pub use batch::{OldPolicy, PolicyBatch};
pub use candle_grpo_core::{Kl, KlEstimator, KlGradient, Mask, MetricValues, Metrics};
pub use candle_grpo_kernels::{
    LinearGradients, LinearLogProb, LogProbOptions, TokenLogProbs, linear_log_prob, log_prob,
};
pub use importance::ImportanceLevel;
pub use kl_loss::{BiasCorrection, KlLoss, KlValues};
pub use linear_policy_loss::{LinearPolicyLossOutput, linear_policy_loss};
pub use policy_loss::{EmptySequences, PolicyLoss, PolicyLossOutput, TokenTerms};
pub use positive_nll::PositiveNll;
pub use recipe::Recipe;
pub use rollout_correction::{
    Corrected, FilterLevel, FilterStatistic, ImportanceWeight, Outside, RolloutCorrection,
    RolloutFilter,
};
pub use sample_weights::{difficulty_weights, length_weights};
pub use sum_of_squared_probs::sum_of_squared_probs;
pub use surrogate::{
    Clip, ClipCov, DetachedWeight, Divergence, DivergenceMask, GeometricMean, KlCov, PositiveIf,
    SoftGate, SquaredLogRatio, Surrogate, Topr, UnifiedMask, Vespo,
};
pub use totals::StepTotals;
pub use value_loss::ValueLoss;
