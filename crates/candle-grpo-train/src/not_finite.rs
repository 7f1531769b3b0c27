//! The error of NaN and infinity.

use std::error::Error;
use std::fmt;

/// The error of a step that would learn from a NaN or an infinity, or of a checkpoint that would
/// have one in its weights. A step with this error changes nothing, and no checkpoint is written.
///
/// It is found by its type in an error with any context: `error.is::<NotFinite>()`.
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

    /// The name of the tensor.
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
