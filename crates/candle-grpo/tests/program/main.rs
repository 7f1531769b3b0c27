//! The program and its pages.

mod cli;
mod report;
mod tensorboard;
mod train;
