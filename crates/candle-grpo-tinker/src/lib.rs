//! A server with the API of Tinker: the loop stays in Python, the model is in this process.
//!
//! Choose this crate if you have a training loop for the client `tinker`, or want to write one in
//! Python. If your loop is in Rust, use [`Actor`](candle_grpo_train::Actor) directly.
//!
//! [`TinkerServer`] owns one base model. Clients create LoRA adapters over it, compute losses and
//! gradients, make optimizer steps, save weights and sample. One thread does the work, in turns of
//! all models and sampling sessions. A result does not depend on the other sessions: in f32 on the
//! CPU it is bit-identical alone and beside others.
//!
//! Promised training requests, results and states are files. A server that is killed and starts
//! again with the same folder answers what it promised. Requests for samples must be sent again,
//! which the client does.
//!
//! The losses are [`PolicyLoss`](candle_grpo_loss::PolicyLoss)es, and the optimizer is
//! [`AdamW`](candle_grpo_nn::AdamW).

#![warn(clippy::missing_errors_doc)]

mod base;
mod config;
mod engine;
mod loss;
mod queue;
mod route;
mod sampling;
mod server;
mod service;
mod store;
mod wire;
mod work;

pub use config::TinkerConfig;
pub use server::{TinkerListener, TinkerServer};

/// Returns a SHA-256 digest.
fn digest(bytes: &[u8]) -> store::Digest {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).into()
}

/// Runs the README's code as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
