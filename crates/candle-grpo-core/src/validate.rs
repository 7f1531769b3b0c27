//! Validation of options: one typed error, and the checks that produce it.

use std::fmt;

use candle_core::Error;
use serde::Serialize;

/// An invalid option: its name, its value, and what it must be.
///
/// It displays as `field: value, must ...` and converts into [`candle_core::Error`], so `?` works
/// in functions of both error types. [`Invalid::find`] recovers it from there.
///
/// ```
/// use candle_grpo_core::{GroupAdvantage, Invalid, Scale};
///
/// let function = GroupAdvantage { epsilon: -1., ..GroupAdvantage::grpo() };
/// let error = function.compute(&[0., 1.], 2, Scale::Group).unwrap_err();
/// assert_eq!(error.to_string(), "epsilon: -1, must be finite and at least 0");
/// assert_eq!(Invalid::find(&error).map(|invalid| invalid.field.as_str()), Some("epsilon"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// The path of the option, such as `kl_penalty.coef`.
    pub field: String,
    /// The value that was given.
    pub value: String,
    /// The requirement, starting after the word "must".
    pub must: String,
}

impl Invalid {
    /// The option `field` has `value` and must do or be `must`, such as `be at least 1`.
    pub fn new(
        field: impl Into<String>,
        value: impl fmt::Display,
        must: impl Into<String>,
    ) -> Self {
        Self {
            field: field.into(),
            value: value.to_string(),
            must: must.into(),
        }
    }

    /// The same error for an option inside `section`: its field becomes `section.field`.
    pub fn within(mut self, section: &str) -> Self {
        self.field = format!("{section}.{}", self.field);
        self
    }

    /// Applies [`Self::within`] to an error that an invalid option has caused. Returns any other
    /// error unchanged.
    pub fn within_error(section: &str, error: Error) -> Error {
        match Self::find(&error) {
            Some(invalid) => invalid.clone().within(section).into(),
            None => error,
        }
    }

    /// Finds the invalid option that caused `error`, if it has such a cause.
    pub fn find(error: &Error) -> Option<&Self> {
        match error {
            Error::Io(error) => error.get_ref()?.downcast_ref(),
            Error::Context { inner, .. }
            | Error::WithPath { inner, .. }
            | Error::WithBacktrace { inner, .. } => Self::find(inner),
            Error::WrappedContext { wrapped, .. } => wrapped
                .downcast_ref()
                .or_else(|| Self::find(wrapped.downcast_ref()?)),
            _ => None,
        }
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}, must {}", self.field, self.value, self.must)
    }
}

impl std::error::Error for Invalid {}

impl From<Invalid> for Error {
    fn from(invalid: Invalid) -> Self {
        // Of the variants of the error that display a foreign error unchanged, the only one whose
        // contents can be recovered by type and whose meaning fits: std's "invalid input".
        std::io::Error::new(std::io::ErrorKind::InvalidInput, invalid).into()
    }
}

/// Displays an option of several names by its name in a configuration file.
///
/// A name that has options of its own is displayed as `given`.
pub struct Name<'a, T>(pub &'a T);

impl<T: Serialize> fmt::Display for Name<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.serialize(&mut *f).or_else(|_| f.write_str("given"))
    }
}

/// The result of a check.
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

/// Checks that the bounds of a clip are finite and in order.
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

/// Checks the delta degrees of freedom of a variance.
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
    fn an_invalid_option_is_found_in_a_candle_error_with_and_without_context() {
        let invalid = Invalid::new("coef", 7, "be at most 1").within("kl");
        let plain = Error::from(invalid.clone());
        assert_eq!(plain.to_string(), "kl.coef: 7, must be at most 1");
        assert_eq!(Invalid::find(&plain), Some(&invalid));
        assert_eq!(Invalid::find(&plain.context("step 3")), Some(&invalid));
        assert_eq!(Invalid::find(&Error::Msg("kl.coef: 7".to_owned())), None);
    }

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
