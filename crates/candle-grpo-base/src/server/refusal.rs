//! Refused requests.

use std::fmt;

use hyper::Method;

/// Maximum number of characters that an error quotes from a wrong value.
const SHOWN: usize = 200;

/// The reason why a request gets no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status.
    pub status: u16,
    /// Short name, for programs.
    pub code: &'static str,
    /// Name of the wrong argument.
    pub param: Option<String>,
    /// Text for people.
    pub message: String,
}

impl Refusal {
    /// Creates a refusal without an argument.
    pub fn new(status: u16, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            param: None,
            message: message.into(),
        }
    }

    /// Reports an invalid argument as `{name}: {value}, must {must}`.
    pub fn invalid(name: &str, value: impl fmt::Display, must: &str) -> Self {
        let value: String = value.to_string().chars().take(SHOWN).collect();
        Self {
            param: Some(name.to_owned()),
            ..Self::new(
                400,
                "invalid_value",
                format!("{name}: {value}, must {must}"),
            )
        }
    }

    /// Reports an error that names a field of the argument before it: `{place}{error}`.
    pub fn within(place: &str, error: &anyhow::Error) -> Self {
        Self::new(400, "invalid_value", format!("{place}{error:#}"))
    }

    /// Reports an argument that names nothing, as [`Self::invalid`] does.
    pub fn missing(name: &str, value: impl fmt::Display, must: &str) -> Self {
        Self {
            status: 404,
            ..Self::invalid(name, value, must)
        }
    }

    /// Reports a path's method that is not `allowed`.
    pub fn method(given: &Method, allowed: &Method) -> Self {
        let message = format!("method: {given}, must be {allowed}");
        Self::new(405, "method_not_allowed", message)
    }
}
