//! GGUF metadata keys that hold a configuration field.

use crate::DecoderConfig;

/// A key, without the architecture prefix, and its configuration field.
#[derive(Debug)]
pub(crate) struct GgufKey {
    pub(crate) name: &'static str,
    pub(crate) is_required: bool,
    pub(crate) field: GgufField,
}

/// A configuration field.
#[derive(Debug)]
pub(crate) enum GgufField {
    Size(fn(&mut DecoderConfig) -> &mut usize),
    /// 0 means none.
    OptionalSize(fn(&mut DecoderConfig) -> &mut Option<usize>),
    Number(fn(&mut DecoderConfig) -> &mut f64),
    OptionalNumber(fn(&mut DecoderConfig) -> &mut Option<f64>),
}

impl GgufKey {
    /// A key that files must have.
    pub(crate) const fn required(name: &'static str, field: GgufField) -> Self {
        Self {
            name,
            is_required: true,
            field,
        }
    }

    /// A key that leaves the field unchanged if absent.
    pub(crate) const fn optional(name: &'static str, field: GgufField) -> Self {
        Self {
            name,
            is_required: false,
            field,
        }
    }
}
