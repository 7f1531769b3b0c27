//! Scores that are 0 or 1.

use anyhow::Result;

use super::score::Score;
use crate::Sample;

/// Returns 1 for each sample that `is_right` accepts, 0 for the others.
pub(super) fn right_or_wrong(
    samples: &[Sample],
    is_right: impl Fn(&Sample) -> Result<bool>,
) -> Result<Vec<Score>> {
    samples
        .iter()
        .map(|sample| Ok(f32::from(is_right(sample)?).into()))
        .collect()
}
