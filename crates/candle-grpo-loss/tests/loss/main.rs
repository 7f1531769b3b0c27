//! Tests for the policy losses.
#![allow(clippy::too_many_lines, reason = "lists of cases")]

mod bad_input;
mod cuda_budget;
mod custom_surrogate;
mod defaults;
mod distillation_loss;
mod documentation;
mod fixture;
mod formulas;
mod fused_loss;
mod gradients;
mod group_contrast;
mod linear_policy_loss;
mod log_prob;
mod masks;
mod micro_batches;
mod observations;
mod preference_loss;
mod presets;
mod published_values;
mod recipes;
mod rollout_policies;
mod step_wide;
