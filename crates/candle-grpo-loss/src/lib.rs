//! Differentiable policy losses of the GRPO family for Candle: log-probs and advantages to a scalar
//! loss.
//!
//! 1. [`PaddedTokens`] makes tensors of prompts and responses of unequal length. [`log_prob`]
//!    computes log-probs and entropies of the sampled tokens from logits, [`linear_log_prob`] from
//!    hidden states.
//! 2. [`PolicyLoss`] configures the loss, [`PolicyBatch`] holds its tensors, [`StepTotals`] its
//!    denominators.
//! 3. [`PolicyLoss::compute`] returns the loss and its [`Metrics`].
//!
//! [`linear_policy_loss`] goes from hidden states to loss and gradients in one call, without
//! logits.
//!
//! A loss combines [`ImportanceLevel`], [`Surrogate`], [`KlLoss`], entropy bonus and
//! [`Aggregation`]. Published losses are constructors such as [`PolicyLoss::grpo`]. A [`Recipe`]
//! adds reward shaping and advantages: the algorithm section of a configuration file. A custom
//! surrogate implements [`TokenLoss`]. Items in [`experimental`] may change between releases.
//!
//! The re-exports below are documented in the crates that they come from. In the examples there,
//! `candle_grpo_loss` may replace the name of that crate.
//!
//! # Compatibility
//!
//! Options are structs with public fields and a `Default`, and releases add fields: end a literal
//! with `..Default::default()` or a constructor, such as `..PolicyLoss::dapo()`. Enums that may
//! grow, and results, are `#[non_exhaustive]`.
//!
//! # Gradients
//!
//! `candle_nn::ops::{rms_norm, layer_norm, softmax_last_dim, sdpa}` and
//! `candle_nn::rotary_emb::{rope, rope_i, rope_thd}` have no backward pass and cut the graph
//! without an error, so models of candle-transformers train few of their variables.
//! [`ensure_gradients`] names the variables that a loss does not reach. Operators with gradients
//! are in `candle-grpo-kernels`, and a decoder that loads Hugging Face folders in `candle-grpo-nn`.
//!
//! # Devices
//!
//! ```
//! // The first GPU in a build with the feature `cuda`, otherwise the CPU.
//! let device = candle_grpo_loss::default_device()?;
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! A GPU is opened with [`default_device`] or [`cuda_device`], which give all threads one stream.
//! The devices of `Device::cuda_if_available` are rejected. Tensors of a batch are on one device,
//! except that values per sequence (`[B]` or `[B, 1]`), such as advantages, may be on the CPU.
//! Without a GPU, for example in CI, build without the feature.
//!
//! # Shapes
//!
//! B sequences, T response tokens, V vocabulary. Masks are 0/1 in any dtype. A position outside the
//! mask never influences a value or a gradient, even if it holds NaN. Arithmetic is in f32; f64
//! inputs stay f64.

#![warn(clippy::missing_errors_doc)]

mod adaptive_entropy;
mod aggregation;
pub mod correction;
mod distillation_loss;
mod distribution_statistics;
mod divergence;
pub mod experimental;
mod importance_level;
mod kl_loss;
mod padded_tokens;
mod policy_loss;
mod positive_nll;
mod preference_loss;
mod recipe;

mod softmax;
mod sum_of_squared_probs;
pub mod surrogate;
mod totals;
mod value_loss;

pub use adaptive_entropy::AdaptiveEntropy;
pub use aggregation::Aggregation;
#[doc(no_inline)]
pub use candle_grpo_core::kl::KlGradient;
#[doc(no_inline)]
pub use candle_grpo_core::{Kl, KlEstimator, Mask, MetricValues, Metrics};
#[doc(no_inline)]
pub use candle_grpo_kernels::{
    LinearGradients, LinearLogProb, LogProbOptions, TokenLogProbs, cuda_device, default_device,
    ensure_gradients, linear_log_prob, log_prob,
};
pub use correction::{RolloutCorrection, RolloutWeights};
pub use distillation_loss::{
    DistillationLoss, LinearDistillationOutput, OutputLayer, Support, Tail, TeacherLogits,
    linear_distillation_bytes, linear_distillation_loss,
};
pub use distribution_statistics::{DistributionStatistics, distribution_statistics};
pub use importance_level::ImportanceLevel;
pub use kl_loss::{BiasCorrection, KlLoss};
pub use padded_tokens::PaddedTokens;
pub use policy_loss::{
    EarlyWeight, EmptySequences, EntropyTokens, LinearPolicyLossOutput, OldPolicy, PolicyBatch,
    PolicyLoss, PolicyLossOutput, Student, TeacherTerm, TeacherTermForm, linear_policy_loss,
};
pub use positive_nll::PositiveNll;
pub use preference_loss::PreferenceLoss;
pub use recipe::Recipe;
pub use sum_of_squared_probs::sum_of_squared_probs;
pub use surrogate::{Clip, Surrogate, TokenLoss};
pub use totals::StepTotals;
pub use value_loss::{ErrorLoss, ValueLoss};

/// Runs the code of the README as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
