//! Server options.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use candle_grpo_core::validate::{at_least_one, check};
use candle_grpo_train::ComputeDType;

/// Options for a [`TinkerServer`](crate::TinkerServer).
#[derive(Debug, Clone, PartialEq)]
pub struct TinkerConfig {
    /// Address to listen at. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// Folder for sessions, results and weights. A server that starts again continues there.
    pub folder: PathBuf,
    /// Model name for clients, which they pass as `base_model`.
    pub model_name: String,
    /// Environment variable with the API key. Required unless `listen` is a loopback address.
    pub api_key_env: Option<String>,
    /// The compute dtype.
    pub compute_dtype: ComputeDType,
    /// Maximum number of tokens that a training pass reads, unless a single example has more.
    pub micro_batch_tokens: usize,
    /// Maximum number of samples that are drawn at the same time. With an
    /// [engine](crate::TinkerListener::with_engine), of requests for samples.
    pub max_batch_size: usize,
    /// Maximum request body size in bytes, also after decompression.
    pub max_request_bytes: usize,
    /// Maximum number of requests that wait, for each model and sampling session.
    pub max_waiting: usize,
    /// Number of models whose adapters and optimizers stay in memory, and number of saved weights
    /// that stay in memory to sample from, which is also the most that share a batch. Others are
    /// loaded again from the folder when their turn comes.
    pub max_loaded_models: usize,
}

impl TinkerConfig {
    /// Returns the defaults for a model: loopback on a free port.
    pub fn new(folder: impl Into<PathBuf>, model_name: impl Into<String>) -> Self {
        Self {
            listen: ([127, 0, 0, 1], 0).into(),
            folder: folder.into(),
            model_name: model_name.into(),
            api_key_env: None,
            compute_dtype: ComputeDType::F32,
            micro_batch_tokens: 4096,
            max_batch_size: 64,
            max_request_bytes: 64 << 20,
            max_waiting: 1024,
            max_loaded_models: 8,
        }
    }

    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Names the first option that is invalid.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in [
            ("micro_batch_tokens", self.micro_batch_tokens),
            ("max_batch_size", self.max_batch_size),
            ("max_request_bytes", self.max_request_bytes),
            ("max_waiting", self.max_waiting),
            ("max_loaded_models", self.max_loaded_models),
        ] {
            at_least_one(name, value)?;
        }
        let name = &self.model_name;
        check(
            !name.is_empty(),
            "model_name",
            "\"\"",
            "have at least one character",
        )?;
        ensure!(
            self.listen.ip().is_loopback() || self.api_key_env.is_some(),
            "api_key_env: absent, must name a variable with a key, because other machines reach {}",
            self.listen
        );
        Ok(())
    }
}
