//! The error for NaN and infinity.

use std::error::Error;
use std::fmt;

/// The error when a step would learn from NaN or infinity, or when a checkpoint's weights would
/// contain one. The step then changes nothing, and no checkpoint is written.
///
/// You can find it by type in an error with any context: `error.is::<NotFinite>()`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotFinite {
    tensor: String,
    consequence: &'static str,
}

impl NotFinite {
    pub(crate) fn new(tensor: impl Into<String>) -> Self {
        Self::with_consequence(tensor, "nothing was learned from it")
    }

    pub(crate) fn with_consequence(tensor: impl Into<String>, consequence: &'static str) -> Self {
        Self {
            tensor: tensor.into(),
            consequence,
        }
    }

    /// Tensor name.
    pub fn tensor(&self) -> &str {
        &self.tensor
    }
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}: not finite, {}", self.tensor, self.consequence)
    }
}

impl Error for NotFinite {}
