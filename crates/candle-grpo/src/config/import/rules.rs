//! The rules for other trainers' keys, and value conversions.

use serde_json::{Value, json};

/// Makes a rule table, with one line per key.
macro_rules! rules {
    ($($key:literal: $rule:expr;)*) => {
        &[$(($key, $rule)),*]
    };
}
pub(super) use rules;

/// The rule for the keys at and below a path.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rule {
    /// The same value has its place here.
    To(&'static str),
    /// A converted value has its place here. `None`: it has no counterpart.
    Convert(&'static str, fn(&Value) -> Option<Value>),
    /// It does not change what is learned.
    NoMeaning(&'static str),
    /// Not supported, unless the file has our key for it. Includes the end of the advice to set it.
    Set(&'static str, &'static str),
    /// Not supported, unless the file has our key for it. The run learns the same without it.
    Advise(&'static str),
    /// Not supported, unless it is off or has this value, as JSON.
    Unless(&'static str, &'static str),
    /// Not supported, unless it is off.
    Refuse(&'static str),
}

impl Rule {
    /// Returns the key here.
    pub(super) fn place(&self) -> Option<&'static str> {
        match self {
            Self::To(place)
            | Self::Convert(place, _)
            | Self::Set(place, _)
            | Self::Advise(place) => Some(place),
            Self::NoMeaning(_) | Self::Unless(..) | Self::Refuse(_) => None,
        }
    }
}

pub(super) const RANKS: &str = "mpirun, srun or torchrun starts the ranks";
pub(super) const METRICS: &str = "TensorBoard files are always written; trackers adds others";
pub(super) const MEMORY: &str = "it is about memory or speed";
pub(super) const DATA: &str = "rows are read as they are";
pub(super) const PENALTY: &str = "a penalty changes the distribution of tokens";
pub(super) const ENVIRONMENT: &str = "an environment is a program here (docs/environments.md)";

/// Where the optimizer's state is, given whether it is in main memory.
pub(super) fn state_memory(value: &Value) -> Option<Value> {
    Some(json!(if value.as_bool()? { "host" } else { "device" }))
}

/// Why it stays on the device under adapters.
pub(super) const SMALL_STATE: &str = "the state of adapters stays on the device";

/// A period in steps: none for a number that is not positive.
pub(super) fn period(value: &Value) -> Option<Value> {
    let steps = value.as_f64()?;
    Some(if steps > 0. {
        value.clone()
    } else {
        Value::Null
    })
}

/// `top_k`, whose -1 is 0 here: all tokens.
pub(super) fn from_minus_one(value: &Value) -> Option<Value> {
    Some(if value.as_f64()? < 0. {
        json!(0)
    } else {
        value.clone()
    })
}

/// Converts a text, or a list of texts.
pub(super) fn files(value: &Value) -> Option<Value> {
    match value {
        Value::String(text) => {
            // A script has lists as texts.
            let list = text
                .strip_prefix('[')
                .and_then(|text| text.strip_suffix(']'));
            let names = list.unwrap_or(text).split(',');
            let names = names.map(|name| name.trim().trim_matches(['"', '\'']));
            Some(json!(names.collect::<Vec<_>>()))
        }
        Value::Array(_) => Some(value.clone()),
        _ => None,
    }
}

/// `true` is bf16.
pub(super) fn bf16(value: &Value) -> Option<Value> {
    Some(if value.as_bool()? {
        json!("bf16")
    } else {
        json!("f32")
    })
}

/// Converts a PyTorch dtype.
pub(super) fn dtype(value: &Value) -> Option<Value> {
    match value.as_str()? {
        "bf16" | "bfloat16" => Some(json!("bf16")),
        "fp16" | "float16" | "half" | "f16" => Some(json!("f16")),
        "fp32" | "float32" | "float" | "f32" => Some(json!("f32")),
        _ => None,
    }
}
