//! Invalid options within errors of any type.

use anyhow::Error;
use candle_grpo_core::Invalid;

/// Returns the error for an option in `section`, with the full path.
pub fn within(section: &str, error: Error) -> Error {
    match find_invalid(&error) {
        Some(invalid) => invalid.clone().within(section).into(),
        None => error.context(section.to_owned()),
    }
}

/// Finds the invalid option that caused `error`, if it has such a cause.
pub fn find_invalid(error: &Error) -> Option<&Invalid> {
    error.chain().find_map(|cause| {
        let in_candle_error = || Invalid::find(cause.downcast_ref::<candle_core::Error>()?);
        cause.downcast_ref::<Invalid>().or_else(in_candle_error)
    })
}
