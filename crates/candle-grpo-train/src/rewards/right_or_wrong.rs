//! Scores of 0 or 1.

use anyhow::Result;

use crate::Sample;

/// Returns 1 for each sample that `is_right` accepts, 0 for the others.
pub(super) fn right_or_wrong(
    samples: &[Sample],
    is_right: impl Fn(&Sample) -> Result<bool>,
) -> Result<Vec<f32>> {
    samples
        .iter()
        .map(|sample| Ok(f32::from(is_right(sample)?)))
        .collect()
}
