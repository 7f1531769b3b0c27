//! The configuration, the program and its pages.

mod accepted;
mod changed_inputs;
mod cli;
mod configuration;
mod engines;
mod environment;
#[cfg(feature = "hub")]
mod hub;
mod judge;
mod mutation;
mod overwrite;
mod real_engines;
mod report;
mod session;
mod silent_errors;
mod support;
mod tensorboard;
mod train;
