//! The error for an invalid option.

use std::fmt;

use candle_core::Error;

/// An invalid option: its name, its value, and what it must be.
///
/// Displays as `field: value, must ...` and converts into [`candle_core::Error`], so `?` works in
/// functions with either error type. To recover it from a Candle error, call [`Invalid::find`].
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
    /// The option's path, such as `kl_penalty.coef`.
    pub field: String,
    /// The value that was given.
    pub value: String,
    /// The requirement, starting after the word "must".
    pub must: String,
}

impl Invalid {
    /// Creates an error: the option `field` has `value`, and must do or be `must`, such as
    /// `be at least 1`.
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

    /// Moves the option into `section`: its field becomes `section.field`.
    #[must_use]
    pub fn within(mut self, section: &str) -> Self {
        self.field = format!("{section}.{}", self.field);
        self
    }

    /// Applies [`Self::within`] if an invalid option caused `error`. Returns any other error
    /// unchanged.
    pub fn within_error(section: &str, error: Error) -> Error {
        match Self::find(&error) {
            Some(invalid) => invalid.clone().within(section).into(),
            None => error,
        }
    }

    /// Returns the invalid option that caused `error`, if there is one.
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
        // Several error variants display a foreign error unchanged. Only this one lets us recover
        // its type and has a fitting meaning: std's "invalid input".
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
