//! The program and its pages.

mod cli;
mod overwrite;
mod report;
mod support;
mod tensorboard;
mod train;
