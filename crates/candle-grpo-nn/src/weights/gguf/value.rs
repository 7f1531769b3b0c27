//! One entry of the metadata.

use std::fmt;

/// A value of the metadata of a GGUF file.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    /// A whole number of any width.
    Integer(i128),
    /// A number. One that was stored in 32 bits is the shortest decimal that rounds to it, 0.00001 for example.
    Float(f64),
    /// Yes or no.
    Bool(bool),
    /// Text; bytes that are not UTF-8 have been replaced.
    String(String),
    /// An array of whole numbers, or of yes (1) and no (0).
    Integers(Vec<i64>),
    /// An array of numbers.
    Floats(Vec<f64>),
    /// An array of texts.
    Strings(Vec<String>),
}

impl GgufValue {
    /// The whole number that this is, if it is one and not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Integer(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// The number that this is.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Integer(value) => Some(*value as f64),
            Self::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// Yes or no.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// The text that this is.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(value) => Some(value),
            _ => None,
        }
    }

    /// The whole numbers that this is an array of.
    pub fn as_integers(&self) -> Option<&[i64]> {
        match self {
            Self::Integers(values) => Some(values),
            _ => None,
        }
    }

    /// The numbers that this is an array of.
    pub fn as_floats(&self) -> Option<&[f64]> {
        match self {
            Self::Floats(values) => Some(values),
            _ => None,
        }
    }

    /// The texts that this is an array of.
    pub fn as_strings(&self) -> Option<&[String]> {
        match self {
            Self::Strings(values) => Some(values),
            _ => None,
        }
    }
}

impl fmt::Display for GgufValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value}"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::String(value) => write!(f, "{value:?}"),
            Self::Integers(values) => write!(f, "an array of {} whole numbers", values.len()),
            Self::Floats(values) => write!(f, "an array of {} numbers", values.len()),
            Self::Strings(values) => write!(f, "an array of {} texts", values.len()),
        }
    }
}
