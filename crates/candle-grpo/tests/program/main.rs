//! The program and its pages.

mod accepted;
mod changed_inputs;
mod cli;
mod mutation;
mod overwrite;
mod report;
mod silent_errors;
mod support;
mod tensorboard;
mod train;
