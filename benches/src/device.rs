//! The device of the cases.

use candle_core::Device;

/// Returns the name of the device in the results.
pub(crate) fn name(device: &Device) -> &'static str {
    if device.is_cpu() { "cpu" } else { "cuda" }
}
