//! Searches by bisection.

use anyhow::Result;

/// Finds the largest number from `least` to `most` that fits, by bisection. `None` if `least` does
/// not fit.
pub(crate) fn largest(
    least: usize,
    most: usize,
    mut fits: impl FnMut(usize) -> Result<bool>,
) -> Result<Option<usize>> {
    if !fits(least)? {
        return Ok(None);
    }
    let (mut fitting, mut too_many) = (least, most.max(least) + 1);
    while too_many - fitting > 1 {
        let middle = fitting.midpoint(too_many);
        if fits(middle)? {
            fitting = middle;
        } else {
            too_many = middle;
        }
    }
    Ok(Some(fitting))
}
