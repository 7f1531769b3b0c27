//! Metadata values.

use std::fmt;

use candle_core::quantized::gguf_file::Value;

/// A GGUF metadata value.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum GgufValue {
    /// An integer of any width.
    Integer(i128),
    /// A floating-point number. If stored in 32 bits, this is the shortest decimal that rounds to
    /// it, such as 0.00001.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A string, in which invalid UTF-8 is replaced.
    String(String),
    /// An array of integers, or of booleans as 1 and 0.
    Integers(Vec<i64>),
    /// An array of floating-point numbers.
    Floats(Vec<f64>),
    /// An array of strings.
    Strings(Vec<String>),
}

impl GgufValue {
    /// The value if it is a nonnegative integer.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Integer(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// The value if it is an integer or floating-point number.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Integer(value) => Some(*value as f64),
            Self::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// The value if it is a boolean.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// The value if it is a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(value) => Some(value),
            _ => None,
        }
    }

    /// The values if it is an integer array.
    pub fn as_integers(&self) -> Option<&[i64]> {
        match self {
            Self::Integers(values) => Some(values),
            _ => None,
        }
    }

    /// The values if it is a string array.
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

impl From<&GgufValue> for Value {
    fn from(value: &GgufValue) -> Self {
        match value {
            GgufValue::Integer(value) => match (u32::try_from(*value), i64::try_from(*value)) {
                (Ok(value), _) => Self::U32(value),
                (_, Ok(value)) => Self::I64(value),
                // From 2^63.
                _ => Self::U64(*value as u64),
            },
            GgufValue::Float(value) => Self::F32(*value as f32),
            GgufValue::Bool(value) => Self::Bool(*value),
            GgufValue::String(value) => Self::String(value.clone()),
            GgufValue::Integers(values) => {
                match values
                    .iter()
                    .map(|&value| i32::try_from(value))
                    .collect::<Result<Vec<_>, _>>()
                {
                    Ok(values) => Self::Array(values.into_iter().map(Self::I32).collect()),
                    Err(_) => Self::Array(values.iter().map(|&value| Self::I64(value)).collect()),
                }
            }
            GgufValue::Floats(values) => Self::Array(
                values
                    .iter()
                    .map(|&value| Self::F32(value as f32))
                    .collect(),
            ),
            GgufValue::Strings(values) => {
                Self::Array(values.iter().cloned().map(Self::String).collect())
            }
        }
    }
}
