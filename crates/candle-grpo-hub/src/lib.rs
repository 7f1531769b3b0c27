//! Models and data sets of the Hugging Face hub, and the requests of all HTTP clients.
//!
//! [`HubName`] is a name such as `Qwen/Qwen2.5-0.5B-Instruct@main`. With the feature `client`,
//! `Hub::locate` returns where its files are in the cache, and downloads those that are missing.

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

use std::fmt;
use std::path::PathBuf;

#[cfg(feature = "client")]
pub use locate::Hub;
pub use name::{HubKind, HubName};

/// The part of a repository that is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HubContent {
    /// A model: `config.json`, the tokenizer and the weights in safetensors files, or the one GGUF
    /// file that the name has.
    Model,
    /// [`Self::Model`] without downloads of weights.
    ModelWithoutWeights,
    /// The file of the name.
    Data,
}

/// Files of a repository in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// The folder of the commit, or the file of the name.
    pub path: PathBuf,
    /// The commit that the revision stands for: 40 hexadecimal digits.
    pub commit: String,
    /// The weights that are not in the cache. Empty unless [`HubContent::ModelWithoutWeights`] was
    /// located.
    pub missing: Vec<MissingFile>,
}

/// A file that is not in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingFile {
    /// The path in the repository.
    pub file: String,
    /// The size in bytes, if the server reports it.
    pub bytes: Option<u64>,
}

/// The error of a transfer: the server does not respond, or sends other bytes than it should. The
/// same request may succeed later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferError(pub(crate) String);

impl fmt::Display for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TransferError {}

/// Runs the code of the README as a documentation test.
#[cfg(all(doctest, feature = "client"))]
#[doc = include_str!("../README.md")]
struct Readme;
