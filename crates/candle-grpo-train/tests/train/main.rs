//! Tests sampling, rewards, training and runs.

mod actor;
mod adapters;
mod ahead;
mod chat_template;
mod checkpoint;
mod common;
mod critic;
mod cuda_budget;
mod cuda_out_of_memory;
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
mod host_memory;
mod memory_fit;
mod partial;
mod pretrained;
mod ranks;
mod real_model;
mod recipes;
mod resume;
mod reward_model;
mod sampler;
mod self_teacher;
mod several_teachers;
mod sft;
#[cfg(feature = "statistics")]
mod statistics;
mod teacher_samples;
mod teams;
mod trainer;
mod trajectories;
