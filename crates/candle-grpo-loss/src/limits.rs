//! Checks of single options; the error names the option and what it must be.

use candle_core::{Result, bail};

/// An error that names `name` unless `x` is positive and finite.
pub(crate) fn check_positive(name: &str, x: f64) -> Result<()> {
    if !(x > 0. && x.is_finite()) {
        bail!("{name}: {x}, must be positive and finite");
    }
    Ok(())
}

/// An error that names `name` unless `x` is at least 0 and finite.
pub(crate) fn check_not_negative(name: &str, x: f64) -> Result<()> {
    if !(x >= 0. && x.is_finite()) {
        bail!("{name}: {x}, must be at least 0 and finite");
    }
    Ok(())
}
