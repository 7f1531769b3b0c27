//! Option checks, which return [`Invalid`].

use std::fmt;

use serde::Serialize;

use crate::Invalid;

/// Displays an option's variant by its name in a configuration file.
///
/// A variant with its own options displays as `given`.
pub struct Name<'a, T>(pub &'a T);

impl<T: Serialize> fmt::Display for Name<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.serialize(&mut *f).or_else(|_| f.write_str("given"))
    }
}

/// A check's result.
pub type Checked = std::result::Result<(), Invalid>;

/// Returns the error with `field`, `value` and `must` unless `valid`.
///
/// # Errors
///
/// Fails unless `valid`.
pub fn check(valid: bool, field: &str, value: impl fmt::Display, must: &str) -> Checked {
    if valid {
        Ok(())
    } else {
        Err(Invalid::new(field, value, must))
    }
}

/// Checks that `x` is not NaN and not infinite.
///
/// # Errors
///
/// Fails with `field`, its value and the requirement.
pub fn finite(field: &str, x: f64) -> Checked {
    check(x.is_finite(), field, x, "be finite")
}

/// Checks that `x` is positive and finite.
///
/// # Errors
///
/// Fails with `field`, its value and the requirement.
pub fn positive(field: &str, x: f64) -> Checked {
    check(x > 0. && x.is_finite(), field, x, "be positive and finite")
}

/// Checks that `x` is at least 0 and finite.
///
/// # Errors
///
/// Fails with `field`, its value and the requirement.
pub fn non_negative(field: &str, x: f64) -> Checked {
    let valid = x >= 0. && x.is_finite();
    check(valid, field, x, "be finite and at least 0")
}

/// Checks that `x` lies from 0 to 1, both included.
///
/// # Errors
///
/// Fails with `field`, its value and the requirement.
pub fn unit_interval(field: &str, x: f64) -> Checked {
    check((0. ..=1.).contains(&x), field, x, "be from 0 to 1")
}

/// Checks that `x` is a share of something: above 0 and at most 1.
///
/// # Errors
///
/// Fails with `field`, its value and the requirement.
pub fn share(field: &str, x: f64) -> Checked {
    let valid = x > 0. && x <= 1.;
    check(valid, field, x, "be above 0 and at most 1")
}

/// Checks that `x` is at least 1.
///
/// # Errors
///
/// Fails with `field`, its value and the requirement.
pub fn at_least_one(field: &str, x: usize) -> Checked {
    check(x > 0, field, x, "be at least 1")
}

/// Checks that clip bounds are finite and in order.
///
/// # Errors
///
/// Fails with `field`, its value and the requirement.
pub fn range(field: &str, [low, high]: [f64; 2]) -> Checked {
    check(
        low < high && low.is_finite() && high.is_finite(),
        field,
        format_args!("[{low}, {high}]"),
        "be two finite numbers, the smaller one first",
    )
}

/// Checks a variance's delta degrees of freedom.
///
/// # Errors
///
/// Fails with `field`, its value and the requirement.
pub fn ddof(field: &str, x: usize) -> Checked {
    check(x <= 1, field, x, "be 0 or 1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_accept_their_bounds_and_refuse_nan_and_infinity() {
        for x in [f64::NAN, f64::INFINITY] {
            assert!(finite("x", x).is_err());
            assert!(positive("x", x).is_err());
            assert!(non_negative("x", x).is_err());
            assert!(unit_interval("x", x).is_err());
            assert!(share("x", x).is_err());
            assert!(range("x", [0., x]).is_err());
        }
        assert!(positive("x", 0.).is_err() && non_negative("x", 0.).is_ok());
        assert!(share("x", 0.).is_err() && share("x", 1.).is_ok());
        assert!(unit_interval("x", 0.).is_ok() && unit_interval("x", 1.).is_ok());
        assert!(range("x", [1., 1.]).is_err() && range("x", [0., 1.]).is_ok());
        assert!(at_least_one("x", 0).is_err() && at_least_one("x", 1).is_ok());
    }
}
