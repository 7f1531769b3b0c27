//! The configuration, the program and its pages.
#![allow(clippy::too_many_lines, reason = "lists of cases")]

mod accepted;
#[cfg(feature = "agents")]
mod agents;
mod changed_inputs;
mod chat;
mod chat_templates;
mod cli;
mod configuration;
mod curriculum;
mod demonstrations;
mod engines;
mod environment;
#[cfg(feature = "hub")]
mod hub;
mod init;
mod judge;
mod killed;
mod longrope;
#[cfg(feature = "mcp")]
mod mcp;
mod memory;
mod mixing;
mod models;
mod mutation;
mod overwrite;
mod push;
mod real_engines;
mod report;
mod running;
mod session;
mod sft;
mod silent_errors;
mod suites;
mod support;
mod teacher;
mod tensorboard;
#[cfg(feature = "tinker")]
mod tinker;
mod trackers;
mod train;
