//! The keys of GGUF metadata that state a field of the configuration.

use crate::DecoderConfig;

/// A key, without its architecture, and the field that it states.
#[derive(Debug)]
pub(crate) struct GgufKey {
    pub(crate) name: &'static str,
    pub(crate) is_required: bool,
    pub(crate) field: GgufField,
}

/// A field of the configuration.
#[derive(Debug)]
pub(crate) enum GgufField {
    Size(fn(&mut DecoderConfig) -> &mut usize),
    /// A size of 0 means none.
    OptionalSize(fn(&mut DecoderConfig) -> &mut Option<usize>),
    Number(fn(&mut DecoderConfig) -> &mut f64),
    OptionalNumber(fn(&mut DecoderConfig) -> &mut Option<f64>),
}

impl GgufKey {
    /// A key without which a file is refused.
    pub(crate) const fn required(name: &'static str, field: GgufField) -> Self {
        Self {
            name,
            is_required: true,
            field,
        }
    }

    /// A key whose absence leaves the field as it is.
    pub(crate) const fn optional(name: &'static str, field: GgufField) -> Self {
        Self {
            name,
            is_required: false,
            field,
        }
    }
}
