//! The program and its pages.

mod changed_inputs;
mod cli;
mod overwrite;
mod report;
mod silent_errors;
mod support;
mod tensorboard;
mod train;
