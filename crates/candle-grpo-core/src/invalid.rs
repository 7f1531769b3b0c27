//! The error of an invalid option.

use std::fmt;

use candle_core::Error;

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
    #[must_use]
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
}
