//! Parameters that files may store as one tensor.

use std::ops::Range;

/// Several parameters that a file may store as one tensor.
#[derive(Debug)]
pub(crate) struct Stack {
    pub(crate) name: String,
    /// One matrix per index.
    pub(crate) shape: [usize; 3],
    pub(crate) parts: Vec<Part>,
}

/// A parameter within a [`Stack`]: rows from one of its matrices.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) index: usize,
    pub(crate) rows: Range<usize>,
}
