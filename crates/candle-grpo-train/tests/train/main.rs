//! Tests of sampling, rewards, training and runs.

mod actor;
mod adapters;
mod ahead;
mod chat_template;
mod checkpoint;
#[cfg(target_os = "linux")]
mod code_reward;
mod common;
mod critic;
mod curriculum;
mod custom_model;
mod data_formats;
mod dataset;
mod demonstrations;
mod distillation;
#[cfg(feature = "engines")]
mod engines;
mod environment;
mod excluded;
mod generator;
#[cfg(feature = "engines")]
mod judge;
mod pretrained;
#[cfg(unix)]
mod program_reward;
mod ranks;
mod real_model;
mod recipes;
mod resume;
mod reward_model;
mod rewards;
mod sampler;
mod sft;
mod statistics;
mod trainer;
