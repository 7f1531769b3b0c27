//! Differentiable policy losses in the GRPO family for Candle: from log-probs and advantages to a
//! scalar loss.
//!
//! Choose this crate if you have your own model and training loop. `candle-grpo-core` computes the
//! advantages, and `candle-grpo-train` has a complete trainer.
//!
//! # Start here
//!
//! 1. Compute log-probs and entropies for the sampled tokens: with [`log_prob`] from logits, or
//!    with [`linear_log_prob`] from hidden states. If prompts or responses have different lengths,
//!    [`PaddedTokens`] makes their tensors.
//! 2. Choose a loss, such as [`PolicyLoss::grpo`] or [`PolicyLoss::dapo`]. Put its tensors into a
//!    [`PolicyBatch`], and count its denominators over the whole optimizer step with
//!    [`StepTotals`].
//! 3. Call [`PolicyLoss::compute`]. It returns the loss and [`Metrics`].
//!
//! Before the first update, the ratio is 1 and group advantages add up to about 0, so a clipped
//! loss is about 0 by construction. Its value says little about progress: watch the reward. The
//! metrics `clip_fraction` and `approx_kl` show how far an update moves the policy.
//!
//! If the logits do not fit in memory, use [`linear_policy_loss`]: it goes from hidden states to
//! loss and gradients in one call.
//!
//! # Build your own loss
//!
//! A loss combines [`ImportanceLevel`], [`Surrogate`], [`KlLoss`], entropy bonus and
//! [`Aggregation`]. For another surrogate, implement [`TokenLoss`]. A [`Recipe`] adds reward
//! shaping and advantages: it is the section `recipe` in a configuration file. Items in
//! [`experimental`] may change between releases.
//!
//! The re-exports below are documented in their own crates. In the examples there, you can replace
//! the crate name by `candle_grpo_loss`.
//!
//! # Compatibility
//!
//! Options are structs with public fields and a `Default`, and releases add fields. End a literal
//! with `..Default::default()` or a constructor, such as `..PolicyLoss::dapo()`. Enums that may
//! grow, and results, are `#[non_exhaustive]`.
//!
//! # Gradients
//!
//! Some candle-nn operators have no backward pass:
//! `candle_nn::ops::{rms_norm, layer_norm, softmax_last_dim, sdpa}` and
//! `candle_nn::rotary_emb::{rope, rope_i, rope_thd}`. They cut the graph without an error, so
//! candle-transformers models train few of their variables. [`ensure_gradients`] names the
//! variables that a loss does not reach. For operators with gradients, use `candle-grpo-kernels`.
//! For a decoder that loads Hugging Face directories, use `candle-grpo-nn`.
//!
//! # Devices
//!
//! ```
//! // The first GPU in a build with the feature `cuda`, otherwise the CPU.
//! let device = candle_grpo_loss::default_device()?;
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! Open a GPU with [`default_device`] or [`cuda_device`], which give all threads one stream.
//! Devices from `Device::cuda_if_available` are rejected. A batch's tensors must be on one device,
//! but values per sequence (`[B]` or `[B, 1]`), such as advantages, may be on the CPU. On a machine
//! without a GPU, for example in CI, build without the feature.
//!
//! # Shapes
//!
//! B sequences, T response tokens, V vocabulary. Masks are 0/1 in any dtype. A position outside the
//! mask never influences a value or a gradient, even if it holds NaN. Arithmetic runs in f32; f64
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
    EarlyWeight, EmptySequences, EntropyTokens, LayerPart, LinearPolicyLossOutput, OldPolicy,
    PolicyBatch, PolicyLoss, PolicyLossOutput, Student, TeacherTerm, TeacherTermForm,
    linear_policy_loss, linear_policy_loss_of_part,
};
pub use positive_nll::PositiveNll;
pub use preference_loss::PreferenceLoss;
pub use recipe::Recipe;
pub use sum_of_squared_probs::sum_of_squared_probs;
pub use surrogate::{Clip, Surrogate, TokenLoss};
pub use totals::StepTotals;
pub use value_loss::{ErrorLoss, ValueLoss};

/// Runs the README's code as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
