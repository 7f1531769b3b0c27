//! Models and data sets on the Hugging Face hub, and requests for all HTTP clients.
//!
//! [`HubName`] is a name such as `Qwen/Qwen2.5-0.5B-Instruct@main`. With the feature `client`,
//! `Hub::locate` returns where its files are in the cache, and downloads missing ones.
//! `Hub::upload` uploads a folder to a repository.

#[cfg(feature = "client")]
mod cache;
#[cfg(feature = "client")]
mod client;
#[cfg(feature = "client")]
mod download;
#[cfg(feature = "client")]
mod environment;
#[cfg(feature = "client")]
mod files;
#[cfg(feature = "client")]
pub mod http;
#[cfg(feature = "client")]
mod locate;
mod name;
#[cfg(feature = "client")]
mod upload;
mod uploaded;

use std::fmt;
use std::path::PathBuf;

#[cfg(feature = "client")]
pub use locate::Hub;
pub use name::{HubKind, HubName, is_gguf};
pub use uploaded::{Transfer, UploadOptions, Uploaded, UploadedFile};

/// The part of a repository that you need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HubContent {
    /// A model: `config.json`, the tokenizer and the safetensors weights, or the GGUF file in the
    /// name.
    Model,
    /// Like [`Self::Model`], without downloading weights.
    ModelWithoutWeights,
    /// The file in the name.
    Data,
}

/// A repository's files in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// The commit's folder, or the file in the name.
    pub path: PathBuf,
    /// The commit that the revision stands for: 40 hexadecimal digits.
    pub commit: String,
    /// Weights that are not in the cache. Always empty except with
    /// [`HubContent::ModelWithoutWeights`].
    pub missing: Vec<MissingFile>,
}

/// A file that is not in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingFile {
    /// Path in the repository.
    pub file: String,
    /// The size in bytes, if the server reports it.
    pub bytes: Option<u64>,
}

/// A failed transfer: the server does not respond, or sends different bytes than it should. The
/// same request may succeed later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferError(pub(crate) String);

impl fmt::Display for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TransferError {}

/// Runs the README example as a doc test.
#[cfg(all(doctest, feature = "client"))]
#[doc = include_str!("../README.md")]
struct Readme;
